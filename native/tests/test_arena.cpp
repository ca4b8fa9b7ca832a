// The arena: where blocks lie, when they come back, and what a send looks at.
#include <algorithm>
#include <functional>

#include "arena_setup.h"

using namespace conveyor;

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

// Each unit is a block of 4 MiB, of which eight reach the cap.
constexpr size_t kUnit = 4 * kMiB - kBlockHeader;

TEST(above_the_cap_a_warm_block_is_for_those_alone_who_may_cross_it) {
  Setup s(32 * kMiB);
  std::vector<Block*> blocks;
  const auto release = [&] { s.arena.release(blocks.back()), blocks.pop_back(); };
  for (int i = 0; i < 8; ++i) blocks.push_back(s.arena.allocate(kUnit));
  Arena::given = 4 * kMiB;
  for (int i = 0; i < 2; ++i) blocks.push_back(s.arena.allocate(kUnit));
  CHECK_THROWS(ArenaFull, s.arena.allocate(kUnit));  // the rest is more than what it was given above the cap
  release();
  CHECK_EQ(s.arena.bytes_touched(), 40 * kMiB);  // it is warm
  blocks.push_back(s.arena.allocate(kUnit));
  release();
  Arena::given = 0;
  CHECK_THROWS(ArenaFull, s.arena.allocate(kUnit));
  release();
  CHECK_THROWS(ArenaFull, s.arena.allocate(kUnit));
  release();
  blocks.push_back(s.arena.allocate(kUnit));  // at the cap, and not above it
  for (Block* block : blocks) s.arena.release(block);
}

// Its free memory is found there as that of other sizes is.
TEST(above_the_cap_a_warm_block_with_more_than_is_asked_for_makes_room) {
  for (const size_t smaller : {size_t(512), size_t(300) << 10}) {
    Setup s(32 * kMiB);
    std::vector<Block*> blocks;
    for (int i = 0; i < 8; ++i) blocks.push_back(s.arena.allocate(kUnit));
    Arena::given = kMiB;
    blocks.push_back(s.arena.allocate((size_t(256) << 10) - kBlockHeader));
    Arena::given = 0;
    CHECK_EQ(s.arena.bytes_touched(), 32 * kMiB + (256 << 10));
    Block* warm = blocks[3];
    blocks.erase(blocks.begin() + 3);
    s.arena.release(warm);
    if (smaller < 256 << 10) {
      CHECK_THROWS(ArenaFull, s.arena.allocate(kUnit - smaller));  // what it gives is too little
    } else {
      blocks.push_back(s.arena.allocate(kUnit - smaller));
      std::memset(blocks.back()->data(), 7, kUnit - smaller);
      CHECK(s.arena.bytes_touched() <= 32 * kMiB);
    }
    CHECK_EQ(s.memory(), s.arena.bytes_touched());
    for (Block* block : blocks) s.arena.release(block);
    s.arena.give_back(0);
    CHECK_EQ(s.memory(), 0u);
    CHECK_EQ(s.arena.bytes_touched(), 0u);
  }
}

TEST(who_tries_again_and_again_keeps_no_warm_block_from_going_back) {
  Setup s(32 * kMiB);
  std::vector<Block*> blocks;
  for (int i = 0; i < 8; ++i) blocks.push_back(s.arena.allocate(kUnit));
  Arena::given = 4 * kMiB;
  blocks.push_back(s.arena.allocate(kUnit));
  Arena::given = 0;
  s.arena.release(blocks.back());
  blocks.pop_back();
  constexpr uint64_t kIdle = 50'000'000;
  for (const uint64_t until = now_ns() + kIdle; now_ns() < until;) CHECK_THROWS(ArenaFull, s.arena.allocate(kUnit));
  s.arena.give_back(kIdle);
  CHECK_EQ(s.arena.bytes_touched(), 32 * kMiB);
  for (Block* block : blocks) s.arena.release(block);
}

TEST(what_is_passed_on_is_ahead_of_what_makes_the_next_one) {
  Setup s(32 * kMiB);
  std::vector<Block*> blocks;
  for (int i = 0; i < 8; ++i) blocks.push_back(s.arena.allocate(kUnit));
  // A method that was given 1 MiB has made 4 of it: so the next one waits.
  Arena::given = kMiB;
  blocks.push_back(s.arena.allocate(kUnit));
  CHECK_THROWS(ArenaFull, s.arena.allocate(kUnit));
  Arena::given = Arena::kAsMuch;
  blocks.push_back(s.arena.allocate(kUnit));
  CHECK_THROWS(ArenaFull, s.arena.allocate(kUnit));
  Arena::given = 0;
  for (Block* block : blocks) s.arena.release(block);
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

TEST(what_is_not_requested_for_costs_nothing) {
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
