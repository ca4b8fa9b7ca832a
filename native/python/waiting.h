// Waiting on the process's doorbell by threads that have the GIL, with Ctrl-C in mind.
#pragma once

#include <Python.h>

#include "inbox.h"

namespace conveyor {

// Wait until the count differs from `seen`. False at the deadline (0: none). Throws what a signal handler
// raised, or another thread has thrown into this one. In a child that a handler has forked it ends at once, as if the
// count had changed. `ours`: of a thread that waits for work, into which nobody throws; it sleeps until there is some.
bool wait(Inbox& inbox, uint32_t seen, uint64_t deadline, bool ours = false);
// The same without spinning first, for a caller that has done that elsewhere.
bool sleep(Inbox& inbox, uint32_t seen, uint64_t deadline);
// The next ready bit, waiting for one if there is none; -1 at the deadline.
int next(Inbox& inbox, uint64_t deadline);

// Let it be the Python error that code of this process has closed the library's descriptors.
void set_lost();
// Within this time a thread that sleeps finds what another thread has thrown into it.
constexpr uint64_t kLookNs = 40'000'000;
// Set what another thread has thrown into the calling one, whose state this is, as Python's error; false: nothing. Python
// does so between two bytecodes, and a wait has none.
bool set_thrown(const PyThreadState* state);

}  // namespace conveyor
