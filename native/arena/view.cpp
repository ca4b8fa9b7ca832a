#include "view.h"

#include <sys/stat.h>

#include <algorithm>
#include <iterator>

namespace conveyor {

namespace {

// Never destroyed: views may outlive static destructors.
struct Views {
  ForkMutex mutex;
  std::map<std::pair<dev_t, ino_t>, std::weak_ptr<ArenaView>> by_file;
  static Views& get() {
    static Views* views = new Views;
    return *views;
  }
};

}  // namespace

void BlockHeader::end(uint32_t reader, uint32_t generation, Returns* returns) {
  uint32_t expected = held(generation);
  const bool tells = readers & kTells;  // before: afterwards the block may be another value's
  // Sequentially consistent for Returns::note; release: our reads of the block come before the writer's
  // reuse of it. Only from `held` of the same generation: if the writer took this process for dead, the
  // word belongs to a newer value by now.
  lease[reader].compare_exchange_strong(expected, done(generation), std::memory_order_seq_cst, std::memory_order_relaxed);
  if (returns == nullptr) return;
  if (tells)
    returns->note_kept();
  else
    returns->note();
}

std::shared_ptr<ArenaView> ArenaView::of(int fd, size_t size, const std::shared_ptr<ProcessTable>& process_table, uint32_t slot) {
  struct stat file;
  if (::fstat(fd, &file) != 0) throw_errno("arena");
  // Before the lock, as its end: a view has a ForkMutex, and all of those share another lock.
  auto fresh = std::make_shared<ArenaView>(fd, size, process_table, slot);
  Views& views = Views::get();
  std::shared_ptr<ArenaView> known;
  std::lock_guard lock(views.mutex);
  // Its number is no other file's as long as a view has it open.
  std::weak_ptr<ArenaView>& place = views.by_file[{file.st_dev, file.st_ino}];
  known = place.lock();
  // What a forked child has inherited is its parent's.
  if (known && known->fork_ == fresh->fork_ && known->size_ == size) return known;
  std::erase_if(views.by_file, [&](const auto& view) { return view.second.expired() && &view.second != &place; });
  place = fresh;
  return fresh;
}

char* ArenaView::block(uint64_t offset, uint64_t size, std::shared_ptr<Mapping>& keep) {
  if (size < kBlockHeader || offset % kGranule != 0 || size > size_ || offset > size_ - size)
    throw std::system_error(EFAULT, std::generic_category(), "block outside the arena");
  std::lock_guard lock(mutex_);
  if (size >= kBigBlock) {
    auto at = big_.lower_bound(offset);
    if (at != big_.begin() && std::prev(at)->first + std::prev(at)->second->size > offset) --at;
    if (at == big_.end() || at->first != offset || at->second->size != size) {
      auto fresh = std::make_shared<Mapping>(fd_, offset, size);
      // Blocks that were here before are no more.
      while (at != big_.end() && at->first < offset + size) at = big_.erase(at);
      at = big_.emplace(offset, std::move(fresh)).first;
    }
    keep = at->second;
    return keep->base;
  }
  const size_t index = offset / kWindow;
  const size_t within = offset % kWindow;
  if (within + size > kWindow) throw std::system_error(EFAULT, std::generic_category(), "block across windows");
  if (index >= windows_.size()) windows_.resize(index + 1);
  if (!windows_[index]) windows_[index] = std::make_shared<Mapping>(fd_, index * kWindow, kWindow);
  keep = windows_[index];
  return keep->base + within;
}

void ArenaView::skip_block(uint64_t offset, uint64_t size, uint32_t reader) noexcept {
  if (size < kBlockHeader || offset % kGranule != 0 || size > size_ || offset > size_ - size || reader >= kMaxReaders) return;
  std::unique_lock lock(mutex_);
  std::shared_ptr<Mapping> keep;  // another thread may have the view forget it
  char* mapped = nullptr;
  if (size < kBigBlock) {
    const size_t index = offset / kWindow;
    if (index < windows_.size() && windows_[index] && offset % kWindow + size <= kWindow) mapped = windows_[index]->base + offset % kWindow;
  } else if (auto it = big_.find(offset); it != big_.end()) {
    if (it->second->size == size) keep = it->second, mapped = keep->base;
  }
  lock.unlock();
  if (mapped != nullptr) {
    auto* header = reinterpret_cast<BlockHeader*>(mapped);
    const uint32_t word = header->lease[reader].load(std::memory_order_relaxed);
    if (header->magic == kBlockMagic && (word & 1) != 0) header->end(reader, word >> 1, returns_.get());
    return;
  }
  // Read and written through the file, which is the same memory. Nobody else writes this word: the writer
  // takes the block back only after this, and the frame is still in the ring, so it is of its generation.
  const off_t at = off_t(offset + offsetof(BlockHeader, lease) + reader * sizeof(uint32_t));
  uint32_t magic, word;
  if (::pread(fd(), &magic, sizeof magic, off_t(offset + offsetof(BlockHeader, magic))) != ssize_t(sizeof magic) || magic != kBlockMagic) return;
  if (::pread(fd(), &word, sizeof word, at) != ssize_t(sizeof word) || (word & 1) == 0) return;
  word = BlockHeader::done(word >> 1);
  // The system call orders our earlier reads before it; there were none of this block.
  while (::pwrite(fd(), &word, sizeof word, at) < 0 && errno == EINTR) {
  }
  if (returns_ != nullptr) returns_->note_any();
}

void ArenaView::copy(uint64_t offset, void* to, size_t size) const {
  if (size > size_ || offset > size_ - size) throw std::system_error(EFAULT, std::generic_category(), "outside the arena");
  for (char* at = static_cast<char*>(to); size != 0;) {
    const ssize_t n = ::pread(fd(), at, size, off_t(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw_errno("read a block");
    if (n == 0) throw std::system_error(EFAULT, std::generic_category(), "outside the arena");
    at += n, offset += uint64_t(n), size -= size_t(n);
  }
}

namespace {

// Where the block lies, if there is one and `reader` can be one of its readers.
char* checked_block(ArenaView& view, uint64_t offset, uint64_t size, uint32_t reader, std::shared_ptr<Mapping>& keep) {
  char* block = view.block(offset, size, keep);
  if (reinterpret_cast<BlockHeader*>(block)->magic != kBlockMagic || reader >= kMaxReaders)
    throw std::system_error(EPROTO, std::generic_category(), "no block header");
  return block;
}

}  // namespace

Lease::Lease(ArenaView& view, uint64_t offset, uint64_t size, uint32_t reader)
    : returns_(view.returns()), offset_(offset), size_(size), block_(checked_block(view, offset, size, reader, mapping_)), reader_(reader),
      generation_(reinterpret_cast<BlockHeader*>(block_)->lease[reader].load(std::memory_order_relaxed) >> 1), hold_(*mapping_) {}

Lease::~Lease() {
  hold_.leave([returns = std::move(returns_), mapping = std::move(mapping_), header = reinterpret_cast<BlockHeader*>(block_), reader = reader_, generation = generation_] {
    header->end(reader, generation, returns.get());
  });
}

namespace {

char* checked_block(ArenaView& view, uint64_t offset, uint64_t size, std::shared_ptr<Mapping>& keep) {
  char* block = view.block(offset, size, keep);
  if (reinterpret_cast<BlockHeader*>(block)->magic != kBlockMagic) throw std::system_error(EPROTO, std::generic_category(), "no block header");
  return block;
}

}  // namespace

Borrowed::Borrowed(std::shared_ptr<const void> keeps, ArenaView& view, uint64_t offset, uint64_t size)
    : keeps_(std::move(keeps)), block_(checked_block(view, offset, size, mapping_)), hold_(*mapping_) {}

Borrowed::~Borrowed() {
  hold_.leave([keeps = std::move(keeps_), mapping = std::move(mapping_)] {});
}

}  // namespace conveyor
