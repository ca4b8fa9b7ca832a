// What tests of arenas share: an arena of this process with readers, and what it costs.
#pragma once

#include <sys/stat.h>

#include <cstring>
#include <fstream>
#include <string>

#include "arena/arena.h"
#include "check.h"

namespace conveyor {

constexpr size_t kMiB = size_t(1) << 20;
constexpr size_t kFile = 16 * kWindow;
constexpr uint64_t kNever = 3'600'000'000'000;  // nothing has been free for so long

// An arena of this process, and a view of it as its readers (slots 1 and 2 of the process table) have one.
struct Setup {
  std::shared_ptr<ProcessTable> process_table = ProcessTable::create(4);
  Fd file = Arena::create_file(kFile);
  Arena arena;
  std::shared_ptr<ArenaView> view = std::make_shared<ArenaView>(file.get(), kFile);
  ReaderCursor cursors[3] = {};

  explicit Setup(size_t cap = 64 * kMiB) : arena(file.get(), kFile, cap) {
    for (uint32_t i = 0; i < 4; ++i) start(i);
  }
  void start(uint32_t slot) {
    process_table->prepare(slot, "");
    process_table->slot(slot)->condition.store(Condition::kAlive);
  }
  std::shared_ptr<ReaderSet> readers(uint32_t count = 1) {
    auto set = std::make_shared<ReaderSet>();
    set->process_table = process_table;
    for (uint32_t r = 0; r < count; ++r) set->add(r + 1, &cursors[r]);
    return set;
  }
  Block* publish(size_t size, uint32_t count = 1) {
    Block* block = arena.allocate(size);
    std::memset(block->data(), int(size % 251), size);
    arena.publish(block, readers(count), 0, 0);
    return block;
  }
  std::unique_ptr<Lease> lease(const Block* block, uint32_t reader = 0) { return std::make_unique<Lease>(*view, block->offset, block->size, reader); }
  bool is_out(const Block* block) {
    arena.give_back(kNever);
    return block->readers != nullptr;
  }
  // What the file costs.
  size_t memory() const {
    struct stat s;
    ::fstat(file.get(), &s);
    return size_t(s.st_blocks) * 512;
  }
};

// Of arenas: a sanitizer maps and unmaps as it likes.
inline size_t mappings() {
  std::ifstream maps("/proc/self/maps");
  size_t found = 0;
  for (std::string line; std::getline(maps, line);) found += line.find("conveyor-arena") != std::string::npos;
  return found;
}

// A watch's thread closes what an ended child had in its own time, so a test may begin with one too many of
// an earlier test's: later there are as many or fewer.
inline int open_descriptors() {
  int count = 0;
  for (int fd = 0; fd < 1'024; ++fd) count += ::fcntl(fd, F_GETFD) >= 0;
  return count;
}

}  // namespace conveyor
