// Any bytes as a body, any room behind it: read_table refuses them, or all it returns can be read.
#include "body.h"
#include "fuzz_input.h"

using namespace conveyor;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  // Up to 64 KiB, so that both sides of every limit are near; 0, "no block", is its own case.
  const size_t block_size = input.take<uint16_t>();
  const size_t body_size = input.left();
  const auto body = fuzz::exactly(input.data(), body_size);
  const auto block = std::make_unique_for_overwrite<char[]>(block_size);
  const auto table = read_table(body.get(), body_size, block_size);
  if (!table) return 0;
  FUZZ_CHECK(table->entries.size() <= kMaxBuffers);
  FUZZ_CHECK(table->meta >= body.get() && table->meta <= body.get() + body_size);
  fuzz::touch(table->meta, table->meta_length);
  for (const BufferEntry& entry : table->entries) {
    const bool in_block = entry.offset & kInBlock;
    // Without a block there is nothing such an entry could point into, be it empty.
    FUZZ_CHECK(!in_block || block_size != 0);
    const size_t room = in_block ? block_size : body_size;
    const uint64_t at = entry.offset & ~kInBlock;
    FUZZ_CHECK(at <= room && entry.length <= room - at);
    fuzz::touch((in_block ? block.get() : body.get()) + at, entry.length);
  }
  return 0;
}
