// Memory of this process that a body lies in, aligned like a block.
#pragma once

#include <memory>

#include "arena/view.h"
#include "platform.h"

namespace conveyor {

class OwnedMemory {
  class InArena;
  std::unique_ptr<InArena> in_arena_{};
  size_t mapped_ = 0;  // of a file, for this alone

 public:
  // From 256 KiB on it lies in a file of this process's own, and can be shown in private pages. Small memory is the heap's,
  // and so is all where no file is to be had.
  explicit OwnedMemory(size_t size);
  // Shared with who else has the file of at least `size` bytes.
  OwnedMemory(std::shared_ptr<const Fd> file, size_t size);
  // What is in a file, whose pages are shared until they are written to: that nobody else sees.
  static std::shared_ptr<OwnedMemory> copy_of(int fd, size_t size);
  ~OwnedMemory();
  // Give back what nobody has any more, which else stays warm for a while.
  static void give_back_soon() noexcept;
  OwnedMemory(const OwnedMemory&) = delete;
  OwnedMemory& operator=(const OwnedMemory&) = delete;

  const std::shared_ptr<Mapping> mapping{};  // of a file that it lies in, with whatever else
  char* const data;

 private:
  OwnedMemory(char* data, size_t mapped);
  OwnedMemory(std::unique_ptr<InArena> in_arena, size_t size);
};

}  // namespace conveyor
