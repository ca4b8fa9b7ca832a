// What tests of deaths share: a session of processes that are watched.
#pragma once

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

#include "process_table.h"
#include "check.h"
#include "arena/view.h"
#include "death_watch.h"
#include "waiter.h"

namespace conveyor {

constexpr uint64_t kMs = 1'000'000;
constexpr uint64_t kSoon = 10'000 * kMs;  // what a death may take on a machine that has other work; commonly 0.1 ms
constexpr uint32_t kSelf = 0;

// The driver: this process has slot 0, its actors the others.
struct Session {
  std::shared_ptr<ProcessTable> process_table;
  DeathWatch watch;

  explicit Session(uint32_t slots = 64) : process_table(make_process_table(slots)), watch(process_table) {}
  static std::shared_ptr<ProcessTable> make_process_table(uint32_t slots) {
    auto process_table = ProcessTable::create(slots);
    process_table->prepare(kSelf, "driver");
    process_table->slot(kSelf)->condition.store(Condition::kAlive);
    return process_table;
  }

  // An actor in `slot` that has lived when this returns, and runs `body`.
  template <class Body>
  check::Child start(uint32_t slot, Body body) {
    process_table->prepare(slot, "actor");
    watch.add(slot);
    check::Child child([&, slot] {
      const rlimit none = {0, 0};
      ::setrlimit(RLIMIT_CORE, &none);
      process_table->live(slot);
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

  Condition condition(uint32_t slot) const { return process_table->slot(slot)->condition.load(); }
  template <class True>
  static void await(True condition) {
    for (const uint64_t start = now_ns(); !condition(); ::usleep(200))
      if (!CHECK(now_ns() - start < 2 * kSoon)) throw check::Abandon{};
  }
  void await_condition(uint32_t slot, Condition wanted) {
    await([&] { return condition(slot) == wanted; });
  }
  // Sleep on the own doorbell, as any waiter does, until `slot` is known to be dead; the time since `start`.
  uint64_t await_death(uint32_t slot, uint64_t start) {
    Doorbell& doorbell = process_table->slot(kSelf)->doorbell;
    Waiter waiter(&doorbell);
    for (;;) {
      const uint32_t seen = waiter.count();
      doorbell.ready[0].exchange(0);
      if (condition(slot) == Condition::kDead) break;
      if (!CHECK(waiter.park(seen, start + 2 * kSoon))) throw check::Abandon{};
    }
    const uint64_t took = now_ns() - start;
    CHECK(took < kSoon);
    return took;
  }
  uint32_t deaths() const { return process_table->header()->deaths.load(); }
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
inline void forget_handlers() {
  for (int number : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT}) ::signal(number, SIG_DFL);
}

[[gnu::noinline]] int overflow_the_stack(volatile int* depth) {
  volatile char room[512];
  room[0] = char(*depth);
  *depth = *depth + 1;
  return (*depth != 0 ? overflow_the_stack(depth) : 0) + room[0];
}

}  // namespace conveyor
