// Calls of one process that have failed, and when somebody on this host has learned of each: in its slot of the board.
//
// Each host of a session has a clock (BoardHeader::sights), which moves whenever somebody there learns of a failure. A
// call bears what its host's clock says when it is made. So a call that bears at least what the clock said when a failure
// became known there was made by who could know of it, and one that bears less was made before anybody there did. What
// the clocks of two hosts say is never compared: what bears it (a *stamp*) bears the host, too.
//
// A word for each of the last failures holds its number and the clock, so that one compare-and-swap tells a failure
// from the one that has had the word before it. Whoever asks for one that is too long ago finds that nobody has learned
// of it.
//
// A call may fail at its caller, which may be on another host than the process. So a failure's number says which host has
// numbered it, and those of other hosts have words of their own, which they get when somebody here learns of them.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

namespace conveyor {

// When something was, by the clock of sights of a host.
using Stamp = uint64_t;
constexpr uint32_t kStampShift = 48;
inline constexpr Stamp stamp_of(uint32_t host, uint64_t clock) { return uint64_t(host) << kStampShift | clock; }
inline constexpr uint32_t host_of(Stamp stamp) { return uint32_t(stamp >> kStampShift); }
inline constexpr uint64_t clock_of(Stamp stamp) { return stamp & ((uint64_t(1) << kStampShift) - 1); }

class FailedCalls {
 public:
  static constexpr uint32_t kKept = 64;
  // Of failures that a host beyond these has numbered nobody learns.
  static constexpr uint32_t kHosts = 256;

  // One more, on `host`, which is this one: its number, which is not 0. Any process of it may say so: a call also fails
  // at its caller.
  uint64_t add(uint32_t host) {
    if (host >= kHosts) return kNumbers + 1;
    uint64_t count;
    do {
      count = (count_.fetch_add(1, std::memory_order_relaxed) + 1) & kCounts;
    } while (count == 0);
    const uint64_t number = uint64_t(host) << kCountBits | count;
    // Relaxed: the number travels behind this, with whatever tells of the failure.
    here_[number % kKept].store(number << kClockBits, std::memory_order_relaxed);
    return number;
  }

  // Somebody on `host`, which is this one, has learned of it. Only the first time moves the clock: whether it was that.
  bool see(uint64_t number, uint32_t host, std::atomic<uint64_t>& clock) {
    if (number == 0 || number > kNumbers) return false;  // it is none
    const bool own = number >> kCountBits == host;
    std::atomic<uint64_t>& word = *place_of(number, own);
    uint64_t unseen = number << kClockBits;
    // Acquire, here and where the swap fails: whoever finds that another one was first finds the clock moved by that, and
    // so its calls bear no less. The swap that succeeds releases for these.
    uint64_t found = word.load(std::memory_order_acquire);
    if (own ? found != unseen : found >> kClockBits == number) return false;
    if (own) found = unseen;
    const uint64_t now = clock.fetch_add(1, std::memory_order_relaxed) + 1;
    do {
      if (word.compare_exchange_strong(found, unseen | (now & kClock), std::memory_order_release, std::memory_order_acquire)) return true;
    } while (!own && found >> kClockBits != number);
    return false;
  }

  // What the clock of `host`, which is this one, said then; nothing: nobody has, or it is not known any more.
  std::optional<uint64_t> seen_at(uint64_t number, uint32_t host) const {
    const uint64_t found = place_of(number, number >> kCountBits == host)->load(std::memory_order_acquire);
    if (found >> kClockBits != number || (found & kClock) == 0) return {};
    return found & kClock;
  }

  // All that somebody here has learned of, as far as they are known: calls `take(place, number, clock)`, where the place
  // has another number later.
  static constexpr uint32_t kPlaces = 2 * kKept;
  template <class Take>
  void each_seen(const Take& take) const {
    for (uint32_t i = 0; i < kPlaces; ++i)
      if (const uint64_t word = (i < kKept ? here_[i] : there_[i - kKept]).load(std::memory_order_acquire); (word & kClock) != 0) take(i, word >> kClockBits, word & kClock);
  }

  // How often somebody has said that he has learned of something. Release and acquire: behind a mark is what was learned.
  void mark() { marks_.fetch_add(1, std::memory_order_release); }
  uint64_t marks() const { return marks_.load(std::memory_order_acquire); }

 private:
  // Sixty billion failures that were learned of, on one host in one session.
  static constexpr uint32_t kClockBits = 36, kCountBits = 20;
  static constexpr uint64_t kClock = (uint64_t(1) << kClockBits) - 1;
  static constexpr uint64_t kCounts = (uint64_t(1) << kCountBits) - 1;
  static constexpr uint64_t kNumbers = (uint64_t(1) << (64 - kClockBits)) - 1;
  static_assert(uint64_t(kHosts) << kCountBits == kNumbers + 1);

  // Pointers, since GCC 12 with -fsanitize=bounds computes the index into one of two arrays for the first of them only.
  std::atomic<uint64_t>* place_of(uint64_t number, bool own) { return own ? here_ + number % kKept : there_ + number % kKept; }
  const std::atomic<uint64_t>* place_of(uint64_t number, bool own) const { return own ? here_ + number % kKept : there_ + number % kKept; }

  std::atomic<uint64_t> count_;
  std::atomic<uint64_t> marks_;
  std::atomic<uint64_t> here_[kKept];   // of those that this host has numbered
  std::atomic<uint64_t> there_[kKept];  // and of others
};

}  // namespace conveyor
