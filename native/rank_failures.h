// What has failed last in the process of a rank of collective groups, and whether it has begun something else since. On
// the board, for ranks of other hosts: pumps tell each other of it ahead of all that was published behind it, as of sights
// (heard_sights.h), and tell it on. So what somebody does who has heard of a failure, on whatever way, comes to each host
// behind that failure. What is told is the last: however many there are, they need no room anywhere.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <type_traits>

#include "failed_calls.h"

namespace conveyor {

// What a step is of.
struct Execution {
  uint32_t graph = 0;  // 0: none, it is a call
  uint64_t number = 0;
  bool operator==(const Execution&) const = default;
};

struct RankFailure {
  uint64_t count = 0;      // from 1 on: which of the process's it is
  uint64_t number = 0;     // of the call that has failed (FailedCalls); 0: it was a step,
  uint64_t execution = 0;  // in this execution
  Stamp cancelled_at = 0;  // of a call that was cancelled: when; else 0
  uint32_t graph = 0;      // of this graph
  uint32_t unused = 0;
  uint64_t noted_ns = 0;   // when that was, or was heard of, on the host that reads it
  char why[256] = {};      // in words
};
static_assert(std::is_trivially_copyable_v<RankFailure> && sizeof(RankFailure) % sizeof(uint64_t) == 0);

class RankFailures {
 public:
  // By the process's main thread, and on other hosts by the pump's.
  void note(RankFailure failure) {
    failure.why[sizeof failure.why - 1] = 0;
    uint64_t words[kWords];
    std::memcpy(words, &failure, sizeof failure);
    const uint64_t n = done_.load(std::memory_order_relaxed) + 1;
    // Before the words: who has read one that is written from here on finds that. The writer may die half way; the entry
    // before this one stays.
    begun_.store(n, std::memory_order_relaxed);
    for (size_t i = 0; i < kWords; ++i) entries_[n & 1][i].store(words[i], std::memory_order_release);
    count_.store(failure.count, std::memory_order_relaxed);
    done_.store(n, std::memory_order_release);
  }
  // Whether there is anything.
  bool any() const { return done_.load(std::memory_order_acquire) != 0; }
  // How many there were. By who writes.
  uint64_t count() const { return count_.load(std::memory_order_relaxed); }
  std::optional<RankFailure> last() const {
    for (;;) {
      const uint64_t n = done_.load(std::memory_order_acquire);
      if (n == 0) return {};
      uint64_t words[kWords];
      for (size_t i = 0; i < kWords; ++i) words[i] = entries_[n & 1][i].load(std::memory_order_acquire);
      if (begun_.load(std::memory_order_relaxed) > n + 1) continue;  // two have come since, which needs two failures each time
      RankFailure failure;
      std::memcpy(&failure, words, sizeof failure);
      return failure;
    }
  }

  // Something else begins there, in that execution or as a call: whether something had failed since the last time.
  bool begin(Execution in) {
    const uint64_t now = count();
    if (went_on_.load(std::memory_order_relaxed) >= now) return false;
    go_on(now, in);
    return true;
  }
  // Another host has told of that, or it is so here. Who finds that count finds what belongs to it, or, in part, to a later
  // one: then something has failed again, of which who waits is told, and looks anew.
  void go_on(uint64_t count, Execution in) {
    graph_.store(in.graph, std::memory_order_relaxed);
    execution_.store(in.number, std::memory_order_relaxed);
    went_on_.store(count, std::memory_order_release);
  }
  // How many had failed when something began for the first time since the last of them, and what that was.
  uint64_t went_on() const { return went_on_.load(std::memory_order_acquire); }
  Execution went_on_in() const { return {graph_.load(std::memory_order_relaxed), execution_.load(std::memory_order_relaxed)}; }

 private:
  static constexpr size_t kWords = sizeof(RankFailure) / sizeof(uint64_t);
  std::atomic<uint64_t> begun_, done_;  // how many were written here
  std::atomic<uint64_t> count_, went_on_, execution_;
  std::atomic<uint32_t> graph_;
  std::atomic<uint64_t> entries_[2][kWords];
};

}  // namespace conveyor
