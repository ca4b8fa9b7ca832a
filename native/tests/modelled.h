// The native core, compiled for explorer.h; and what the tests of its interleavings share.
#pragma once

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <deque>
#include <map>
#include <set>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <thread>
#include <unordered_map>
#include <vector>

#include "explorer.h"

#ifndef SYS_futex_waitv
#define SYS_futex_waitv 449
#endif

namespace model {

inline void step(const char* what, const void* word, bool writes, bool fences = true) {
  if (explorer != nullptr) explorer->step(what, word, writes, fences);
}
// Plain memory that a body reads or writes.
inline void reads(const void* word) { step("read", word, false, false); }
inline void writes(const void* word) { step("write", word, true, false); }

inline unsigned long thread_ident() { return (unsigned long)(self + 1); }

template <class T>
class Atomic {
 public:
  Atomic() = default;
  constexpr Atomic(T value) : value_(value) {}
  Atomic(const Atomic&) = delete;
  ~Atomic() {
    if (explorer != nullptr && explorer->buffers) explorer->forget(this);
  }
  T load(std::memory_order = std::memory_order_seq_cst) const {
    step("load", this, false, false);
    T value;
    const void* const own = explorer != nullptr ? explorer->own(this) : nullptr;
    return own == nullptr ? value_ : (std::memcpy(&value, own, sizeof value), value);
  }
  void store(T value, std::memory_order order = std::memory_order_seq_cst) {
    if (explorer != nullptr && explorer->buffered(this, order == std::memory_order_seq_cst)) {
      if (explorer->does("store", this, [this, value] { value_ = value; })) explorer->buffer(this, &value, sizeof value);
      return;
    }
    change("store", [this, value] { value_ = value; });
  }
  T exchange(T value, std::memory_order = std::memory_order_seq_cst) {
    return change("exchange", [this, value] { value_ = value; });
  }
  T fetch_add(T n, std::memory_order = std::memory_order_seq_cst) {
    return change("fetch_add", [this, n] { value_ = T(value_ + n); });
  }
  T fetch_sub(T n, std::memory_order = std::memory_order_seq_cst) {
    return change("fetch_sub", [this, n] { value_ = T(value_ - n); });
  }
  T fetch_or(T bits, std::memory_order = std::memory_order_seq_cst) {
    return change("fetch_or", [this, bits] { value_ = T(value_ | bits); });
  }
  // A fault makes it an unconditional store: what it would be without the comparison.
  bool compare_exchange_strong(T& expected, T wanted, std::memory_order = std::memory_order_seq_cst,
                               std::memory_order = std::memory_order_seq_cst) {
    step("compare_exchange", this, true);
    if (value_ == expected || (explorer != nullptr && !explorer->does("compare_exchange", this, [] {}))) return value_ = wanted, true;
    return expected = value_, false;
  }
  bool compare_exchange_weak(T& expected, T wanted, std::memory_order order = std::memory_order_seq_cst) {
    return compare_exchange_strong(expected, wanted, order);
  }

 private:
  template <class Operation>
  T change(const char* what, Operation operation) {
    step(what, this, true);
    const T before = value_;
    if (explorer == nullptr || explorer->does(what, this, operation)) operation();
    return before;
  }
  T value_;
};

class Mutex {
 public:
  void lock() {
    for (;;) {
      step("lock", this, true);
      if (explorer == nullptr || explorer->abandoned()) return;
      if (!held_) break;
      explorer->doze({this});
    }
    if (explorer->does("lock", this, [] {})) held_ = true;
  }
  void unlock() {
    step("unlock", this, true);
    held_ = false;
    if (explorer != nullptr) explorer->wake(this);
  }

