// The service thread: however a process ends, its death is announced soon, once, and to everybody.
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <thread>

#include "board.h"
#include "check.h"
#include "lease.h"
#include "service.h"
#include "waiter.h"

using namespace conveyor;

namespace {

constexpr uint64_t kMs = 1'000'000;
constexpr uint64_t kSoon = 1'000 * kMs;  // what a death may take on a busy machine; commonly 0.1 ms
constexpr uint32_t kSelf = 0;

// The driver: this process has slot 0, its actors the others.
struct Session {
  std::shared_ptr<Board> board;
  DeathWatch watch;

  explicit Session(uint32_t slots = 64) : board(make_board(slots)), watch(board) {}
  static std::shared_ptr<Board> make_board(uint32_t slots) {
    auto board = Board::create(slots);
    board->prepare(kSelf, "driver");
    board->slot(kSelf)->condition.store(Condition::kAlive);
    return board;
  }

  // An actor in `slot` that has lived when this returns, and runs `body`.
  template <class Body>
  check::Child start(uint32_t slot, Body body) {
    board->prepare(slot, "actor");
    watch.add(slot);
    check::Child child([&, slot] {
      const rlimit none = {0, 0};
      ::setrlimit(RLIMIT_CORE, &none);
      board->live(slot);
      body();
    });
    await([&] { return condition(slot) != Condition::kStarting; });  // it may be dead by now
    return child;
  }
  // An actor that does nothing until it is killed.
  check::Child start(uint32_t slot) {
    return start(slot, [] {
      for (;;) ::pause();
    });
  }

  Condition condition(uint32_t slot) const { return board->slot(slot)->condition.load(); }
  template <class True>
  static void await(True condition) {
    for (const uint64_t start = now_ns(); !condition(); ::usleep(200))
      if (!CHECK(now_ns() - start < 20 * kSoon)) throw check::Abandon{};
  }
  void await_condition(uint32_t slot, Condition wanted) {
    await([&] { return condition(slot) == wanted; });
  }
  // Sleep on the own bell, as any waiter does, until `slot` is known to be dead; the time since `start`.
  uint64_t await_death(uint32_t slot, uint64_t start) {
    Bell& bell = board->slot(kSelf)->bell;
    Waiter waiter(&bell);
    for (;;) {
      const uint32_t seen = waiter.count();
      bell.ready[0].exchange(0);
      if (condition(slot) == Condition::kDead) break;
      if (!CHECK(waiter.park(seen, start + 20 * kSoon))) throw check::Abandon{};
    }
    const uint64_t took = now_ns() - start;
    CHECK(took < kSoon);
    return took;
  }
  uint32_t deaths() const { return board->header()->deaths.load(); }
  // So many were announced, and no more. (A slot is dead a moment before its death is counted.)
  void check_deaths(uint32_t number) {
    await([&] { return deaths() >= number; });
    CHECK_EQ(deaths(), number);
  }
};

// In a process forked from one with several threads ThreadSanitizer cannot start any: it takes those
// of the parent for living.
constexpr bool kThreadsInChildren = !check::kThreadSanitizer;

// The default consequence of a signal, instead of a sanitizer's report.
void forget_handlers() {
  for (int number : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT}) ::signal(number, SIG_DFL);
}

[[gnu::noinline]] int overflow_the_stack(volatile int* depth) {
  volatile char room[512];
  room[0] = char(*depth);
  *depth = *depth + 1;
  return (*depth != 0 ? overflow_the_stack(depth) : 0) + room[0];
}

}  // namespace

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
      s.board->guard_signals(slot);
      ::raise(number);
      ::_exit(8);
    });
    s.await_condition(slot, Condition::kDead);
    CHECK_EQ(s.board->slot(slot)->status.signal.load(), uint32_t(number));
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
      s.board->guard_signals(slot);
      way.end();
    });
    const int status = child.wait();
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == way.signal);
    s.await_condition(slot, Condition::kDead);
    CHECK_EQ(s.board->slot(slot)->status.signal.load(), uint32_t(way.signal));
  }
}

TEST(a_fault_in_another_thread_is_the_actor_s) {
  if (!kThreadsInChildren) return;
  Session s;
  auto child = s.start(1, [&] {
    forget_handlers();
    s.board->guard_signals(1);
    std::thread([] { ::raise(SIGBUS); }).join();
  });
  const int status = child.wait();
  CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS);
  s.await_condition(1, Condition::kDead);
  CHECK_EQ(s.board->slot(1)->status.signal.load(), uint32_t(SIGBUS));
}

