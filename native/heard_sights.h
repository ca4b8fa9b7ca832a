// When somebody on another host has learned that a call has failed, as that host has told this one's pump. On the board.
//
// Hosts tell each other of sights ahead of all that was published behind them (net/peer_sights.cpp), and what a host is
// told of counts as learned there, so it is told on. Whoever gets a call that was made by who could know of a failure
// therefore finds that here.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <optional>

#include "failed_calls.h"

namespace conveyor {

// Somebody on a host has learned of a failure of the process in `slot` when the clock of sights there said that.
struct Sight {
  uint32_t slot;
  uint64_t number;
  Stamp at;
};

// The last of them, in a ring that the pump's thread writes and everybody reads.
class HeardSights {
 public:
  static constexpr uint32_t kKept = 1024;

  void add(const Sight& sight) {
    const uint64_t n = begun_.load(std::memory_order_relaxed);
    // Before the words: who has read one that is written from here on finds that.
    begun_.store(n + 1, std::memory_order_relaxed);
    Entry& entry = entries_[n % kKept];
    const Stamp before = entry.at.load(std::memory_order_relaxed);
    if (const uint32_t host = host_of(before); n >= kKept && host < FailedCalls::kHosts)
      forgotten_[host].store(std::max(forgotten_[host].load(std::memory_order_relaxed), before), std::memory_order_relaxed);
    // Release, and acquired by readers: see each().
    entry.what.store(uint64_t(sight.slot) << 32 | (sight.number & kNumbers), std::memory_order_release);
    entry.at.store(sight.at, std::memory_order_release);
    done_.store(n + 1, std::memory_order_release);
  }

  // Whether a host has told of that, or of a later one, and it is not kept any more. A host tells in the order of its clock,
  // and all of it again after a reconnect: what is forgotten then would come back in the place of what is kept, sights of
  // other hosts among it. By the pump's thread.
  bool forgotten(Stamp at) const {
    const uint32_t host = host_of(at);
    return host < FailedCalls::kHosts && at <= forgotten_[host].load(std::memory_order_relaxed);
  }

  // Calls `take(stamp)` for each host's sight of that failure; of those that it has told of twice for both.
  template <class Take>
  void each(uint32_t slot, uint64_t number, const Take& take) const {
    const uint64_t what = uint64_t(slot) << 32 | (number & kNumbers), done = done_.load(std::memory_order_acquire);
    for (uint64_t n = done - std::min<uint64_t>(done, kKept); n < done; ++n) {
      const Entry& entry = entries_[n % kKept];
      if (entry.what.load(std::memory_order_acquire) != what) continue;
      const Stamp at = entry.at.load(std::memory_order_acquire);
      // Another one may have been written there meanwhile.
      if (begun_.load(std::memory_order_relaxed) <= n + kKept) take(at);
    }
  }
  // That of one host.
  std::optional<Stamp> at(uint32_t slot, uint64_t number, uint32_t host) const {
    std::optional<Stamp> found;
    each(slot, number, [&](Stamp at) {
      if (host_of(at) == host) found = std::min(found.value_or(at), at);
    });
    return found;
  }

  // What the clock of a host has said last, as far as is known here. Of sights it tells in any order.
  void note(Stamp now) {
    const uint32_t host = host_of(now);
    if (host < FailedCalls::kHosts && now > last(host)) last_[host].store(now, std::memory_order_release);
  }
  // Of hosts beyond those that are counted: as late as can be, so that nobody there has known of it.
  Stamp last(uint32_t host) const { return host < FailedCalls::kHosts ? std::max(last_[host].load(std::memory_order_acquire), stamp_of(host, 0)) : stamp_of(host + 1, 0) - 1; }

 private:
  static constexpr uint64_t kNumbers = 0xffff'ffff;
  struct Entry {
    std::atomic<uint64_t> what;  // the slot, and the failure's number
    std::atomic<uint64_t> at;
  };
  std::atomic<uint64_t> begun_, done_;
  std::atomic<Stamp> last_[FailedCalls::kHosts];
  std::atomic<Stamp> forgotten_[FailedCalls::kHosts];
  Entry entries_[kKept];
};

}  // namespace conveyor
