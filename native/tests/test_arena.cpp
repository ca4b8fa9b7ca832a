// The arena and its leases: where blocks lie, when they come back, what they cost, and what a fork does
// to those who hold them.
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <algorithm>
#include <functional>
#include <mutex>
#include <thread>

#include "arena.h"
#include "check.h"

using namespace conveyor;

namespace {

constexpr size_t kMiB = size_t(1) << 20;
constexpr size_t kFile = 16 * kWindow;
constexpr uint64_t kNever = 3'600'000'000'000;  // nothing has been free for so long

// An arena of this process, and a view of it as its readers (slots 1 and 2 of the board) have one.
struct Setup {
  std::shared_ptr<Board> board = Board::create(4);
  Fd file = Arena::create_file(kFile);
  Arena arena;
  std::shared_ptr<ArenaView> view = std::make_shared<ArenaView>(file.get(), kFile);
  ReaderCursor cursors[3] = {};

  explicit Setup(size_t cap = 64 * kMiB) : arena(file.get(), kFile, cap) {
    for (uint32_t i = 0; i < 4; ++i) start(i);
  }
  void start(uint32_t slot) {
    board->prepare(slot, "");
    board->slot(slot)->condition.store(Condition::kAlive);
  }
  std::shared_ptr<ReaderSet> readers(uint32_t count = 1) {
    auto set = std::make_shared<ReaderSet>();
    set->board = board;
    for (uint32_t r = 0; r < count; ++r) set->add(r + 1, &cursors[r]);
    return set;
  }
  Block* publish(size_t size, uint32_t count = 1) {
    Block* block = arena.allocate(size);
    std::memset(block->data(), int(size % 251), size);
    arena.publish(block, readers(count), 0, 0);
    return block;
  }
  std::unique_ptr<Lease> lease(const Block* block, uint32_t reader = 0) { return std::make_unique<Lease>(*view, block->offset, block->size, reader); }
  bool is_out(const Block* block) {
    arena.give_back(kNever);
    return block->readers != nullptr;
  }
  // What the file costs.
  size_t memory() const {
    struct stat s;
    ::fstat(file.get(), &s);
    return size_t(s.st_blocks) * 512;
  }
};

size_t mappings() {
  FILE* file = std::fopen("/proc/self/maps", "r");
  REQUIRE(file != nullptr);
  size_t lines = 0;
  for (int c; (c = std::fgetc(file)) != EOF;) lines += c == '\n';
  std::fclose(file);
  return lines;
}

int open_descriptors() {
  int count = 0;
  for (int fd = 0; fd < 1'024; ++fd) count += ::fcntl(fd, F_GETFD) >= 0;
  return count;
}

}  // namespace

TEST(blocks_have_room_and_keep_to_themselves) {
  Setup s(size_t(8) << 30);
  std::vector<size_t> sizes;
  for (size_t size = 0; size <= 3 * kGranule; size += 61) sizes.push_back(size);
  for (size_t size = kGranule; size <= 64 * kMiB; size += size / 3)
    for (size_t near : {size - 1, size, size + 1, size - kBlockHeader, size - kBlockHeader + 1}) sizes.push_back(near);
  std::vector<Block*> blocks;
  for (size_t size : sizes) {
    if (size > kFile / 2) continue;
    Block* block;
    try {
      block = s.arena.allocate(size);
    } catch (const ArenaFull&) {
      break;  // no addresses left
    }
    CHECK(block->capacity() >= size);
    CHECK(block->size <= std::max(size_t(2 * kGranule), (size + kBlockHeader) / 4 * 5 + kGranule));
    CHECK_EQ(block->offset % kGranule, 0u);
    CHECK_EQ(reinterpret_cast<uintptr_t>(block->data()) % 64, 0u);
    CHECK(block->offset + block->size <= kFile);
    if (block->size < kBigBlock) CHECK_EQ(block->offset / kWindow, (block->offset + block->size - 1) / kWindow);
    block->data()[0] = block->data()[size != 0 ? size - 1 : 0] = char(blocks.size());
    blocks.push_back(block);
  }
  CHECK(blocks.size() > 300);
  for (size_t i = 0; i < blocks.size(); ++i) {
    CHECK_EQ(blocks[i]->data()[0], char(i));
    // The same bytes in a reader's mapping.
    std::shared_ptr<Mapping> keep;
    CHECK_EQ(s.view->block(blocks[i]->offset, blocks[i]->size, keep)[kBlockHeader], char(i));
  }
  std::sort(blocks.begin(), blocks.end(), [](Block* a, Block* b) { return a->offset < b->offset; });
  for (size_t i = 1; i < blocks.size(); ++i) CHECK(blocks[i - 1]->offset + blocks[i - 1]->size <= blocks[i]->offset);
  for (Block* block : blocks) s.arena.release(block);
}

TEST(a_block_comes_back_when_every_reader_is_done) {
  Setup s;
  Block* block = s.publish(10'000, 3);
  CHECK_EQ(s.arena.blocks_out(), 1u);
  CHECK_EQ(s.arena.bytes_out(), align_up(10'000 + kBlockHeader, kGranule));
  std::vector<std::unique_ptr<Lease>> leases;
  for (uint32_t r = 0; r < 3; ++r) leases.push_back(s.lease(block, r));
  CHECK_EQ(live_leases(), 3u);
  CHECK_EQ(leases[1]->data()[9'999], char(10'000 % 251));
  for (uint32_t r : {1u, 0u, 2u}) {
    CHECK(s.is_out(block));
    leases[r].reset();
  }
  CHECK(!s.is_out(block));
  CHECK_EQ(s.arena.blocks_out(), 0u);
  CHECK_EQ(live_leases(), 0u);
}

TEST(a_block_that_nobody_published_is_given_back) {
  Setup s;
  Block* block = s.arena.allocate(100);
  CHECK_EQ(s.arena.blocks_out(), 0u);
  s.arena.release(block);
  CHECK(s.arena.allocate(100) == block);
}

TEST(the_block_freed_last_is_used_first) {
  Setup s;
  std::vector<Block*> blocks;
  for (int i = 0; i < 4; ++i) blocks.push_back(s.arena.allocate(20'000));
  for (Block* block : blocks) s.arena.release(block);
  CHECK(s.arena.allocate(20'000) == blocks[3]);
  CHECK(s.arena.allocate(20'000) == blocks[2]);
  // A value sent, read and dropped, over and over, stays in one block.
  Setup t;
  Block* first = t.publish(kMiB);
  t.lease(first).reset();
  const size_t touched = t.arena.bytes_touched();
  for (int i = 0; i < 100; ++i) {
    Block* next = t.publish(kMiB);
    CHECK(next == first);
    t.lease(next).reset();
  }
  CHECK_EQ(t.arena.bytes_touched(), touched);
}

TEST(values_held_for_long_do_not_hide_those_that_are_done) {
  Setup s(size_t(1) << 30);
  std::vector<std::unique_ptr<Lease>> held;
  for (int i = 0; i < 100; ++i) held.push_back(s.lease(s.publish(8'000)));
  const size_t touched = s.arena.bytes_touched();
  for (int i = 0; i < 1'000; ++i) s.lease(s.publish(8'000)).reset();
  CHECK_EQ(s.arena.bytes_touched(), touched + align_up(8'000 + kBlockHeader, kGranule));
  CHECK(s.arena.blocks_out() <= 101);
}

TEST(all_that_is_done_comes_back_at_once) {
  Setup s(size_t(1) << 30);
  for (size_t held_every : {0u, 2u, 7u}) {
    std::vector<std::unique_ptr<Lease>> leases, held;
    for (size_t i = 0; i < 1'000; ++i) leases.push_back(s.lease(s.publish(100)));
    for (size_t i = 0; i < 1'000; ++i)
      if (held_every != 0 && i % held_every == 0) held.push_back(std::move(leases[i]));
    s.arena.release(s.arena.allocate(1));  // let the next look begin somewhere
    leases.clear();
    s.arena.give_back(kNever);
    CHECK_EQ(s.arena.blocks_out(), held.size());
    held.clear();
    s.arena.give_back(kNever);
    CHECK_EQ(s.arena.blocks_out(), 0u);
  }
}

TEST(the_cap_is_an_error_and_no_more) {
  Setup s(kMiB);
  std::vector<std::unique_ptr<Lease>> leases;
  const size_t size = 256 * 1'024 - kBlockHeader;
  for (int i = 0; i < 4; ++i) leases.push_back(s.lease(s.publish(size)));
  CHECK_EQ(s.arena.bytes_touched(), kMiB);
  for (int i = 0; i < 3; ++i) {
    CHECK_THROWS(ArenaFull, s.arena.allocate(size));
    CHECK_THROWS(ArenaFull, s.arena.allocate(1));
  }
  try {
    s.arena.allocate(1);
  } catch (const ArenaFull& error) {
    CHECK(std::strstr(error.what(), "4 values") != nullptr);  // what is in the way
    CHECK(std::strstr(error.what(), "1048576 bytes") != nullptr);
  }
  CHECK_EQ(s.arena.bytes_touched(), kMiB);
  for (auto& lease : leases) CHECK_EQ(lease->data()[size - 1], char(size % 251));
  leases.pop_back();
  Block* block = s.publish(size);  // room again
  CHECK_THROWS(ArenaFull, s.arena.allocate(1));
  s.lease(block).reset();
  leases.clear();
  // The memory may move to another size, also all of it.
  block = s.arena.allocate(kMiB - kBlockHeader);
  CHECK(s.arena.bytes_touched() <= kMiB);
  s.arena.release(block);
  CHECK_THROWS(ArenaFull, s.arena.allocate(kMiB));
  s.arena.release(s.arena.allocate(kMiB - kBlockHeader));
}

TEST(the_error_at_the_cap_says_who_holds_what) {
  Setup s(kMiB);
  const size_t size = 256 * 1'024 - kBlockHeader;
  auto other = s.readers();
  other->graph = 3;
  other->edge = 7;
  other->carries = "graph 3, edge #7";
  std::vector<std::unique_ptr<Lease>> leases;
  for (uint64_t tag : {5, 6, 8}) {
    Block* block = s.arena.allocate(size);
    s.arena.publish(block, other, tag, 0);
    leases.push_back(s.lease(block));
  }
  Block* mine = s.arena.allocate(size);
  try {
    s.arena.allocate(1);
    CHECK(false);
  } catch (const ArenaFull& error) {
    CHECK_EQ(error.holdings.size(), 1u);
    const Holding& held = error.holdings[0];
    CHECK_EQ(held.channel->edge, 7u);
    CHECK_EQ(held.slot, 1u);
    CHECK_EQ(held.bytes, 3 * kMiB / 4);
    CHECK((held.tags == std::vector<uint64_t>{5, 6, 8}));
    CHECK(std::strstr(error.what(), "made in place") != nullptr);  // `mine`
  }
  // What must get through does.
  Block* beyond = s.arena.allocate(size, {}, true);
  CHECK(s.arena.bytes_touched() > kMiB);
  s.arena.release(beyond);
  // Ended leases are no holdings, seen as free or not.
  leases[1].reset();
  CHECK((s.arena.holdings()[0].tags == std::vector<uint64_t>{5, 8}));
  s.arena.release(mine);
}

TEST(a_budget_bounds_what_its_channels_have_out) {
  Setup s(kMiB);
  const size_t size = 64 * 1'024 - kBlockHeader;
  auto first = s.readers(), second = s.readers(), other = s.readers();
  first->budget = second->budget = std::make_shared<Budget>(128 * 1'024);
  first->graph = 3;
  std::vector<std::unique_ptr<Lease>> leases;
  const auto send = [&](const std::shared_ptr<ReaderSet>& channel, size_t bytes) {
    Block* block = s.arena.allocate(bytes, channel->budget);
    s.arena.publish(block, channel, 0, 0);
    leases.push_back(s.lease(block));
  };
  send(first, size);
  send(second, size);
  CHECK_EQ(first->budget->out, 128u * 1'024);
  try {
    s.arena.allocate(1, first->budget);
    CHECK(false);
  } catch (const ArenaFull& error) {
    CHECK(std::strstr(error.what(), "131072 bytes (memory_bytes)") != nullptr);
    CHECK_EQ(error.holdings.size(), 2u);
    CHECK_EQ(error.holdings[0].channel->graph, 3u);
  }
  for (int i = 0; i < 4; ++i) send(other, size);  // nobody else's concern
  leases.erase(leases.begin());
  send(second, size - 1);  // what has come back counts no more
  CHECK_THROWS(ArenaFull, s.arena.allocate(1, second->budget));
  // A smaller value in a block that was used for a larger one takes what it needs.
  leases.clear();
  s.arena.give_back(kNever);
  CHECK_EQ(first->budget->out, 0u);
  send(first, size);
  leases.clear();
  s.arena.give_back(kNever);
  send(first, 56 * 1'024);
  CHECK_EQ(first->budget->out, align_up(56 * 1'024 + kBlockHeader, kGranule));
}

TEST(a_large_value_gets_the_memory_of_many_small_ones) {
  Setup s(4 * kMiB);
  const int kMany = int(4 * kMiB / kGranule) - 24;
  for (int i = 0; i < kMany; ++i) s.lease(s.publish(kGranule - kBlockHeader)).reset();
  std::vector<std::unique_ptr<Lease>> leases;
  for (int i = 0; i < kMany; ++i) leases.push_back(s.lease(s.publish(kGranule - kBlockHeader)));
  leases.clear();
  Block* block = s.arena.allocate(4 * kMiB - kBlockHeader);
  std::memset(block->data(), 1, block->capacity() < 4 * kMiB ? block->capacity() : 4 * kMiB - kBlockHeader);
  CHECK(s.memory() <= 4 * kMiB);
  s.arena.release(block);
}

TEST(addresses_can_run_out) {
  Setup s(size_t(1) << 40);
  CHECK_THROWS(ArenaFull, s.arena.allocate(kFile));
  CHECK_THROWS(ArenaFull, s.arena.allocate(SIZE_MAX));
  CHECK_THROWS(ArenaFull, s.arena.allocate(SIZE_MAX / 2));
  std::vector<Block*> blocks;
  CHECK_THROWS(ArenaFull, [&] {
    for (int i = 0; i < 1'000; ++i) blocks.push_back(s.arena.allocate(kWindow / 2));
  }());
  CHECK(blocks.size() >= kFile / kWindow / 2);
  for (Block* block : blocks) s.arena.release(block);
  CHECK_EQ(s.arena.allocate(kWindow / 2), blocks.back());
}

TEST(trimming_frees_the_memory_of_idle_blocks) {
  Setup s;
  const size_t size = 8 * kMiB;
  std::unique_ptr<Lease> kept = s.lease(s.publish(kMiB));
  std::vector<std::unique_ptr<Lease>> leases;
  for (int i = 0; i < 4; ++i) leases.push_back(s.lease(s.publish(size)));
  CHECK(s.memory() >= 4 * size);
  leases.clear();
  s.arena.give_back(kNever);
  CHECK(s.memory() >= 4 * size);
  s.arena.give_back(0);
  CHECK(s.memory() < 2 * kMiB);
  CHECK_EQ(s.arena.bytes_touched(), align_up(kMiB + kBlockHeader, kGranule));
  CHECK_EQ(kept->data()[kMiB - 1], char(kMiB % 251));  // a value that is held keeps its memory
  // Blocks are as good as new.
  Block* again = s.publish(size);
  auto lease = s.lease(again);
  CHECK_EQ(lease->data()[size - 1], char(size % 251));
  lease.reset();
  CHECK(!s.is_out(again));
}

TEST(what_is_not_asked_for_costs_nothing) {
  // Memory is there when a block is given out, so that writing to it cannot fail.
  Setup s;
  Block* block = s.arena.allocate(40 * kMiB);
  CHECK(s.memory() >= 40 * kMiB);
  CHECK(s.memory() < 41 * kMiB);
  s.arena.release(block);
  // A class is larger than what is asked for; only what is asked for counts.
  Setup t(kMiB);
  t.arena.release(t.arena.allocate(kMiB - kBlockHeader - kGranule));
  CHECK_EQ(t.arena.bytes_touched(), kMiB - kGranule);
}

TEST(a_dead_reader_is_done) {
  Setup s;
  Block* block = s.publish(5'000, 2);
  auto mine = s.lease(block, 0);
  CHECK(s.is_out(block));
  s.board->announce_death(2);  // reader 1
  CHECK(s.is_out(block));
  mine.reset();
  CHECK(!s.is_out(block));
  // So is one whose slot has another process by now.
  s.start(2);
  block = s.publish(5'000, 2);
  s.lease(block, 0).reset();
  CHECK(s.is_out(block));
  s.start(2);
  CHECK(!s.is_out(block));
}

TEST(a_reader_that_has_left_holds_what_it_has_taken_and_nothing_else) {
  Setup s;
  const auto set = s.readers(2);
  std::vector<Block*> blocks;
  for (uint64_t number = 7; number < 10; ++number) {
    blocks.push_back(s.arena.allocate(5'000));
    s.arena.publish(blocks.back(), set, 0, number);
  }
  std::vector<std::unique_ptr<Lease>> other;
  for (Block* block : blocks) other.push_back(s.lease(block, 0));
  auto taken = s.lease(blocks[0], 1);
  s.cursors[1].next.store(8);
  other.clear();
  for (Block* block : blocks) CHECK(s.is_out(block));
  s.cursors[1].end.store(9);
  CHECK(s.is_out(blocks[0]));
  CHECK(!s.is_out(blocks[1]));
  CHECK(!s.is_out(blocks[2]));
  CHECK_EQ(s.arena.holdings().size(), 1u);
  // What is published afterwards waits for the others alone.
  Block* late = s.arena.allocate(5'000);
  s.arena.publish(late, set, 0, 10);
  CHECK(s.is_out(late));
  s.lease(late, 0).reset();
  CHECK(!s.is_out(late));
  taken.reset();
  CHECK(!s.is_out(blocks[0]));
}

TEST(a_late_end_of_an_old_lease_frees_no_new_value) {
  Setup s;
  Block* block = s.publish(5'000);
  auto late = s.lease(block);
  s.board->announce_death(1);  // announced; it is still running
  CHECK(!s.is_out(block));
  s.start(1);
  Block* again = s.publish(5'000);
  CHECK(again == block);
  auto held = s.lease(again);
  late.reset();
  CHECK(s.is_out(again));
  held.reset();
  CHECK(!s.is_out(again));
  // Also when the late end comes before the new reader looks.
  block = s.publish(5'000);
  late = s.lease(block);
  s.board->announce_death(1);
  CHECK(!s.is_out(block));
  s.start(1);
  again = s.publish(5'000);
  CHECK(again == block);
  late.reset();
  CHECK(s.is_out(again));
  held = s.lease(again);
  CHECK(s.is_out(again));
  held.reset();
  CHECK(!s.is_out(again));
}

TEST(generations_may_wrap) {
  Setup s;
  Block* block = s.arena.allocate(100);
  block->generation = 0x7ffffffd;
  s.arena.release(block);
  for (int i = 0; i < 5; ++i) {
    CHECK(s.publish(100) == block);
    auto lease = s.lease(block);
    CHECK(s.is_out(block));
    lease.reset();
    CHECK(!s.is_out(block));
  }
}

TEST(a_view_refuses_what_lies_outside) {
  Setup s;
  auto& view = *s.view;
  std::shared_ptr<Mapping> keep;
  CHECK_THROWS(std::system_error, view.block(kFile, kGranule, keep));
  CHECK_THROWS(std::system_error, view.block(kFile - kGranule, 2 * kGranule, keep));
  CHECK_THROWS(std::system_error, view.block(0, kFile + kGranule, keep));
  CHECK_THROWS(std::system_error, view.block(UINT64_MAX - kGranule + 1, kGranule, keep));
  CHECK_THROWS(std::system_error, view.block(UINT64_MAX - kGranule + 1, 2 * kGranule, keep));
  CHECK_THROWS(std::system_error, view.block(kGranule, UINT64_MAX, keep));
  CHECK_THROWS(std::system_error, view.block(0, 0, keep));
  CHECK_THROWS(std::system_error, view.block(0, kBlockHeader - 1, keep));  // no room for a header
  CHECK_THROWS(std::system_error, view.block(1, kGranule, keep));             // not at a page
  CHECK_THROWS(std::system_error, view.block(kWindow - kGranule, 2 * kGranule, keep));  // over a window's end
  CHECK_THROWS(std::system_error, ArenaView(-1, kFile));
  // Random requests: an error, or memory that is there.
  check::Random random(1);
  int good = 0;
  for (int i = 0; i < 20'000; ++i) {
    const uint64_t offset = random.below(2) != 0 ? random.below(2 * kFile) : random.below(2 * kFile / kGranule) * kGranule;
    const uint64_t size = random.next() >> (44 + random.below(20));
    try {
      char* p = view.block(offset, size, keep);
      ++good;
      CHECK(offset + size <= kFile);
      CHECK(*const_cast<volatile char*>(p) == 0);
      CHECK(*const_cast<volatile char*>(p + size - 1) == 0);
    } catch (const std::system_error&) {
    }
  }
  CHECK(good > 100);
  CHECK(s.memory() < kFile);  // looking may allocate pages, not more
}

TEST(a_lease_refuses_what_is_no_block) {
  Setup s;
  CHECK_THROWS(std::system_error, Lease(*s.view, 0, kGranule, 0));  // no header there yet
  Block* block = s.publish(100);
  CHECK_THROWS(std::system_error, Lease(*s.view, block->offset, block->size, kMaxReaders));
  CHECK_THROWS(std::system_error, Lease(*s.view, block->offset, block->size, UINT32_MAX));
  CHECK_THROWS(std::system_error, Lease(*s.view, block->offset + kGranule, block->size, 0));
  CHECK_THROWS(std::system_error, Lease(*s.view, kFile, kGranule, 0));
  CHECK_EQ(live_leases(), 0u);
  CHECK(s.is_out(block));
}

TEST(a_view_outlives_its_arena) {
  auto s = std::make_unique<Setup>();
  Block* small = s->publish(1'000);
  Block* big = s->publish(20 * kMiB);
  auto a = s->lease(small), b = s->lease(big);
  s.reset();
  CHECK_EQ(a->data()[999], char(1'000 % 251));
  CHECK_EQ(b->data()[20 * kMiB - 1], char(20 * kMiB % 251));
}

TEST(leases_end_in_any_thread) {
  Setup s;
  std::vector<std::unique_ptr<Lease>> leases;
  for (int i = 0; i < 800; ++i) leases.push_back(s.lease(s.publish(1'000 + size_t(i))));
  std::vector<std::thread> threads;
  for (size_t t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (size_t i = t; i < leases.size(); i += 4) leases[i].reset();
    });
  for (auto& thread : threads) thread.join();
  CHECK_EQ(live_leases(), 0u);
  s.arena.give_back(kNever);
  CHECK_EQ(s.arena.blocks_out(), 0u);
}

// --- Addresses, and sends while much is held ---

TEST(addresses_serve_any_size_again) {
  FreeAddresses free(64 * kMiB);
  std::vector<uint64_t> all;
  for (int i = 0; i < 64; ++i) all.push_back(*free.take(kMiB, kWindow));
  CHECK(!free.take(1, 0));
  for (size_t i = 0; i < 64; i += 2) free.give(all[i], kMiB);
  CHECK_EQ(free.gaps(), 32u);
  CHECK(!free.take(2 * kMiB, 0));
  for (size_t i = 1; i < 64; i += 2) free.give(all[i], kMiB);
  CHECK_EQ(free.gaps(), 1u);
  CHECK_EQ(*free.take(64 * kMiB, 0), 0u);
  // Within a window, or not at all.
  FreeAddresses two(2 * kWindow);
  CHECK_EQ(*two.take(kWindow - kGranule, 0), 0u);
  CHECK_EQ(*two.take(2 * kGranule, kWindow), uint64_t(kWindow));
  CHECK_EQ(*two.take(kGranule, kWindow), uint64_t(kWindow - kGranule));
  CHECK(!two.take(kWindow, kWindow));
}

TEST(sizes_in_turn_leave_room_for_any_other) {
  Setup s(kFile / 8);
  check::Random random(7);
  for (size_t size = kMiB; size <= 100 * kMiB; size += size / 3) {
    std::vector<std::unique_ptr<Lease>> held;
    for (size_t sum = 0; sum + size + kMiB < kFile / 8; sum += size + kMiB) {
      held.push_back(s.lease(s.publish(size - random.below(size / 8))));
      held.push_back(s.lease(s.publish(random.below(kMiB / 2) + 1)));
    }
    for (auto& lease : held) {
      const size_t last = lease->capacity();
      CHECK(last != 0);
    }
    held.clear();
  }
  Block* all = s.arena.allocate(kFile / 8 - kBlockHeader);
  CHECK(s.memory() <= kFile / 8 + kMiB);
  s.arena.release(all);
  s.arena.give_back(0);
  CHECK_EQ(s.arena.gaps(), 1u);
  CHECK_EQ(s.arena.bytes_touched(), 0u);
}

TEST(a_value_that_is_read_stays_when_its_addresses_neighbours_change) {
  Setup s(size_t(1) << 30);
  std::vector<Block*> blocks;
  for (int i = 0; i < 4; ++i) blocks.push_back(s.publish(20 * kMiB));
  auto kept = s.lease(blocks[1]);
  for (int i : {0, 2, 3}) s.lease(blocks[size_t(i)]).reset();
  s.arena.give_back(0);  // what lay around it is gone
  Block* larger = s.publish(35 * kMiB);
  auto other = s.lease(larger);
  CHECK_EQ(kept->data()[20 * kMiB - 1], char(20 * kMiB % 251));
  CHECK_EQ(other->data()[35 * kMiB - 1], char(35 * kMiB % 251));
}

TEST(sends_look_at_few_of_the_values_that_are_held) {
  Setup s(kFile);
  constexpr uint64_t kSends = 1'000;
  const size_t large = check::kThreadSanitizer ? 3'000 : kFile / kGranule / 3;
  const auto looks = [&] {
    const uint64_t before = s.arena.looks();
    for (uint64_t i = 0; i < kSends; ++i) s.arena.release(s.arena.allocate(20'000));
    return s.arena.looks() - before;
  };
  std::vector<std::unique_ptr<Lease>> held;
  for (const size_t count : {size_t(100), large}) {
    while (held.size() < count) held.push_back(s.lease(s.publish(100)));
    const uint64_t n = looks();
    CHECK(n >= kSends && n <= 10 * kSends);
  }
  // Those that are let go of in the middle are found in time.
  const size_t before = s.arena.bytes_touched();
  for (size_t i = 0; i < held.size(); i += 2) held[i].reset();
  for (size_t i = held.size() / 2; i > 0; --i) held.push_back(s.lease(s.publish(100)));
  CHECK(s.arena.bytes_touched() < before + before / 4);
}

// --- The session's memory, and the thread that gives it back ---

namespace {

// Another process of the session: here, another arena on the same board.
struct Peer {
  Fd file = Arena::create_file(kFile);
  Arena arena;
  Peer(Setup& s, uint32_t slot, size_t cap, uint64_t idle_ns = Arena::kIdleNs) : arena(file.get(), kFile, cap, s.board, slot, idle_ns) {}
  size_t memory() const {
    struct stat st;
    ::fstat(file.get(), &st);
    return size_t(st.st_blocks) * 512;
  }
};

}  // namespace

TEST(what_is_idle_goes_back_by_itself) {
  Setup s;
  Peer peer(s, 0, 64 * kMiB, 600'000'000);
  const auto view = std::make_shared<ArenaView>(peer.file.get(), kFile, s.board, 0);
  const auto set = s.readers();
  const auto send = [&](size_t size) {
    Block* block = peer.arena.allocate(size);
    peer.arena.publish(block, set, 0, 0);
    return std::make_unique<Lease>(*view, block->offset, block->size, 0);
  };
  std::vector<std::unique_ptr<Lease>> held;
  for (int i = 0; i < 8; ++i) held.push_back(send(4 * kMiB));
  auto kept = send(kMiB);
  Block* made = peer.arena.allocate(2 * kMiB);
  CHECK(peer.memory() >= 35 * kMiB);
  CHECK_EQ(s.board->header()->memory.bytes.load(), peer.arena.bytes_touched());
  // The thread sleeps while nothing is free.
  CHECK(check::soon([&] { return s.board->slot(0)->returns.wanted.load() == 1; }));
  held.clear();
  peer.arena.release(made);
  const uint64_t start = now_ns();
  CHECK(check::soon([&] { return peer.memory() < 2 * kMiB; }));
  CHECK(now_ns() - start > 200'000'000);  // not at once: what is used again is warm
  // The pages go first, and are counted afterwards.
  CHECK(check::soon([&] { return s.board->slot(0)->memory.load() == peer.arena.bytes_touched(); }));
  kept.reset();
  peer.arena.give_back_soon();
  CHECK(check::soon([&] { return peer.memory() == 0; }));
}

// Nobody ends a lease then, and so nobody else wakes the thread.
TEST(what_is_published_for_readers_that_are_gone_goes_back_by_itself) {
  Setup s;
  Peer peer(s, 0, 64 * kMiB, 50'000'000);
  const auto set = s.readers(2);
  const auto publish = [&] {
    Block* block = peer.arena.allocate(kMiB);
    // The thread has looked, found nothing that is free, and sleeps.
    CHECK(check::soon([&] { return s.board->slot(0)->returns.wanted.load() == 1; }));
    ::usleep(20'000);
    peer.arena.publish(block, set, 0, 7);
    CHECK(check::soon([&] { return peer.memory() == 0; }));
  };
  s.board->announce_death(1);
  s.cursors[1].end.store(1);  // left, before it took anything
  publish();
  s.start(1);  // another process
  publish();
}

TEST(a_session_s_end_or_a_teardown_lets_go_of_whom_blocks_were_for) {
  Setup s;
  Peer peer(s, 0, 64 * kMiB);
  std::vector<std::weak_ptr<ReaderSet>> sets;
  for (int i = 0; i < 50; ++i) {
    const auto set = s.readers();
    sets.push_back(set);
    peer.arena.publish(peer.arena.allocate(5'000), set, 0, 0);
  }
  for (auto& set : sets) CHECK(!set.expired());
  s.cursors[0].end.store(1);
  peer.arena.give_back_soon();
  for (auto& set : sets) CHECK(set.expired());
}

TEST(the_cap_is_the_session_s) {
  Setup s;
  constexpr size_t kCap = 8 * kMiB;
  Peer a(s, 0, kCap), b(s, 3, kCap);
  const auto set = s.readers();
  const size_t size = kMiB - kBlockHeader;
  std::vector<Block*> blocks;
  for (int i = 0; i < 6; ++i) blocks.push_back(a.arena.allocate(size));
  Block* two[2] = {b.arena.allocate(size), b.arena.allocate(size)};
  try {
    b.arena.allocate(size);
    CHECK(false);
  } catch (const ArenaFull& error) {
    CHECK(std::strstr(error.what(), "the session's memory cap of 8388608 bytes") != nullptr);
    CHECK(std::strstr(error.what(), " 6291456") != nullptr);  // that of `a`
    CHECK(std::strstr(error.what(), " 2097152") != nullptr);
  }
  CHECK_THROWS(ArenaFull, a.arena.allocate(size));
  CHECK_EQ(s.board->header()->memory.bytes.load(), kCap);
  // What is free in another process is asked for, warm as it is.
  a.arena.release(blocks.back());
  blocks.pop_back();
  Block* third = b.arena.allocate(size);
  CHECK_EQ(s.board->header()->memory.bytes.load(), kCap);
  // And what a process had that has ended.
  CHECK_THROWS(ArenaFull, b.arena.allocate(size));
  s.board->announce_death(0);
  s.board->forget_memory(0);
  for (int i = 0; i < 5; ++i) b.arena.release(b.arena.allocate(size));
  for (Block* block : {two[0], two[1], third}) b.arena.release(block);
}

// Who asks while an earlier one is being answered waits for an answer of its own: what that look has found
// may be what the earlier one takes.
TEST(each_who_asks_for_memory_has_its_own_answer) {
  Setup s;
  Returns& returns = s.board->slot(3)->returns;
  s.board->slot(3)->memory.store(1);
  auto first = s.board->ask_for_memory(0);
  const uint32_t looks_for = returns.asked.load();
  auto second = s.board->ask_for_memory(1);
  returns.answered.store(looks_for);
  s.board->still_asked(first);
  CHECK(first.empty());
  s.board->still_asked(second);
  CHECK_EQ(second.size(), 1u);
  returns.answered.store(returns.asked.load());
  s.board->still_asked(second);
  CHECK(second.empty());
  // A process that has the slot after it counts from the beginning: nobody waits for its answer.
  auto late = s.board->ask_for_memory(0);
  s.board->prepare(3, "later");
  s.board->slot(3)->memory.store(1);
  s.board->still_asked(late);
  CHECK(late.empty());
  s.board->slot(3)->memory.store(0);
}

// Others may take what has come back before who has asked for it does.
TEST(who_asks_for_memory_asks_again_as_long_as_some_comes_back) {
  Setup s;
  constexpr uint64_t kCap = 8 * kMiB, kOthers = 6 * kMiB;
  Peer peer(s, 0, kCap);
  SessionMemory& memory = s.board->header()->memory;
  BoardSlot* other = s.board->slot(3);
  Returns& returns = other->returns;
  // What the other process does when it is asked: that often it gives back, and takes again at once.
  const auto answer = [&](uint32_t rounds, bool at_last) {
    for (uint32_t seen = 0; seen <= rounds; ++seen) {
      for (;;) {
        const uint32_t news = returns.count.load();
        if (returns.asked.load() != seen) break;
        futex_wait(&returns.count, news, nullptr);
      }
      if (seen < rounds || at_last) memory.give_back(kOthers);
      if (seen < rounds)
        memory.bytes.fetch_add(kOthers);
      else if (at_last)
        other->memory.store(0);
      returns.answered.store(seen + 1);
      memory.note_given();
    }
  };
  for (const bool at_last : {true, false}) {
    s.start(3);
    other->memory.store(kOthers);
    memory.bytes.store(kOthers);
    std::thread thread(answer, 3, at_last);
    if (at_last) {
      peer.arena.release(peer.arena.allocate(5 * kMiB));
    } else {
      CHECK_THROWS(ArenaFull, peer.arena.allocate(5 * kMiB));
    }
    thread.join();
    CHECK_EQ(returns.asked.load(), 4u);  // not once more: nothing has come back
    peer.arena.give_back(0);
  }
  memory.bytes.store(0);
}

TEST(no_two_get_the_last_of_the_memory) {
  Setup s;
  constexpr size_t kCap = 4 * kMiB;
  std::vector<std::unique_ptr<Peer>> peers;
  for (uint32_t slot : {0, 3}) peers.push_back(std::make_unique<Peer>(s, slot, kCap));
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      Arena& arena = peers[t % 2]->arena;
      check::Random random(t);
      std::vector<Block*> mine;
      for (int i = 0; i < 3'000; ++i) {
        try {
          mine.push_back(arena.allocate(1 + random.below(200'000), {}, false, false));
        } catch (const ArenaFull&) {
        }
        CHECK(s.board->header()->memory.bytes.load() <= kCap);
        while (mine.size() > random.below(16)) {
          arena.release(mine.back());
          mine.pop_back();
        }
      }
      for (Block* block : mine) arena.release(block);
    });
  for (auto& thread : threads) thread.join();
  for (auto& peer : peers) peer->arena.give_back(0);
  CHECK_EQ(s.board->header()->memory.bytes.load(), 0u);
  for (auto& peer : peers) CHECK_EQ(peer->memory(), 0u);
}

// The descriptor is closed when nobody punches with it any more: its number may be another file's next.
TEST(an_arena_is_closed_while_others_allocate) {
  for (int round = 0; round < 10; ++round) {
    Setup s;
    Peer peer(s, 0, 2 * kMiB);
    std::atomic<int> full{0};
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < 3; ++t)
      threads.emplace_back([&, t] {
        check::Random random(t);
        std::vector<Block*> mine;
        for (bool open = true; open;) {
          try {
            mine.push_back(peer.arena.allocate(1 + random.below(300'000), {}, false, false));
            std::memset(mine.back()->data(), 7, 100);
          } catch (const ArenaFull& error) {
            open = std::strstr(error.what(), "shut down") == nullptr;
            full.fetch_add(1);
          }
          while (mine.size() > random.below(8)) {
            peer.arena.release(mine.back());
            mine.pop_back();
          }
        }
        for (Block* block : mine) peer.arena.release(block);
      });
    while (full.load() < 20 && peer.arena.gaps() < 20) std::this_thread::yield();
    peer.arena.close();
    // Whoever opens something now may get the number.
    Fd other = make_memfd("other", kMiB);
    const std::vector<char> text(kMiB, 'x');
    CHECK_EQ(::pwrite(other.get(), text.data(), kMiB, 0), ssize_t(kMiB));
    for (auto& thread : threads) thread.join();
    std::vector<char> read(kMiB);
    CHECK_EQ(::pread(other.get(), read.data(), kMiB, 0), ssize_t(kMiB));
    CHECK(read == text);
    CHECK_THROWS(ArenaFull, peer.arena.allocate(1));
    peer.arena.close();
    CHECK_EQ(peer.memory(), 0u);
    CHECK_EQ(s.board->header()->memory.bytes.load(), 0u);
  }
}

// An array that was made in place is dropped after the session, a value is sent to the dead meanwhile: a graph
// that somebody holds keeps the arena.
TEST(what_is_released_when_the_arena_is_closed_goes_back_at_once) {
  Setup s;
  Peer peer(s, 0, 64 * kMiB);
  const auto set = s.readers();
  Block* blocks[] = {peer.arena.allocate(20 * kMiB), peer.arena.allocate(kMiB), peer.arena.allocate(2 * kMiB)};
  peer.arena.close();
  CHECK(peer.memory() >= 23 * kMiB);
  std::memset(blocks[2]->data(), 7, 2 * kMiB);
  s.board->slot(1)->condition.store(Condition::kDead);
  peer.arena.publish(blocks[0], set, 0, 0);
  peer.arena.release(blocks[1]);
  CHECK(peer.memory() < 3 * kMiB);
  CHECK_EQ(blocks[2]->data()[2 * kMiB - 1], 7);
  peer.arena.release(blocks[2]);
  CHECK_EQ(peer.memory(), 0u);
  CHECK_EQ(s.board->header()->memory.bytes.load(), 0u);
}

// A reader's view goes with its last ring, an array that was read there may stay.
TEST(a_lease_outlives_the_view_and_keeps_nothing_but_its_mapping) {
  Setup s(4 * kWindow);
  const size_t before = mappings();
  const int descriptors = open_descriptors();
  auto kept = s.lease(s.publish(2 * kMiB));
  auto big = s.lease(s.publish(20 * kMiB));
  Block* other = s.publish(20 * kMiB);
  s.lease(other).reset();
  s.view.reset();
  big.reset();
  CHECK_EQ(mappings(), before + 1 + 3);  // the lease's window, and the arena's own mappings
  CHECK_EQ(open_descriptors(), descriptors);
  CHECK_EQ(kept->data()[2 * kMiB - 1], char(2 * kMiB % 251));
  kept.reset();
  CHECK_EQ(open_descriptors(), descriptors - 1);
  CHECK_EQ(mappings(), before + 3);
  CHECK_EQ(s.arena.blocks_out(), 3u);
  s.arena.give_back(0);
  CHECK_EQ(s.arena.blocks_out(), 0u);
}

// Who has got a block just before the end of the session may still be on its way to hold it.
TEST(nothing_is_held_where_the_file_has_been_let_go_of) {
  Setup s;
  Block* block = s.arena.allocate(20 * kMiB);
  Block* held = s.arena.allocate(20 * kMiB);
  Hold before(*held->mapping);
  s.arena.close();
  CHECK_THROWS(std::system_error, Hold(*block->mapping));
  CHECK_EQ(live_holds(), 1u);
  const int descriptors = open_descriptors();
  const pid_t child = ::fork();
  if (child == 0) {
    std::memset(held->data(), 7, 20 * kMiB);
    ::_exit(0);
  }
  int status = 0;
  CHECK_EQ(::waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK_EQ(held->data()[0], 0);
  before.leave([] {});
  CHECK(check::soon([&] { return open_descriptors() == descriptors - 1; }));
}

TEST(an_arena_is_its_parent_s_in_a_forked_child) {
  Setup s;
  auto peer = std::make_unique<Peer>(s, 0, 64 * kMiB);
  Block* block = peer->arena.allocate(kMiB);
  const uint64_t counted = s.board->header()->memory.bytes.load();
  for (int i = 0; i < 20; ++i)
    CHECK(check::Child([&] {
            CHECK_THROWS(ArenaFull, peer->arena.allocate(1));
            peer->arena.release(block);
            peer.reset();
          }).passed());
  CHECK_EQ(s.board->header()->memory.bytes.load(), counted);
  peer->arena.release(block);
  CHECK(peer->arena.allocate(kMiB) == block);
}

// --- Forks ---

namespace {

// A child that lives until it is told.
struct Pause {
  int ends[2];
  Pause() { CHECK(::pipe2(ends, O_CLOEXEC) == 0); }
  ~Pause() { go_on(), ::close(ends[0]); }
  void wait() {
    ::close(std::exchange(ends[1], -1));
    char c;
    while (::read(ends[0], &c, 1) < 0 && errno == EINTR) {
    }
  }
  void go_on() {
    if (ends[1] >= 0) ::close(std::exchange(ends[1], -1));
  }
};

}  // namespace

TEST(a_forked_child_cannot_end_its_parent_s_lease) {
  install_fork_handlers();
  Setup s;
  Block* block = s.publish(5'000);
  auto lease = s.lease(block);
  check::Child child([&] {
    CHECK_EQ(live_leases(), 0u);
    CHECK_EQ(lease->data()[4'999], char(5'000 % 251));
    lease.reset();
    release_unpinned();
  });
  CHECK(child.passed());
  CHECK(s.is_out(block));
  CHECK_EQ(live_leases(), 1u);
  lease.reset();
  CHECK(!s.is_out(block));
}

TEST(what_a_forked_child_writes_stays_its_own) {
  install_fork_handlers();
  Setup s;
  for (size_t size : {size_t(5'000), 20 * kMiB}) {
    Block* block = s.publish(size);
    Block* beside = s.publish(size);
    auto lease = s.lease(block), other = s.lease(beside);
    const char before = lease->data()[0];
    check::Child child([&] {
      CHECK_EQ(lease->data()[0], before);
      CHECK_EQ(lease->data()[size - 1], before);
      std::memset(lease->data(), 77, size);
      CHECK_EQ(other->data()[0], before);
      other->data()[size - 1] = 78;
    });
    CHECK(child.passed());
    CHECK_EQ(lease->data()[0], before);
    CHECK_EQ(lease->data()[size - 1], before);
    CHECK_EQ(other->data()[size - 1], before);
    CHECK_EQ(block->data()[0], before);
  }
}

TEST(a_value_stays_while_a_forked_child_may_read_it) {
  install_fork_handlers();
  Setup s;
  const int descriptors = open_descriptors();
  Block* block = s.publish(5'000);
  auto lease = s.lease(block);
  Pause pause;
  check::Child child([&] {
    pause.wait();
    CHECK_EQ(lease->data()[4'999], char(5'000 % 251));
  });
  lease.reset();
  CHECK_EQ(live_leases(), 0u);
  CHECK(s.is_out(block));
  Block* next = s.publish(5'000);
  CHECK(next != block);
  pause.go_on();
  CHECK(child.passed());
  CHECK(check::soon([&] { return !s.is_out(block); }));
  s.lease(next).reset();
  CHECK(!s.is_out(next));  // it was made after the fork
  ::close(std::exchange(pause.ends[0], ::dup(2)));
  ::close(pause.ends[0]);
  CHECK(check::soon([&] { return open_descriptors() == descriptors; }));
  pause.ends[0] = -1;
}

TEST(a_child_that_ended_first_delays_nothing) {
  install_fork_handlers();
  Setup s;
  const int descriptors = open_descriptors();
  for (int i = 0; i < 5; ++i) {
    Block* block = s.publish(5'000);
    auto lease = s.lease(block);
    for (int children = 0; children < 3; ++children) CHECK(check::Child([] {}).passed());
    lease.reset();
    CHECK(!s.is_out(block));
  }
  CHECK(check::soon([&] { return open_descriptors() == descriptors; }));
}

TEST(only_living_children_cost_descriptors) {
  install_fork_handlers();
  Setup s;
  auto lease = s.lease(s.publish(5'000));
  const int descriptors = open_descriptors();
  for (int i = 0; i < 50; ++i) CHECK(check::Child([] {}).passed());
  CHECK(check::soon([&] { return open_descriptors() == descriptors; }));
  {
    Pause pause;
    std::vector<check::Child> children;
    for (int i = 0; i < 10; ++i) children.emplace_back([&] { pause.wait(); });
    CHECK(open_descriptors() <= descriptors + 10 + 2 + 1);  // and that of the thread
    pause.go_on();
    for (auto& child : children) CHECK(child.passed());
  }
  CHECK(check::soon([&] { return open_descriptors() == descriptors; }));
}

// Whoever lowers the limit later has more of them than it says.
TEST(children_are_heard_of_beyond_the_limit_of_descriptors) {
  install_fork_handlers();
  Setup s;
  Block* block = s.publish(5'000);
  auto lease = s.lease(block);
  Pause pause;
  std::vector<check::Child> children;
  for (int i = 0; i < 10; ++i) children.emplace_back([&] { pause.wait(); });
  lease.reset();
  rlimit before;
  REQUIRE(::getrlimit(RLIMIT_NOFILE, &before) == 0);
  const rlimit few{3, before.rlim_max};
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &few) == 0);
  pause.go_on();
  for (auto& child : children) CHECK(child.passed());
  CHECK(check::soon([&] { return !s.is_out(block); }));
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &before) == 0);
}

TEST(without_a_descriptor_what_a_child_may_read_stays_for_ever) {
  install_fork_handlers();
  // In a child, because the descriptors of this process are needed.
  check::Child all([] {
    Setup s;
    Block* block = s.publish(5'000);
    auto lease = s.lease(block);
    rlimit before;
    REQUIRE(::getrlimit(RLIMIT_NOFILE, &before) == 0);
    const rlimit none{3, before.rlim_max};
    REQUIRE(::setrlimit(RLIMIT_NOFILE, &none) == 0);
    const pid_t child = ::fork();
    if (child == 0) ::_exit(0);
    REQUIRE(::setrlimit(RLIMIT_NOFILE, &before) == 0);
    CHECK(::waitpid(child, nullptr, 0) == child);
    lease.reset();
    CHECK(s.is_out(block));
    s.lease(s.publish(6'000)).reset();  // later ones come back
    CHECK_EQ(live_leases(), 0u);
  });
  CHECK(all.passed());
}

// Each was a mapping of its own there, of which a process may have 65,530.
TEST(a_child_has_no_more_mappings_than_its_parent) {
  install_fork_handlers();
  Setup s(512 * kMiB);
  std::vector<std::unique_ptr<Lease>> held;
  for (int i = 0; i < 2'000; ++i) {
    Block* block = s.publish(1'000);
    if (i % 2 == 0) held.push_back(s.lease(block));
  }
  held.push_back(s.lease(s.publish(20 * kMiB)));
  const size_t before = mappings();
  check::Child child([&] {
    CHECK(mappings() <= before + 16);
    for (auto& lease : held) lease->data()[0] = 77;
  });
  CHECK(child.passed());
  for (size_t i = 0; i + 1 < held.size(); ++i) CHECK_EQ(held[i]->data()[0], char(1'000 % 251));
}

// As an array that is made in place is (values.h).
TEST(what_is_held_in_ones_own_arena_is_private_in_a_child_too) {
  install_fork_handlers();
  for (size_t size : {size_t(5'000), 20 * kMiB}) {
    Setup s;
    Block* block = s.arena.allocate(size);
    std::memset(block->data(), 1, size);
    Hold hold(*block->mapping);
    Pause pause;
    check::Child child([&] {
      block->data()[0] = 77;
      check::Child grandchild([&] {
        CHECK_EQ(block->data()[0], char(77));
        block->data()[1] = 78;
      });
      CHECK(grandchild.passed());
      CHECK_EQ(block->data()[1], char(1));
      pause.wait();
      CHECK_EQ(block->data()[0], char(77));
      CHECK_EQ(block->data()[size - 1], char(1));
    });
    std::atomic<bool> back{false};
    CHECK(hold.pinned());
    hold.leave([&] { s.arena.release(block, false), back.store(true); });
    CHECK(!back);
    Block* next = s.arena.allocate(size);
    CHECK(next != block);
    std::memset(next->data(), 2, size);
    s.arena.close();  // the child needs no descriptor of it
    pause.go_on();
    CHECK(child.passed());
    CHECK(check::soon([&] { return back.load(); }));
  }
}

TEST(a_grandchild_holds_on_to_it_too) {
  install_fork_handlers();
  Setup s;
  Block* block = s.publish(5'000);
  auto lease = s.lease(block);
  int started[2];
  REQUIRE(::pipe2(started, O_CLOEXEC) == 0);
  Pause pause;
  check::Child child([&] {
    if (::fork() == 0) {  // left behind when its parent ends
      ::close(started[0]);
      const pid_t self = ::getpid();
      CHECK(::write(started[1], &self, sizeof self) == sizeof self);
      pause.wait();
      ::_exit(lease->data()[0] != char(5'000 % 251));
    }
  });
  lease.reset();
  pid_t grandchild;
  REQUIRE(::read(started[0], &grandchild, sizeof grandchild) == sizeof grandchild);
  CHECK(child.passed());
  CHECK(s.is_out(block));
  pause.go_on();
  CHECK(check::soon([&] { return !s.is_out(block); }));
  ::close(started[0]);
  ::close(started[1]);
}

TEST(each_child_has_its_own_hold) {
  install_fork_handlers();
  Setup s;
  Block* block = s.publish(5'000);
  auto lease = s.lease(block);
  Pause first_pause, second_pause;
  check::Child first([&] {
    ::close(std::exchange(second_pause.ends[1], -1));
    first_pause.wait();
  });
  check::Child second([&] {
    ::close(std::exchange(first_pause.ends[1], -1));
    second_pause.wait();
  });
  lease.reset();
  second_pause.go_on();
  CHECK(second.passed());
  CHECK(s.is_out(block));
  first_pause.go_on();
  CHECK(first.passed());
  CHECK(check::soon([&] { return !s.is_out(block); }));
}

// A lease that was dropped and only waits for the first child is not the second child's to end.
TEST(a_child_ends_nothing_that_waits_for_another_child) {
  install_fork_handlers();
  Setup s;
  Block* block = s.publish(5'000);
  auto lease = s.lease(block);
  Pause first_pause, second_pause;
  check::Child first([&] {
    ::close(std::exchange(second_pause.ends[1], -1));
    first_pause.wait();
  });
  lease.reset();  // waits for the first child
  check::Child second([&] {
    ::close(std::exchange(first_pause.ends[1], -1));
    second_pause.wait();
    release_unpinned();
  });
  first_pause.go_on();
  CHECK(first.passed());
  CHECK(check::soon([&] { return !s.is_out(block); }));
  Block* again = s.publish(5'000);
  CHECK(again == block);
  lease = s.lease(again);
  second_pause.go_on();
  CHECK(second.passed());
  CHECK_EQ(again->header()->lease[0].load(), BlockHeader::held(again->generation));
  lease.reset();
  CHECK(!s.is_out(again));
}

TEST(a_child_may_hold_leases_of_its_own) {
  install_fork_handlers();
  Setup s;
  auto held = s.lease(s.publish(5'000));
  Block* block = s.publish(6'000);
  check::Child child([&] {
    auto view = std::make_shared<ArenaView>(s.file.get(), kFile);
    Lease mine(*view, block->offset, block->size, 0);
    CHECK_EQ(live_leases(), 1u);
    CHECK_EQ(mine.data()[5'999], char(6'000 % 251));
  });
  CHECK(child.passed());
  CHECK(!s.is_out(block));
}

TEST(forks_and_leases_meet_in_any_order) {
  install_fork_handlers();
  Setup s;
  std::atomic<bool> stop{false};
  std::mutex mutex;  // views and arenas are for one thread at a time
  std::thread reader([&] {
    check::Random random(3);
    std::vector<std::unique_ptr<Lease>> leases;
    while (!stop.load()) {
      {
        std::lock_guard lock(mutex);
        leases.push_back(s.lease(s.publish(1'000 + random.below(5'000))));
      }
      while (leases.size() > random.below(20)) leases.erase(leases.begin() + ptrdiff_t(random.below(leases.size())));
    }
  });
  for (int i = 0; i < 60; ++i) {
    std::vector<check::Child> children;
    // A thread may hold the mutex at the fork, so the child leaves it alone.
    for (int j = 0; j < 3; ++j) children.emplace_back([] { CHECK_EQ(live_leases(), 0u); });
    for (auto& child : children) CHECK(child.passed());
  }
  stop.store(true);
  reader.join();
  CHECK(check::soon([&] { return s.arena.give_back(kNever), s.arena.blocks_out() == 0; }));
}
