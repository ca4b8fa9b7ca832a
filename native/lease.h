// Reading other processes' arenas, and the leases that keep their blocks from being used again.
#pragma once

#include <memory>
#include <unordered_map>
#include <vector>

#include "platform.h"

namespace conveyor {

constexpr uint32_t kBlockMagic = 0x4b434c42;
constexpr size_t kBlockHeader = 512;
constexpr uint32_t kMaxReaders = (kBlockHeader - 16) / sizeof(uint32_t);
constexpr size_t kWindow = size_t(64) << 20;    // small blocks share windows of this size
constexpr size_t kBigBlock = size_t(16) << 20;  // blocks from here on are mapped alone

// At the start of every block. A lease word belongs to one reader: the writer sets it to
// `held(generation)` before it publishes, after that only the reader writes it, once, to
// `done(generation)`. A late end of an older generation changes nothing.
struct BlockHeader {
  uint32_t magic;
  uint32_t readers;
  uint64_t size;
  std::atomic<uint32_t> lease[kMaxReaders];

  static uint32_t held(uint32_t generation) { return generation << 1 | 1; }
  static uint32_t done(uint32_t generation) { return generation << 1; }
};
static_assert(sizeof(BlockHeader) == kBlockHeader);

// This process's mapping of another process's arena, in windows mapped at first use.
class ArenaView {
 public:
  ArenaView(int fd, size_t size) : fd_(dup_cloexec(fd)), size_(size) {}
  ~ArenaView();
  ArenaView(const ArenaView&) = delete;
  ArenaView& operator=(const ArenaView&) = delete;

  // Where the block of `size` bytes at `offset` lies here. Throws if it lies outside the arena.
  char* block(uint64_t offset, uint64_t size);
  // The arena offset that corresponds to `p` within `block_at` (the mapped start of the block).
  int fd() const { return fd_.get(); }

 private:
  Fd fd_;
  size_t size_;
  std::vector<char*> windows_;
  std::unordered_map<uint64_t, std::pair<char*, size_t>> big_;
};

// What a fork left behind: while the child (or a child of its) lives, leases that were alive at the
// fork stay taken, because the child still reads the block. The read end of a pipe tells: it hangs up
// when the last inheritor of the write end is gone.
struct ForkPin {
  Fd read_end;
  bool released() const;
};

// One reader's hold on one block; ends with the object. Inert in a forked child.
class Lease {
 public:
  Lease(std::shared_ptr<ArenaView> view, uint64_t offset, uint64_t size, uint32_t reader);
  ~Lease();
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  char* data() const { return block_ + kBlockHeader; }
  size_t capacity() const { return size_ - kBlockHeader; }
  const std::shared_ptr<ArenaView>& view() const { return view_; }
  uint64_t offset() const { return offset_; }

 private:
  friend struct LeaseRegistry;
  std::shared_ptr<ArenaView> view_;
  uint64_t offset_;
  uint64_t size_;
  char* block_;
  uint32_t reader_;
  uint32_t generation_;
  uint64_t fork_generation_;
  std::vector<std::shared_ptr<ForkPin>> pins_;
  Lease* previous_ = nullptr;
  Lease* next_ = nullptr;
};

size_t live_leases();
// End leases that only waited for a forked child to end. Called before a process sleeps.
void release_unpinned();
void install_fork_handlers();

}  // namespace conveyor
