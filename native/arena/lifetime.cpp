// An arena from its beginning to its end: forks meanwhile, and what is kept beyond the end, as somebody still reads it.
#include "arena.h"
#include "../hazards.h"
#include "../signals_blocked.h"

namespace conveyor {

// All arenas of this process: fork() is held off while one of them is being changed, so that a child finds
// them whole. There they are inert, and the threads do not exist.
struct Arena::ForkHandlers {
  std::mutex mutex;
  std::vector<Arena*> all;

  static ForkHandlers& get() {
    static ForkHandlers* handlers = [] {
      install_fork_handlers();        // first, so that its lock is taken after ours: who has an arena's may take it
      auto* made = new ForkHandlers;  // never destroyed: arenas may outlive static destructors
      if (const int rc = pthread_atfork(before, in_parent, in_child); rc != 0) throw std::system_error(rc, std::generic_category(), "pthread_atfork");
      return made;
    }();
    return *handlers;
  }
  static void before() {
    get().mutex.lock();
    for (Arena* arena : get().all) arena->mutex_.lock();
  }
  static void in_parent() {
    for (Arena* arena : get().all) arena->mutex_.unlock();
    get().mutex.unlock();
  }
  static void in_child() {
    for (Arena* arena : get().all) arena->inherited_ = true;
    in_parent();
  }
};

Arena::Arena(int fd, size_t size, size_t cap, std::shared_ptr<Board> board, uint32_t slot, uint64_t idle_ns)
    : fd_(std::make_shared<const Fd>(dup_cloexec(fd))), size_(size / kWindow * kWindow), cap_(cap), board_(std::move(board)), slot_(slot), idle_ns_(idle_ns),
      memory_(board_ ? &board_->header()->memory : &own_memory_),
      returns_(board_ ? &board_->slot(slot)->returns : &own_returns_), addresses_(size_) {
  std::lock_guard lock(ForkHandlers::get().mutex);
  ForkHandlers::get().all.push_back(this);
}

Arena::~Arena() {
  stop_thread();
  {
    std::lock_guard lock(ForkHandlers::get().mutex);
    std::erase(ForkHandlers::get().all, this);
  }
  if (!inherited_) count(-int64_t(bytes_touched()));
}

void Arena::close() {
  if (inherited_) return;
  {
    std::lock_guard lock(mutex_);
    if (std::exchange(closed_, true)) return;
    ++punching_;
  }
  // Nobody starts it any more.
  stop_thread();
  give_back(0);
  {
    std::lock_guard lock(mutex_);
    stop_punching();
  }
  look_after();
}

// Have a closed arena looked after while its blocks keep something, by one thread.
void Arena::look_after() noexcept {
  {
    std::lock_guard lock(mutex_);
    if (outlasted_ || !keeps_any()) return;
    outlasted_ = true;
  }
  const SignalsBlocked blocked;
  try {
    std::thread([self = owner()] { self->outlast(); }).detach();
  } catch (const std::exception&) {  // no thread is to be had: what is kept stays as long as the arena
    std::lock_guard lock(mutex_);
    outlasted_ = false;
  }
}

bool Arena::keeps_any() const {
  return !lingering_.empty() || std::ranges::any_of(out_, [](const Block* block) { return block->attached != nullptr; });
}

// A closed arena has no thread, but leases go on ending: those on values that are held, and those on blocks that were
// kept by what was just let go of. What is attached to blocks is somebody's, and goes with the last of them. The flag
// is not taken down: the slot may be another process's by then, whose own thread waits by it.
void Arena::outlast() noexcept {
  for (;;) {
    const uint32_t seen = returns_->count.load(std::memory_order_seq_cst);
    returns_->kept_wanted.store(1, std::memory_order_seq_cst);  // before it looks: Returns::note_kept
    sweep();
    destroy_dropped();
    destroy_lingering();
    {
      std::lock_guard lock(mutex_);
      if (!keeps_any()) {
        outlasted_ = false;
        return;
      }
    }
    futex_wait(&returns_->count, seen, nullptr);
  }
}

void Arena::leave_slot() {
  if (inherited_) return;
  std::lock_guard lock(mutex_);
  if (!std::exchange(has_slot_, false) || !board_) return;
  board_->slot(slot_)->memory.fetch_sub(touched_.load(std::memory_order_relaxed), std::memory_order_seq_cst);
}

bool Arena::is_read(uint64_t number) const noexcept { return !inherited_ && board_ && is_announced(*board_, number); }

void Arena::linger(std::list<Lingering>& one) noexcept {
  bool late;
  {
    std::lock_guard lock(mutex_);
    lingering_.splice(lingering_.end(), one, one.begin());
    late = closed_;
  }
  // Before the thread looks at the words: who has let go of one before that has seen no value that lingers, and who does
  // so afterwards tells the thread (Hazard).
  returns_->lingering.fetch_add(1, std::memory_order_seq_cst);
  returns_->note_kept();
  if (late) look_after();
}

// In a closed arena, too: no other value comes to lie there, but its pages would go.
void Arena::destroy_lingering() noexcept {
  std::list<Lingering> gone;  // destroyed without the lock
  std::lock_guard lock(mutex_);
  for (auto at = lingering_.begin(); at != lingering_.end();) {
    const auto one = at++;
    if (is_announced(*board_, one->number)) continue;
    gone.splice(gone.end(), lingering_, one);
    returns_->lingering.fetch_sub(1, std::memory_order_relaxed);
  }
}

}  // namespace conveyor
