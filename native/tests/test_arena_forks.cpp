// What a fork does to those who hold something in an arena.
#include <sys/resource.h>
#include <sys/wait.h>
#include <functional>
#include <thread>

#include "arena_setup.h"

using namespace conveyor;

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
  CHECK(check::soon([&] { return open_descriptors() <= descriptors; }));
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
  CHECK(check::soon([&] { return open_descriptors() <= descriptors; }));
}

TEST(only_living_children_cost_descriptors) {
  install_fork_handlers();
  Setup s;
  auto lease = s.lease(s.publish(5'000));
  const int descriptors = open_descriptors();
  for (int i = 0; i < 50; ++i) CHECK(check::Child([] {}).passed());
  CHECK(check::soon([&] { return open_descriptors() <= descriptors; }));
  {
    Pause pause;
    std::vector<check::Child> children;
    for (int i = 0; i < 10; ++i) children.emplace_back([&] { pause.wait(); });
    CHECK(open_descriptors() <= descriptors + 10 + 2 + 1);  // and that of the thread
    pause.go_on();
    for (auto& child : children) CHECK(child.passed());
  }
  CHECK(check::soon([&] { return open_descriptors() <= descriptors; }));
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

// As an array that is made in place is (python/made_in_place.h).
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
    hold.leave([&] { s.arena.release(block), back.store(true); });
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
