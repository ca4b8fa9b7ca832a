// The table of a frame: what is laid out is read back, and arbitrary bytes give spans inside the body or
// nothing. Bodies lie in heap memory of exactly their size, so AddressSanitizer sees every byte too many.
#include <algorithm>
#include <memory>

#include "check.h"
#include "body.h"

using namespace conveyor;

namespace {

// Reads the table of `bytes` and everything it points to. True if there is one.
bool read_all(const std::vector<char>& bytes, size_t block_size) {
  const auto body = std::make_unique<char[]>(bytes.size());
  if (!bytes.empty()) std::memcpy(body.get(), bytes.data(), bytes.size());
  static const auto block = std::make_unique<char[]>(1 << 16);
  const auto table = read_table(body.get(), bytes.size(), block_size);
  if (!table) return false;
  const char* const end = body.get() + bytes.size();
  bool inside = table->meta >= body.get() && table->meta <= end && table->meta_length <= size_t(end - table->meta);
  unsigned sum = 0;
  auto touch = [&](const char* at, size_t length) {
    if (length != 0) sum += unsigned(at[0]) + unsigned(at[length - 1]) + unsigned(at[length / 2]);
  };
  if (inside) touch(table->meta, table->meta_length);
  for (const BufferEntry& e : table->entries) {
    const bool in_block = (e.offset & kInBlock) != 0;
    const uint64_t at = e.offset & ~kInBlock;
    const uint64_t room = in_block ? block_size : bytes.size();
    inside = inside && at <= room && e.length <= room - at;
    if (inside) touch((in_block ? block.get() : body.get()) + at, e.length);
  }
  volatile unsigned used = sum;
  (void)used;
  CHECK(inside);
  return true;
}

template <class T>
void put(std::vector<char>& bytes, size_t at, T value) {
  if (at + sizeof value <= bytes.size()) std::memcpy(bytes.data() + at, &value, sizeof value);
}

// A body with this table and `tail` bytes behind it.
std::vector<char> with_table(uint32_t meta_length, uint32_t buffers, const std::vector<BufferEntry>& entries, size_t tail) {
  std::vector<char> bytes(sizeof(TableHeader) + entries.size() * sizeof(BufferEntry) + tail);
  put(bytes, 0, TableHeader{meta_length, buffers});
  for (size_t i = 0; i < entries.size(); ++i) put(bytes, sizeof(TableHeader) + i * sizeof(BufferEntry), entries[i]);
  return bytes;
}

}  // namespace

TEST(what_is_laid_out_is_read_back) {
  check::Random random(7);
  for (int round = 0; round < 2'000; ++round) {
    std::string meta(random.below(300), '\0');
    for (char& c : meta) c = char(random.next());
    std::vector<size_t> lengths(random.below(12));
    for (size_t& length : lengths) length = random.below(4) == 0 ? 0 : random.below(500);
    const TableLayout layout = lay_out_table(meta.size(), lengths);
    REQUIRE(layout.entries.size() == lengths.size());
    // The layout: nothing overlaps, buffers are aligned, all is inside, and not much is wasted.
    CHECK_EQ(layout.meta_at, sizeof(TableHeader) + lengths.size() * sizeof(BufferEntry));
    size_t end = layout.meta_at + meta.size();
    for (size_t i = 0; i < lengths.size(); ++i) {
      CHECK_EQ(layout.entries[i].length, lengths[i]);
      CHECK_EQ(layout.entries[i].offset % kBufferAlign, 0u);
      CHECK(layout.entries[i].offset >= end && layout.entries[i].offset < end + kBufferAlign);
      end = layout.entries[i].offset + lengths[i];
    }
    CHECK_EQ(layout.total, end);
    // As Encoded::write_body writes it.
    const auto body = std::make_unique<char[]>(layout.total);
    const TableHeader head{uint32_t(meta.size()), uint32_t(lengths.size())};
    std::memcpy(body.get(), &head, sizeof head);
    if (!lengths.empty()) std::memcpy(body.get() + sizeof head, layout.entries.data(), lengths.size() * sizeof(BufferEntry));
    std::memcpy(body.get() + layout.meta_at, meta.data(), meta.size());
    for (size_t i = 0; i < lengths.size(); ++i) std::memset(body.get() + layout.entries[i].offset, int('a' + i), lengths[i]);
    const auto table = read_table(body.get(), layout.total, 0);
    REQUIRE(table.has_value());
    CHECK(std::string(table->meta, table->meta_length) == meta);
    REQUIRE(table->entries.size() == lengths.size());
    for (size_t i = 0; i < lengths.size(); ++i) {
      CHECK_EQ(table->entries[i].length, lengths[i]);
      const char* at = body.get() + table->entries[i].offset;
      CHECK(std::all_of(at, at + lengths[i], [i](char c) { return c == char('a' + i); }));
    }
    // One byte less is never a table, if its last part has any bytes.
    if (lengths.empty() ? !meta.empty() : lengths.back() != 0) CHECK(!read_table(body.get(), layout.total - 1, 0));
  }
}

TEST(the_most_buffers_there_can_be) {
  const TableLayout layout = lay_out_table(0, std::vector<size_t>(kMaxBuffers, 1));
  std::vector<char> bytes(layout.total);
  put(bytes, 0, TableHeader{0, uint32_t(kMaxBuffers)});
  std::memcpy(bytes.data() + sizeof(TableHeader), layout.entries.data(), kMaxBuffers * sizeof(BufferEntry));
  CHECK(read_all(bytes, 0));
  put(bytes, 0, TableHeader{0, uint32_t(kMaxBuffers + 1)});
  CHECK(!read_all(bytes, 0));
}

