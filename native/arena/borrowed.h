// Blocks that other processes have not published, and in which values of theirs lie that they keep.
#pragma once

#include <memory>

#include "lease.h"

namespace conveyor {

// A block of another process's arena, read in place. It has no lease of its own: that on a frame, or a Hazard, keeps the
// value which lies there, and so the block, as it is. Ends with the object, or later if a forked child may still read the
// block.
class Borrowed {
 public:
  // `keeps`: the lease, or the hazard. Throws if no block lies there, and what ArenaView::block does.
  Borrowed(std::shared_ptr<const void> keeps, ArenaView& view, uint64_t offset, uint64_t size);
  ~Borrowed();
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;

  char* block() const { return block_; }  // with its header
  const std::shared_ptr<Mapping>& mapping() const { return mapping_; }

 private:
  std::shared_ptr<const void> keeps_;
  std::shared_ptr<Mapping> mapping_;
  char* const block_;
  Hold hold_;
};

// Where a range of a value lies in its process's arena.
struct Lying {
  uint64_t block;  // offset in the file
  uint64_t size;   // of the block
  uint64_t at;     // from the block's beginning; 0: it lies elsewhere
};

}  // namespace conveyor
