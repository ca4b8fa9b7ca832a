// The memory a process writes its large payloads into: one sparse memfd, blocks of a few sizes for
// each doubling, reused while their pages are warm.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <stdexcept>
#include <vector>

#include "board.h"
#include "lease.h"

namespace conveyor {

// What the channels of one graph may have out of one process's arena, all together.
struct Budget {
  explicit Budget(size_t cap) : cap(cap) {}
  const size_t cap;
  size_t out = 0;  // bytes of blocks that are published and not yet seen free
};

// The processes that may hold leases on a channel's blocks, to know which of them are dead; and what
// the channel is, for the error at the cap.
struct ReaderSet {
  std::shared_ptr<Board> board;
  std::vector<uint32_t> slots;
  std::vector<uint32_t> incarnations;
  uint32_t graph = 0;   // 0: of no graph
  uint32_t edge = 0;
  std::string carries;  // in words
  std::shared_ptr<Budget> budget{};  // none: only the arena's cap holds

  void add(uint32_t slot) {
    slots.push_back(slot);
    incarnations.push_back(board->slot(slot)->incarnation.load(std::memory_order_relaxed));
  }
  bool gone(uint32_t reader) const { return board->gone(slots[reader], incarnations[reader]); }
};

struct Block {
  uint64_t offset;
  uint64_t size;     // of the class, header included
  char* base;        // mapped here
  uint64_t touched;  // bytes from the start that may have pages behind them
  uint64_t used;     // of these, the ones that its present value takes, header included
  uint64_t freed_ns;
  uint32_t generation;
  uint64_t tag;      // of the frame it was published with: an execution, or a call
  std::shared_ptr<ReaderSet> readers;

  BlockHeader* header() const { return reinterpret_cast<BlockHeader*>(base); }
  char* data() const { return base + kBlockHeader; }
  size_t capacity() const { return size - kBlockHeader; }
  // Whether reader `r` of a published block still has its lease.
  bool held_by(uint32_t r) const {
    // Acquire: the reader's last reads come before our next writes.
    return header()->lease[r].load(std::memory_order_acquire) != BlockHeader::done(generation & 0x7fffffff) && !readers->gone(r);
  }
};

// Values of one channel that one process still holds.
struct Holding {
  std::shared_ptr<const ReaderSet> channel;
  uint32_t slot;  // the process's
  std::string process;
  uint64_t bytes = 0;
  std::vector<uint64_t> tags{};
};

struct ArenaFull : std::runtime_error {
  explicit ArenaFull(const std::string& message, std::vector<Holding> holdings = {})
      : std::runtime_error(message), holdings(std::move(holdings)) {}
  std::vector<Holding> holdings;
};

// Not thread-safe: its callers hold the GIL (or are a single-threaded test).
class Arena {
 public:
  // `cap` bounds the bytes that have memory behind them; the file is larger, because blocks keep
  // their places and sizes for ever.
  Arena(int fd, size_t size, size_t cap);
  ~Arena();
  static Fd create_file(size_t size) { return make_memfd("conveyor-arena", size); }

  // A block with room for `payload` bytes, for the caller alone until it is published or released.
  // `beyond_cap`: for what must get through when memory is short.
  Block* allocate(size_t payload, bool beyond_cap = false);
  // Throw ArenaFull if `payload` bytes more for these readers are more than their budget.
  void check_budget(const ReaderSet& readers, size_t payload);
  // Hand `block` to its readers: it comes back when each of them is done or dead.
  void publish(Block* block, std::shared_ptr<ReaderSet> readers, uint64_t tag = 0);
  // Give back a block that was not published.
  void release(Block* block);
  // The block whose payload area holds `p`, or nullptr.
  Block* find(const void* p) const;

  size_t bytes_touched() const { return touched_; }
  size_t blocks_out() const { return out_.size(); }
  size_t bytes_out() const;
  // Who has not ended which leases, as the lease words say; of each process and channel together.
  // `of`: only blocks of this budget.
  std::vector<Holding> holdings(const Budget* of = nullptr) const;
  size_t cap() const { return cap_; }
  // At the end of a session: nothing more can be allocated.
  void close_fd() { fd_.reset(); }
  // Free the pages of blocks that have been free for `idle_ns`.
  void trim(uint64_t idle_ns);
  void reclaim(size_t at_most);

 private:
  static size_t class_of(size_t size);
  static size_t class_size(size_t index);
  void punch(Block* block);
  void make_room(size_t bytes);

  Fd fd_;
  size_t size_;
  size_t cap_;
  uint64_t top_ = 0;
  size_t touched_ = 0;
  uint64_t trimmed_ns_ = 0;
  size_t scan_ = 0;
  std::vector<char*> windows_;
  std::vector<std::unique_ptr<Block>> all_;  // by offset
  std::vector<Block*> out_;                  // published, not yet seen free
  std::array<std::vector<Block*>, 256> free_;
};

}  // namespace conveyor
