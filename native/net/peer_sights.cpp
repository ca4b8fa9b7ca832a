// Who has learned that a call has failed, as hosts tell each other of it. See ../heard_sights.h.
#include "peer.h"

namespace conveyor::net {

// Behind the looks at what is to be sent: whatever was published behind a sight is sent behind it. What a host is told
// of twice, after a reconnect, it knows.
void Peer::put_sights() {
  // What has failed in processes of ranks goes behind the sights that were before that, and so is looked for ahead of them.
  std::vector<RankFailed> all;
  told_failures_.look(*hub_.board(), host, [&](const RankFailed& failed) { all.push_back(failed); });
  told_sights_.look(*hub_.board(), [this](const Saw& saw) {
    connection_->put(Prefix{What::kSight, 0, sizeof saw, 0});
    connection_->put(saw);
  });
  for (const RankFailed& failed : all) {
    connection_->put(Prefix{What::kRankFailed, 0, sizeof failed, 0});
    connection_->put(failed);
  }
}


void Peer::hear(const RankFailed& failed) {
  Board& board = *hub_.board();
  if (failed.slot >= board.slots()) throw Violation("a failure of a process that is none");
  // Another process may have the slot by now; and of its own ones this host knows more.
  if (board.slot(failed.slot)->elsewhere.load(std::memory_order_relaxed) == 0 || board.gone(failed.slot, failed.incarnation)) return;
  board.hear(failed.slot, failed.failure, failed.went_on, {failed.graph, failed.execution});
}

void Peer::hear(const Saw& saw) {
  if (clock_of(saw.clock) != saw.clock) throw Violation("a clock of sights that is none");
  if (saw.slot != Saw::kClockAlone && saw.slot >= hub_.board()->slots()) throw Violation("a failure of a process that is none");
  hub_.board()->hear({saw.slot, saw.number, stamp_of(host, saw.clock)});
}

}  // namespace conveyor::net
