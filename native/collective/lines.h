// What lies at the beginning of a collective group's segment: of the group, and of each rank.
#pragma once

#include "group.h"

namespace conveyor {

// Two lines: x86 fetches them in pairs.
constexpr size_t kApart = 2 * kCacheLine;

struct alignas(kApart) CollectiveGroup::Header {
  uint32_t magic;
  uint32_t ranks;
  uint32_t cores;  // that the session may use: one rank may be bound to a single one
  uint32_t most;   // ranks on one host
  std::atomic<uint32_t> cause;  // 0, or a Cause with the rank above it, and above that whose line has the words; set once
  std::atomic<uint32_t> told_of_waits;  // 0, or above its slot by one: the process that ranks ring when they sleep
};

// Of one rank, which alone writes there.
struct alignas(kApart) CollectiveGroup::Line {
  std::atomic<uint64_t> arrived;  // the last barrier it has come to
  std::atomic<uint32_t> asleep;   // 1: it sleeps on its doorbell, or is about to
  alignas(kCacheLine) CollectiveCall calls[2];  // by the half of the barrier
  // Why this rank has broken the group, or what it has heard of another host; written before `cause`.
  Execution in;    // that has failed
  char why[256];
};

}  // namespace conveyor
