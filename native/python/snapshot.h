// Snapshots that are made here, and those of other processes.
#pragma once

#include "decode.h"

namespace conveyor {

// `sent` has carried nothing; `share_from`: the size from which its body lies in a file.
Snapshot snapshot(nb::handle value, nb::handle sent, size_t share_from);
// One of another process: its body is in `data`, or in the file `fd` (else -1), which is duplicated.
Snapshot received_snapshot(uint16_t codec, uint32_t flags, size_t size, nb::handle data, int fd);

}  // namespace conveyor
