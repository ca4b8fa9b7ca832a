// Memory behind a shared mapping, before anybody writes to it: a lack of it is an error then, where a write
// would end in SIGBUS.
#pragma once

#include "../platform.h"

namespace conveyor {

// When to try again what the kernel has refused: after a second, and twice as long each time that it refuses again.
class Attempts {
 public:
  static constexpr uint64_t kFirstPauseNs = 1'000'000'000, kLongestPauseNs = 64'000'000'000;
  bool due(uint64_t now) const { return now >= next_.load(std::memory_order_relaxed); }
  void refused(uint64_t now);
  void worked() { pause_.store(kFirstPauseNs, std::memory_order_relaxed); }

 private:
  // Threads that write both at once leave a pause that one of them has meant.
  std::atomic<uint64_t> next_{0}, pause_{kFirstPauseNs};
};

// Processor time of a huge page from which on small ones are had sooner. A kernel that clears it takes an eighth of
// that. A virtual machine's host may have to find memory for each 4 KiB of it, as it has been told of what is free in
// pieces of that size; of small pages most were somebody's a while ago, and have it.
constexpr uint64_t kDearHugePageNs = 2'000'000;

// Give `size` bytes at `base` their pages; `offset` is their place in the file. What is a whole huge page, in the
// file and here, becomes one if the kernel has any: it is there ten times as fast as small pages are, and its
// readers take one fault for it. Where the first one takes `dear_ns`, the others are not worth it. Memory that is there
// already keeps what it holds. Several threads do it from 8 MiB on. False: there is none.
bool populate(char* base, uint64_t offset, size_t size, uint64_t dear_ns = kDearHugePageNs);

}  // namespace conveyor
