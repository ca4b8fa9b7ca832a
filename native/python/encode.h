// Python values to frames. The types that cost less here than a call into Python are done here; for all others
// the codec in Python is asked (codec/frames.py).
#pragma once

#include <Python.h>
#include <nanobind/nanobind.h>

#include <bitset>
#include <cstddef>
#include <utility>
#include <vector>

#include "made_in_place.h"
#include "native_values.h"
#include "sender.h"

namespace nb = nanobind;

namespace conveyor {

// Pauses of the garbage collector, while many objects are made of which none is garbage.
// Who turns the collector off meanwhile, in another thread, finds it on. With the GIL.
class Uncollected {
 public:
  Uncollected() : began_(PyGC_Disable() != 0) {
    if (began_) ++under_way_;
  }
  ~Uncollected() { end(); }
  Uncollected(const Uncollected&) = delete;
  Uncollected& operator=(const Uncollected&) = delete;

  // May come before the end of the object. In a child that was forked meanwhile it has ended.
  void end() noexcept {
    if (!std::exchange(began_, false) || forks_seen_ != forks_) return;
    --under_way_;
    PyGC_Enable();
  }

  // A child of fork has one thread: those that had paused the collector are not there to turn it on. Where that thread
  // has done so itself, the child goes on without a pause.
  static void in_child() noexcept {
    ++forks_;
    if (std::exchange(under_way_, 0) != 0) PyGC_Enable();
  }

 private:
  static inline size_t under_way_ = 0;  // of those that have found it on
  static inline size_t forks_ = 0;      // on the way down to this process
  const size_t forks_seen_ = forks_;
  bool began_;
};

// A value on its way out: what its body will be, and what keeps the source alive until it is copied.
struct Encoded : Outgoing {
  const char* data = nullptr;  // a body that is copied as it is
  char small[8];
  Scratch scratch;
  nb::object source;
  nb::object meta;
  nb::object sent;  // the channel's definitions, until the frame is published and all its claims are its readers'
  std::bitset<kMaxReaders> unclaimed;  // of a frame that is published: readers that had left before
  std::vector<Py_buffer> views;
  TableLayout layout;
  std::shared_ptr<MadeInPlace> made;  // whose block goes with the frame, for the buffers that lie there
  size_t in_block = 0;                // bytes of these
  bool raw = false;  // `data` is the body as it is, whatever the codec

  Encoded() = default;
  ~Encoded();
  // Have the buffers that lie in the block of `made` stay there; or have all of them be in the body, and no `made`.
  void lay_out_in_block();
  void lay_out_in_body();
  void write_body(char* to) const;
};

// Definitions that are gone, of which a channel's next frames have to tell (SentDefinitions.gone). With the GIL.
class Untold {
 public:
  ~Untold() { all_ -= int(tokens_.size()); }
  // Whether any channel has such.
  static bool any() { return all_ > 0; }
  size_t size() const { return tokens_.size(); }
  void add(nb::sequence tokens);
  // Take out the first `most` of them.
  nb::tuple take(size_t most);

 private:
  static inline int all_ = 0;
  std::vector<nb::object> tokens_;  // in their order
};

// Throws what Python raised for a value that cannot be encoded; then nothing has happened.
// What was made in place in `arena` (null: in none), and has no more than `moved_refs` references, moves.
// `passes_on`: its readers decode it at once, so what names a value that has stayed with its maker may stand among a
// tuple's elements as it has come (kArguments).
void encode(Encoded& out, nb::handle value, nb::handle sent, Py_ssize_t moved_refs, const Arena* arena, bool passes_on = false);

}  // namespace conveyor
