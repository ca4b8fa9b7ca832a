#include "waiting.h"

#include <Python.h>
#include <nanobind/nanobind.h>

#include "exit.h"

namespace nb = nanobind;

namespace conveyor {

namespace {

// Python runs signal handlers in its main thread, between bytecodes. A thread that checks for a signal
// and then sleeps in a futex can sleep through one that comes in between; so signals are blocked,
// checked for, and let in again by ppoll itself.
bool park_main(Inbox& inbox, uint32_t seen, uint64_t deadline) {
  sigset_t blocked, before;
  sigfillset(&blocked);
  for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS}) sigdelset(&blocked, fault);
  for (;;) {
    pthread_sigmask(SIG_SETMASK, &blocked, &before);
    if (PyErr_CheckSignals() != 0) {
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      throw nb::python_error();
    }
    // A handler may have forked. The parent takes the events of both, so here nothing might end a sleep: whoever waits
    // looks whose bell it is.
    if (inbox.inherited()) {
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      return true;
    }
    // A handler may have ended the session, or another thread while it ran.
    if (inbox.eventfd() < 0) {
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      Unlocked unlocked;
      return inbox.park(seen, deadline);
    }
    // With the GIL, as close_fds(): the eventfd is closed before, and was seen above, or after the sleep.
    const bool may_sleep = inbox.arm_main(seen);
    bool timed_out = false;
    {
      Unlocked unlocked;
      if (may_sleep) timed_out = inbox.poll_main(deadline, before);
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (inbox.count() != seen || inbox.inherited()) return true;
    if (timed_out) return false;
  }
}

}  // namespace

bool wait(Inbox& inbox, uint32_t seen, uint64_t deadline) {
  if (PyThread_get_thread_ident() != inbox.main_thread()) {
    Unlocked unlocked;
    return inbox.wait(seen, deadline);
  }
  const uint64_t start = now_ns();
  {
    Unlocked unlocked;
    if (inbox.spin(seen, start)) return true;
  }
  const bool moved = park_main(inbox, seen, deadline);
  inbox.learn_parked(start);
  return moved;
}

bool sleep(Inbox& inbox, uint32_t seen, uint64_t deadline) {
  if (PyThread_get_thread_ident() == inbox.main_thread()) return park_main(inbox, seen, deadline);
  Unlocked unlocked;
  return inbox.park(seen, deadline);
}

int next(Inbox& inbox, uint64_t deadline) {
  for (;;) {
    const uint32_t seen = inbox.count();
    const int bit = inbox.poll();
    if (bit >= 0) return bit;
    inbox.status().state.store(uint32_t(State::kIdle), std::memory_order_relaxed);
    if (!wait(inbox, seen, deadline)) return -1;
  }
}

}  // namespace conveyor
