#include "lease.h"

#include <poll.h>
#include <pthread.h>
#include <sys/mman.h>

#include <mutex>

namespace conveyor {

std::atomic<uint64_t> fork_generation{0};

// All leases of this process, for the fork handlers. The mutex is held across fork(), so that the
// child finds the list whole.
struct LeaseRegistry {
  struct Deferred {
    std::shared_ptr<ArenaView> view;
    BlockHeader* header;
    uint32_t reader;
    uint32_t generation;
    std::vector<std::shared_ptr<ForkPin>> pins;
  };

  std::mutex mutex;
  Lease* first = nullptr;
  size_t count = 0;
  std::vector<Deferred> deferred;
  int pipe_ends[2] = {-1, -1};

  static LeaseRegistry& get() {
    // Never destroyed: leases held by Python objects may outlive static destructors.
    static LeaseRegistry* registry = new LeaseRegistry;
    return *registry;
  }

  static bool pinned(std::vector<std::shared_ptr<ForkPin>>& pins) {
    std::erase_if(pins, [](const auto& pin) { return pin->released(); });
    return !pins.empty();
  }

  static void before_fork() {
    LeaseRegistry& r = get();
    r.mutex.lock();
    r.pipe_ends[0] = r.pipe_ends[1] = -1;
    if (r.first != nullptr && ::pipe2(r.pipe_ends, O_CLOEXEC) != 0) r.pipe_ends[0] = r.pipe_ends[1] = -1;
  }

  static void after_fork_in_parent() {
    LeaseRegistry& r = get();
    if (r.pipe_ends[0] >= 0) {
      ::close(r.pipe_ends[1]);
      auto pin = std::make_shared<ForkPin>(ForkPin{Fd(r.pipe_ends[0])});
      for (Lease* l = r.first; l != nullptr; l = l->next_) l->pins_.push_back(pin);
    } else {
      // No descriptor for a pipe was left: hold these leases for ever rather than let the child read
      // memory that changes under it.
      auto pin = std::make_shared<ForkPin>(ForkPin{Fd(-1)});
      for (Lease* l = r.first; l != nullptr; l = l->next_) l->pins_.push_back(pin);
    }
    r.mutex.unlock();
  }

  static void after_fork_in_child() {
    fork_generation.fetch_add(1, std::memory_order_relaxed);
    LeaseRegistry& r = get();
    if (r.pipe_ends[0] >= 0) ::close(r.pipe_ends[0]);  // the write end stays open until this process ends
    for (Lease* l = r.first; l != nullptr; l = l->next_) {
      // What the child writes into a value stays in the child. The pages are file-backed as before, so
      // nothing is copied until somebody writes; the parent's pin keeps the block from being reused.
      const size_t length = align_up(l->size_, kPage);
      ::mmap(l->block_, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, l->view_->fd(), off_t(l->offset_));
    }
    r.first = nullptr;
    r.count = 0;
    // The parent's to end. Kept alive, not destroyed: their views are shared with what else is here.
    new std::vector<Deferred>(std::move(r.deferred));
    r.deferred.clear();
    r.mutex.unlock();
  }
};

namespace {

void end_lease(BlockHeader* header, uint32_t reader, uint32_t generation) {
  uint32_t expected = BlockHeader::held(generation);
  // Release: our reads of the block come before the writer's reuse of it. Only from `held` of the same
  // generation: if the writer took this process for dead, the word belongs to a newer value by now.
  header->lease[reader].compare_exchange_strong(expected, BlockHeader::done(generation), std::memory_order_release, std::memory_order_relaxed);
}

}  // namespace

bool ForkPin::released() const {
  if (read_end.get() < 0) return false;
  pollfd p = {read_end.get(), 0, 0};
  return ::poll(&p, 1, 0) == 1 && (p.revents & POLLHUP);
}

void install_fork_handlers() {
  static const int rc = pthread_atfork(LeaseRegistry::before_fork, LeaseRegistry::after_fork_in_parent,
                                       LeaseRegistry::after_fork_in_child);
  if (rc != 0) throw std::system_error(rc, std::generic_category(), "pthread_atfork");
}

ArenaView::~ArenaView() {
  for (char* window : windows_)
    if (window != nullptr) ::munmap(window, kWindow);
  for (auto& [offset, mapping] : big_) ::munmap(mapping.first, mapping.second);
}

char* ArenaView::block(uint64_t offset, uint64_t size) {
  if (size < kBlockHeader || offset % kPage != 0 || size > size_ || offset > size_ - size)
    throw std::system_error(EFAULT, std::generic_category(), "block outside the arena");
  if (size >= kBigBlock) {
    auto it = big_.find(offset);
    if (it != big_.end()) {
      // A block keeps its place and size for the life of the arena.
      if (it->second.second < size) throw std::system_error(EPROTO, std::generic_category(), "a block that has grown");
      return it->second.first;
    }
    char* p = map_shared(fd_.get(), offset, size);
    big_.emplace(offset, std::make_pair(p, size_t(size)));
    return p;
  }
  const size_t index = offset / kWindow;
  const size_t within = offset % kWindow;
  if (within + size > kWindow) throw std::system_error(EFAULT, std::generic_category(), "block across windows");
  if (index >= windows_.size()) windows_.resize(index + 1, nullptr);
  if (windows_[index] == nullptr) windows_[index] = map_shared(fd_.get(), index * kWindow, kWindow);
  return windows_[index] + within;
}

Lease::Lease(std::shared_ptr<ArenaView> view, uint64_t offset, uint64_t size, uint32_t reader)
    : view_(std::move(view)), offset_(offset), size_(size), reader_(reader) {
  block_ = view_->block(offset, size);
  auto* header = reinterpret_cast<BlockHeader*>(block_);
  if (header->magic != kBlockMagic || reader >= kMaxReaders)
    throw std::system_error(EPROTO, std::generic_category(), "no block header");
  generation_ = header->lease[reader].load(std::memory_order_relaxed) >> 1;
  fork_generation_ = fork_generation.load(std::memory_order_relaxed);
  LeaseRegistry& r = LeaseRegistry::get();
  std::lock_guard lock(r.mutex);
  next_ = r.first;
  if (next_ != nullptr) next_->previous_ = this;
  r.first = this;
  ++r.count;
}

Lease::~Lease() {
  // In a forked child an inherited lease is the parent's: ending it would let the writer reuse memory
  // that the parent still reads. The registry was emptied there, so it is not linked either.
  if (fork_generation_ != fork_generation.load(std::memory_order_relaxed)) return;
  LeaseRegistry& r = LeaseRegistry::get();
  std::lock_guard lock(r.mutex);
  if (previous_ != nullptr) previous_->next_ = next_;
  if (next_ != nullptr) next_->previous_ = previous_;
  if (r.first == this) r.first = next_;
  --r.count;
  auto* header = reinterpret_cast<BlockHeader*>(block_);
  if (LeaseRegistry::pinned(pins_)) {
    r.deferred.push_back({view_, header, reader_, generation_, std::move(pins_)});
    return;
  }
  end_lease(header, reader_, generation_);
}

size_t live_leases() {
  LeaseRegistry& r = LeaseRegistry::get();
  std::lock_guard lock(r.mutex);
  return r.count;
}

void release_unpinned() {
  LeaseRegistry& r = LeaseRegistry::get();
  std::lock_guard lock(r.mutex);
  if (r.deferred.empty()) return;
  std::erase_if(r.deferred, [](LeaseRegistry::Deferred& d) {
    if (LeaseRegistry::pinned(d.pins)) return false;
    end_lease(d.header, d.reader, d.generation);
    return true;
  });
}

}  // namespace conveyor
