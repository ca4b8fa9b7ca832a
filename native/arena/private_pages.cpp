#include "private_pages.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>

namespace conveyor {

namespace {

// Of the kernel's (6.7), whose headers may be older here.
struct ScanArguments {
  uint64_t size, flags, start, end, walk_end, vector, vector_length, most_pages, inverted, all_of, any_of, returned;
};
struct ScannedRegion {
  uint64_t start, end, categories;
};
constexpr uint64_t kScannedFile = 1 << 2, kScannedPresent = 1 << 3, kScannedSwapped = 1 << 4;

}  // namespace

std::optional<bool> scanned_as_written(int pagemap, const char* base, size_t size) {
  ScannedRegion found{};
  ScanArguments scan{};
  scan.size = sizeof scan;
  scan.start = reinterpret_cast<uintptr_t>(base);
  scan.end = scan.start + align_up(size, kernel_page());
  scan.vector = reinterpret_cast<uintptr_t>(&found);
  scan.vector_length = scan.most_pages = 1;
  scan.inverted = scan.all_of = kScannedFile;  // none of the file's
  scan.any_of = scan.returned = kScannedPresent | kScannedSwapped;
  const int regions = ::ioctl(pagemap, _IOWR('f', 16, ScanArguments), &scan);
  if (regions < 0) return std::nullopt;
  return regions > 0;
}

bool read_as_written(int pagemap, const char* base, size_t size) {
  constexpr uint64_t kPresent = uint64_t(1) << 63, kSwapped = uint64_t(1) << 62, kOfFile = uint64_t(1) << 61;
  const size_t page = kernel_page();
  uint64_t entries[512];
  size_t at = reinterpret_cast<uintptr_t>(base) / page;
  for (size_t left = align_up(size, page) / page; left != 0;) {
    const size_t count = std::min(left, std::size(entries));
    if (::pread(pagemap, entries, count * sizeof *entries, off_t(at * sizeof *entries)) != ssize_t(count * sizeof *entries)) return true;
    if (std::any_of(entries, entries + count, [](uint64_t e) { return (e & (kPresent | kSwapped)) != 0 && (e & kOfFile) == 0; })) return true;
    at += count, left -= count;
  }
  return false;
}

namespace {

bool was_written(const char* base, size_t size) {
  // Opened each time: a process that keeps it has one descriptor more, and a forked child its parent's.
  const Fd pagemap(::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
  if (pagemap.get() < 0) return true;
  const std::optional<bool> scanned = scanned_as_written(pagemap.get(), base, size);
  return scanned ? *scanned : read_as_written(pagemap.get(), base, size);
}

// Whether pages of `view`, which was laid aside as nobody had written to them, may have been copied since. mlockall copies
// all pages of private mappings, and they have the bytes of the value before from then on. It begins with a mapping's first
// page, so that one tells of all: to look at each may take milliseconds. While it is on its way, the mapping is locked, so
// this is asked first.
bool was_written_idle(const PrivateView& view) {
  if (::msync(view.base, view.size, MS_INVALIDATE) != 0) return true;  // EBUSY: it is locked. Does nothing else
  const Fd pagemap(::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
  return pagemap.get() < 0 || read_as_written(pagemap.get(), view.base, kernel_page());
}

}  // namespace

PrivatePages::PrivatePages(std::shared_ptr<const void> keep, std::shared_ptr<Mapping> mapping, const char* data, size_t size) : keep_(std::move(keep)), mapping_(std::move(mapping)) {
  if (count_.fetch_add(1, std::memory_order_relaxed) >= kMost) return;
  const uint64_t at = mapping_->offset() + uint64_t(data - mapping_->base);
  const uint64_t first = at / kGranule * kGranule;
  skipped_ = size_t(at - first);
  view_ = mapping_->take_private(first, skipped_ + size);
  if (view_.base != nullptr) {
    // What is locked does not give its pages up.
    if (!was_written_idle(view_) || ::madvise(view_.base, view_.size, MADV_DONTNEED) == 0) return;
    ::munmap(std::exchange(view_, {}).base, skipped_ + size);
  }
  void* p = map_file(mapping_->fd(), first, skipped_ + size, MAP_PRIVATE);
  if (p != MAP_FAILED) view_ = {static_cast<char*>(p), first, skipped_ + size};
}

PrivatePages::~PrivatePages() {
  count_.fetch_sub(1, std::memory_order_relaxed);
  if (view_.base == nullptr) return;
  // A forked child has nothing of its parent's to keep.
  const bool kept = fork_ == fork_generation.load(std::memory_order_relaxed) &&
                    (!was_written(view_.base, view_.size) || ::madvise(view_.base, view_.size, MADV_DONTNEED) == 0);
  const PrivateView over = kept ? mapping_->keep_private(view_) : view_;
  if (over.base != nullptr) ::munmap(over.base, over.size);
}

}  // namespace conveyor