 private:
  bool held_ = false;
};

// The death watch's function, for a body to run.
inline std::function<void()> started;
class Thread {
 public:
  Thread() = default;
  explicit Thread(std::function<void()> body) { started = std::move(body); }
  bool joinable() const { return false; }
  void join() {}
  void detach() {}
};

struct FutexVector {
  uint64_t value, address;
  uint32_t flags, reserved;
};

template <class... A>
long system_call(long number, A... arguments) {
  const uintptr_t a[] = {(uintptr_t)arguments..., 0};
  if (explorer == nullptr) return ::syscall(number, arguments...);
  if (number == SYS_futex_waitv) {
    const auto* entries = reinterpret_cast<const FutexVector*>(a[0]);
    if (entries == nullptr) return errno = EINVAL, -1;
    std::vector<const void*> words;
    for (size_t i = 0; i < a[1]; ++i) {
      const auto* word = reinterpret_cast<const uint32_t*>(entries[i].address);
      // The kernel looks at one after the other, and is on each one's list from then on. Here it looks at
      // each once more in the step in which it falls asleep, which it then does with all of them.
      words.push_back(word);
    }
    explorer->step("futex wait", words.front(), true);
    for (size_t i = 0; i < a[1]; ++i)
      if (*static_cast<const uint32_t*>(words[i]) != uint32_t(entries[i].value)) return errno = EAGAIN, -1;
    explorer->sleep_on(std::move(words), false);
    return 0;
  }
  if (number != SYS_futex) return ::syscall(number, arguments...);
  const auto* word = reinterpret_cast<const uint32_t*>(a[0]);
  if (a[1] == FUTEX_WAKE) {
    explorer->step("futex wake", word, true);
    if (explorer->does("futex wake", word, [word, e = explorer] { e->wake(word); })) explorer->wake(word);
    return 0;
  }
  explorer->step("futex wait", word, false);
  if (*word != uint32_t(a[2])) return errno = EAGAIN, -1;
  explorer->sleep_on({word}, a[3] != 0);
  return 0;
}

// All descriptors are one word: they are few, and what is done with them seldom commutes.
inline int descriptors = 0;
inline int faulty_descriptor = -1;  // with Fault{kOmitted, "write", &descriptors}: writing to this one is left out
inline ssize_t write_event(int fd, const void* data, size_t size) {
  step("write", &descriptors, true);
  if (explorer != nullptr && fd == faulty_descriptor && !explorer->does("write", &descriptors, [] {})) return ssize_t(size);
  const ssize_t n = ::write(fd, data, size);
  if (explorer != nullptr) explorer->wake(&descriptors);
  return n;
}
inline ssize_t read_event(int fd, void* data, size_t size) {
  step("read", &descriptors, true);
  return ::read(fd, data, size);
}
inline int epoll_now(int epoll, epoll_event* events, int size, int) {
  step("poll", &descriptors, false);
  return ::epoll_wait(epoll, events, size, 0);
}
inline int poll_events(pollfd* p, nfds_t n, const timespec* timeout, const sigset_t*) {
  for (;;) {
    step("poll", &descriptors, false);
    const int ready = ::poll(p, n, 0);
    if (ready != 0 || explorer == nullptr) return ready;
    explorer->sleep_on({&descriptors}, timeout != nullptr);
    if (timeout != nullptr) return 0;
  }
}
inline void close_now(int fd) {
  step("close", &descriptors, true);
  ::close(fd);
  if (explorer != nullptr) explorer->wake(&descriptors);
}

// A millisecond passes with every look, so that nobody spins for long.
inline int clock_look(clockid_t clock, timespec* t) {
  if (explorer == nullptr) return ::clock_gettime(clock, t);
  const uint64_t ns = explorer->now++ * 1'000'000;
  *t = {time_t(ns / 1'000'000'000u), long(ns % 1'000'000'000u)};
  return 0;
}
inline int yield() { return 0; }

}  // namespace model

namespace std {
template <class T>
using model_atomic = model::Atomic<T>;
using model_mutex = model::Mutex;
using model_thread = model::Thread;
}  // namespace std
#define atomic model_atomic
#define mutex model_mutex
#define thread model_thread
#define syscall model::system_call
#define write model::write_event
#define read model::read_event
#define ppoll model::poll_events
#define clock_gettime model::clock_look
#define sched_yield model::yield
// `::write(...)` becomes `::model::write_event(...)`.
#include "arena/arena.h"
#include "hazards.h"
#include "inbox.h"
#include "leftovers.h"
#include "arena/pins.h"
#include "pump_wait.h"
#include "ring.h"
#include "death_watch.h"
#include "waiter.h"

#include "process_table.cpp"
#include "arena/arena.cpp"
#include "arena/populate.cpp"
#include "hazards.cpp"
#define epoll_wait model::epoll_now
#include "arena/holds.cpp"
#undef epoll_wait
#include "arena/view.cpp"
#include "arena/pins.cpp"
#include "inbox.cpp"
#include "python/waiting.cpp"
inline void conveyor::set_lost() {}  // nobody closes descriptors here
#include "death_watch.cpp"
#undef write
#undef read
#ifdef MODELLED_COLLECTIVES  // half as much again to compile, for one program
#include "directory.cpp"
#include "owned_memory.cpp"
#include "recorder.cpp"
#include "sender.cpp"
#include "receiver.cpp"
#include "collective/group.cpp"
#include "collective/links.cpp"
#endif
#undef atomic
#undef mutex
#undef thread
#undef syscall
#undef ppoll
#undef clock_gettime
#undef sched_yield

