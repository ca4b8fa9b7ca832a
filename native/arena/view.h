// Another process's arena as this one sees it: where its blocks lie, and what keeps them from being used again: leases on
// those that were published, and whatever else on those in which values lie that their process keeps.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "../process_table.h"
#include "../platform.h"
#include "holds.h"

namespace conveyor {

constexpr uint32_t kBlockMagic = 0x4b434c42;
constexpr size_t kBlockHeader = 512;
constexpr uint32_t kMaxPins = 16;
constexpr uint32_t kMaxReaders = (kBlockHeader - 16) / sizeof(uint32_t) - kMaxPins;
constexpr uint32_t kTells = uint32_t(1) << 31;  // something is attached to the block: its end is told at once
constexpr size_t kWindow = size_t(64) << 20;    // small blocks share windows of this size
constexpr size_t kBigBlock = size_t(16) << 20;  // blocks from here on are mapped alone, wherever they lie

// At the start of every block. A lease word belongs to one reader: the writer sets it to
// `held(generation)` before it publishes, after that only the reader writes it, once, to
// `done(generation)`. A late end of an older generation changes nothing.
struct BlockHeader {
  uint32_t magic;
  uint32_t readers;  // how many, and kTells
  uint64_t backed;   // bytes from the start that have memory; for who has a lease
  std::atomic<uint32_t> pins[kMaxPins];  // processes that have pinned these for a device, or 0: see pins.h
  std::atomic<uint32_t> lease[kMaxReaders];

  static uint32_t held(uint32_t generation) { return generation << 1 | 1; }
  static uint32_t done(uint32_t generation) { return generation << 1; }
  // End the lease of that generation, and tell `returns` (null: nobody).
  void end(uint32_t reader, uint32_t generation, Returns* returns);
};
static_assert(sizeof(BlockHeader) == kBlockHeader);

// This process's mapping of another process's arena, in windows mapped at first use. A big block has a
// mapping of its own, which stays for the next value in it: until a block of other bounds lies there, and
// as long as a lease reads it. Any thread may use it.
class ArenaView : public Shareable<ArenaView> {
 public:
  // `slot`: of the arena's process on `process_table`, to tell it of leases that have ended; none: nobody is told.
  ArenaView(int fd, size_t size, const std::shared_ptr<ProcessTable>& process_table = {}, uint32_t slot = 0)
      : fd_(std::make_shared<const Fd>(dup_cloexec(fd))), size_(size), returns_(process_table, process_table ? &process_table->slot(slot)->returns : nullptr) {}
  // The one of this process that is there for this file, or a new one: who opens another channel from a process
  // maps nothing once more.
  static std::shared_ptr<ArenaView> of(int fd, size_t size, const std::shared_ptr<ProcessTable>& process_table, uint32_t slot);
  ArenaView(const ArenaView&) = delete;
  ArenaView& operator=(const ArenaView&) = delete;

  // Where the block of `size` bytes at `offset` lies here; of a big one as long as `keep` does. Throws if
  // it lies outside the arena. Strong: if it throws, nothing is mapped that was not before.
  char* block(uint64_t offset, uint64_t size, std::shared_ptr<Mapping>& keep);
  // End the lease of `reader` on a block that was never looked at, without mapping it: this process may
  // have no addresses left for it. Cannot fail but for a block that is none, or whose header is swapped
  // out and does not come back; then the lease ends with the process.
  void skip_block(uint64_t offset, uint64_t size, uint32_t reader) noexcept;
  // Copy what lies there, without mapping it. Throws if it lies outside the arena.
  void copy(uint64_t offset, void* to, size_t size) const;
  int fd() const { return fd_->get(); }
  // Where it is noted that leases have ended; null: nowhere. Keeps the process table mapped.
  const std::shared_ptr<Returns>& returns() const { return returns_; }

 private:
  const std::shared_ptr<const Fd> fd_;
  const size_t size_;
  ForkMutex mutex_;  // who has it may map, and take the lock of all mappings for that
  std::vector<std::shared_ptr<Mapping>> windows_;
  std::map<uint64_t, std::shared_ptr<Mapping>> big_;  // by offset; no two overlap
  const std::shared_ptr<Returns> returns_;
  const uint64_t fork_ = fork_generation.load(std::memory_order_relaxed);
};

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
    if (view_ && fork_ == fork_generation.load(std::memory_order_relaxed)) view_->skip_block(offset_, size_, reader_);
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
