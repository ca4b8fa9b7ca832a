// A process's own side of its doorbell: what is ready, and waiting for it.
#pragma once

#include <poll.h>
#include <signal.h>

#include "platform.h"
#include "waiter.h"

namespace conveyor {

class Leftovers;

class Inbox {
 public:
  Inbox(std::shared_ptr<ProcessTable> process_table, uint32_t slot, int eventfd, unsigned long main_thread, std::shared_ptr<Leftovers> leftovers = {})
      : leftovers(std::move(leftovers)), process_table_(std::move(process_table)), slot_(slot), self_(process_table_->slot(slot)), eventfd_(dup_cloexec(eventfd)), main_thread_(main_thread), waiter_(&self_->doorbell) {
    if (main_relay_.get() < 0) throw_errno("eventfd");
  }

  const std::shared_ptr<ProcessTable>& process_table() const { return process_table_; }
  uint32_t slot() const { return slot_; }
  Status& status() { return self_->status; }
  WaitNotes& waits() { return self_->waits; }
  // A method begins, whose work is in the status by now: whoever sees the time of it sees that work, too.
  void begins(uint64_t since_ns) {
    self_->status.since_ns.store(since_ns, std::memory_order_release);
    self_->status.state.store(uint32_t(State::kRunning), std::memory_order_release);
  }
  // The main thread has nothing to do; methods in other threads may.
  void idle() {
    if (concurrent_.load(std::memory_order_relaxed) == 0) self_->status.state.store(uint32_t(State::kIdle), std::memory_order_relaxed);
  }
  // The main thread of a program waits for something of this library, or does no longer.
  void count_waiting(int32_t more) { self_->waiting.fetch_add(uint32_t(more), std::memory_order_seq_cst); }
  // So many more methods run beside the main thread, in others or as coroutines. Who ends the last one notifies this process.
  void count_concurrent(int32_t more) { concurrent_.fetch_add(uint32_t(more), std::memory_order_relaxed); }
  // It is idle, and is about to sleep. What the last method has held is let go of by now: who waits for memory may have
  // nobody left to wait for.
  void tell_starving() const {
    std::atomic_thread_fence(std::memory_order_seq_cst);  // they raise their flag, and look whether we are idle
    process_table_->notify_starving();
  }
  int eventfd() const { return eventfd_.get(); }
  // Code of this process has closed the descriptors that its main thread slept on: nobody can wake it.
  bool lost() const { return lost_; }
  // The thread that sleeps in ppoll for the sake of signal handlers; 0: none does.
  unsigned long main_thread() const { return main_thread_; }
  void set_main_thread(unsigned long thread) { main_thread_ = thread; }
  uint32_t count() const { return waiter_.count(); }
  // How long a wait may spin at most before it parks.
  uint64_t spin_limit() const { return waiter_.limit(); }
  void set_spin_limit(uint64_t ns) { waiter_.set_limit(ns); }

  // Wait until the count differs from `seen`. False at the deadline (0: none). Any thread may, and several at
  // once; one that has the GIL, or signal handlers to run, waits as python/waiting.h does.
  bool wait(uint32_t seen, uint64_t deadline);
  // The next ready bit or -1, without waiting. One thread takes them, for all others.
  int poll();

  // The parts of a wait of the main thread, which has signals to look for (python/waiting.cpp).
  bool spin(uint32_t seen, uint64_t start) { return waiter_.spin(seen, start); }
  bool park(uint32_t seen, uint64_t deadline) { return waiter_.park(seen, deadline); }
  void learn_parked(uint64_t start) { waiter_.learn_parked(start); }
  // Before the main thread sleeps on the eventfd: true if it may.
  bool arm_main(uint32_t seen) { return arm(seen, main_relay_.get()); }
  // It does, where it may, with these signals blocked. True if the deadline (0: none) has ended it. `until()`: until when
  // it may sleep before that is asked again; 0: no longer.
  template <class Until>
  bool poll_main(uint64_t deadline, const sigset_t& blocked, const Until& until) {
    for (;;) {
      const uint64_t end = until();
      if (end != 0 && poll_once(end, blocked)) {
        if (end != deadline) continue;
        disarm(main_relay_.get());
        return true;
      }
      if (end == 0) disarm(main_relay_.get());
      return false;
    }
  }

  // Several threads may sleep on the eventfd: the main thread in ppoll, and event loops of any thread.
  // Each has a relay, a descriptor that is written when another of them took the event down, and goes by
  // it: `own`. The doorbell's flag is up exactly while one of them sleeps, or may be about to. It changes
  // under `sleepers_mutex_`, and no other process ever writes it.
  void add_relay(int fd);
  void remove_relay(int fd);
  // Before `own` sleeps on the eventfd and its relay: true if it may, since the count is `seen` still.
  bool arm(uint32_t seen, int own);
  // `own` does not sleep any more.
  void disarm(int own);
  // The same, and takes the event down. The others who sleep on it may not have seen it yet: it wakes them.
  void clear_event(int own);
  // At the end of a session, unless somebody sleeps on them; waits then use the futex alone.
  void close_fds();

  // Of forks, when it was made.
  uint64_t generation() const { return fork_; }
  // In a forked child the doorbell and the eventfd are the parent's, and it leaves them alone.
  bool inherited() const { return fork_ != fork_generation.load(std::memory_order_relaxed); }
  // User code has returned to what serves this doorbell: a forked child ends here.
  void came_back(const char* where) const {
    if (inherited()) end_forked_child(where);
  }
  void came_back() const {
    if (inherited()) end_forked_child(process_table_->name(slot_).c_str());
  }

  // Of this process; none: nobody looks after them.
  const std::shared_ptr<Leftovers> leftovers;

 private:
  static void drain_event(int fd);
  // One sleep of the main thread. True, and still armed, if it has lasted until `end` (UINT64_MAX: for ever).
  bool poll_once(uint64_t end, const sigset_t& blocked);
  std::shared_ptr<ProcessTable> process_table_;
  uint32_t slot_;
  ProcessTableSlot* self_;
  Fd eventfd_;
  unsigned long main_thread_;
  Waiter waiter_;
  Fd main_relay_ = own(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  bool lost_ = false;
  struct Sleeper {
    int relay;
    bool asleep;
  };
  std::atomic<uint32_t> concurrent_ = 0;
  ForkMutex sleepers_mutex_;
  std::vector<Sleeper> sleepers_{{main_relay_.get(), false}};  // the main thread is the first
  bool closing_ = false;
  const uint64_t fork_ = fork_generation.load(std::memory_order_relaxed);
  // With `sleepers_mutex_`:
  void set_awake(int own);
  // Close what close_fds() has asked to, once nobody sleeps on it.
  void close_unused();
  uint64_t pending_[kDoorbellWords] = {};
  size_t pending_words_ = 0;
};

}  // namespace conveyor
