// Python values to and from frames. The types that cost less here than a call into Python are done
// here; for all others the codec in Python is asked (channel/codec.py).
#pragma once

#include <Python.h>
#include <nanobind/nanobind.h>

#include <memory>
#include <string>
#include <vector>

#include "arena.h"
#include "frame.h"
#include "ring.h"

namespace nb = nanobind;

namespace conveyor {

// A copy of a small body, aligned like a block.
struct OwnedMemory {
  explicit OwnedMemory(size_t size) : data(static_cast<char*>(std::aligned_alloc(kBufferAlign, align_up(size + 1, kBufferAlign)))) {
    if (data == nullptr) throw std::bad_alloc();
  }
  // Shared with who else has the file of at least `size` bytes.
  OwnedMemory(int fd, size_t size) : data(map_shared(fd, 0, align_up(size, kPage))), mapped(align_up(size, kPage)) {}
  ~OwnedMemory() {
    if (mapped != 0)
      ::munmap(data, mapped);
    else
      std::free(data);
  }
  OwnedMemory(const OwnedMemory&) = delete;
  OwnedMemory& operator=(const OwnedMemory&) = delete;
  char* data;
  size_t mapped = 0;
};

// A block of this process's own arena that a value is being made in (conveyor.empty).
struct MadeInPlace : std::enable_shared_from_this<MadeInPlace> {
  MadeInPlace(std::shared_ptr<Arena> owner, size_t bytes);
  ~MadeInPlace();
  MadeInPlace(const MadeInPlace&) = delete;
  MadeInPlace& operator=(const MadeInPlace&) = delete;
  // The one that `size` bytes at `data` lie in, if it can still be sent; and whether there is any.
  static std::shared_ptr<MadeInPlace> find(const char* data, size_t size);
  static bool any();

  std::shared_ptr<Arena> arena;
  Block* block;
  size_t length;
  bool sent = false;
  uint64_t fork = fork_generation.load();
};

// Private copy-on-write pages over a part of a leased block.
struct PrivatePages {
  PrivatePages(std::shared_ptr<Lease> of, char* at, size_t bytes) : lease(std::move(of)), base(at), length(bytes) {}
  PrivatePages(const PrivatePages&) = delete;
  PrivatePages& operator=(const PrivatePages&) = delete;
  std::shared_ptr<Lease> lease;
  char* base;
  size_t length;
  ~PrivatePages() { ::munmap(base, length); }
};

// What Python sees of received or own memory; exports the buffer protocol.
struct Buffer {
  char* data;
  size_t length;
  bool readonly;
  std::shared_ptr<void> owner;  // Lease, OwnedMemory, MadeInPlace or PrivatePages
  std::shared_ptr<Lease> lease;
  std::shared_ptr<MadeInPlace> made;
};

// A value on its way out: what its body will be, and what keeps the source alive until it is copied.
struct Encoded {
  uint16_t codec = kNone;
  uint32_t flags = 0;
  size_t size = 0;
  const char* data = nullptr;  // a body that is copied as it is
  char small[8];
  std::string scratch;
  nb::object source;
  nb::object meta;
  nb::object sent;  // the channel's definitions, until the frame is published
  std::vector<Py_buffer> views;
  TableLayout layout;
  Block* block = nullptr;
  std::shared_ptr<Arena> arena;
  std::shared_ptr<MadeInPlace> made;
  bool raw = false;  // `data` is the body as it is, whatever the codec

  Encoded() = default;
  Encoded(const Encoded&) = delete;
  Encoded& operator=(const Encoded&) = delete;
  ~Encoded();
  void write_body(char* to) const;
};

// A frame taken out of its ring, decoded when somebody asks for it.
struct Frame {
  uint64_t tag = 0;
  Kind kind = Kind::kValue;
  uint16_t codec = kNone;
  uint32_t flags = 0;
  size_t size = 0;
  const char* body = nullptr;
  bool readonly = false;
  bool kept = false;  // decoded more than once: its memory is nobody's to write
  std::shared_ptr<OwnedMemory> memory;
  std::shared_ptr<Lease> lease;
};

// A value encoded into memory of this process, or into a file that others can be given: it can be
// decoded any number of times. Sending a snapshot sends the value that it is of.
struct Snapshot {
  Frame frame;
  Fd fd;
};
// `share_from`: the size from which its body lies in a file.
Snapshot snapshot(nb::handle value, nb::handle sent, size_t share_from);
// One of another process: its body is in `data`, or in the file `fd` (else -1), which is duplicated.
Snapshot received_snapshot(uint16_t codec, uint32_t flags, size_t size, nb::handle data, int fd);

struct ErrorFrame {
  nb::bytes meta;
};

// `final_error`: the class of errors that will not go away by decoding again; `arena_full(message,
// holdings)`: makes what to raise at an arena's memory cap; `held_alone(value)`: nothing but `value` refers to its memory.
void set_codec(nb::object encode, nb::object decode, nb::object announce, nb::object final_error, nb::object arena_full,
               nb::object held_alone, nb::object state_error);
// Throws if this process was forked since `generation`: rings and results are the parent's.
void check_owner(uint64_t generation);
void raise_arena_full(const ArenaFull& error);
bool is_final(nb::handle exception);
void clear_codec();

// Throws what Python raised for a value that cannot be encoded; then nothing has happened.
void encode(Encoded& out, nb::handle value, nb::handle sent, Py_ssize_t moved_refs);
// Native codecs only; `body` of `size` bytes may be anything.
nb::object decode_native(uint16_t codec, const char* body, size_t size);
nb::object decode(const Frame& frame);
// A frame with definitions that nobody will decode.
void announce(const Frame& frame);

}  // namespace conveyor
