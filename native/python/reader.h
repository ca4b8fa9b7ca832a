// The reading end of a channel as Python uses it: a Receiver of values. Guarded by the GIL. Every reader of a
// channel learns the definitions in each frame, in order, and gives up the claims in those that nobody decodes.
#pragma once

#include "decode.h"
#include "receiver.h"

namespace conveyor {

class Reader : public Receiver {
 public:
  using Receiver::Receiver;
  ~Reader();

  // All of these only if the ring is not empty, and those that decode not in a forked child: they throw.
  //
  // The next frame's value; cheaper than decode(take()) for what is decoded natively. The frame is out of
  // the ring afterwards, `tag` and `kind` are its own, and its lease ends, also if this throws: what cannot
  // be read keeps nobody from what comes behind it.
  nb::object receive();
  // The same, but what something of may have stayed elsewhere is what `make` makes of a Snapshot, to be decoded once: what
  // is decoded of it may be written to where that of receive() may.
  nb::object receive_undecoded(nb::handle make);
  // As receive(), but if this throws the frame is still there, and can be received once more.
  nb::object receive_or_leave();
  // The next frame's value, which is still in the ring until skip_head(); invalid, and nothing done, for an
  // error. If this throws, the frame is out of the ring.
  nb::object receive_head();
  // The frame that receive_head() has decoded is out of the ring.
  void skip_head() noexcept;
  // The next frame's value, if it decodes_natively(); if this throws, the frame is still there.
  nb::object receive_native();
  // Something of the next frame's value may have stayed elsewhere.
  bool front_keeps() const {
    const SlotHeader slot = read_once(*ring.front());
    return slot.kind != Kind::kError && (slot.flags & kKeeps);
  }
  // The next frame is decoded without any Python code.
  bool decodes_natively() const { return is_native(read_once(*ring.front())) && !front_; }
  // What stands for the next frame's value (`keep`), its definitions learnt and its claims made good. If this throws, the frame is
  // still there, unless it is not valid. Invalid if Python code that ran meanwhile has taken the frame.
  nb::object receive_snapshot();
  // Learn the next frame's definitions, since frames behind it may be decoded first; or if nobody will
  // ever decode it, let go of what it holds too. If this throws, the frame is still there. False if Python
  // code that ran meanwhile has taken it.
  bool announce_front(bool unwanted = false);
  // Make the next frame's claims good, since it is to be decoded when it is out of the ring, where nobody knows any more that
  // they are to be made good. As announce_front(), which goes before. `refs`: to be held with the frame.
  bool take_front_claims(nb::object& refs);
  // The next frame, out of the ring unread: its lease ends, its claims are given up, and its definitions are
  // sent again.
  void give_up() noexcept;
  // The same for a frame that nobody wants, its definitions learnt if they can be.
  void skip();
  // Nothing has come that was not received, and nothing is being decoded that was. Nor has what was received claims that were
  // not made good: those of what is kept to be decoded later are, before it is out of the ring.
  bool dry() const;
  // Take no more: what lies in the ring, and what still comes, is given back to its writer, and nobody
  // decodes it. Throws what is Python's, and has been closed then, too.
  void close();

  // What this process's loop does comes here, one thing after the other: nothing runs while receive() decodes it.
  bool brings_work = false;

  // What the next frame's bytes refer to, to be held as long as it may be decoded; its own definitions were learnt.
  // Invalid if it brings all that it needs.
  nb::object front_definitions() const { return definitions_for(read_once(*ring.front()).flags); }

 private:
  // What this process knows of the channel's definitions; invalid for a frame that is bound to no channel's.
  nb::handle known_for(uint32_t flags) const { return flags & kBound ? nb::handle(known_) : nb::handle(); }
  nb::object definitions_for(uint32_t flags) const;
  // The value of a frame that may define something: that is learnt first.
  nb::object learn_and_decode(const Frame& frame);
  // Made with the reader: making it runs Python code, in which another thread may take the frame that is looked at.
  static nb::object made_known();
  const nb::object known_ = made_known();
  // What `how` makes of a frame that is out of the ring. If this throws, nobody will read it.
  template <class How>
  nb::object read(const Frame& frame, How how);
  uint32_t decoding_ = 0;  // frames that are out of the ring already

  static bool is_native(const SlotHeader& slot) { return slot.block == 0 && slot.codec < kFirstPython && slot.kind != Kind::kError; }
};

}  // namespace conveyor
