// Arrays that are made where they are sent from (conveyor.empty), and the memory of values as Python sees it.
#pragma once

#include <memory>

#include "arena/arena.h"
#include "arena/view.h"
#include "frame.h"

namespace conveyor {

// A block of this process's own arena that a value is being made in (conveyor.empty). In a forked child its
// pages are private; as long as that child lives, the block is neither sent nor used again.
struct MadeInPlace : std::enable_shared_from_this<MadeInPlace> {
  MadeInPlace(std::shared_ptr<Arena> owner, size_t bytes, bool may_wait = true);
  ~MadeInPlace();
  MadeInPlace(const MadeInPlace&) = delete;
  MadeInPlace& operator=(const MadeInPlace&) = delete;
  // The one of `arena` that `size` bytes at `data` lie in, if it can still be sent; and whether there is any. Others
  // may refer to its memory, too.
  static std::shared_ptr<MadeInPlace> find(const char* data, size_t size, const Arena* arena);
  static bool any();

  bool inherited() const { return hold_.inherited(); }
  // Whether one Buffer refers to it, and whoever asks, by a reference of its own.
  static bool of_one_buffer(const std::shared_ptr<MadeInPlace>& made) { return made.use_count() <= 1 + kOfABuffer; }

  const std::shared_ptr<Arena> arena;
  Block* const block;
  const size_t length;
  bool sent = false;
  uintptr_t storage = 0;  // torch's, that refers to it without an array between them; 0: none

 private:
  static constexpr long kOfABuffer = 2;  // its owner, and its `made`
  static Hold hold_of(Arena& arena, Block* block);
  std::shared_ptr<Mapping> mapping_;  // the block's own may be gone before this: once sent, it is its readers'
  Hold hold_;
};

// Memory that others read, or that is decoded again, as one value has it. What Python gets may be written to, so
// from its first use on it is a copy, or private pages, which cost no copy. Guarded by the GIL.
class Unshared {
 public:
  // `keep` keeps `size` bytes from `data` on as they are; `mapping`: the one that they lie in, if any.
  Unshared(std::shared_ptr<void> keep, std::shared_ptr<Mapping> mapping, char* data, size_t size)
      : from_(data), size_(size), keep_(std::move(keep)), mapping_(std::move(mapping)) {}
  // Where the value has what is at `data`, and what keeps it there. Throws where there is no memory.
  std::pair<char*, std::shared_ptr<void>> own(const char* data);

 private:
  char* const from_;
  const size_t size_;
  std::shared_ptr<void> keep_;
  std::shared_ptr<Mapping> mapping_;
  char* to_ = nullptr;
  std::shared_ptr<void> owner_{};
};

// What Python sees of received or own memory; exports the buffer protocol.
struct Buffer {
  char* data;
  size_t length;
  std::shared_ptr<void> owner;  // Lease, OwnedMemory, MadeInPlace, Borrowed or PrivatePages
  std::shared_ptr<Lease> lease;
  std::shared_ptr<MadeInPlace> made;
  std::shared_ptr<Unshared> unshared = nullptr;  // until it is exported, of what is not its own to write

  // Have memory of its own.
  void unshare();
};

}  // namespace conveyor
