#include "populate.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <thread>

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

// Of this thread: what others do meanwhile makes no page dear.
uint64_t processor_ns() {
  timespec time;
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return uint64_t(time.tv_sec) * 1'000'000'000 + uint64_t(time.tv_nsec);
}

// Since Linux 6.1, whatever the settings of transparent huge pages are, but for a process that has turned them off.
// False: it was not done. What it does not do is left to the small pages.
bool collapse(char* base, size_t size) {
  // Memory without any page is refused, so each huge page begins as a small one.
  for (size_t at = 0; at < size; at += kHugePage)
    if (::madvise(base + at, kernel_page(), MADV_POPULATE_WRITE) != 0) return false;
  int error = 0;
  // A page may be on a list of another core's, or locked by who looks at it: then a second time is enough.
  for (int tries = 0; tries < 2; ++tries) {
    error = ::madvise(base, size, MADV_COLLAPSE) == 0 ? 0 : errno;
    if (error != EAGAIN && error != EINTR) break;
  }
  if (error == 0)
    huge.worked();
  else if (error != EAGAIN && error != EINTR)
    huge.refused(now_ns());
  return error == 0;
}

void populate_huge(char* base, size_t size, uint64_t dear_ns) {
  const uint64_t before = processor_ns();
  if (!collapse(base, kHugePage) || processor_ns() - before >= dear_ns) return;
  if (size > kHugePage) collapse(base + kHugePage, size - kHugePage);
}

}  // namespace

void Attempts::refused(uint64_t now) {
  const uint64_t pause = pause_.load(std::memory_order_relaxed);
  next_.store(now + pause, std::memory_order_relaxed);
  pause_.store(std::min(2 * pause, kLongestPauseNs), std::memory_order_relaxed);
}

namespace {

// Most of the time goes into clearing pages, or, in a virtual machine, into its host's finding some: cores do that side
// by side. Below, a thread takes as long to be started as it saves.
constexpr size_t kSharedFrom = 8 << 20;
constexpr size_t kThreads = 4;

bool populate_part(char* base, uint64_t offset, size_t size, uint64_t dear_ns) {
  const size_t skipped = align_up(offset, kHugePage) - offset;
  if (size >= skipped + kHugePage && is_aligned_for_huge_pages(base, offset) && huge.due(now_ns()))
    populate_huge(base + skipped, (size - skipped) / kHugePage * kHugePage, dear_ns);
  return populate_small(base, size);
}

}  // namespace

bool populate(char* base, uint64_t offset, size_t size, uint64_t dear_ns) {
  if (size == 0) return true;
  const size_t threads = std::min({kThreads, size_t(usable_cores()), size / (kSharedFrom / 2)});
  if (size < kSharedFrom || threads < 2) return populate_part(base, offset, size, dear_ns);
  // Each part ends where a huge page does.
  std::array<size_t, kThreads> ends;
  for (size_t i = 1; i < threads; ++i) ends[i - 1] = align_up(offset + size / threads * i, kHugePage) - offset;
  ends[threads - 1] = size;
  std::atomic<bool> all{true};
  const auto part = [&](size_t i) noexcept {
    const size_t from = i == 0 ? 0 : ends[i - 1];
    // Relaxed: joining the threads orders it before what follows.
    if (!populate_part(base + from, offset + from, ends[i] - from, dear_ns)) all.store(false, std::memory_order_relaxed);
  };
  std::array<std::thread, kThreads> others;
  size_t started = 1;
  {
    const SignalsBlocked blocked;
    try {
      for (; started < threads; ++started) others[started] = std::thread([&part, started] { part(started); });
    } catch (const std::exception&) {  // no more are to be had: their parts are this one's
    }
  }
  part(0);
  for (size_t i = started; i < threads; ++i) part(i);
  for (size_t i = 1; i < started; ++i) others[i].join();
  return all.load(std::memory_order_relaxed);
}

}  // namespace conveyor
