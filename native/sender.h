// The writing end of a channel: it gives frames their places, in the slot or in a block of the arena, and
// publishes them. One thread at a time uses it; which one, and what lock goes with that, is its owner's matter.
#pragma once

#include <span>

#include "frame.h"
#include "recorder.h"

namespace conveyor {

// A frame that is not published. A block that it has was allocated for it, and goes back with it.
struct Outgoing {
  uint64_t tag = 0;
  Kind kind = Kind::kValue;
  uint16_t codec = kNone;
  uint32_t flags = 0;
  size_t size = 0;         // of the body
  size_t beside = 0;       // bytes of the value that lie in the block beside the body (kExternal)
  Block* block = nullptr;  // with the body, or with what lies beside it; null: all of it is in the slot
  std::shared_ptr<Arena> arena{};          // the block's
  std::shared_ptr<const void> attached{};  // destroyed, by any thread, when no reader needs the block any more
  Numbers keeps{};                         // the values that this keeps, as far as it is known
  std::shared_ptr<Sent> noted{};           // what the directory says of it, from reserve() on

  Outgoing() = default;
  Outgoing(const Outgoing&) = delete;
  Outgoing& operator=(const Outgoing&) = delete;
  ~Outgoing() {
    if (block != nullptr) arena->release(block);
  }
};

class Sender {
 public:
  Sender(std::shared_ptr<Segment> segment, size_t offset, std::shared_ptr<ProcessTable> process_table, std::vector<Target> targets, std::shared_ptr<Arena> arena,
         const std::bitset<kMaxReaders>& is_remote = {})
      : ring(std::move(segment), offset, std::move(process_table), std::move(targets), is_remote), arena(std::move(arena)) {}

  // The steps of a send, with the frame's parts set: reserve, fill, publish. Between the first and the last
  // the thread may do what it likes; nobody sees the frame before it is published.
  //
  // Let a body that does not fit the slot have a block. Throws ArenaFull, and in a forked child, whose ring is
  // its parent's. `beyond_cap`, `may_wait`: see Arena::allocate.
  void reserve(Outgoing& out, bool beyond_cap = false, bool may_wait = true);
  // Where the body is to be written: in its block, or in the next slot, which must be free (ring.has_room())
  // from then on until it is published.
  char* body_of(const Outgoing& out) noexcept { return out.block != nullptr && !(out.flags & kExternal) ? out.block->data() : ring.next_body(); }
  // Publish it, with its body written. Its number in the ring. Cannot fail: others of the same submission may
  // be on their way already.
  uint64_t publish(Outgoing& out) noexcept;

  // Send a copy of `body`. False, with nothing done, if the ring is full. Throws as reserve() does.
  bool send(uint64_t tag, Kind kind, uint16_t codec, std::span<const char> body, bool may_wait = true);
  // Send what another end has taken, without a look at what its bytes mean: a block that is not mapped is copied
  // through its file. A frame that refers to what its channel carried before (kBound) means the same only if
  // all frames of that channel are sent on, in their order. Throws ENOTSUP for a frame with refs inside,
  // which are counted for the readers that it was sent to.
  bool forward(const Frame& frame, bool may_wait = true);

  // Note from now on what is sent as send `index` of `recorder`; `output`: -1, or which output it is.
  void record(std::shared_ptr<Recorder> recorder, uint32_t index, int output) {
    recorder_ = std::move(recorder);
    index_ = index;
    output_ = output;
  }
  bool inherited() const { return fork_ != fork_generation.load(std::memory_order_relaxed); }

  RingWriter ring;
  const std::shared_ptr<Arena> arena;
  uint64_t bytes = 0;  // of all that was sent

 private:
  std::shared_ptr<Recorder> recorder_;
  uint32_t index_ = 0;
  int output_ = -1;

 protected:
  const uint64_t fork_ = fork_generation.load();
};

}  // namespace conveyor
