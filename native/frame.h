// A frame that has been taken out of its ring.
#pragma once

#include <cstring>

#include "body.h"
#include "lease.h"
#include "ring.h"

namespace conveyor {

// Memory of this process that a body lies in, aligned like a block.
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

// Its body lies in memory of its own, or in the block of its writer, under a lease that ends with the last copy
// of the frame. Any thread may read it and let go of it.
struct Frame {
  uint64_t tag = 0;
  Kind kind = Kind::kValue;
  uint16_t codec = kNone;
  uint32_t flags = 0;
  size_t size = 0;             // of the body
  size_t beside = 0;           // bytes of the value that lie in the block beside the body (kExternal)
  const char* body = nullptr;  // null: it lies in a block that is not mapped
  bool readonly = false;       // others read the same memory
  bool kept = false;           // decoded more than once: its memory is nobody's to write
  std::shared_ptr<OwnedMemory> memory{};
  std::shared_ptr<Lease> lease{};
  std::shared_ptr<UnmappedLease> unmapped{};  // instead of the lease, until map()
  std::shared_ptr<const void> attached{};     // of one that was made here: kept as long as the frame is

  // Bytes of the block that the frame holds: those behind kInBlock offsets.
  size_t block_room() const { return lease ? lease->capacity() : unmapped ? unmapped->capacity() : 0; }
  // Map the block, if that has not been done. Strong: if it throws, it can be tried again.
  void map() {
    if (!unmapped) return;
    lease = unmapped->map();
    unmapped.reset();
    if (!(flags & kExternal)) body = lease->data();
  }
  // Copy `length` bytes of the body from `at` on, or of the block behind its header. A block that is not mapped
  // is read through its file, and stays unmapped. Throws EFAULT for what lies outside.
  void read(size_t at, void* to, size_t length) const {
    check_range(at, length, size);
    if (body != nullptr)
      std::memcpy(to, body + at, length);
    else
      unmapped->copy(at, to, length);
  }
  void read_block(size_t at, void* to, size_t length) const {
    check_range(at, length, block_room());
    if (lease)
      std::memcpy(to, lease->data() + at, length);
    else if (unmapped)
      unmapped->copy(at, to, length);
  }

 private:
  static void check_range(size_t at, size_t length, size_t room) {
    if (length > room || at > room - length) throw std::system_error(EFAULT, std::generic_category(), "outside of a frame");
  }
};

}  // namespace conveyor
