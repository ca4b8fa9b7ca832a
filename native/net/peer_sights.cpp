// Who has learned that a call has failed, as hosts tell each other of it. See ../heard_sights.h.
#include "peer.h"

namespace conveyor::net {

// Behind the looks at what is to be sent: whatever was published behind a sight is sent behind it. What a host is told
// of twice, after a reconnect, it knows.
void Peer::put_sights() {
  const Board& board = *hub_.board();
  const uint64_t marks = board.header()->sight_marks.load(std::memory_order_acquire);
  if (marks == told_sights_.marks) return;
  told_sights_.marks = marks;
  const auto put = [&](const Saw& saw) {
    connection_->put(Prefix{What::kSight, 0, sizeof saw, 0});
    connection_->put(saw);
  };
  // First, as the clock is what it was at some time behind the marks, and the sights are of any time until now.
  put({Saw::kClockAlone, 0, 0, clock_of(board.sights())});
  for (uint32_t slot = 0, n = board.used(); slot < n; ++slot) {
    if (!board.is_rank(slot)) continue;
    const FailedCalls& calls = board.slot(slot)->failed_calls;
    const uint64_t now = calls.marks();
    if (uint64_t& told = told_sights_.of_slot[slot]; told == now)
      continue;
    else
      told = now;
    calls.each_seen([&](uint32_t place, uint64_t number, uint64_t clock) {
      if (std::exchange(told_sights_.numbers[{slot, place}], number) != number) put({slot, 0, number, clock});
    });
  }
}

void Peer::hear(const Saw& saw) {
  const Stamp at = stamp_of(host, saw.clock);
  if (host_of(at) != host) throw Violation("a clock of sights that is none");
  if (saw.slot != Saw::kClockAlone && saw.slot >= hub_.board()->slots()) throw Violation("a failure of a process that is none");
  hub_.board()->hear({saw.slot, saw.number, at});
}

}  // namespace conveyor::net
