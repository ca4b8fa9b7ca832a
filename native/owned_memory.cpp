#include "owned_memory.h"

#include <cstdlib>
#include <mutex>
#include <thread>
#include <utility>

#include "arena/arena.h"
#include "body.h"
#include "platform.h"

namespace conveyor {

// A file for what this process keeps for itself, which no session counts. It is there, and so are its descriptor and its
// thread, as long as something lies in it, and while what has lain there is warm.
class OwnArena : public Arena {
 public:
  // Of this process: a forked child's parent has another one. Null: there is none.
  static std::shared_ptr<OwnArena> known();
  static std::shared_ptr<OwnArena> get();
  OwnArena() : Arena(create_file(kAddresses).get(), kAddresses, kAddresses) {}

  Block* take(size_t size) {
    Block* const block = allocate(size);
    used_.fetch_add(block->touched, std::memory_order_relaxed);
    return block;
  }
  void give(Block* block) noexcept;
  // Have the thread give back all that is warm.
  void hurry() noexcept {
    requested_.fetch_add(1);
    futex_wake_all(&requested_);
  }

 private:
  struct Own {
    ForkMutex mutex;
    std::weak_ptr<OwnArena> arena;
    static Own& get() {
      static Own& own = *new Own;  // what is kept may outlive static destructors
      return own;
    }
  };
  static constexpr size_t kAddresses = size_t(1) << 40;
  static constexpr size_t kMostWarm = size_t(512) << 20;
  void trim(size_t bytes) noexcept;
  void start_to_cool() noexcept;
  void cool() noexcept;
  uint64_t give_back_idle(uint64_t idle_ns) noexcept;

  const uint64_t fork_ = fork_generation.load(std::memory_order_relaxed);
  std::atomic<size_t> used_{0};
  std::atomic<bool> cools_{false};  // a thread gives back what has been idle
  std::atomic<uint32_t> requested_{0};  // how often it has been hurried; a futex
  uint32_t answered_ = 0;           // that thread's
};

std::shared_ptr<OwnArena> OwnArena::known() {
  Own& own = Own::get();
  std::shared_ptr<OwnArena> arena;  // destroyed without the lock, if it is a parent's
  std::lock_guard lock(own.mutex);
  arena = own.arena.lock();
  return arena && arena->fork_ == fork_generation.load(std::memory_order_relaxed) ? arena : nullptr;
}

std::shared_ptr<OwnArena> OwnArena::get() {
  if (std::shared_ptr<OwnArena> arena = known()) return arena;
  // Not under the lock, which is taken after an arena's own by who forks. Two at the same time have one each.
  auto fresh = std::make_shared<OwnArena>();
  Own& own = Own::get();
  std::lock_guard lock(own.mutex);
  own.arena = fresh;
  return fresh;
}

void OwnArena::give(Block* block) noexcept {
  const size_t used = used_.fetch_sub(block->touched, std::memory_order_relaxed) - block->touched;
  release(block);
  const size_t touched = bytes_touched();
  if (touched > used + kMostWarm) trim(touched - used - kMostWarm);
  if (!cools_.exchange(true)) start_to_cool();
}

void OwnArena::trim(size_t bytes) noexcept {
  try {
    give_some(0, bytes);
  } catch (const std::bad_alloc&) {  // not even for a list of blocks is there memory: the thread tries again
  }
}

void OwnArena::start_to_cool() noexcept {
  const SignalsBlocked blocked;
  try {
    std::thread([self = owner(), this] { cool(); }).detach();
  } catch (const std::exception&) {  // no thread is to be had now: whoever lets go of something next tries again
    cools_.store(false);
  }
}

// Until nothing is left to be given back.
void OwnArena::cool() noexcept {
  for (;;) {
    const uint32_t requested = requested_.load();
    if (const uint64_t due = give_back_idle(std::exchange(answered_, requested) != requested ? 0 : kIdleNs); due != 0) {
      const uint64_t now = now_ns();
      const timespec left = to_timespec(due > now ? due - now : 0);
      futex_wait(&requested_, requested, &left);
      continue;
    }
    cools_.store(false);
    // Whoever has let go of something before that relied on this thread.
    if (give_back_idle(kIdleNs) == 0 || cools_.exchange(true)) return;
  }
}

uint64_t OwnArena::give_back_idle(uint64_t idle_ns) noexcept {
  try {
    return give_back(idle_ns);
  } catch (const std::bad_alloc&) {
    return now_ns() + kIdleNs;
  }
}

namespace {

char* of_heap(size_t size) {
  void* const data = std::aligned_alloc(kBufferAlign, align_up(size + 1, kBufferAlign));
  if (data == nullptr) throw std::bad_alloc();
  return static_cast<char*>(data);
}

}  // namespace

// A forked child's pages are its own, and as long as it lives no other value comes to lie there.
class OwnedMemory::InArena {
  // What is smaller is copied in less time than private pages of it are had.
  static constexpr size_t kFrom = size_t(256) << 10;

 public:
  // Null if there is no file, no addresses or no memory for one: the heap may have some.
  static std::unique_ptr<InArena> make(size_t size) {
    if (size < kFrom) return nullptr;
    try {
      return std::make_unique<InArena>(size);
    } catch (const std::exception&) {
      return nullptr;
    }
  }
  explicit InArena(size_t size) : arena_(OwnArena::get()), block_(arena_->take(size)), mapping_(block_->mapping), hold_(*mapping_) {}
  ~InArena() {
    hold_.leave([arena = std::move(arena_), block = block_, mapping = std::move(mapping_)] { arena->give(block); });
  }
  const std::shared_ptr<Mapping>& mapping() const { return mapping_; }
  char* data() const { return block_->data(); }

 private:
  std::shared_ptr<OwnArena> arena_;
  Block* const block_;
  std::shared_ptr<Mapping> mapping_;
  Hold hold_;
};

void OwnedMemory::give_back_soon() noexcept {
  if (const std::shared_ptr<OwnArena> arena = OwnArena::known()) arena->hurry();
}

OwnedMemory::OwnedMemory(size_t size) : OwnedMemory(InArena::make(size), size) {}

OwnedMemory::OwnedMemory(std::unique_ptr<InArena> in_arena, size_t size)
    : in_arena_(std::move(in_arena)), mapping(in_arena_ ? in_arena_->mapping() : nullptr), data(in_arena_ ? in_arena_->data() : of_heap(size)) {}

OwnedMemory::OwnedMemory(std::shared_ptr<const Fd> file, size_t size)
    : mapping(std::make_shared<Mapping>(std::move(file), 0, align_up(size, kGranule))), data(mapping->base) {}

std::shared_ptr<OwnedMemory> OwnedMemory::copy_of(int fd, size_t size) {
  const size_t room = align_up(std::max<size_t>(size, 1), kGranule);
  void* const at = ::mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
  if (at == MAP_FAILED) throw_errno("mmap");
  return std::shared_ptr<OwnedMemory>(new OwnedMemory(static_cast<char*>(at), room));
}

OwnedMemory::OwnedMemory(char* data, size_t mapped) : mapped_(mapped), data(data) {}

OwnedMemory::~OwnedMemory() {
  if (mapped_ != 0)
    ::munmap(data, mapped_);
  else if (!mapping)
    std::free(data);
}

}  // namespace conveyor
