#include "waiting.h"

#include <Python.h>
#include <nanobind/nanobind.h>

#include <algorithm>

#include "exit.h"
#include "platform.h"

namespace nb = nanobind;

namespace conveyor {

namespace {

constexpr uint64_t kForEver = UINT64_MAX;

bool thrown_into(const PyThreadState* state) { return __atomic_load_n(&state->async_exc, __ATOMIC_RELAXED) != nullptr; }

// A thread's sleep, in which another thread may throw an exception into it (PyThreadState_SetAsyncExc). Python sets a word
// of the thread's for that and wakes nobody, so somebody has to look at these words. One of the sleepers does it for all
// of them, so a process that sleeps pays for one thread's looks. A sleep is on the list once it has lasted for kLookNs:
// those of a busy process never are.
//
// Made and destroyed without the GIL. A thread that is on the list sleeps, so its state is there until the interpreter
// ends; from then on nobody looks.
class Sleep {
 public:
  Sleep(Inbox& inbox, uint32_t seen, const PyThreadState* state) : inbox_(inbox), seen_(seen), state_(state) {}
  Sleep(const Sleep&) = delete;
  ~Sleep() {
    if (!listed_) return;
    List& list = all();
    {
      std::lock_guard lock(list.mutex);
      std::erase(list.sleeps, this);
      if (list.looks != this) return;
      list.looks = nullptr;
      // Who sleeps on, with the count as it is, sleeps without end: one of them is to look from now on. The count may be
      // another than this sleep began with, and they have begun since.
      const uint32_t count = inbox_.count();
      if (std::ranges::none_of(list.sleeps, [&](const Sleep* sleep) { return sleep->seen_ == count; })) return;
    }
    wake_all();
  }

  // Until when to sleep before this is asked again, `deadline` (0: none) at the latest; kForEver. 0: not at all, since
  // something was thrown into the thread.
  uint64_t until(uint64_t deadline) {
    const uint64_t last = deadline != 0 ? deadline : kForEver;
    if (state_ == nullptr || Exit::begun()) return last;
    if (thrown_into(state_)) return 0;
    if (!listed_) {
      const uint64_t now = now_ns();
      if (listed_at_ == 0) listed_at_ = now + kLookNs;
      if (now < listed_at_) return std::min(last, listed_at_);
    }
    return look() ? std::min(last, now_ns() + kLookNs) : last;
  }

 private:
  struct List {
    ForkMutex mutex;
    std::vector<Sleep*> sleeps;
    Sleep* looks = nullptr;
    uint64_t fork = fork_generation.load();
  };
  static List& all() {
    static List* list = new List;  // never destroyed: threads sleep while the process ends
    return *list;
  }

  // Look at all threads on the list, and wake them if something was thrown into one. False: another thread looks.
  bool look() {
    List& list = all();
    bool found;
    {
      std::lock_guard lock(list.mutex);
      if (const uint64_t fork = fork_generation.load(); list.fork != fork) {  // the sleepers are the parent's
        list.sleeps.clear();
        list.looks = nullptr;
        list.fork = fork;
      }
      if (!listed_) list.sleeps.push_back(this);
      listed_ = true;
      if (list.looks == nullptr) list.looks = this;
      if (list.looks != this) return false;
      found = std::ranges::any_of(list.sleeps, [](const Sleep* sleep) { return thrown_into(sleep->state_); });
    }
    if (found) wake_all();
    return true;
  }
  // They sleep on one doorbell. Not with the list's mutex, which is older than the doorbell's.
  void wake_all() { inbox_.process_table()->notify(inbox_.slot(), kAttentionBit); }

  Inbox& inbox_;
  const uint32_t seen_;
  const PyThreadState* const state_;  // null: nobody throws anything into it
  uint64_t listed_at_ = 0;
  bool listed_ = false;
};

// Without the GIL.
bool park(Inbox& inbox, uint32_t seen, uint64_t deadline, const PyThreadState* state) {
  Sleep sleep(inbox, seen, state);
  for (;;) {
    const uint64_t until = sleep.until(deadline);
    if (until == 0 || inbox.park(seen, until == kForEver ? 0 : until)) return true;
    if (until == deadline) return false;
  }
}

// Python runs signal handlers in its main thread, between bytecodes. A thread that checks for a signal
// and then sleeps in a futex can sleep through one that comes in between; so signals are blocked,
// checked for, and let in again by ppoll itself.
bool park_main(Inbox& inbox, uint32_t seen, uint64_t deadline, const PyThreadState* state) {
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
    // looks whose doorbell it is.
    if (inbox.inherited()) {
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      return true;
    }
    // A handler may have ended the session, or another thread while it ran.
    if (inbox.eventfd() < 0) {
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      Unlocked unlocked;
      return park(inbox, seen, deadline, state);
    }
    // With the GIL, as close_fds(): the eventfd is closed before, and was seen above, or after the sleep.
    const bool may_sleep = inbox.arm_main(seen);
    bool timed_out = false;
    {
      Unlocked unlocked;
      if (may_sleep) {
        Sleep sleep(inbox, seen, state);
        timed_out = inbox.poll_main(deadline, before, [&] { return sleep.until(deadline); });
      }
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (inbox.lost()) {
      set_lost();
      throw nb::python_error();
    }
    if (inbox.count() != seen || inbox.inherited() || (state != nullptr && thrown_into(state))) return true;
    if (timed_out) return false;
  }
}

}  // namespace

bool set_thrown(const PyThreadState* state) {
  if (state == nullptr || !thrown_into(state)) return false;
  // Only the interpreter itself can take it: what is taken by others leaves it looking for ever.
  PyObject* const globals = PyDict_New();
  if (globals == nullptr) return true;
  PyObject* const none = PyRun_String("pass", Py_file_input, globals, globals);
  Py_DECREF(globals);
  Py_XDECREF(none);
  return none == nullptr;
}

bool wait(Inbox& inbox, uint32_t seen, uint64_t deadline, bool ours) {
  const PyThreadState* const state = ours ? nullptr : PyThreadState_Get();
  const uint64_t start = now_ns();
  bool moved;
  if (PyThread_get_thread_ident() != inbox.main_thread()) {
    Unlocked unlocked;
    moved = inbox.spin(seen, start);
    if (!moved) {
      if (ours) inbox.tell_starving();
      moved = park(inbox, seen, deadline, state);
      inbox.learn_parked(start);
    }
  } else {
    {
      Unlocked unlocked;
      moved = inbox.spin(seen, start);
    }
    if (!moved) {
      if (ours) inbox.tell_starving();
      moved = park_main(inbox, seen, deadline, state);
      inbox.learn_parked(start);
    }
  }
  if (set_thrown(state)) throw nb::python_error();
  return moved;
}

bool sleep(Inbox& inbox, uint32_t seen, uint64_t deadline) {
  const PyThreadState* const state = PyThreadState_Get();
  bool moved;
  if (PyThread_get_thread_ident() == inbox.main_thread()) {
    moved = park_main(inbox, seen, deadline, state);
  } else {
    Unlocked unlocked;
    moved = park(inbox, seen, deadline, state);
  }
  if (set_thrown(state)) throw nb::python_error();
  return moved;
}

int next(Inbox& inbox, uint64_t deadline) {
  for (;;) {
    const uint32_t seen = inbox.count();
    const int bit = inbox.poll();
    if (bit >= 0) return bit;
    inbox.idle();
    if (!wait(inbox, seen, deadline, true)) return -1;
  }
}

}  // namespace conveyor
