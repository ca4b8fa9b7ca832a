// What lay_out_table lays out and Encoded::write_body writes, read_table reads back; cut short, it is
// refused or read as what is left.
#include "body.h"
#include "fuzz_input.h"

using namespace conveyor;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  const uint8_t flags = input.take<uint8_t>();
  const size_t meta_length = input.take<uint16_t>() % 2048;
  const uint16_t cut = input.take<uint16_t>();
  std::vector<size_t> lengths;
  while (input.left() != 0 && lengths.size() < 512) lengths.push_back(input.take<uint16_t>() % 1024);

  // An array made in place: its one buffer lies in the block, the body holds table and meta alone.
  const bool in_block = (flags & 1) && lengths.size() == 1;
  const size_t block_size = 1024;
  TableLayout layout = lay_out_table(meta_length, in_block ? std::vector<size_t>{0} : lengths);
  if (in_block) layout.entries[0] = {kInBlock | uint64_t(block_size - lengths[0]), lengths[0]};

  const std::unique_ptr<char[]> body(new char[layout.total]);
  std::memset(body.get(), 0, layout.total);
  const TableHeader head{uint32_t(meta_length), uint32_t(lengths.size())};
  std::memcpy(body.get(), &head, sizeof head);
  if (!lengths.empty()) std::memcpy(body.get() + sizeof head, layout.entries.data(), lengths.size() * sizeof(BufferEntry));
  std::memset(body.get() + layout.meta_at, 0x5a, meta_length);
  size_t end = layout.meta_at + meta_length;
  for (size_t i = 0; i < lengths.size() && !in_block; ++i) {
    FUZZ_CHECK(layout.entries[i].offset % kBufferAlign == 0);
    FUZZ_CHECK(layout.entries[i].offset >= end);  // nothing overlaps
    FUZZ_CHECK(layout.entries[i].length == lengths[i]);
    end = layout.entries[i].offset + lengths[i];
    std::memset(body.get() + layout.entries[i].offset, int(i), lengths[i]);
  }
  FUZZ_CHECK(in_block || end == layout.total);

  const auto table = read_table(body.get(), layout.total, in_block ? block_size : 0);
  FUZZ_CHECK(table.has_value());
  FUZZ_CHECK(table->meta == body.get() + layout.meta_at && table->meta_length == meta_length);
  for (size_t i = 0; i < meta_length; ++i) FUZZ_CHECK(table->meta[i] == 0x5a);
  FUZZ_CHECK(table->entries.size() == lengths.size());
  for (size_t i = 0; i < lengths.size(); ++i) {
    const BufferEntry& entry = table->entries[i];
    FUZZ_CHECK(entry.offset == layout.entries[i].offset && entry.length == lengths[i]);
    if (in_block) continue;
    for (size_t k = 0; k < lengths[i]; ++k) FUZZ_CHECK(body[entry.offset + k] == char(i));
  }

  // A body that says it is shorter than it was written.
  const size_t shorter = layout.total == 0 ? 0 : cut % layout.total;
  const auto part = fuzz::exactly(body.get(), shorter);
  if (const auto rest = read_table(part.get(), shorter, in_block ? block_size : 0)) {
    fuzz::touch(rest->meta, rest->meta_length);
    for (const BufferEntry& entry : rest->entries)
      if (!(entry.offset & kInBlock)) fuzz::touch(part.get() + entry.offset, entry.length);
  }
  // The in-block entry is refused where no block came with the frame.
  if (in_block) FUZZ_CHECK(!read_table(body.get(), layout.total, 0));
  return 0;
}
