// Values that their reader may write to: what it writes is its own, and is dropped with the value.
#pragma once

#include <atomic>
#include <memory>
#include <optional>

#include "view.h"

namespace conveyor {

// Private copy-on-write pages over a part of a block that is held. To map memory and to fault it in costs more than to
// read it, so the mapping is kept for the next value in the same place (`Mapping::keep_private`): a page that
// nobody has written to shows what the file has. Nobody: the kernel does, where the process locks its memory meanwhile.
class PrivatePages {
 public:
  // What is smaller is better copied, and so is whatever comes when there are this many: a process may have
  // 65,530 mappings (vm.max_map_count), of which other libraries want some too.
  static constexpr size_t kFrom = size_t(64) << 10;
  static constexpr size_t kMost = 16'384;

  // `size` bytes of `mapping` from `data` on, which `keep` keeps as they are. `data()` is null if they cannot be mapped.
  PrivatePages(std::shared_ptr<const void> keep, std::shared_ptr<Mapping> mapping, const char* data, size_t size);
  ~PrivatePages();
  PrivatePages(const PrivatePages&) = delete;
  PrivatePages& operator=(const PrivatePages&) = delete;

  char* data() const { return view_.base == nullptr ? nullptr : view_.base + skipped_; }

 private:
  static inline std::atomic<size_t> count_{0};  // in this process
  const std::shared_ptr<const void> keep_;      // ends when nobody can read the pages any more
  const std::shared_ptr<Mapping> mapping_;
  const uint64_t fork_ = fork_generation.load(std::memory_order_relaxed);
  PrivateView view_;
  size_t skipped_ = 0;  // from the beginning of a page on
};

// Whether a page of a private mapping has been written to: such a page is there (or swapped out), and is no page of the
// file any more. `pagemap`: the process's own. The kernel looks through its tables itself, and tells nothing where it
// cannot yet (before 6.7); to read its entry of each page takes 35 us for 64 MiB. True if that cannot be done, either.
std::optional<bool> scanned_as_written(int pagemap, const char* base, size_t size);
bool read_as_written(int pagemap, const char* base, size_t size);

}  // namespace conveyor
