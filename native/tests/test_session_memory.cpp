// The session's memory, and the thread that gives it back.
#include <mutex>
#include <thread>

#include "arena_setup.h"

using namespace conveyor;

namespace {

// Another process of the session: here, another arena on the same process table.
struct Peer {
  Fd file = Arena::create_file(kFile);
  Arena arena;
  Peer(Setup& s, uint32_t slot, size_t cap, uint64_t idle_ns = Arena::kIdleNs) : arena(file.get(), kFile, cap, s.process_table, slot, idle_ns) {}
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
  const auto view = std::make_shared<ArenaView>(peer.file.get(), kFile, s.process_table, 0);
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
  CHECK_EQ(s.process_table->header()->memory.bytes.load(), peer.arena.bytes_touched());
  // The thread sleeps while nothing is free.
  CHECK(check::soon([&] { return s.process_table->slot(0)->returns.wanted.load() == 1; }));
  const uint64_t start = now_ns();  // before: other programs may have the cores behind it
  held.clear();
  peer.arena.release(made);
  CHECK(check::soon([&] { return peer.memory() < 2 * kMiB; }));
  CHECK(now_ns() - start > 200'000'000);  // not at once: what is used again is warm
  // The pages go first, and are counted afterwards.
  CHECK(check::soon([&] { return s.process_table->slot(0)->memory.load() == peer.arena.bytes_touched(); }));
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
    CHECK(check::soon([&] { return s.process_table->slot(0)->returns.wanted.load() == 1; }));
    ::usleep(20'000);
    peer.arena.publish(block, set, 0, 7);
    CHECK(check::soon([&] { return peer.memory() == 0; }));
  };
  s.process_table->announce_death(1);
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
  CHECK_EQ(s.process_table->header()->memory.bytes.load(), kCap);
  // What is free in another process is asked for, warm as it is.
  a.arena.release(blocks.back());
  blocks.pop_back();
  Block* third = b.arena.allocate(size);
  CHECK_EQ(s.process_table->header()->memory.bytes.load(), kCap);
  // And what a process had that has ended.
  CHECK_THROWS(ArenaFull, b.arena.allocate(size));
  s.process_table->announce_death(0);
  s.process_table->forget_memory(0);
  for (int i = 0; i < 5; ++i) b.arena.release(b.arena.allocate(size));
  for (Block* block : {two[0], two[1], third}) b.arena.release(block);
}

// Who asks while an earlier one is being answered waits for an answer of its own: what that look has found
// may be what the earlier one takes.
TEST(each_who_asks_for_memory_has_its_own_answer) {
  Setup s;
  Returns& returns = s.process_table->slot(3)->returns;
  s.process_table->slot(3)->memory.store(1);
  auto first = s.process_table->ask_for_memory(0);
  const uint32_t looks_for = returns.requested.load();
  auto second = s.process_table->ask_for_memory(1);
  returns.answered.store(looks_for);
  s.process_table->still_requested(first);
  CHECK(first.empty());
  s.process_table->still_requested(second);
  CHECK_EQ(second.size(), 1u);
  returns.answered.store(returns.requested.load());
  s.process_table->still_requested(second);
  CHECK(second.empty());
  // A process that has the slot after it counts from the beginning: nobody waits for its answer.
  auto late = s.process_table->ask_for_memory(0);
  s.process_table->prepare(3, "later");
  s.process_table->slot(3)->memory.store(1);
  s.process_table->still_requested(late);
  CHECK(late.empty());
  s.process_table->slot(3)->memory.store(0);
}

// Others may take what has come back before who has asked for it does.
TEST(who_asks_for_memory_asks_again_as_long_as_some_comes_back) {
  Setup s;
  constexpr uint64_t kCap = 8 * kMiB, kOthers = 6 * kMiB;
  Peer peer(s, 0, kCap);
  SessionMemory& memory = s.process_table->header()->memory;
  ProcessTableSlot* other = s.process_table->slot(3);
  Returns& returns = other->returns;
  // What the other process does when it is asked: that often it gives back, and takes again at once.
  const auto answer = [&](uint32_t rounds, bool at_last) {
    for (uint32_t seen = 0; seen <= rounds; ++seen) {
      for (;;) {
        const uint32_t news = returns.count.load();
        if (returns.requested.load() != seen) break;
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
    CHECK_EQ(returns.requested.load(), 4u);  // not once more: nothing has come back
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
        CHECK(s.process_table->header()->memory.bytes.load() <= kCap);
        while (mine.size() > random.below(16)) {
          arena.release(mine.back());
          mine.pop_back();
        }
      }
      for (Block* block : mine) arena.release(block);
    });
  for (auto& thread : threads) thread.join();
  for (auto& peer : peers) peer->arena.give_back(0);
  CHECK_EQ(s.process_table->header()->memory.bytes.load(), 0u);
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
    CHECK_EQ(s.process_table->header()->memory.bytes.load(), 0u);
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
  s.process_table->slot(1)->condition.store(Condition::kDead);
  peer.arena.publish(blocks[0], set, 0, 0);
  peer.arena.release(blocks[1]);
  CHECK(peer.memory() < 3 * kMiB);
  CHECK_EQ(blocks[2]->data()[2 * kMiB - 1], 7);
  peer.arena.release(blocks[2]);
  CHECK_EQ(peer.memory(), 0u);
  CHECK_EQ(s.process_table->header()->memory.bytes.load(), 0u);
}

TEST(an_arena_is_its_parent_s_in_a_forked_child) {
  Setup s;
  auto peer = std::make_unique<Peer>(s, 0, 64 * kMiB);
  Block* block = peer->arena.allocate(kMiB);
  const uint64_t counted = s.process_table->header()->memory.bytes.load();
  for (int i = 0; i < 20; ++i)
    CHECK(check::Child([&] {
            CHECK_THROWS(ArenaFull, peer->arena.allocate(1));
            peer->arena.release(block);
            peer.reset();
          }).passed());
  CHECK_EQ(s.process_table->header()->memory.bytes.load(), counted);
  peer->arena.release(block);
  CHECK(peer->arena.allocate(kMiB) == block);
}

// Blocks come and go one by one, so none is free whenever the thread looks. Who frees the next one is not to wake it
// out of the pause that it takes between two looks.
TEST(what_is_attached_to_one_block_after_the_other_wakes_the_thread_now_and_then) {
  const auto process_table = ProcessTable::create(2);
  process_table->prepare(1, "");
  process_table->slot(1)->condition.store(Condition::kAlive);
  Setup setup;
  Arena arena(setup.file.get(), kFile, 64 * kMiB, process_table, 0, 1'000'000'000);
  const auto view = std::make_shared<ArenaView>(setup.file.get(), kFile, process_table, 0);
  const auto readers = std::make_shared<ReaderSet>();
  readers->process_table = process_table;
  readers->add(1, &setup.cursors[0]);
  std::atomic<int> freed{0};
  Returns& returns = process_table->slot(0)->returns;
  std::unique_ptr<Lease> held;
  constexpr int kValues = 2'000;
  const uint32_t before = returns.count.load();
  const uint64_t began = now_ns();
  for (int i = 0; i < kValues; ++i) {
    held.reset();  // which the allocation finds, and frees
    Block* block = arena.allocate(64);
    arena.publish(block, readers, 0, 0, std::shared_ptr<const void>(&freed, [](const std::atomic<int>* freed) { const_cast<std::atomic<int>*>(freed)->fetch_add(1); }));
    held = std::make_unique<Lease>(*view, block->offset, block->size, 0);
    for (const uint64_t until = now_ns() + 20'000; now_ns() < until;) std::this_thread::yield();
  }
  const uint64_t milliseconds = (now_ns() - began) / 1'000'000;
  const uint32_t woken = returns.count.load() - before;
  CHECK(woken < 4 * (milliseconds + 1));
  held.reset();
  CHECK(check::soon([&] { return freed.load() == kValues; }));
}

TEST(while_a_process_starves_what_is_free_goes_back_at_once_and_it_is_rung) {
  Setup s;
  Peer peer(s, 0, 64 * kMiB);  // it would keep what is free for three seconds
  const auto view = std::make_shared<ArenaView>(peer.file.get(), kFile, s.process_table, 0);
  const auto set = s.readers();
  const auto send = [&] {
    Block* block = peer.arena.allocate(kMiB);
    peer.arena.publish(block, set, 0, 0);
    return std::make_unique<Lease>(*view, block->offset, block->size, 0);
  };
  const auto rung = [&](uint32_t slot) { return s.process_table->slot(slot)->doorbell.count.load(); };
  std::vector<std::unique_ptr<Lease>> held;
  for (int i = 0; i < 4; ++i) held.push_back(send());
  // It has seen a lease end, and waits a second before it looks again.
  held.pop_back();
  CHECK(check::soon([&] { return s.process_table->slot(0)->returns.wanted.load() == 0; }));
  s.process_table->starve(3, true);
  CHECK(check::soon([&] { return peer.memory() < 4 * kMiB; }));
  uint64_t shortest = UINT64_MAX;  // other work of the machine may delay any one of them
  for (uint64_t left = 3; left > 0; --left) {
    const uint32_t before = rung(3), others = rung(2);
    const uint64_t news = peer.arena.news(), since = now_ns();
    held.pop_back();
    CHECK(check::soon([&] { return peer.memory() < left * kMiB && rung(3) != before; }));
    CHECK(peer.arena.news() != news);
    shortest = std::min(shortest, now_ns() - since);
    CHECK_EQ(rung(2), others);
  }
  CHECK(shortest < 500'000'000);
  // Who holds what of it, and runs something, is on the process table.
  held.push_back(send());
  s.process_table->slot(1)->status.state.store(uint32_t(State::kRunning));
  peer.arena.give_back_soon();
  CHECK(check::soon([&] { return s.process_table->slot(0)->holders[0].load() == 1 + 1; }));
  held.clear();
  CHECK(check::soon([&] { return s.process_table->slot(0)->holders[0].load() == 0; }));
  // Its death is the end of it, and so is the last one's that does not starve any more.
  s.process_table->starve(2, true);
  s.process_table->announce_death(3);
  CHECK(s.process_table->any_starving());
  s.process_table->starve(2, false);
  CHECK(!s.process_table->any_starving());
}

TEST(what_is_taken_off_a_budget_is_news_for_who_starves) {
  Setup s;
  Peer peer(s, 3, 64 * kMiB);
  const auto budget = std::make_shared<Budget>(2 * kMiB);
  const auto one = peer.arena.allocate(kMiB, budget);
  try {
    peer.arena.allocate(kMiB, budget);
    CHECK(false);
  } catch (const ArenaFull& error) {
    CHECK(error.cap == ArenaFull::Cap::kGraph);
  }
  try {
    peer.arena.allocate(2 * kMiB, budget);
    CHECK(false);
  } catch (const ArenaFull& error) {
    CHECK(error.cap == ArenaFull::Cap::kNone);  // it never has room
  }
  s.process_table->starve(3, true);
  const uint32_t before = s.process_table->slot(3)->doorbell.count.load();
  const uint64_t news = peer.arena.news();
  peer.arena.uncharge(one);
  CHECK(peer.arena.news() != news);
  CHECK(check::soon([&] { return s.process_table->slot(3)->doorbell.count.load() != before; }));
  peer.arena.release(peer.arena.allocate(kMiB, budget));
  peer.arena.release(one);
  s.process_table->starve(3, false);
}
