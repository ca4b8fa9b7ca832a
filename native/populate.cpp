#include "populate.h"

#include <sys/mman.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace conveyor {

namespace {

// Of the whole process: where one mapping is refused, so are the others.
Attempts huge;

bool populate_small(char* base, size_t size) {
  static std::atomic<bool> possible{true};  // since Linux 5.14
  if (!possible.load(std::memory_order_relaxed)) return true;
  while (::madvise(base, size, MADV_POPULATE_WRITE) != 0) {
    if (errno == EINTR || errno == EAGAIN) continue;
    if (errno != EINVAL) return false;
    possible.store(false, std::memory_order_relaxed);
    break;
  }
  return true;
}

// Since Linux 6.1, whatever the settings of transparent huge pages are, but for a process that has turned them off.
// What it does not do is left to the small pages.
void populate_huge(char* base, size_t size) {
  // Memory without any page is refused, so each huge page begins as a small one.
  for (size_t at = 0; at < size; at += kHugePage)
    if (::madvise(base + at, kernel_page(), MADV_POPULATE_WRITE) != 0) return;
  int error = 0;
  // A page may be on a list of another core's, or locked by who looks at it: then a second time is enough.
  for (int tries = 0; tries < 2; ++tries) {
    error = ::madvise(base, size, MADV_COLLAPSE) == 0 ? 0 : errno;
    if (error != EAGAIN && error != EINTR) break;
  }
  if (error == 0) return huge.worked();
  if (error != EAGAIN && error != EINTR) huge.refused(now_ns());
}

}  // namespace

void Attempts::refused(uint64_t now) {
  const uint64_t pause = pause_.load(std::memory_order_relaxed);
  next_.store(now + pause, std::memory_order_relaxed);
  pause_.store(std::min(2 * pause, kLongestPauseNs), std::memory_order_relaxed);
}

bool populate(char* base, uint64_t offset, size_t size) {
  if (size == 0) return true;
  const size_t skipped = align_up(offset, kHugePage) - offset;
  if (size >= skipped + kHugePage && is_aligned_for_huge_pages(base, offset) && huge.due(now_ns()))
    populate_huge(base + skipped, (size - skipped) / kHugePage * kHugePage);
  return populate_small(base, size);
}

}  // namespace conveyor
