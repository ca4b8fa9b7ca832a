// How the thread that sends calls of this process later (calls/pending.py) waits. Whoever waits for the result of
// such a call sends it, too, and needs no help: the thread wakes only where nobody has begun to wait within some time,
// kDelayNs at first. To be woken for each call would cost more than to send it. So does a timer that ends so soon, in a
// virtual machine: to set the clock's next interrupt, and to take that back, leaves the machine each time (10 us, against
// 1 us where the clock ticks before the timer ends). Hence whoever has been in vain prepared for waits longer next time.
#pragma once

#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <unordered_map>

#include "inbox.h"

namespace conveyor {

// All but wait() is called with the GIL, and so one after the other. None runs any of Python's code, so a signal's
// handler finds either all of it done or nothing.
class PumpWait {
 public:
  explicit PumpWait(Inbox& inbox) : inbox_(inbox) {}

  // The sender of this number has something to send, now or when the doorbell rings.
  void begin(uint64_t sender) {
    senders_[sender].pending = true;
    update();
    if (!covered_.load(std::memory_order_relaxed)) look(delay_.load(std::memory_order_relaxed));
  }
  // It has nothing any more.
  void end(uint64_t sender) {
    const auto found = senders_.find(sender);
    if (found == senders_.end()) return;
    found->second.pending = false;
    forget(found);
    update();
  }

  // A thread waits that sends what this sender can send, each time the doorbell rings.
  void attend(uint64_t sender) {
    ++senders_[sender].attended;
    update();
  }
  // It does not any more.
  void unattend(uint64_t sender) {
    const auto found = senders_.find(sender);
    if (found == senders_.end() || found->second.attended == 0) return;
    --found->second.attended;
    forget(found);
    const bool was = covered_.load(std::memory_order_relaxed);
    update();
    // Something may have to be sent, and nobody else looks.
    if (was && some_.load(std::memory_order_relaxed) && !covered_.load(std::memory_order_relaxed)) look_now();
  }

  // wait() returns false from now on.
  void close() {
    closed_.store(true, std::memory_order_relaxed);
    look_now();
  }
  // The thread is about to start.
  void open() {
    if (timer_.get() < 0) timer_ = own(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC));  // none is to be had: the thread is woken at once
  }
  // It has ended, or never was.
  void release() { timer_.reset(); }

  // Until there may be something to send, and nobody attends to it. Without the GIL.
  bool wait() {
    for (;;) {
      // Acquire: what was set before look() is seen.
      const uint32_t looks = looks_.load(std::memory_order_acquire);
      // The count is read before all that is looked at: who closes, or ceases to attend, rings afterwards. A begin()
      // that is missed is of somebody who sends once more himself when he has called it.
      const uint32_t seen = inbox_.count();
      if (closed_.load(std::memory_order_relaxed)) return false;
      if (!some_.load(std::memory_order_relaxed)) {
        // Sequentially consistent, as in look(): either that finds it parked, or this finds another number.
        parked_.store(true, std::memory_order_seq_cst);
        if (looks_.load(std::memory_order_seq_cst) == looks) park(looks);
        parked_.store(false, std::memory_order_relaxed);
        continue;
      }
      if (!covered_.load(std::memory_order_seq_cst) && (looks != looked_ || seen != seen_)) {
        looked_ = looks;
        seen_ = seen;
        // Calls come that nobody waits for: the next one is not to come later than it must.
        delay_.store(kDelayNs, std::memory_order_relaxed);
        needed_.store(true, std::memory_order_relaxed);
        return true;
      }
      inbox_.park(seen, 0);
    }
  }

 private:
  struct Sender {
    bool pending = false;
    uint32_t attended = 0;
  };
  using Senders = std::unordered_map<uint64_t, Sender>;

  // Who calls and waits does so within a few microseconds.
  static constexpr uint64_t kDelayNs = 50'000, kLongestDelayNs = 3'200'000;

  void forget(Senders::iterator sender) {
    if (!sender->second.pending && sender->second.attended == 0) senders_.erase(sender);
  }
  void update() {
    bool some = false, covered = true;
    for (const auto& [_, sender] : senders_) {
      some |= sender.pending;
      covered &= !sender.pending || sender.attended != 0;
    }
    some_.store(some, std::memory_order_relaxed);
    covered_.store(covered, std::memory_order_seq_cst);
    if (covered && armed_) {
      armed_ = false;
      if (!needed_.exchange(false, std::memory_order_relaxed)) delay_.store(std::min(2 * delay_.load(std::memory_order_relaxed), kLongestDelayNs), std::memory_order_relaxed);
      if (!closed_.load(std::memory_order_relaxed)) set_timer(0);
    }
  }
  // Have the thread look, if it is parked: after `ns`, unless nothing has to be sent then, or somebody attends.
  void look(uint64_t ns) {
    looks_.fetch_add(1, std::memory_order_seq_cst);
    if (!parked_.load(std::memory_order_seq_cst)) return;
    if (timer_.get() < 0) return futex_wake_all(&looks_);
    armed_ = true;
    set_timer(ns);
  }
  void look_now() {
    look(1);
    inbox_.process_table()->notify(inbox_.slot(), kAttentionBit);
  }
  void set_timer(uint64_t ns) {
    // A forked child has the same timer: it would take from the parent's thread what wakes it.
    if (inbox_.inherited()) return;
    const itimerspec when{{}, to_timespec(ns)};
    ::timerfd_settime(timer_.get(), 0, &when, nullptr);
  }
  // A spurious end does no harm.
  void park(uint32_t looks) {
    if (timer_.get() < 0) {
      futex_wait(&looks_, looks, nullptr);
      return;
    }
    uint64_t ends;
    [[maybe_unused]] const ssize_t got = ::read(timer_.get(), &ends, sizeof ends);
  }

  Inbox& inbox_;
  Fd timer_;
  Senders senders_;
  bool armed_ = false;
  std::atomic<uint64_t> delay_{kDelayNs};  // until somebody must have begun to wait; both sides write it, and either is right
  std::atomic<bool> needed_{false};  // the thread has returned since the timer was set
  std::atomic<uint32_t> looks_{0};  // grows whenever the thread has to look; futex word without a timer
  std::atomic<bool> some_{false}, covered_{true}, closed_{false}, parked_{false};
  uint32_t looked_ = 0, seen_ = 0;  // the thread's own: when it has last returned
};

// A thread's wait for a result, as long as it attends to a sender: from enter() to end() or exit(), whatever comes first.
// It is a context manager, so that no signal's handler can raise between what it does and the `with`.
class Attending {
 public:
  Attending(PumpWait& wait, uint64_t sender, bool does) : wait_(wait), sender_(sender), does_(does) {}
  void enter() {
    if (does_ && !on_) wait_.attend(sender_);
    on_ = does_;
  }
  void end() {
    if (on_) wait_.unattend(sender_);
    on_ = false;
  }

 private:
  PumpWait& wait_;
  const uint64_t sender_;
  const bool does_;
  bool on_ = false;
};

}  // namespace conveyor
