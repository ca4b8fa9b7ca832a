// The death watch: when it is made, told, stopped, and asked to wake others.
#include "death_setup.h"

using namespace conveyor;

TEST(actors_may_be_watched_at_any_time) {
  Session s;
  // From before it lives, later, and when it is dead already.
  for (uint32_t slot : {1u, 2u}) {
    s.process_table->prepare(slot, "actor");
    check::Child child([&] {
      s.process_table->live(slot);
      for (;;) ::pause();
    });
    s.await_condition(slot, Condition::kAlive);
    ::usleep(5'000);
    if (slot == 1) s.watch.add(slot);
    child.kill(SIGKILL);
    child.wait();
    if (slot == 2) {
      ::usleep(5'000);
      CHECK(s.condition(slot) == Condition::kAlive);  // nobody has looked
      s.watch.add(slot);
    }
    s.await_condition(slot, Condition::kDead);
  }
  // One that is watched no more dies in silence.
  auto child = s.start(3);
  s.watch.remove(3);
  child.kill(SIGKILL);
  child.wait();
  ::usleep(20'000);
  CHECK(s.condition(3) == Condition::kAlive);
  s.check_deaths(2u);
}

TEST(a_slot_is_watched_for_one_process_after_the_other) {
  Session s;
  for (uint32_t i = 0; i < 30; ++i) {
    auto child = s.start(1);
    CHECK(!s.process_table->gone(1, i + 1));
    child.kill(SIGKILL);
    s.await_death(1, now_ns());
    CHECK(s.process_table->gone(1, i + 1));
  }
  s.check_deaths(30u);
}

TEST(a_watch_is_inert_in_a_forked_child) {
  install_fork_handlers();
  Session s;
  auto child = s.start(1);
  CHECK(check::Child([&] { s.watch.stop(); }).passed());
  child.kill(SIGKILL);
  s.await_condition(1, Condition::kDead);
}

// A process that leaves the session is dead for everybody, once, and what it does afterwards concerns nobody.
TEST(one_that_has_left_goes_on) {
  Session s;
  auto child = s.start(1, [&] {
    s.process_table->guard_signals(1);
    s.process_table->retire(1);
    for (;;) ::pause();
  });
  s.await_condition(1, Condition::kDead);
  s.await([&] { return liveness_futex(s.process_table->slot(1))->load() == 0; });  // nobody owns it, nor has died with it
  s.watch.remove(1);
  s.process_table->prepare(1, "its successor");
  child.kill(SIGABRT);
  child.wait();
  CHECK(s.condition(1) == Condition::kStarting);
  s.check_deaths(1u);
}

// Whoever else knows of a death (the one who killed it, the fork server) may announce it at the same
// time, and use the slot again.
TEST(a_death_known_twice_is_announced_once) {
  Session s;
  for (uint32_t i = 0; i < 30; ++i) {
    auto child = s.start(1);
    child.kill(SIGKILL);
    if (i % 2 == 0) child.wait();
    s.process_table->announce_death(1);
    s.watch.remove(1);
    s.check_deaths(i + 1);
  }
}

// What was announced after `remove` would be the death of the slot's next process.
TEST(no_death_is_announced_after_its_watch_ended) {
  Session s;
  const int rounds = check::kThreadSanitizer ? 2'000 : 20'000;
  for (int i = 0; i < rounds; ++i) {
    s.process_table->prepare(1, "");
    // Alive with a liveness futex that nobody holds: dead, for whoever looks.
    s.process_table->slot(1)->condition.store(Condition::kAlive);
    s.watch.add(1);
    for (int spin = i % 50; spin > 0; --spin) (void)now_ns();
    s.watch.remove(1);
    s.process_table->announce_death(1);
    s.process_table->slot(1)->condition.store(Condition::kStarting);
    for (int spin = 0; spin < 20; ++spin) (void)now_ns();
    if (!CHECK(s.condition(1) == Condition::kStarting)) return;
  }
}

TEST(actors_start_while_others_die) {
  Session s;
  for (int i = 0; i < 500; ++i) {
    s.process_table->prepare(1, "");
    s.process_table->slot(1)->condition.store(Condition::kAlive);  // and dead: nobody holds its liveness futex
    s.watch.add(1);
    for (uint32_t slot = 2; slot < 6; ++slot) s.process_table->prepare(slot, "actor");
    s.await_death(1, now_ns());
    for (uint32_t slot = 2; slot < 6; ++slot) CHECK(s.condition(slot) == Condition::kStarting);
  }
}

TEST(watches_come_and_go_while_actors_die) {
  constexpr uint32_t kActors = 24;
  Session s;
  std::vector<check::Child> children;
  for (uint32_t i = 1; i <= kActors; ++i) children.push_back(s.start(i));
  std::vector<std::thread> threads;
  std::atomic<bool> stop{false};
  for (uint64_t t = 0; t < 3; ++t)
    threads.emplace_back([&, t] {
      check::Random random(t);
      while (!stop.load()) {
        const auto slot = uint32_t(1 + random.below(kActors));
        if (random.below(2) != 0)
          s.watch.add(slot);
        else
          s.watch.remove(slot);
        if (random.below(8) == 0) s.process_table->announce_death(slot);
        if (random.below(4) == 0) ::usleep(100);
      }
    });
  for (auto& child : children) {
    child.kill(SIGKILL);
    child.wait();
    ::usleep(500);
  }
  stop.store(true);
  for (auto& thread : threads) thread.join();
  for (uint32_t i = 1; i <= kActors; ++i) s.watch.add(i);
  for (uint32_t i = 1; i <= kActors; ++i) s.await_condition(i, Condition::kDead);
  s.check_deaths(kActors);
}

TEST(watches_may_be_made_and_stopped_at_any_moment) {
  auto process_table = Session::make_process_table(8);
  for (uint32_t i = 1; i < 8; ++i) {
    process_table->prepare(i, "");
    process_table->slot(i)->condition.store(Condition::kStarting);
  }
  for (int i = 0; i < 1'000; ++i) {
    DeathWatch watch(process_table);
    std::thread other([&] {
      for (uint32_t slot = 1; slot < 8; ++slot) watch.add(slot);
      for (uint32_t slot = 1; slot < 8; ++slot) watch.remove(slot);
    });
    if (i % 3 == 0) ::usleep(uint32_t(i % 200));
    watch.stop();
    other.join();
  }
  CHECK_EQ(process_table->header()->deaths.load(), 0u);
}

TEST(a_ringer_that_is_no_peer_wakes_through_the_death_watch) {
  Session s;
  auto child = s.start(1, [&] {
    const int event = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    s.process_table->set_eventfd(1, event, 1);
    for (;;) ::pause();
  });
  // The actor sleeps in poll, and this process does not have its eventfd.
  const uint32_t alarm = s.process_table->header()->alarm.load();
  Waiter waiter(&s.process_table->slot(1)->doorbell);
  CHECK(waiter.arm_event(waiter.count()));
  s.process_table->notify(1, 5);
  CHECK(s.process_table->header()->alarm.load() != alarm);
  // The death watch sees it; having no eventfd either, it can only ring the attention bit.
  s.await([&] { return (s.process_table->slot(1)->doorbell.ready[0].load() & 1) != 0; });
}

TEST(an_event_sleeper_is_woken_by_a_ringer_that_is_no_peer) {
  Session s;
  const int event = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  s.process_table->set_eventfd(1, event, 1);
  int ready[2];
  REQUIRE(::pipe2(ready, O_CLOEXEC) == 0);
  auto sleeper = s.start(1, [&] {
    Waiter waiter(&s.process_table->slot(1)->doorbell);
    const uint32_t seen = waiter.count();
    CHECK(waiter.arm_event(seen));
    CHECK(::write(ready[1], "", 1) == 1);
    pollfd p = {event, POLLIN, 0};
    CHECK_EQ(::poll(&p, 1, 20'000), 1);
    CHECK(waiter.count() != seen);
  });
  char c;
  CHECK(::read(ready[0], &c, 1) == 1);
  check::Child stranger([&] {
    auto process_table = ProcessTable::attach(s.process_table->fd());  // knows nobody's eventfd
    process_table->notify(1, 5);
  });
  CHECK(stranger.passed());
  CHECK(sleeper.passed());
  ::close(event);
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST(guarding_signals_twice_does_not_loop) {
  Session s;
  auto child = s.start(1, [&] {
    forget_handlers();
    s.process_table->guard_signals(1);
    s.process_table->guard_signals(1);
    ::alarm(5);
    ::raise(SIGSEGV);
  });
  const int status = child.wait();
  CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
}

// Where futex_waitv is forbidden, whatever the error, the death watch sleeps on its alarm, and serves it.
TEST(a_watch_that_may_not_wait_for_many_does_not_spin) {
  for (const int error : {EPERM, ENOSYS, EACCES, ENOMEM}) {
    check::Child child([error] {
      if (!kThreadsInChildren) return;
      const sock_filter code[] = {
          BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
          BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 449, 0, 1),  // futex_waitv
          BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | uint32_t(error)),
          BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
      };
      const sock_fprog program = {std::size(code), const_cast<sock_filter*>(code)};
      REQUIRE(::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
      REQUIRE(::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
      CHECK(!DeathWatch::supported());
      Session s(8);
      auto cpu = [] {
        rusage used;
        ::getrusage(RUSAGE_SELF, &used);
        return uint64_t(used.ru_utime.tv_sec + used.ru_stime.tv_sec) * 1'000 * kMs + uint64_t(used.ru_utime.tv_usec + used.ru_stime.tv_usec) * 1'000;
      };
      s.process_table->prepare(1, "actor");
      s.process_table->slot(1)->condition.store(Condition::kAlive);
      liveness_futex(s.process_table->slot(1))->store(uint32_t(::getpid()));
      s.watch.add(1);
      const uint64_t before = cpu();
      ::usleep(100'000);
      CHECK(cpu() - before < 50 * kMs);
      // It is there for its alarm still: a fatal signal that its actor announces.
      s.process_table->slot(1)->condition.store(Condition::kDying);
      s.process_table->header()->alarm.fetch_add(1);
      futex_wake_all(&s.process_table->header()->alarm);
      s.await_condition(1, Condition::kDead);
    });
    CHECK(child.passed());
  }
}