TEST(what_an_actor_forks_may_die_without_it) {
  Session s;
  int forked[2];
  REQUIRE(::pipe2(forked, O_CLOEXEC) == 0);
  auto child = s.start(1, [&] {
    forget_handlers();
    s.board->guard_signals(1);
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
  CHECK_EQ(s.board->slot(1)->status.signal.load(), 0u);
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

TEST(actors_may_be_watched_at_any_time) {
  Session s;
  // From before it lives, later, and when it is dead already.
  for (uint32_t slot : {1u, 2u}) {
    s.board->prepare(slot, "actor");
    check::Child child([&] {
      s.board->live(slot);
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
    CHECK(!s.board->gone(1, i + 1));
    child.kill(SIGKILL);
    s.await_death(1, now_ns());
    CHECK(s.board->gone(1, i + 1));
  }
  s.check_deaths(30u);
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

TEST(a_watch_is_inert_in_a_forked_child) {
  install_fork_handlers();
  Session s;
  auto child = s.start(1);
  CHECK(check::Child([&] { s.watch.stop(); }).passed());
  child.kill(SIGKILL);
  s.await_condition(1, Condition::kDead);
}

// Whoever else knows of a death (the one who killed it, the fork server) may announce it at the same
// time, and use the slot again.
TEST(a_death_known_twice_is_announced_once) {
  Session s;
  for (uint32_t i = 0; i < 30; ++i) {
    auto child = s.start(1);
    child.kill(SIGKILL);
    if (i % 2 == 0) child.wait();
    s.board->announce_death(1);
    s.watch.remove(1);
    s.check_deaths(i + 1);
  }
}

// What was announced after `remove` would be the death of the slot's next process.
TEST(no_death_is_announced_after_its_watch_ended) {
  Session s;
  const int rounds = check::kThreadSanitizer ? 2'000 : 20'000;
  for (int i = 0; i < rounds; ++i) {
    s.board->prepare(1, "");
    // Alive with a life word that nobody holds: dead, for whoever looks.
    s.board->slot(1)->condition.store(Condition::kAlive);
    s.watch.add(1);
    for (int spin = i % 50; spin > 0; --spin) (void)now_ns();
    s.watch.remove(1);
    s.board->announce_death(1);
    s.board->slot(1)->condition.store(Condition::kStarting);
    for (int spin = 0; spin < 20; ++spin) (void)now_ns();
    if (!CHECK(s.condition(1) == Condition::kStarting)) return;
  }
}

TEST(actors_start_while_others_die) {
  Session s;
  for (int i = 0; i < 500; ++i) {
    s.board->prepare(1, "");
    s.board->slot(1)->condition.store(Condition::kAlive);  // and dead: nobody holds its life word
    s.watch.add(1);
    for (uint32_t slot = 2; slot < 6; ++slot) s.board->prepare(slot, "actor");
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
        if (random.below(8) == 0) s.board->announce_death(slot);
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
  auto board = Session::make_board(8);
  for (uint32_t i = 1; i < 8; ++i) {
    board->prepare(i, "");
    board->slot(i)->condition.store(Condition::kStarting);
  }
  for (int i = 0; i < 1'000; ++i) {
    DeathWatch watch(board);
    std::thread other([&] {
      for (uint32_t slot = 1; slot < 8; ++slot) watch.add(slot);
      for (uint32_t slot = 1; slot < 8; ++slot) watch.remove(slot);
    });
    if (i % 3 == 0) ::usleep(uint32_t(i % 200));
    watch.stop();
    other.join();
  }
  CHECK_EQ(board->header()->deaths.load(), 0u);
}

TEST(a_ringer_that_is_no_peer_wakes_through_the_service_thread) {
  Session s;
  auto child = s.start(1, [&] {
    const int event = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    s.board->set_eventfd(1, event, 1);
    for (;;) ::pause();
  });
  // The actor sleeps in poll, and this process does not have its eventfd.
  const uint32_t alarm = s.board->header()->alarm.load();
  Waiter waiter(&s.board->slot(1)->bell);
  CHECK(waiter.arm_event(waiter.count()));
  s.board->ring(1, 5);
  CHECK(s.board->header()->alarm.load() != alarm);
  // The service thread sees it; having no eventfd either, it can only ring the attention bit.
  s.await([&] { return (s.board->slot(1)->bell.ready[0].load() & 1) != 0; });
}

TEST(an_event_sleeper_is_woken_by_a_ringer_that_is_no_peer) {
  Session s;
  const int event = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  s.board->set_eventfd(1, event, 1);
  int ready[2];
  REQUIRE(::pipe2(ready, O_CLOEXEC) == 0);
  auto sleeper = s.start(1, [&] {
    Waiter waiter(&s.board->slot(1)->bell);
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
    auto board = Board::attach(s.board->fd());  // knows nobody's eventfd
    board->ring(1, 5);
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
    s.board->guard_signals(1);
    s.board->guard_signals(1);
    ::alarm(5);
    ::raise(SIGSEGV);
  });
  const int status = child.wait();
  CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
}

// Where futex_waitv is forbidden, whatever the error, the service thread sleeps on its alarm, and serves it.
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
      s.board->prepare(1, "actor");
      s.board->slot(1)->condition.store(Condition::kAlive);
      life_word(s.board->slot(1))->store(uint32_t(::getpid()));
      s.watch.add(1);
      const uint64_t before = cpu();
      ::usleep(100'000);
      CHECK(cpu() - before < 50 * kMs);
      // It is there for its alarm still: a fatal signal that its actor announces.
      s.board->slot(1)->condition.store(Condition::kDying);
      s.board->header()->alarm.fetch_add(1);
      futex_wake_all(&s.board->header()->alarm);
      s.await_condition(1, Condition::kDead);
    });
    CHECK(child.passed());
  }
}
