// Calls of one process that have failed, and when somebody has learned of each: in its slot of the board.
//
// A clock of the session (BoardHeader::sights) moves whenever somebody learns of a failure. A call bears what the clock
// says when it is made. So a call that bears at least what the clock said when a failure became known was made by who
// could know of it, and one that bears less was made before anybody did.
//
// A word for each of the last failures holds its number and the clock, so that one compare-and-swap tells a failure
// from the one that has had the word before it. Whoever asks for one that is too long ago finds that nobody has learned
// of it.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

namespace conveyor {

class FailedCalls {
 public:
  static constexpr uint32_t kKept = 64;

  // One more: its number, which is not 0. Any process may say so: a call also fails at its caller.
  uint64_t add() {
    uint64_t number;
    do {
      number = (count_.fetch_add(1, std::memory_order_relaxed) + 1) & kNumbers;
    } while (number == 0);
    // Relaxed: the number travels behind this, with whatever tells of the failure.
    word(number).store(number << kClockBits, std::memory_order_relaxed);
    return number;
  }

  // Somebody has learned of it. Only the first time moves the clock.
  void see(uint64_t number, std::atomic<uint64_t>& clock) {
    if (number == 0 || number > kNumbers) return;  // it is none
    uint64_t unseen = number << kClockBits;
    // Acquire, here and where the swap fails: whoever finds that another one was first finds the clock moved by that, and
    // so its calls bear no less. The swap that succeeds releases for these.
    if (word(number).load(std::memory_order_acquire) != unseen) return;
    const uint64_t now = clock.fetch_add(1, std::memory_order_relaxed) + 1;
    word(number).compare_exchange_strong(unseen, unseen | (now & kClock), std::memory_order_release, std::memory_order_acquire);
  }

  // What the clock said then; nothing: nobody has, or it is not known any more.
  std::optional<uint64_t> seen_at(uint64_t number) const {
    const uint64_t found = word(number).load(std::memory_order_acquire);
    if (found >> kClockBits != number || (found & kClock) == 0) return {};
    return found & kClock;
  }

 private:
  // A trillion failures that were learned of, in one session.
  static constexpr uint32_t kClockBits = 40;
  static constexpr uint64_t kClock = (uint64_t(1) << kClockBits) - 1;
  static constexpr uint64_t kNumbers = (uint64_t(1) << (64 - kClockBits)) - 1;

  std::atomic<uint64_t>& word(uint64_t number) { return words_[number % kKept]; }
  const std::atomic<uint64_t>& word(uint64_t number) const { return words_[number % kKept]; }

  std::atomic<uint64_t> count_;
  std::atomic<uint64_t> words_[kKept];
};

}  // namespace conveyor
