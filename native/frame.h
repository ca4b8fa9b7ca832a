// A frame that has been taken out of its ring.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "body.h"
#include "directory.h"
#include "arena/view.h"
#include "owned_memory.h"
#include "ring.h"

namespace conveyor {

// Behind the body of a frame that keeps values stand their numbers.
constexpr uint64_t kTrailerMagic = 0x4b455053;
constexpr size_t kMostNumbers = 1 << 16;

inline size_t trailer_size(const Numbers& numbers) { return (1 + std::min(numbers.size(), kMostNumbers)) * sizeof(uint64_t); }
inline size_t trailer_at(size_t body) { return align_up(body, sizeof(uint64_t)); }

inline void write_trailer(char* data, size_t body, const Numbers& numbers) noexcept {
  char* at = data + trailer_at(body);
  const uint64_t count = std::min(numbers.size(), kMostNumbers), head = kTrailerMagic << 32 | count;
  std::memcpy(at, &head, sizeof head);
  if (count != 0) std::memcpy(at + sizeof head, numbers.data(), count * sizeof(uint64_t));
}

// Nothing where there is none: `data` may hold anything.
inline Numbers read_trailer(const char* data, size_t body, size_t capacity) {
  const size_t at = trailer_at(body);
  uint64_t head;
  if (body > capacity || capacity - body < sizeof head + sizeof(uint64_t)) return {};
  std::memcpy(&head, data + at, sizeof head);
  const uint64_t count = head & 0xffffffff;
  if (head >> 32 != kTrailerMagic || count > kMostNumbers || count > (capacity - at - sizeof head) / sizeof(uint64_t)) return {};
  Numbers numbers(count);
  if (count != 0) std::memcpy(numbers.data(), data + at + sizeof head, count * sizeof(uint64_t));
  return numbers;
}

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
  std::shared_ptr<const Held> attached{};     // of one that was made here: kept as long as the frame is

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
  // The values that it keeps in the processes that have made them, as far as it says (kKeeps).
  Numbers keeps() const {
    if (attached) return attached->numbers;
    if (!(flags & kKeeps) || (flags & kExternal) || !lease) return {};
    return read_trailer(lease->data(), size, lease->capacity());
  }

 private:
  static void check_range(size_t at, size_t length, size_t room) {
    if (length > room || at > room - length) throw std::system_error(EFAULT, std::generic_category(), "outside of a frame");
  }
};

}  // namespace conveyor
