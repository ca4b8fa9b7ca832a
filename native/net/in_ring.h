// The writing end of a ring whose writer is on another host. What comes over the connection is received straight into
// the slot, or into a block of the arena that stands for the writer's here, and published when it is whole: once for all
// readers of this host. What was received of a block outlives its connection.
//
// It always has room, because the writer's ring, which has as many slots, waits for these readers.
#pragma once

#include "../recorder.h"
#include "../sender.h"
#include "claims.h"
#include "lent.h"
#include "wire.h"

namespace conveyor::net {

// In the place of a frame that could not come.
constexpr const char* kNotBetweenHosts = "conveyor:not-sent";   // what it refers to stays on its host
constexpr const char* kHostIsFull = "conveyor:host-full";       // this host has no memory for it

class InRing {
 public:
  // `id`: the segment's. `here`: which of its readers are on this host. `returning`: to the writer's. `unclaimed` is told of claims of those that have left.
  // `times`: see RingSpec.
  InRing(const std::shared_ptr<Segment>& segment, uint64_t id, uint32_t index, size_t offset, const std::shared_ptr<ProcessTable>& process_table,
         const std::vector<Target>& readers, const std::bitset<kMaxReaders>& here, std::shared_ptr<Arena> arena, std::shared_ptr<Returning> returning,
         Unclaimed unclaimed, size_t times = 0, uint32_t kept = 0);

  // All of these throw Violation. What follows the head, `size` bytes, is to be written to what they return (null: to
  // be dropped); then to received().
  char* frame(const FrameHead& head, uint16_t flags, size_t size);
  char* chunk(const ChunkHead& head, size_t size);
  // True: a frame was published.
  bool received(size_t size);
  // A part of a piece has come, and then the connection has ended.
  void cut(size_t size);

  uint64_t have() const { return sender_.ring.head(); }
  uint64_t at() const { return begun_ && !refused_ ? got_ : 0; }
  // Its sender waits to be told that it has come.
  bool owes_have() const { return owes_have_; }
  void note_told() { owes_have_ = false; }
  // Have the readers ring when they have taken so many that the writer wants to know. True: they have already.
  bool ask(uint64_t told);
  // Whether the writer is held up by this reader, which is here.
  bool waits_for(uint32_t reader) const { return here_.test(reader) && !sender_.ring.readers()->gone(reader) && !ring_.cursor(reader).closed(); }
  bool asks() const { return ring_.flags & kWriterMayWait; }

  const uint32_t index;
  uint64_t frames = 0;

 private:
  void check_size(const FrameHead& head, bool stands_in) const;
  void publish();
  // The header of the frame that has come, if it claims anything.
  std::optional<std::string> claims() const;
  const uint64_t id_;
  Ring ring_;
  Sender sender_;
  std::bitset<kMaxReaders> here_;
  uint32_t readers_;
  const std::shared_ptr<Returning> returning_;
  const Unclaimed unclaimed_;
  Word* const times_;
  const uint32_t kept_;
  std::vector<std::pair<uint32_t, uint32_t>> processes_;  // of the readers: slot and incarnation
  bool begun_ = false;    // a frame has begun to come
  bool refused_ = false;  // with no block for it: an error stands for it
  const char* error_ = nullptr;
  FrameHead head_{};
  Outgoing out_;
  std::shared_ptr<Borrowed> borrowed_;  // of a frame that keeps something at its writer's
  uint64_t in_slot_ = 0;  // bytes of the body still to come into the slot
  uint64_t got_ = 0;      // bytes of the block
  std::vector<char> first_;  // the first of them, of a frame that is refused and claims something
  bool owes_have_ = false;  // of a frame that was in a block
};

}  // namespace conveyor::net
