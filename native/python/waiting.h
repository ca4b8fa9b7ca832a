// Waiting on the process's bell by threads that have the GIL, with Ctrl-C in mind.
#pragma once

#include "inbox.h"

namespace conveyor {

// Wait until the count differs from `seen`. False at the deadline (0: none). Throws what a signal handler
// raised. In a child that a handler has forked it ends at once, as if the count had changed.
bool wait(Inbox& inbox, uint32_t seen, uint64_t deadline);
// The same without spinning first, for who has done that elsewhere.
bool sleep(Inbox& inbox, uint32_t seen, uint64_t deadline);
// The next ready bit, waiting for one if there is none; -1 at the deadline.
int next(Inbox& inbox, uint64_t deadline);

}  // namespace conveyor