TEST(the_least_there_can_be) {
  CHECK(!read_all({}, 0));
  for (size_t size = 1; size < sizeof(TableHeader); ++size) CHECK(!read_all(std::vector<char>(size), 0));
  CHECK(read_all(std::vector<char>(sizeof(TableHeader)), 0));
  CHECK(!read_table(nullptr, 0, 0));
}

TEST(lengths_that_do_not_fit_are_refused) {
  for (uint32_t meta : {1u, 2u, 0x7fffffffu, 0xfffffff8u, 0xffffffffu}) CHECK(!read_all(with_table(meta, 0, {}, 0), 0));
  CHECK(read_all(with_table(1, 0, {}, 1), 0));
  CHECK(!read_all(with_table(2, 0, {}, 1), 0));
  for (uint32_t buffers : {1u, 2u, 0x10000u, 0x10001u, 0x10000000u, 0xffffffffu}) CHECK(!read_all(with_table(0, buffers, {}, 8), 0));
  CHECK(!read_all(with_table(0, 2, {{0, 0}}, 15), 0));
  CHECK(read_all(with_table(0, 2, {{0, 0}}, 16), 0));
}

TEST(spans_that_do_not_fit_are_refused) {
  const size_t size = sizeof(TableHeader) + sizeof(BufferEntry) + 64;
  auto reads = [&](uint64_t offset, uint64_t length, size_t block) { return read_all(with_table(0, 1, {{offset, length}}, 64), block); };
  CHECK(reads(0, size, 0));
  CHECK(reads(size, 0, 0));
  CHECK(reads(size - 1, 1, 0));
  CHECK(!reads(0, size + 1, 0));
  CHECK(!reads(1, size, 0));
  CHECK(!reads(size, 1, 0));
  CHECK(!reads(size + 1, 0, 0));
  for (uint64_t huge : {uint64_t(INT64_MAX), uint64_t(INT64_MAX) - 63, uint64_t(1) << 62, uint64_t(1) << 32}) {
    CHECK(!reads(huge, 0, 0));
    CHECK(!reads(huge, 1, 0));
    CHECK(!reads(0, huge, 0));
    CHECK(!reads(8, huge, 0));
    CHECK(!reads(huge, huge, 0));
    CHECK(!reads(huge, ~huge + 1, 0));
  }
  CHECK(!reads(8, UINT64_MAX, 0));
  CHECK(!reads(8, UINT64_MAX - 7, 0));
  // In the block, whose size is another.
  CHECK(!reads(kInBlock, 1, 0));
  CHECK(!reads(kInBlock, 0, 0));
  CHECK(reads(kInBlock, 1'000, 1'000));
  CHECK(reads(kInBlock | 999, 1, 1'000));
  CHECK(!reads(kInBlock | 999, 2, 1'000));
  CHECK(!reads(kInBlock | 1'001, 0, 1'000));
  CHECK(!reads(kInBlock | INT64_MAX, 1, 1'000));
  CHECK(!reads(UINT64_MAX, UINT64_MAX, 1'000));
  CHECK(!reads(kInBlock | 8, UINT64_MAX - 7, 1'000));
}

TEST(arbitrary_bytes_are_read_inside_or_not_at_all) {
  check::Random random(11);
  const int cases = check::kThreadSanitizer ? 50'000 : 1'000'000;
  int tables = 0, with_buffers = 0;
  std::vector<char> bytes;
  for (int i = 0; i < cases; ++i) {
    bytes.resize(random.below(random.below(8) == 0 ? 400 : 80));
    for (size_t at = 0; at < bytes.size(); at += 8) {
      const uint64_t word = random.next();
      std::memcpy(bytes.data() + at, &word, std::min<size_t>(8, bytes.size() - at));
    }
    const size_t block = random.below(3) == 0 ? random.below(1 << 16) : 0;
    uint32_t buffers = 0;
    if (random.below(8) != 0) {
      // Nearly good ones: each number is small, near an edge, or left as it is.
      auto near = [&](uint64_t edge) { return random.below(2) != 0 ? random.below(edge + 2) : edge + random.below(3) - 1; };
      buffers = uint32_t(random.below(5));
      put(bytes, 0, TableHeader{uint32_t(random.below(4) == 0 ? near(bytes.size()) : random.below(8)), buffers});
      for (uint32_t b = 0; b < buffers; ++b) {
        if (random.below(16) == 0) continue;
        const bool in_block = block != 0 && random.below(2) != 0;
        const uint64_t room = in_block ? block : bytes.size();
        const uint64_t offset = random.below(4) == 0 ? near(room) : random.below(room + 1);
        const uint64_t length = random.below(4) == 0 ? near(room - std::min(offset, room)) : random.below(4);
        put(bytes, sizeof(TableHeader) + b * sizeof(BufferEntry), BufferEntry{offset | (in_block ? kInBlock : 0), length});
      }
    }
    if (read_all(bytes, block)) {
      ++tables;
      with_buffers += buffers != 0;
    }
  }
  // The cases are worth something: many are refused, and many are not.
  CHECK(tables > cases / 20 && tables < cases / 2);
  CHECK(with_buffers > cases / 50);
  std::printf("[%d cases, %d tables] ", cases, tables);
}
