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
  std::atomic<uint32_t> cause;  // 0, or a Cause with the rank above it, and above that who has the words; set once
  std::atomic<uint32_t> told_of_waits;  // 0, or above its slot by one: the process that ranks ring when they sleep
};

// What has led a rank to an operation.
struct CollectiveGroup::Way {
  uint64_t failed_ns;       // when the last of the call's failures was
  uint64_t step_failed_ns;  // and the last of those that were steps of graphs
  uint64_t begun_ns;        // when the method began
  uint64_t execution;       // of `graph`
  Stamp made;               // what the clock of sights said when the call was made, on the host where that was
  uint64_t history;         // a number made of the failures
  uint32_t graph;           // that has called it; 0: an ordinary call has
  uint32_t sights;          // how many of `seen` there are; kEverywhere: none of the failures was a call
  uint64_t failed;          // which failure of its process (RankFailures) the last one was
  uint64_t step_failed;     // and the last that was a step
  uint64_t hears;           // 1: some of `heard` are above 0
  // Of each host on which somebody has learned of all failures that were calls: when that was.
  static constexpr uint32_t kMostSights = 8, kEverywhere = ~uint32_t(0);
  std::array<Stamp, kMostSights> seen;
  // The last execution of each graph in which a step has failed since the last operation. Of more graphs than there are
  // places for, some are left out, and times have to tell.
  std::array<Execution, 4> failed_in;
};

// Of one rank, which alone writes there.
struct alignas(kApart) CollectiveGroup::Line {
  std::atomic<uint64_t> arrived;  // the last barrier it has come to
  std::atomic<uint32_t> asleep;   // 1: it sleeps on its bell, or is about to
  alignas(kCacheLine) CollectiveCall calls[2];  // by the half of the barrier
  std::atomic<uint64_t> failed_ns;  // when something has failed there since its last operation; 0: nothing has
  std::atomic<uint64_t> failures;   // since its last operation
  std::atomic<uint64_t> failed_call;  // the number of the last of them, by which it is known whether anybody has learned of it; 0: a step of a graph
  std::atomic<Stamp> cancelled_at;    // if that was cancelled: when; else 0
  std::atomic<uint64_t> failed_execution;  // in which that was, of
  std::atomic<uint32_t> failed_graph;      // this graph; 0: it was a call
  alignas(kCacheLine) Way ways[2];  // likewise; nobody looks there while nothing fails
  std::array<uint64_t, kMaxRanks> heard[2];  // of ranks of other hosts, which failure of theirs was known here when the method began
  char failure[256];                // what, in words; written before
  char why[256];                    // it has left an operation; written before `cause`
  char told[256];                   // why the group is broken, as it has heard of another host; likewise
};

}  // namespace conveyor
