// Frames to Python values, and what stands for a value that is decoded later, or more than once.
#pragma once

#include <Python.h>
#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "frame.h"

namespace nb = nanobind;

namespace conveyor {

// An encoded value that can be decoded any number of times: in memory of this process, in a file that
// others can be given, or where its writer has put it, under a lease. Sending a snapshot sends the value
// that it is of.
struct Snapshot {
  Frame frame;
  std::shared_ptr<const Fd> fd{};  // of the file that its body lies in, if it does
  nb::object refs{};  // that its value refers to, if they are held here, until a ref has the snapshot: that holds them
  nb::object definitions{};  // that its bytes refer to
};

struct ErrorFrame {
  nb::bytes meta;
  // Of an execution that fails as one: all that was told of it, this first; it may grow. Guarded by the GIL.
  std::shared_ptr<const std::vector<std::string>> told = nullptr;
};

// These three throw only what is Python's. Native codecs only; `body` of `size` bytes may be anything.
nb::object decode_native(uint16_t codec, const char* body, size_t size);
// Not `fetches`: what has stayed in another process comes as something that stands for it (codec/direct.py).
nb::object decode(const Frame& frame, bool fetches = true);
// Whether the frame that this thread is decoding is to be fetched. Code that is run meanwhile may decode others.
bool fetches() noexcept;
// The page of the process table that says when this process decodes values in Python; null: none does.
void show_decoding_on(std::shared_ptr<ProcessTable> process_table, uint32_t slot);
// It says that this thread imports a module for the value that it decodes, if it decodes one, until end_import(). False if
// it says so of another one.
bool note_import(const std::string& module);
void end_import();
// It says that this process runs nothing: what its loop takes next is decoded first.
void note_idle();
// The lease that keeps the value of that number, where it lies in the memory of who has made it, as long as that process
// or the lease lives: that of the frame which this thread is decoding, if it is kSure and names the value. Else null.
std::shared_ptr<Lease> sure_lease(uint64_t number);
// What stands for the value from now on: the value itself where its type is immutable (those that are
// decoded natively), an ErrorFrame, else a Snapshot, which holds `refs` and `definitions`. Runs no Python code.
nb::object keep(const Frame& frame, nb::object refs, nb::object definitions);
// Make a frame's claims good that is to be decoded later: its refs, to be held until then. Invalid if it has none.
nb::object take_claims(const Frame& frame);
nb::bytes meta_of(const Frame& frame);
// The value that what `keep` has returned stands for, a new one each time where it is mutable.
nb::object value_of(nb::handle kept);
// A frame with definitions that is not decoded yet. `known`: what its reader knows of its channel's.
void announce(const Frame& frame, nb::handle known);
// A frame that nobody will ever decode; without `known`, it was announced.
void discard(const Frame& frame, nb::handle known = nb::handle());
// The same in two steps, for a frame that cannot be taken out of its slot: the part of it that says which refs
// it has claims on, null if it has none or cannot be read; and, once the slot is free, to let go of those.
nb::object claims_of(const char* body, size_t size, size_t in_block) noexcept;
void give_up_claims(nb::object claims) noexcept;
// The buffers of a frame with a table, a list or None. `as_it_lies`: of memory that others may read; nobody writes to it.
nb::object buffers_of(const Frame& frame, const TableView& table, bool as_it_lies = false);
TableView table_of(const Frame& frame);

// What a frame says of a value that has stayed with its maker, as `Located.pack` (codec/direct.py) has written it.
struct LocatedParts {
  uint16_t codec;  // of the value
  bool joined;
  bool snapshot;
  uint32_t slot, incarnation, pid;
  uint64_t number, anchor;
  std::string_view ranges, beside, lying, meta;
};

// Nothing where these bytes are too few; they may be anything.
std::optional<LocatedParts> read_located(std::string_view packed);
// Of a frame that keeps one value, and has its meta bytes and nothing else.
std::optional<LocatedParts> located_in(const Frame& frame);

}  // namespace conveyor
