// What another host was told of who here has learned of failed calls, over the connection that there is: see
// ../heard_sights.h.
#pragma once

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "wire.h"

namespace conveyor::net {

struct ToldSights {
  uint64_t marks = 0;                   // of the board
  std::map<uint32_t, uint64_t> of_slot;  // of its slots
  // Of each place of a slot (FailedCalls::each_seen) which failure that is there.
  std::map<std::pair<uint32_t, uint32_t>, uint64_t> numbers;

  // Calls `put(saw)` for what there is to tell, which is told then.
  template <class Put>
  void look(const Board& board, const Put& put) {
    const uint64_t now_marked = board.header()->sight_marks.load(std::memory_order_acquire);
    if (now_marked == marks) return;
    marks = now_marked;
    // First, as the clock is what it was at some time behind the marks, and the sights are of any time until now.
    put(Saw{Saw::kClockAlone, 0, 0, clock_of(board.sights())});
    std::vector<Saw> news;
    for (uint32_t slot = 0, n = board.used(); slot < n; ++slot) {
      if (!board.is_rank(slot)) continue;
      const FailedCalls& calls = board.slot(slot)->failed_calls;
      const uint64_t now = calls.marks();
      if (uint64_t& told = of_slot[slot]; told == now)
        continue;
      else
        told = now;
      calls.each_seen([&](uint32_t place, uint64_t number, uint64_t clock) {
        if (std::exchange(numbers[{slot, place}], number) != number) news.push_back({slot, 0, number, clock});
      });
    }
    // In the order in which they were learned of: of more than are kept there the last ones are.
    std::ranges::sort(news, {}, &Saw::clock);
    for (const Saw& saw : news) put(saw);
  }
};

// And of what has failed in processes of ranks.
struct ToldFailures {
  uint64_t marks = 0;  // of the board
  // Of a slot: its process, how many had failed there, and how many of these before it went on.
  std::map<uint32_t, std::tuple<uint32_t, uint64_t, uint64_t>> of_slot;

  // Calls `put(failed)` for what `host` is to be told, which is told then. It knows of its own processes.
  template <class Put>
  void look(const Board& board, uint32_t host, const Put& put) {
    const uint64_t now_marked = board.header()->failure_marks.load(std::memory_order_acquire);
    if (now_marked == marks) return;
    marks = now_marked;
    for (uint32_t slot = 0, n = board.used(); slot < n; ++slot) {
      const BoardSlot& of = *board.slot(slot);
      if (!of.rank_failures.any() || of.elsewhere.load(std::memory_order_relaxed) == host + 1) continue;
      const uint32_t incarnation = of.incarnation.load(std::memory_order_relaxed);
      // First: what begins behind the last failure is told with that, or with a later one.
      const uint64_t went_on = of.rank_failures.went_on();
      const auto last = of.rank_failures.last();
      if (!last) continue;
      const Execution in = of.rank_failures.went_on_in();
      const std::tuple now(incarnation, last->count, went_on);
      if (std::exchange(of_slot[slot], now) != now) put(RankFailed{slot, incarnation, went_on, in.number, in.graph, 0, *last});
    }
  }
};

}  // namespace conveyor::net
