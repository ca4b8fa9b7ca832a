// The reading end of a channel: it takes frames out of the ring, and leases on the blocks that they lie in. One
// thread at a time uses it; the frames that it has taken are anybody's.
#pragma once

#include <optional>

#include "frame.h"

namespace conveyor {

class Receiver {
 public:
  Receiver(std::shared_ptr<Segment> segment, size_t offset, uint32_t reader, std::shared_ptr<ProcessTable> process_table, Target writer,
           std::shared_ptr<ArenaView> view, bool readonly)
      : ring(std::move(segment), offset, reader, std::move(process_table), writer), view(std::move(view)), readonly(readonly) {}
  ~Receiver() { close(); }
  Receiver(const Receiver&) = delete;
  Receiver& operator=(const Receiver&) = delete;

  // All of these only if the ring is not empty.
  //
  // The next frame, out of the ring; if this throws, it is still there, and its lease with it.
  Frame take();
  // The same, with a block that nobody has looked at yet left unmapped: for who passes the frame on, or reads
  // parts of it (Frame::read).
  Frame take_unmapped();
  // The next frame, out of the ring unread: its lease ends, and definitions in it are lost.
  void pass() noexcept;
  // Let `take` not fail.
  void load_front();
  // Let `take_loaded` not fail. Where the frame's block cannot be mapped it is left unmapped.
  void load_unread();
  // The next frame, out of the ring, as it was loaded.
  Frame take_loaded() noexcept;

  // A frame with definitions was taken and could not be read.
  void lose(const Frame& frame) noexcept {
    if (frame.flags & kDefinitions) ring.lose();
  }
  // Take no more: what lies in the ring, and what still comes, is given back to its writer unread.
  void close() noexcept;

  RingReader ring;
  std::shared_ptr<ArenaView> view;  // none once it is closed: its ring is empty then
  const bool readonly;
  uint64_t tag = 0;  // of the frame received last
  Kind kind = Kind::kValue;
  size_t given = 0;  // bytes of its block, unless that is small
  uint64_t bytes = 0;

 protected:
  SlotHeader checked_front() const;
  // The frame that `slot` describes is out of the ring, and its lease ends unless somebody else has it.
  void release_front(const SlotHeader& slot) noexcept;
  // The front of the ring, once it has been looked into. Kept until it is taken, because two leases of one
  // reader on one block are one: the first that ended would end both.
  std::optional<Frame> front_;
  const uint64_t fork_ = fork_generation.load();

 private:
  Frame frame_of(const SlotHeader& slot, bool mapped) const;
};

}  // namespace conveyor
