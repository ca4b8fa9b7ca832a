// How far one reader of a ring has come, in shared memory.
#pragma once

#include "platform.h"

namespace conveyor {

// Written by its reader alone, but for `end`.
struct alignas(kCacheLine) ReaderCursor {
  static constexpr uint64_t kOpen = 0;
  static constexpr uint64_t kLeaving = UINT64_MAX;

  std::atomic<uint64_t> next;   // number of the next frame this reader takes
  // kOpen; kLeaving; else one more than the number of the first frame that is the writer's own: this reader
  // takes those before it, or gives them up (RingReader::leave), and never looks at those from it on.
  std::atomic<uint64_t> end;
  std::atomic<uint64_t> wanted; // frames with a tag below this are not wanted any more
  std::atomic<uint32_t> lost;   // frames with definitions that this reader has taken and could not read

  // Whether this reader looks at no slot any more, and at no block but those of frames that it has taken.
  // Acquire: its last look comes before whatever is done because of this. Sequentially consistent for
  // Arena::run: RingReader::close writes `end` last.
  bool closed() const {
    const uint64_t said = end.load(std::memory_order_seq_cst);
    return said != kOpen && said != kLeaving && next.load(std::memory_order_acquire) + 1 >= said;
  }
  // Whether frame `number` will never be taken: its lease on the frame's block has ended without a
  // Lease that could end it.
  bool never_takes(uint64_t number) const { return closed() && next.load(std::memory_order_relaxed) <= number; }
};

}  // namespace conveyor
