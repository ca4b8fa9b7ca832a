// Every way in which an actor can die is seen.
#include "death_setup.h"

using namespace conveyor;

TEST(every_way_to_end_is_seen) {
  Session s;
  struct Way {
    const char* name;
    std::function<void()> end;
    int signal;
  };
  const std::vector<Way> ways = {
      {"_exit", [] { ::_exit(0); }, 0},
      {"_exit with a code", [] { ::_exit(3); }, 0},
      {"quick_exit", [] { std::quick_exit(0); }, 0},
      {"return", [] {}, 0},
      {"SIGKILL", [] { ::raise(SIGKILL); }, SIGKILL},
      {"SIGTERM", [] { ::raise(SIGTERM); }, SIGTERM},
      {"SIGSEGV", [] { forget_handlers(), ::raise(SIGSEGV); }, SIGSEGV},
      {"abort", [] { forget_handlers(), std::abort(); }, SIGABRT},
      {"the end of the main thread alone", [] {
         if (!kThreadsInChildren) return;
         std::thread([] { ::usleep(300'000), ::_exit(0); }).detach();
         ::syscall(SYS_exit, 0);
       }, 0},
  };
  uint32_t slot = 0;
  for (const Way& way : ways) {
    ++slot;
    auto child = s.start(slot, way.end);
    s.await_condition(slot, Condition::kDead);
    s.check_deaths(slot);
    const int status = child.wait();
    CHECK_EQ(WIFSIGNALED(status) ? WTERMSIG(status) : 0, way.signal);
  }
}

TEST(fifty_actors_killed_one_by_one) {
  constexpr uint32_t kActors = 50;
  Session s;
  std::vector<check::Child> children;
  for (uint32_t i = 1; i <= kActors; ++i) children.push_back(s.start(i));
  std::vector<uint64_t> times;
  check::Random random(1);
  std::vector<uint32_t> order(kActors);
  for (uint32_t i = 0; i < kActors; ++i) order[i] = i;
  for (uint32_t i = kActors - 1; i > 0; --i) std::swap(order[i], order[random.below(i + 1)]);
  for (uint32_t i : order) {
    const uint64_t start = now_ns();
    children[i].kill(SIGKILL);
    times.push_back(s.await_death(i + 1, start));
    s.check_deaths(uint32_t(times.size()));
    children[i].wait();
  }
  std::sort(times.begin(), times.end());
  std::printf("[median %.2f ms, longest %.2f ms] ", double(times[kActors / 2]) / kMs, double(times.back()) / kMs);
}

TEST(fifty_actors_killed_at_once) {
  constexpr uint32_t kActors = 50;
  Session s;
  std::vector<check::Child> children;
  for (uint32_t i = 1; i <= kActors; ++i) children.push_back(s.start(i));
  const uint64_t start = now_ns();
  for (auto& child : children) child.kill(SIGKILL);
  for (uint32_t i = 1; i <= kActors; ++i) s.await_death(i, start);
  s.check_deaths(kActors);
}

// The kernel frees the memory after it has told of the death.
TEST(a_large_actor_dies_as_fast) {
  constexpr size_t kSize = size_t(256) << 20;
  Session s;
  auto child = s.start(1, [] {
    void* p = ::mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    CHECK(p != MAP_FAILED);
    ::raise(SIGSTOP);
    for (;;) ::pause();
  });
  int status;
  CHECK(::waitpid(child.pid(), &status, WUNTRACED) == child.pid() && WIFSTOPPED(status));
  ::usleep(20'000);
  CHECK(s.condition(1) == Condition::kAlive);  // stopped is not dead
  const uint64_t start = now_ns();
  child.kill(SIGKILL);
  const uint64_t took = s.await_death(1, start);
  child.wait();
  std::printf("[%.2f ms] ", double(took) / kMs);
}

TEST(a_fatal_signal_is_announced_before_its_consequence) {
  Session s;
  uint32_t slot = 0;
  for (int number : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT}) {
    ++slot;
    // In place of a long core dump: a handler that was there before ours.
    auto child = s.start(slot, [&] {
      ::signal(number, [](int) {
        ::sleep(20);
        ::_exit(7);
      });
      s.process_table->guard_signals(slot);
      ::raise(number);
      ::_exit(8);
    });
    s.await_condition(slot, Condition::kDead);
    CHECK_EQ(s.process_table->slot(slot)->status.signal.load(), uint32_t(number));
    CHECK_EQ(::waitpid(child.pid(), nullptr, WNOHANG), 0);  // it is still there
    child.kill(SIGKILL);
    child.wait();
  }
  s.check_deaths(5u);
}

TEST(the_exit_status_stays_the_signal_s) {
  Session s;
  struct Way {
    std::function<void()> end;
    int signal;
  };
  const std::vector<Way> ways = {
      {[] { ::raise(SIGSEGV); }, SIGSEGV},
      {[] { std::abort(); }, SIGABRT},
      {[] {  // a true fault
         void* p = ::mmap(nullptr, kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
         *static_cast<volatile char*>(p) = 1;
       }, SIGSEGV},
      {[] {
         const rlimit small = {1 << 20, 1 << 20};
         ::setrlimit(RLIMIT_STACK, &small);
         volatile int depth = 0;
         overflow_the_stack(&depth);
       }, SIGSEGV},
  };
  uint32_t slot = 0;
  for (const Way& way : ways) {
    ++slot;
    auto child = s.start(slot, [&] {
      forget_handlers();
      s.process_table->guard_signals(slot);
      way.end();
    });
    const int status = child.wait();
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == way.signal);
    s.await_condition(slot, Condition::kDead);
    CHECK_EQ(s.process_table->slot(slot)->status.signal.load(), uint32_t(way.signal));
  }
}

TEST(a_fault_in_another_thread_is_the_actor_s) {
  if (!kThreadsInChildren) return;
  Session s;
  auto child = s.start(1, [&] {
    forget_handlers();
    s.process_table->guard_signals(1);
    std::thread([] { ::raise(SIGBUS); }).join();
  });
  const int status = child.wait();
  CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS);
  s.await_condition(1, Condition::kDead);
  CHECK_EQ(s.process_table->slot(1)->status.signal.load(), uint32_t(SIGBUS));
}

TEST(what_an_actor_forks_may_die_without_it) {
  Session s;
  int forked[2];
  REQUIRE(::pipe2(forked, O_CLOEXEC) == 0);
  auto child = s.start(1, [&] {
    forget_handlers();
    s.process_table->guard_signals(1);
    for (int number : {SIGSEGV, SIGKILL, 0}) {
      const pid_t pid = ::fork();
      if (pid == 0) {
        if (number != 0) ::raise(number);
        ::_exit(0);
      }
      int status;
      ::waitpid(pid, &status, 0);
      CHECK_EQ(WIFSIGNALED(status) ? WTERMSIG(status) : 0, number);
    }
    CHECK(::write(forked[1], "", 1) == 1);
    for (;;) ::pause();
  });
  char c;
  CHECK(::read(forked[0], &c, 1) == 1);
  ::usleep(20'000);
  CHECK(s.condition(1) == Condition::kAlive);
  CHECK_EQ(s.process_table->slot(1)->status.signal.load(), 0u);
  child.kill(SIGKILL);
  s.await_condition(1, Condition::kDead);
  ::close(forked[0]);
  ::close(forked[1]);
}

// A daemon that an actor leaves behind holds its descriptors, not its life.
TEST(an_actor_is_dead_though_its_child_lives) {
  Session s;
  auto child = s.start(1, [] {
    if (::fork() == 0) {
      ::usleep(300'000);
      ::_exit(0);
    }
    ::raise(SIGKILL);
  });
  s.await_condition(1, Condition::kDead);
}

TEST(a_thread_s_end_is_not_its_actor_s) {
  if (!kThreadsInChildren) return;
  Session s;
  auto child = s.start(1, [] {
    std::thread([] {}).join();
    for (;;) ::pause();
  });
  ::usleep(20'000);
  CHECK(s.condition(1) == Condition::kAlive);
  child.kill(SIGKILL);
  s.await_condition(1, Condition::kDead);
}

TEST(stopping_is_final_and_may_be_repeated) {
  Session s;
  auto child = s.start(1);
  s.watch.stop();
  s.watch.stop();
  child.kill(SIGKILL);
  child.wait();
  ::usleep(5'000);
  CHECK(s.condition(1) == Condition::kAlive);
}
