// Python values to and from frames. The types that cost less here than a call into Python are done
// here; for all others the codec in Python is asked (codec/frames.py).
#pragma once

#include <Python.h>
#include <nanobind/nanobind.h>

#include <bitset>
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
  OwnedMemory(int fd, size_t size) : data(map_shared(fd, 0, align_up(size, kGranule))), mapped(align_up(size, kGranule)) {}
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

// A block of this process's own arena that a value is being made in (conveyor.empty). In a forked child its
// pages are private; as long as that child lives, the block is neither sent nor used again.
struct MadeInPlace : std::enable_shared_from_this<MadeInPlace> {
  MadeInPlace(std::shared_ptr<Arena> owner, size_t bytes);
  ~MadeInPlace();
  MadeInPlace(const MadeInPlace&) = delete;
  MadeInPlace& operator=(const MadeInPlace&) = delete;
  // The one of `arena` that `size` bytes at `data` lie in, if it can still be sent; and whether there is any.
  static std::shared_ptr<MadeInPlace> find(const char* data, size_t size, const Arena* arena);
  static bool any();

  struct LastRef {
    explicit LastRef(std::shared_ptr<Arena> arena) : arena(std::move(arena)) {}
    std::shared_ptr<Arena> arena;
    LastRef* next = nullptr;
  };

  std::shared_ptr<Arena> arena;

 private:
  std::unique_ptr<LastRef> last_;  // outlives this as long as a forked child needs the block

 public:
  Block* block;
  size_t length;
  bool sent = false;

 private:
  static Hold hold_of(Arena& arena, Block* block);
  std::shared_ptr<Mapping> mapping_;  // the block's own may be gone before this: once sent, it is its readers'
  Hold hold_;
};

// Private copy-on-write pages over a part of a leased block.
struct PrivatePages {
  PrivatePages(std::shared_ptr<Lease> of, char* at, size_t bytes) : lease(std::move(of)), base(at), length(bytes) { ++count; }
  ~PrivatePages() {
    if (base != nullptr) ::munmap(base, length);
    --count;
  }
  PrivatePages(const PrivatePages&) = delete;
  PrivatePages& operator=(const PrivatePages&) = delete;
  std::shared_ptr<Lease> lease;
  char* base;
  size_t length;
  static inline std::atomic<size_t> count{0};  // in this process
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
  nb::object sent;  // the channel's definitions, until the frame is published and all its claims are its readers'
  std::bitset<kMaxReaders> unclaimed;  // of a frame that is published: readers that had left before
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
  size_t beside = 0;  // bytes of a value made in place, which lies in a block beside the body
  const char* body = nullptr;
  bool readonly = false;
  bool kept = false;  // decoded more than once: its memory is nobody's to write
  std::shared_ptr<OwnedMemory> memory;
  std::shared_ptr<Lease> lease;
  // Instead of the lease, until map_block(): then of a body in the block only what `announce` needs is here.
  std::shared_ptr<UnmappedLease> unmapped;

  // Behind kInBlock offsets.
  size_t block_room() const { return lease ? lease->capacity() : unmapped ? unmapped->capacity() : 0; }
};

// Map the frame's block, if that has not been done. Strong: if it throws, it can be tried again.
inline void map_block(Frame& frame) {
  if (!frame.unmapped) return;
  frame.lease = frame.unmapped->map();
  frame.unmapped.reset();
  if (frame.flags & kExternal) return;
  frame.memory.reset();
  frame.body = frame.lease->data();
}

// An encoded value that can be decoded any number of times: in memory of this process, in a file that
// others can be given, or where its writer has put it, under a lease. Sending a snapshot sends the value
// that it is of.
struct Snapshot {
  Frame frame;
  Fd fd;
};
// `sent` has carried nothing; `share_from`: the size from which its body lies in a file.
Snapshot snapshot(nb::handle value, nb::handle sent, size_t share_from);
// One of another process: its body is in `data`, or in the file `fd` (else -1), which is duplicated.
Snapshot received_snapshot(uint16_t codec, uint32_t flags, size_t size, nb::handle data, int fd);

struct ErrorFrame {
  nb::bytes meta;
  // Of an execution that fails as one: all that was told of it, this first; it may grow. Guarded by the GIL.
  std::shared_ptr<const std::vector<std::string>> told = nullptr;
};

// Metas of error frames for which nothing can be allocated; channel/errors.py puts them into words.
constexpr const char* kUnsaidMeta = "conveyor:unsaid";  // no memory was left to say what had gone wrong
constexpr const char* kBrokenMeta = "conveyor:broken";  // the frame is not valid

// `final_error`: the class of errors that will not go away by decoding again; `arena_full(message,
// holdings)`: makes what to raise at an arena's memory cap; `held_alone(value)`: nothing but `value` refers to its memory;
// `refused(errno, text)`: makes what to raise for what the system has refused.
void set_codec(nb::object encode, nb::object decode, nb::object announce, nb::object discard, nb::object final_error, nb::object arena_full,
               nb::object held_alone, nb::object state_error, nb::object refused = nb::none());
// Throws if this process was forked since `generation`: rings and results are the parent's.
void check_owner(uint64_t generation);
void raise_arena_full(const ArenaFull& error);
// In a catch block: let the exception that is being handled, whatever it is, be the Python error.
void set_python_error() noexcept;
bool is_final(nb::handle exception);
[[noreturn]] void raise_final(const char* message);
void clear_codec();

// Throws what Python raised for a value that cannot be encoded; then nothing has happened.
// What was made in place in `arena` (null: in none), and has no more than `moved_refs` references, moves.
void encode(Encoded& out, nb::handle value, nb::handle sent, Py_ssize_t moved_refs, const Arena* arena);
// These three throw only what is Python's. Native codecs only; `body` of `size` bytes may be anything.
nb::object decode_native(uint16_t codec, const char* body, size_t size);
nb::object decode(const Frame& frame);
// What stands for the value from now on: the value itself where its type is immutable (those that are
// decoded natively), an ErrorFrame, else a Snapshot. Runs no Python code.
nb::object keep(const Frame& frame);
// The parts that the codec has made; the buffers, a list or None, as if they could be written.
nb::bytes meta_of(const Frame& frame);
nb::object loose_buffers(const Frame& frame);
// The value that what `keep` has returned stands for, a new one each time where it is mutable.
nb::object value_of(nb::handle kept);
// A frame with definitions that is not decoded yet.
void announce(const Frame& frame);
// A frame that nobody will ever decode.
void discard(const Frame& frame);
// The same in two steps, for a frame that cannot be taken out of its slot: the part of it that says which refs
// it has claims on, null if it has none or cannot be read; and, once the slot is free, to let go of those.
nb::object claims_of(const char* body, size_t size, size_t in_block) noexcept;
void give_up_claims(nb::object claims) noexcept;
// An instance of a ref's class, which `set_ref_type` has told.
bool is_ref(PyObject* value);
void set_ref_type(nb::handle type);

}  // namespace conveyor