namespace conveyor {

// ThreadSanitizer sees nothing here that it does not see elsewhere, and takes ten times as long.
constexpr bool kThorough = !check::kThreadSanitizer;

constexpr uint32_t kSlots = 4;

struct Doorbells {
  std::shared_ptr<ProcessTable> process_table = ProcessTable::create(kSlots);
  Doorbells() { reset(); }
  virtual ~Doorbells() = default;
  void reset() {
    for (uint32_t i = 0; i < kSlots; ++i) {
      process_table->prepare(i, "");
      process_table->slot(i)->condition.store(Condition::kAlive);
    }
    process_table->header()->deaths.store(0);
    process_table->header()->alarm.store(0);
  }
  Doorbell& doorbell(uint32_t i) { return process_table->slot(i)->doorbell; }

  virtual std::string label(const void* word) const {
    const auto* at = static_cast<const char*>(word);
    for (uint32_t i = 0; i < kSlots; ++i) {
      ProcessTableSlot* slot = process_table->slot(i);
      const Doorbell& doorbell = slot->doorbell;
      const std::string of = " of slot " + std::to_string(i);
      if (word == &doorbell.count) return "count" + of;
      if (word == &doorbell.sleepers) return "sleepers" + of;
      if (word == &doorbell.armed) return "armed" + of;
      if (word == &slot->condition) return "condition" + of;
      if (word == &slot->nudge) return "nudge" + of;
      if (word == liveness_futex(slot)) return "liveness futex" + of;
      if (word == &slot->memory) return "bytes" + of;
      if (word == &slot->pins.count) return "pins' news" + of;
      if (word == &slot->leftovers.count) return "news" + of;
      if (word == &slot->leftovers.wanted) return "wanted" + of;
      if (word == &slot->leftovers.requested) return "requested" + of;
      if (word == &slot->leftovers.answered) return "answered" + of;
      if (at >= reinterpret_cast<const char*>(doorbell.ready) && at < reinterpret_cast<const char*>(&doorbell + 1)) return "ready" + of;
      if (at >= reinterpret_cast<const char*>(slot) && at < reinterpret_cast<const char*>(slot + 1)) return "something" + of;
    }
    if (word == &process_table->header()->deaths) return "deaths";
    if (word == &process_table->header()->alarm) return "alarm";
    if (word == &process_table->header()->memory.given) return "given";
    if (word == &process_table->header()->memory.bytes) return "the session's bytes";
    if (word == &model::descriptors) return "descriptors";
    return "something else";
  }
};

// Another process, as far as waking goes: its own view of the same process table, with descriptors of its own.
struct OtherProcess {
  std::shared_ptr<ProcessTable> process_table;
  explicit OtherProcess(const Doorbells& doorbells) : process_table(ProcessTable::attach(doorbells.process_table->fd())) {}
  // What it has of slot `index`: this, and as the eventfd of that incarnation.
  void knows(uint32_t index, int eventfd, uint32_t incarnation) {
    process_table->forget_eventfd(index);
    process_table->set_eventfd(index, eventfd, incarnation);
  }
  model::Explorer::Alias alias(const Doorbells& doorbells) const {
    return {process_table->header(), sizeof(ProcessTableHeader) + kSlots * sizeof(ProcessTableSlot), doorbells.process_table->header()};
  }
};

// What is explored: bodies that share something, made anew for every schedule.
struct Scene {
  const Doorbells* doorbells;
  std::vector<std::function<void()>> bodies;
  std::function<void()> reset;
  std::function<bool()> judge = [] { return true; };
  size_t daemons = 0;
  std::function<std::vector<model::Explorer::Alias>()> aliases = {};
  uint64_t may_stop = 0;  // bodies, one bit each
  bool buffers = false;   // each thread has a store buffer

  Scene buffered() const {
    Scene scene = *this;
    scene.buffers = true;
    return scene;
  }
  // Holds under every schedule, with at most so many preemptions. At least `at_least` schedules: one that
  // is over at once explores nothing.
  void holds(int preemptions, size_t at_least) const {
    model::Explorer explorer(preemptions, bodies, daemons);
    explorer.aliases = aliases;
    explorer.may_stop = may_stop;
    explorer.buffers = buffers;
    explorer.label = [this](const void* word) { return doorbells->label(word); };
    CHECK(explorer.explore(reset, judge));
    CHECK(explorer.schedules() >= at_least || check::failures() != 0);
    std::printf("[%zu%s] ", explorer.schedules(), preemptions == model::kAll ? "" : " bounded");
    std::fflush(stdout);
  }
  // Does not hold where the code has this fault.
  bool fails(model::Fault::How how, const char* what, const void* word, int preemptions = 2) const {
    model::Explorer explorer(preemptions, bodies, daemons);
    explorer.aliases = aliases;
    explorer.may_stop = may_stop;
    explorer.buffers = buffers;
    explorer.fault = {how, what, word};
    return !explorer.explore(reset, judge, true);
  }
};

constexpr auto kOmitted = model::Fault::kOmitted;
constexpr auto kLate = model::Fault::kLate;
constexpr auto kRelaxed = model::Fault::kRelaxed;

}  // namespace conveyor
