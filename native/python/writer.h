// The writing end of a channel as Python uses it: a Sender of values. Guarded by the GIL.
#pragma once

#include "encode.h"

namespace conveyor {

class Writer : public Sender {
 public:
  Writer(std::shared_ptr<Segment> segment, size_t offset, std::shared_ptr<ProcessTable> process_table, std::vector<Target> targets, std::shared_ptr<Arena> arena, nb::object sent)
      : Sender(std::move(segment), offset, std::move(process_table), std::move(targets), std::move(arena)), sent(std::move(sent)) {}

  void encode_value(Encoded& e, nb::handle value) { encode_value(e, value, moved_refs); }
  void encode_value(Encoded& e, nb::handle value, Py_ssize_t references) {
    if (defined_ && ring.lost() != lost_) define_again();
    e.sent = sent;  // before: what fails half way takes its definitions back
    encode(e, value, sent, references, arena.get(), passes_on);
  }
  // Give the body its place; copies it if that place is in the arena. Releases the GIL for large copies.
  // Throws in a forked child: the ring is its parent's.
  // `beyond_cap`: errors, which must get through also at the arena's cap.
  void prepare(Encoded& e, bool beyond_cap = false);
  // Publish. Cannot fail: others of the same submission may be on their way already.
  uint64_t commit(Encoded& e, uint64_t tag, Kind kind) noexcept;
  // Send an error; there is room. Cannot fail: where there is no memory to say what has happened, that is sent.
  void send_error(const char* meta, size_t size, uint64_t tag) noexcept;

  nb::object sent;
  Py_ssize_t moved_refs = 0;
  bool passes_on = false;  // see encode()

 private:
  // A reader has lost definitions: they all go again with the next frames that need them.
  void define_again();

  bool defined_ = false;  // this channel has carried definitions
  uint32_t lost_ = 0;     // what the ring said of that last
};

}  // namespace conveyor
