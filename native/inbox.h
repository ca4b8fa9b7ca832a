// A process's own side of its bell: what is ready, and waiting for it with Ctrl-C in mind.
#pragma once

#include <Python.h>

#include "waiter.h"

namespace conveyor {

class Inbox {
 public:
  Inbox(std::shared_ptr<Board> board, uint32_t slot, int eventfd, unsigned long main_thread)
      : board_(std::move(board)), slot_(slot), self_(board_->slot(slot)), eventfd_(dup_cloexec(eventfd)), main_thread_(main_thread), waiter_(&self_->bell) {}

  const std::shared_ptr<Board>& board() const { return board_; }
  uint32_t slot() const { return slot_; }
  Status& status() { return self_->status; }
  int eventfd() const { return eventfd_.get(); }
  // The thread that sleeps in ppoll for the sake of signal handlers; 0: none does.
  unsigned long main_thread() const { return main_thread_; }
  void set_main_thread(unsigned long thread) { main_thread_ = thread; }
  uint32_t count() const { return waiter_.count(); }
  // How long a wait may spin at most before it parks.
  uint64_t spin_limit() const { return waiter_.limit(); }
  void set_spin_limit(uint64_t ns) { waiter_.set_limit(ns); }

  // Wait until the count differs from `seen`. False at the deadline (0: none). With the GIL held;
  // throws what a signal handler raised.
  bool wait(uint32_t seen, uint64_t deadline);
  // The next ready bit, waiting for one if there is none; -1 at the deadline.
  int next(uint64_t deadline);
  // The next ready bit or -1, without waiting.
  int poll();
  // For an event loop that is about to watch the eventfd: true if it may sleep.
  bool arm(uint32_t seen) { return waiter_.arm_event(seen); }
  // Take the event down. Whoever does must wake the others in this process who sleep on it: the main
  // thread in ppoll, event loops in other threads. `own` is the caller's relay, -1 for none.
  void clear_event(int own);
  // At the end of a session, unless somebody sleeps on them; waits then use the futex alone.
  void close_fds();
  // A descriptor that is written whenever somebody else took the event down.
  void add_relay(int fd);
  void remove_relay(int fd);

 private:
  bool park_main(uint32_t seen, uint64_t deadline);
  static void drain_event(int fd);
  std::shared_ptr<Board> board_;
  uint32_t slot_;
  BoardSlot* self_;
  Fd eventfd_;
  unsigned long main_thread_;
  Waiter waiter_;
  Fd main_relay_{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  std::atomic<bool> main_parked_{false};
  std::mutex relays_mutex_;
  std::vector<int> relays_;
  bool closing_ = false;
  // With `relays_mutex_`: close what close_fds() has asked to, once nobody sleeps on it.
  void close_unused();
  uint64_t pending_[kBellWords] = {};
  size_t pending_words_ = 0;
};

}  // namespace conveyor
