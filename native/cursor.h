// How far one reader of a ring has come, in shared memory.
#pragma once

#include "platform.h"

namespace conveyor {

// Written by its reader alone.
struct alignas(kCacheLine) ReaderCursor {
  std::atomic<uint64_t> next;   // number of the next frame this reader takes
  std::atomic<uint32_t> closed; // this reader takes no more
  std::atomic<uint64_t> wanted; // frames with a tag below this are not wanted any more
  std::atomic<uint32_t> lost;   // frames with definitions that this reader has taken and could not read

  // Whether frame `number` will never be taken: its lease on the frame's block has ended without a
  // Lease that could end it. Acquire: `next` was written last before `closed`. Sequentially consistent
  // for Arena::run.
  bool never_takes(uint64_t number) const {
    return closed.load(std::memory_order_seq_cst) != 0 && next.load(std::memory_order_acquire) <= number;
  }
};

}  // namespace conveyor
