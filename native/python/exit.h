// The end of the interpreter, and the threads that are inside of this library then.
//
// An interpreter that ends lets no other thread have the GIL again: CPython before 3.14 ends a thread
// that asks for it with pthread_exit. That unwinds the thread's stack, and the frames of C++ on it abort
// the process (a destructor must not be left that way, a catch (...) must not swallow it). So no thread
// may ask for the GIL with a frame of ours below it once the interpreter ends:
//
// - Unlocked gives the GIL away, and from then on never takes it back: the thread sleeps for ever.
// - Calling stands around a call of Python code, which loses the GIL and takes it back as it likes: from
//   then on it is not entered, and the interpreter ends when those that had been entered have been left.
//
// A call that may wait for long can be neither: the interpreter's end would wait for it. `TimedLock` (bind_locks.cpp),
// which waits for a lock of Python's, is therefore written in C, with nothing to be unwound.
//
// `exit_inside` counts the threads' frames that need the GIL. A thread counts itself first and looks for
// the end then; who ends the interpreter says so first and looks at the count then. Both are sequentially
// consistent, so one of them sees the other. Builtins instead of std::atomic: the tests of interleavings
// model the atomics of the doorbell, and these belong to none of its schedules.
#pragma once

#include <errno.h>
#include <linux/futex.h>
#include <nanobind/nanobind.h>
#include <signal.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

namespace conveyor {

inline int32_t exit_inside = 0;
inline bool exit_begun = false;
inline bool exit_interrupted = false;
inline thread_local int32_t exit_depth = 0;  // of this thread's frames in `exit_inside`
inline thread_local bool exit_is_ours = false;

class Exit {
 public:
  // The calling thread ends the interpreter. Waits, without the GIL, until no other thread needs it for a
  // frame of ours. False if one still did after `patience` seconds: user code that does not come back.
  static bool begin(double patience) {
    exit_is_ours = true;
    __atomic_store_n(&exit_begun, true, __ATOMIC_SEQ_CST);
    nanobind::gil_scoped_release unlocked;
    timespec end;
    clock_gettime(CLOCK_MONOTONIC, &end);
    const int64_t ns = end.tv_nsec + int64_t(patience * 1e9);
    end.tv_sec += ns / 1'000'000'000;
    end.tv_nsec = ns % 1'000'000'000;
    for (;;) {
      const int32_t inside = __atomic_load_n(&exit_inside, __ATOMIC_SEQ_CST) - exit_depth;
      if (inside == 0) return true;
      // BITSET: its timeout is a time of the monotonic clock.
      if (syscall(SYS_futex, &exit_inside, FUTEX_WAIT_BITSET | FUTEX_PRIVATE_FLAG, inside + exit_depth, &end, nullptr, FUTEX_BITSET_MATCH_ANY) < 0 && errno == ETIMEDOUT)
        return false;
    }
  }

  // Never comes back. Without the GIL.
  [[noreturn]] static void sleep_for_ever() {
    for (;;) ::pause();
  }

  // Ctrl-C has come while the program ends, where Python can raise nothing any more: once everything has
  // ended, the process dies of SIGINT, as a Python program does that Ctrl-C has ended.
  static void die_of_interrupt() { exit_interrupted = true; }
  // Registered when the module is loaded, so that what other libraries do at the end comes before it.
  static void last() {
    if (!exit_interrupted) return;
    fflush(nullptr);
    signal(SIGINT, SIG_DFL);
    sigset_t interrupt;
    sigemptyset(&interrupt);
    sigaddset(&interrupt, SIGINT);
    pthread_sigmask(SIG_UNBLOCK, &interrupt, nullptr);
    raise(SIGINT);
    _exit(128 + SIGINT);  // the first process of a container does not die of it
  }

  // A child of fork has one thread, and an interpreter of its own to end.
  static void in_child() {
    exit_inside = exit_depth;
    exit_begun = exit_is_ours = exit_interrupted = false;
  }

  static bool begun() { return __atomic_load_n(&exit_begun, __ATOMIC_SEQ_CST); }
  static bool over_for_us() { return begun() && !exit_is_ours; }
  static void add(int32_t frames) { __atomic_fetch_add(&exit_inside, frames, __ATOMIC_SEQ_CST); }
  static void take(int32_t frames) {
    __atomic_fetch_sub(&exit_inside, frames, __ATOMIC_SEQ_CST);
    if (begun()) syscall(SYS_futex, &exit_inside, FUTEX_WAKE | FUTEX_PRIVATE_FLAG, 1);
  }
};

// Like nanobind::gil_scoped_release, whose place it takes everywhere in this library.
class Unlocked {
 public:
  // While it is out, the thread needs the GIL for nothing.
  Unlocked() {
    if (exit_depth != 0) Exit::take(exit_depth);
  }
  ~Unlocked() {
    Exit::add(exit_depth + 1);
    if (Exit::over_for_us()) {
      Exit::take(exit_depth + 1);
      Exit::sleep_for_ever();
    }
  }
  Unlocked(const Unlocked&) = delete;

 private:
  struct Back {
    ~Back() { Exit::take(1); }
  };
  Back back_;  // destroyed last: the GIL is back
  nanobind::gil_scoped_release released_;
};

// From so many bytes on, other threads run while memory is found and copied: the first use of 1 MiB takes a millisecond.
inline constexpr size_t kUnlockedFrom = size_t(1) << 20;

// What `body` returns, which needs no GIL and deals with so many bytes.
template <class Body>
auto unlocked_from(size_t bytes, const Body& body) {
  if (bytes < kUnlockedFrom) return body();
  Unlocked unlocked;
  return body();
}

// Around Python code that a function of ours calls, where the driver may run it.
class Calling {
 public:
  Calling() {
    ++exit_depth;
    Exit::add(1);
    if (Exit::over_for_us()) {
      Exit::take(exit_depth);
      nanobind::gil_scoped_release unlocked;
      Exit::sleep_for_ever();
    }
  }
  ~Calling() {
    --exit_depth;
    Exit::take(1);
  }
  Calling(const Calling&) = delete;
};

}  // namespace conveyor
