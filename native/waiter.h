// Waiting on one's own doorbell: spin within a learned budget, giving the core away in every turn, then
// park. The spin-then-park bound is the classic competitive one (Karlin et al., 1991): spinning for
// about as long as a park and wake-up cost never does worse than twice the best choice.
#pragma once

#include <poll.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <utility>

#include "process_table.h"

namespace conveyor {

// Waking a parked process on an idle core takes about half of this; so spin for no longer.
constexpr uint64_t kMaxSpinNs = 100'000;
constexpr uint64_t kMinSpinNs = 2'000;
// A graph whose every hop wakes a parked process on an idle core takes this long for a round of eight.
// Its processes must try spinning again, or it would stay in that slow state for ever: each finds the
// next one parked because the one before was slow.
constexpr uint64_t kWorthSpinningNs = 4 * kMaxSpinNs;
// Whoever has woken a process spins for so long, whatever it has learned. In a chain that is longer than the
// budget reaches each process finds the next one parked; if it parked at once, its core would halt, and the hop
// after the next take 28 us instead of 10.
constexpr uint64_t kHandedOnNs = kMaxSpinNs / 2;

class Waiter {
 public:
  explicit Waiter(Doorbell* doorbell) : doorbell_(doorbell) {}

  // The largest budget, in nanoseconds; 0: park at once.
  void set_limit(uint64_t limit) {
    __atomic_store_n(&limit_, limit, __ATOMIC_RELAXED);
    budget_.store(limit, std::memory_order_relaxed);
  }
  uint64_t limit() const { return __atomic_load_n(&limit_, __ATOMIC_RELAXED); }

  uint32_t count() const { return doorbell_->count.load(std::memory_order_seq_cst); }

  // True once `count` differs from `seen`; false when the budget is used up.
  bool spin(uint32_t seen, uint64_t start) {
    uint64_t budget = budget_.load(std::memory_order_relaxed);
    if (std::exchange(has_woken, false)) budget = std::max(budget, std::min(limit(), kHandedOnNs));
    uint64_t now = start;
    for (;;) {
      if (doorbell_->count.load(std::memory_order_acquire) != seen) {
        if (budget_.load(std::memory_order_relaxed) != limit()) budget_.store(limit(), std::memory_order_relaxed);
        return true;
      }
      if (now - start >= budget) return false;
      // With more processes than cores a spin that keeps the core delays the very process it waits
      // for; on a core of one's own the call costs a few hundred nanoseconds. (Parking early where the
      // yields show a shared core was tried: it lets the other cores halt, and then a chain of eight
      // over two cores takes 300 us instead of 50.)
      ::sched_yield();
      now = now_ns();
    }
  }

  // Learn from a wait that had to park. A short one may well be caught by spinning next
  // time; longer ones halve the budget, so that a process whose messages come every few milliseconds
  // soon parks at once.
  void learn_parked(uint64_t start) {
    const uint64_t waited = now_ns() - start;
    const uint64_t budget = budget_.load(std::memory_order_relaxed);
    budget_.store(waited < kWorthSpinningNs ? limit() : std::min(limit(), std::max(budget / 2, kMinSpinNs)), std::memory_order_relaxed);
  }

  // Sleep in the futex until `count` differs from `seen` or `deadline` (0: none) has passed.
  bool park(uint32_t seen, uint64_t deadline) {
    doorbell_->sleepers.fetch_add(1, std::memory_order_seq_cst);  // before the look at `count`: see ProcessTable::notify
    bool moved;
    while (!(moved = doorbell_->count.load(std::memory_order_seq_cst) != seen)) {
      timespec left;
      if (deadline != 0) {
        const uint64_t now = now_ns();
        if (now >= deadline) break;
        left = to_timespec(deadline - now);
      }
      futex_wait(&doorbell_->count, seen, deadline != 0 ? &left : nullptr);
    }
    doorbell_->sleepers.fetch_sub(1, std::memory_order_seq_cst);
    return moved;
  }

  // Raise the flag for a sleeper in poll; it may sleep only if this returns true.
  bool arm_event(uint32_t seen) {
    doorbell_->armed.store(1, std::memory_order_seq_cst);  // before the look at `count`: see ProcessTable::strike
    return doorbell_->count.load(std::memory_order_seq_cst) == seen;
  }
  // Nobody of this process sleeps in poll any more. A notifier that sees it late writes once in vain.
  void disarm_event() { doorbell_->armed.store(0, std::memory_order_relaxed); }

 private:
  Doorbell* doorbell_;
  uint64_t limit_ = kMaxSpinNs;  // set while others spin; with builtins: the models need not look at it
  std::atomic<uint64_t> budget_{kMaxSpinNs};
};

}  // namespace conveyor
