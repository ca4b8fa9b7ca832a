// What another host was told of who here has learned of failed calls, over the connection that there is: see
// ../heard_sights.h.
#pragma once

#include <algorithm>
#include <map>
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

}  // namespace conveyor::net
