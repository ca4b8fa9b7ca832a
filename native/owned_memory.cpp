#include "owned_memory.h"

#include <sys/mman.h>

#include <array>
#include <cstdlib>
#include <mutex>
#include <utility>

#include "body.h"
#include "fork_mutex.h"

namespace conveyor {

namespace {

// Mappings that nobody uses. The kernel takes their pages when it is short of memory (MADV_FREE), without being asked, and
// what it has not taken is there without a fault. So no thread has to look after them. Smaller memory the heap keeps by itself.
class Spares {
 public:
  static constexpr size_t kFrom = 4 << 20, kMostBytes = 512 << 20;

  // One of `room` bytes at least, and not of many more; nullptr: there is none. Sets `room` to what it has.
  char* take(size_t& room) {
    std::lock_guard lock(mutex_);
    Spare* best = nullptr;
    for (Spare& spare : spares_)
      if (spare.base != nullptr && spare.room >= room && spare.room - room <= room / 4 && (best == nullptr || spare.room < best->room)) best = &spare;
    if (best == nullptr) return nullptr;
    room = best->room;
    bytes_ -= room;
    return std::exchange(best->base, nullptr);
  }

  void give(char* base, size_t room) noexcept {
    if (room > kMostBytes || ::madvise(base, room, MADV_FREE) != 0) {
      ::munmap(base, room);
      return;
    }
    std::lock_guard lock(mutex_);
    // The oldest ones go: one in whose place this is, and as many as it takes.
    do {
      Spare& oldest = spares_[next_];
      next_ = (next_ + 1) % spares_.size();
      if (oldest.base == nullptr) continue;
      ::munmap(oldest.base, oldest.room);
      oldest.base = nullptr;
      bytes_ -= oldest.room;
    } while (bytes_ + room > kMostBytes);
    spares_[(next_ + spares_.size() - 1) % spares_.size()] = {base, room};
    bytes_ += room;
  }

 private:
  struct Spare {
    char* base = nullptr;
    size_t room = 0;
  };
  ForkMutex mutex_;
  std::array<Spare, 4> spares_;
  size_t next_ = 0, bytes_ = 0;
};

Spares& spares() {
  static Spares& made = *new Spares;  // objects that give theirs back may outlive static destructors
  return made;
}

char* map_huge(size_t room) {
  const size_t reserved = room + kHugePage;
  void* const from = ::mmap(nullptr, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (from == MAP_FAILED) throw std::bad_alloc();
  char* const begin = static_cast<char*>(from);
  char* const base = begin + (align_up(uintptr_t(begin), kHugePage) - uintptr_t(begin));
  if (base != begin) ::munmap(begin, size_t(base - begin));
  ::munmap(base + room, size_t(begin + reserved - (base + room)));
  if (room >= kHugePage) ::madvise(base, room, MADV_HUGEPAGE);  // a wish
  return base;
}

char* of_heap(size_t size) {
  void* const data = std::aligned_alloc(kBufferAlign, align_up(size + 1, kBufferAlign));
  if (data == nullptr) throw std::bad_alloc();
  return static_cast<char*>(data);
}

// Sets `room` to what it has; 0: it is of the heap.
char* of_size(size_t size, size_t& room) {
  room = size < Spares::kFrom ? 0 : align_up(size, std::max(kGranule, kernel_page()));
  if (room == 0) return of_heap(size);
  char* const spare = spares().take(room);
  return spare != nullptr ? spare : map_huge(room);
}

}  // namespace

OwnedMemory::OwnedMemory(size_t size) : data(of_size(size, mapped_)), from_(mapped_ == 0 ? From::kHeap : From::kSpare) {}

std::shared_ptr<OwnedMemory> OwnedMemory::copy_of(int fd, size_t size) {
  const size_t room = align_up(std::max<size_t>(size, 1), kGranule);
  void* const at = ::mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
  if (at == MAP_FAILED) throw_errno("mmap");
  return std::shared_ptr<OwnedMemory>(new OwnedMemory(static_cast<char*>(at), room, From::kFile));
}

OwnedMemory::~OwnedMemory() {
  if (mapping) return;
  switch (from_) {
    case From::kHeap:
      std::free(data);
      break;
    case From::kSpare:
      spares().give(data, mapped_);
      break;
    case From::kFile:
      ::munmap(data, mapped_);
  }
}

}  // namespace conveyor
