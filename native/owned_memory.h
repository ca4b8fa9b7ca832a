// Memory of this process that a body lies in, aligned like a block.
#pragma once

#include <memory>

#include "platform.h"
#include "arena/lease.h"

namespace conveyor {

class OwnedMemory {
  enum class From { kHeap, kSpare, kFile };
  size_t mapped_ = 0;

 public:
  // Large memory comes in huge pages, where the system has them. What has been let go of is used again: a new page costs
  // more than what is written to it.
  explicit OwnedMemory(size_t size);
  // Shared with who else has the file of at least `size` bytes.
  OwnedMemory(std::shared_ptr<const Fd> file, size_t size) : mapping(std::make_shared<Mapping>(std::move(file), 0, align_up(size, kGranule))), data(mapping->base) {}
  // What is in a file, whose pages are shared until they are written to: that nobody else sees.
  static std::shared_ptr<OwnedMemory> copy_of(int fd, size_t size);
  ~OwnedMemory();
  OwnedMemory(const OwnedMemory&) = delete;
  OwnedMemory& operator=(const OwnedMemory&) = delete;

  const std::shared_ptr<Mapping> mapping{};  // of a shared file
  char* const data;

 private:
  OwnedMemory(char* data, size_t mapped, From from) : mapped_(mapped), data(data), from_(from) {}

  const From from_ = From::kHeap;
};

}  // namespace conveyor
