#include "writer.h"

#include <cstring>

#include "exit.h"
#include "hooks.h"
#include "platform.h"

namespace conveyor {

namespace {
constexpr size_t kReleaseGilFrom = 32 * 1024;
}

void Writer::prepare(Encoded& e, bool beyond_cap) {
  check_owner(fork_);
  if (e.made && e.size <= ring.capacity()) {
    const std::shared_ptr<Budget> none, &budget = beyond_cap ? none : ring.readers()->budget;
    try {
      return arena->charge(e.made->block, budget, false);
    } catch (const ArenaFull&) {  // others may have something to let go of
    }
    Unlocked unlocked;
    return arena->charge(e.made->block, budget, true);
  }
  if (e.made) {
    // The table does not fit the slot (a very long meta, or large buffers that lie elsewhere): fall back to
    // copying the value.
    e.lay_out_in_body();
  }
  if (e.size <= ring.capacity() && !(e.flags & kKeeps)) return;
  const auto place = [&](bool may_wait) {
    reserve(e, beyond_cap, may_wait);
    e.write_body(e.block->data());
  };
  if (e.size < kReleaseGilFrom) {
    try {
      return place(false);
    } catch (const ArenaFull&) {  // others may have memory to give
    }
  }
  Unlocked unlocked;
  place(true);
}

uint64_t Writer::commit(Encoded& e, uint64_t tag, Kind kind) noexcept {
  e.tag = tag;
  e.kind = kind;
  if (e.block == nullptr) e.write_body(ring.next_body());
  if (e.made) {
    e.made->sent = true;
    e.block = e.made->block;
    e.flags |= kExternal;
    e.beside = e.in_block;
  }
  defined_ |= (e.flags & kDefinitions) != 0;
  const uint64_t number = publish(e);
  // What it defines is on its way. But those for whom it came too late never come for its claims.
  if (e.flags & kRefs) e.unclaimed = ring.left_behind(number);
  if (e.unclaimed.none()) e.sent = nb::object();
  return number;
}

void Writer::send_error(const char* meta, size_t size, uint64_t tag) noexcept {
  if (inherited()) end_forked_child("code that encodes a value");
  Encoded e;
  e.codec = kBytes;
  e.data = meta;
  e.size = size;
  try {
    prepare(e, true);
  } catch (...) {
    e.data = kUnsaidMeta;  // fits in every slot
    e.size = std::strlen(kUnsaidMeta);
  }
  commit(e, tag, Kind::kError);
}

void Writer::define_again() {
  const auto lost = ring.lost();  // before: what is lost meanwhile is seen next time
  if (!sent.is_none()) {
    Calling python;
    nb::object result = nb::steal(PyObject_CallMethod(sent.ptr(), "forget", nullptr));
    if (!result.is_valid()) throw nb::python_error();
  }
  lost_ = lost;
}

}  // namespace conveyor
