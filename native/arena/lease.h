// The leases that keep blocks of other processes from being used again.
#pragma once

#include <memory>

#include "view.h"

namespace conveyor {

// One reader's hold on one block; ends with the object, or later if a forked child may still read the block.
// Inert in a forked child: ending it there would let the writer reuse memory that the parent reads.
// It needs no view, once it is there: it keeps what the block is mapped with, and nothing else.
class Lease {
 public:
  Lease(ArenaView& view, uint64_t offset, uint64_t size, uint32_t reader);
  ~Lease();
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  char* block() const { return block_; }  // with its header
  char* data() const { return block_ + kBlockHeader; }
  size_t capacity() const { return size_ - kBlockHeader; }
  int fd() const { return mapping_->fd(); }  // the arena's
  uint64_t offset() const { return offset_; }
  Mapping& mapping() const { return *mapping_; }
  const std::shared_ptr<Mapping>& shared_mapping() const { return mapping_; }
  const std::shared_ptr<Returns>& returns() const { return returns_; }
  uint32_t generation() const { return generation_; }
  bool inherited() const { return hold_.inherited(); }

 private:
  std::shared_ptr<Returns> returns_;
  uint64_t offset_;
  uint64_t size_;
  std::shared_ptr<Mapping> mapping_;
  char* block_;
  uint32_t reader_;
  uint32_t generation_;
  Hold hold_;
};

// The lease on a block that could not be mapped when its frame was taken: it is taken later, or ended unseen.
// Inert in a forked child.
class UnmappedLease {
 public:
  UnmappedLease(std::shared_ptr<ArenaView> view, uint64_t offset, uint64_t size, uint32_t reader)
      : view_(std::move(view)), offset_(offset), size_(size), reader_(reader) {}
  ~UnmappedLease() {
    if (view_ && fork_ == fork_generation.load(std::memory_order_relaxed)) view_->forgo(offset_, size_, reader_);
  }
  UnmappedLease(const UnmappedLease&) = delete;
  UnmappedLease& operator=(const UnmappedLease&) = delete;

  // What this stands for, once. Strong: if it throws, it can be tried again.
  std::shared_ptr<Lease> map() {
    auto lease = std::make_shared<Lease>(*view_, offset_, size_, reader_);
    view_.reset();
    return lease;
  }
  size_t capacity() const { return size_ - kBlockHeader; }
  // Copy what lies at `at` behind the block's header, `size` bytes within its capacity. Before map().
  void copy(size_t at, void* to, size_t size) const { view_->copy(offset_ + kBlockHeader + at, to, size); }

 private:
  std::shared_ptr<ArenaView> view_;  // none: it has been mapped
  const uint64_t offset_;
  const uint64_t size_;
  const uint32_t reader_;
  const uint64_t fork_ = fork_generation.load();
};

// How many leases, and arrays made in place, there are.
inline size_t live_leases() { return live_holds(); }

}  // namespace conveyor
