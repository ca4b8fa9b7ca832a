// Who has learned that a call has failed, as hosts tell each other of it. See ../heard_sights.h.
#include "peer.h"

namespace conveyor::net {

// Behind the looks at what is to be sent: whatever was published behind a sight is sent behind it. What a host is told
// of twice, after a reconnect, it knows.
void Peer::put_sights() {
  told_sights_.look(*hub_.board(), [this](const Saw& saw) {
    connection_->put(Prefix{What::kSight, 0, sizeof saw, 0});
    connection_->put(saw);
  });
}

void Peer::hear(const Saw& saw) {
  if (clock_of(saw.clock) != saw.clock) throw Violation("a clock of sights that is none");
  if (saw.slot != Saw::kClockAlone && saw.slot >= hub_.board()->slots()) throw Violation("a failure of a process that is none");
  hub_.board()->hear({saw.slot, saw.number, stamp_of(host, saw.clock)});
}

}  // namespace conveyor::net
