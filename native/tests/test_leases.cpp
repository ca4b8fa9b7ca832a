// Leases on blocks of another process: what ends them, and what is no block.
#include <atomic>
#include <map>
#include <mutex>
#include <thread>

#include "arena_setup.h"

using namespace conveyor;

TEST(a_dead_reader_is_done) {
  Setup s;
  Block* block = s.publish(5'000, 2);
  auto mine = s.lease(block, 0);
  CHECK(s.is_out(block));
  s.process_table->announce_death(2);  // reader 1
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
  s.process_table->announce_death(1);  // announced; it is still running
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
  s.process_table->announce_death(1);
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

TEST(a_file_has_one_view_in_a_process) {
  install_fork_handlers();
  Setup s;
  auto view = ArenaView::of(s.file.get(), kFile, s.process_table, 0);
  const auto lease = [&](const Block* block) { return std::make_unique<Lease>(*ArenaView::of(dup_cloexec(s.file.get()).get(), kFile, s.process_table, 0), block->offset, block->size, 0); };
  const auto first = lease(s.publish(1'000)), other = lease(s.publish(kMiB));
  const size_t before = mappings();
  CHECK(ArenaView::of(s.file.get(), kFile, s.process_table, 0) == view);
  CHECK(first->block() - first->offset() == other->block() - other->offset());  // one window
  CHECK_EQ(mappings(), before);
  Fd another = Arena::create_file(kFile);
  CHECK(ArenaView::of(another.get(), kFile, s.process_table, 1) != view);
  check::Child child([&] { CHECK(ArenaView::of(s.file.get(), kFile, s.process_table, 0) != view); });
  CHECK(child.passed());
  const std::weak_ptr<ArenaView> gone = view;
  view.reset();
  CHECK(gone.expired());  // leases keep mappings, not the view
  CHECK(ArenaView::of(s.file.get(), kFile, s.process_table, 0) != nullptr);
}

namespace {

// What is mapped here just now, as an observer has heard.
struct Heard {
  std::mutex mutex;
  std::map<char*, size_t> all{};
  MappingObserver observer{[this](char* base, size_t size) {
                             std::lock_guard lock(mutex);
                             CHECK(all.emplace(base, size).second);
                           },
                           [this](char* base, size_t size) {
                             std::lock_guard lock(mutex);
                             const auto found = all.find(base);
                             CHECK(found != all.end() && found->second == size);
                             volatile const char still = *base;  // there until this returns
                             (void)still;
                             if (found != all.end()) all.erase(found);
                           }};
  // The size of the mapping that `at` lies in, 0: nobody has told of it.
  size_t around(const char* at) {
    std::lock_guard lock(mutex);
    for (const auto& [base, size] : all)
      if (at >= base && at < base + size) return size;
    return 0;
  }
  size_t count() {
    std::lock_guard lock(mutex);
    return all.size();
  }
};

}  // namespace

TEST(who_registers_memory_hears_of_all_that_is_mapped) {
  install_fork_handlers();
  Setup s(256 * kMiB);
  Block* small = s.publish(1'000);
  auto heard = std::make_unique<Heard>();
  CHECK_EQ(heard->around(small->base), kWindow);  // it was there before
  Block* big = s.publish(20 * kMiB);
  CHECK_EQ(heard->around(big->base), big->size);
  auto lease = s.lease(small), of_big = s.lease(big);
  CHECK_EQ(heard->around(lease->block()), kWindow);
  CHECK_EQ(heard->around(of_big->block()), big->size);
  CHECK_EQ(heard->count(), 4u);
  // A child has its own memory, and nobody there has registered it.
  check::Child child([&] {
    s.view.reset(), lease.reset();
    CHECK_EQ(heard->count(), 4u);
  });
  CHECK(child.passed());
  const char* const where = of_big->block();
  s.view.reset();
  CHECK_EQ(heard->around(where), big->size);  // the lease keeps it
  of_big.reset();
  CHECK_EQ(heard->around(where), 0u);
  lease.reset();
  CHECK_EQ(heard->count(), 2u);
  s.arena.give_back(0);
  CHECK_EQ(heard->around(where), 0u);
  CHECK_EQ(heard->count(), 1u);  // the window stays
}

TEST(observers_come_and_go_while_others_map) {
  Setup s(256 * kMiB);
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t)
    threads.emplace_back([&] {
      while (!stop.load()) {
        ArenaView view(s.file.get(), kFile);
        std::shared_ptr<Mapping> keep;
        view.block(0, kGranule, keep);
        view.block(kWindow, kBigBlock, keep);
      }
    });
  for (int i = 0; i < 200; ++i) {
    std::map<char*, size_t> left;
    {
      std::mutex mutex;
      MappingObserver observer(
          [&](char* base, size_t size) {
            std::lock_guard lock(mutex);
            CHECK(left.emplace(base, size).second);
          },
          [&](char* base, size_t) {
            std::lock_guard lock(mutex);
            CHECK_EQ(left.erase(base), 1u);
          });
    }
    CHECK(left.empty());  // each has its end
  }
  stop.store(true);
  for (std::thread& thread : threads) thread.join();
}
