#include "holds.h"

#include <pthread.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>

#include <algorithm>
#include <list>
#include <mutex>
#include <thread>
#include <vector>

namespace conveyor {

std::atomic<uint64_t> fork_generation{0};

// The mutexes are held across fork(), so that the child finds the lists whole. Nobody who has `mutex` takes another.
struct Holds {
  struct Deferred {
    uint64_t born, left;  // forks before the hold began, and before it ended
    std::function<void()> end;
  };

  // Those who hear of mappings, and the list of these, which changes with both locks; taken before the other.
  std::mutex observers_mutex;
  std::vector<MappingObserver*> observers;

  std::mutex mutex;
  Mapping* first = nullptr;
  size_t count = 0;
  uint64_t forks = 0;
  // Of each child that may still read what was held when it was forked: the read end of a pipe, which hangs
  // up when the last inheritor of the write end is gone. So there is one descriptor for each living child,
  // whatever is held, and none for those that are gone.
  struct Pipe {
    int fd;
    uint64_t fork;  // its number, from 1
    bool hung_up = false;
  };
  std::vector<Pipe> pipes;  // in the order of the forks
  // Forks for which no pipe was to be had, from the first to the last: their children live for ever.
  uint64_t first_lost = 0, last_lost = 0;
  std::list<Deferred> deferred;
  int pipe_ends[2] = {-1, -1};
  // An epoll instance with the pipes in it. There is one, and a thread that sleeps on it, while there are pipes.
  int ends = -1;

  static Holds& get() {
    // Never destroyed: what Python objects hold may outlive static destructors.
    static Holds* holds = new Holds;
    return *holds;
  }

  // See which of the children are gone. Not by poll(), which refuses more than the limit of descriptors.
  // False: there may be more of them.
  bool look() {
    if (pipes.empty()) return true;
    epoll_event events[64];
    const int n = ::epoll_wait(ends, events, int(std::size(events)), 0);
    for (int i = 0; i < n; ++i)
      for (Pipe& pipe : pipes) pipe.hung_up |= pipe.fd == events[i].data.fd;
    return n < int(std::size(events));
  }

  // Whether a child may live that was forked after the first `born` forks, and not after the first `left`.
  bool pinned(uint64_t born, uint64_t left) const {
    for (auto at = std::ranges::upper_bound(pipes, born, {}, &Pipe::fork); at != pipes.end() && at->fork <= left; ++at)
      if (!at->hung_up) return true;
    return last_lost > born && first_lost <= left;  // first_lost is 0 only if last_lost is
  }
  bool pinned_now(uint64_t born) {
    if (!pinned(born, forks)) return false;  // the usual case makes no system call
    look();
    return pinned(born, forks);
  }

  // Forget children that are gone. Only the thread does: it must hear of each of them.
  void forget() {
    for (bool all = false; !all;) {
      all = look();
      std::erase_if(pipes, [this](const Pipe& pipe) {
        if (!pipe.hung_up) return false;
        // Not only closed: another process may have the other copy of it until it runs its program.
        ::epoll_ctl(ends, EPOLL_CTL_DEL, pipe.fd, nullptr);
        ::close(pipe.fd);
        return true;
      });
    }
  }

  // Have the thread hear of the end of the pipe that `pipe` is the read end of. It may need to be started.
  bool watch(int pipe) {
    epoll_event hangs_up{};  // asked for or not
    hangs_up.data.fd = pipe;
    if (ends >= 0) return ::epoll_ctl(ends, EPOLL_CTL_ADD, pipe, &hangs_up) == 0;
    ends = own(::epoll_create1(EPOLL_CLOEXEC)).release();
    if (ends >= 0 && ::epoll_ctl(ends, EPOLL_CTL_ADD, pipe, &hangs_up) == 0 && start_thread()) return true;
    if (ends >= 0) ::close(std::exchange(ends, -1));
    return false;
  }

  bool start_thread() {
    const SignalsBlocked blocked;
    try {
      std::thread([ends = ends] {
        epoll_event ended;
        do
          if (::epoll_wait(ends, &ended, 1, -1) < 0 && errno != EINTR) return;  // the user has closed it
        while (release_unpinned());
      }).detach();
    } catch (const std::exception&) {
      return false;
    }
    return true;
  }

  static void before_fork() {
    Holds& h = get();
    h.observers_mutex.lock();
    h.mutex.lock();
    h.pipe_ends[0] = h.pipe_ends[1] = -1;
    if (h.count == 0) return;
    try {
      h.pipes.reserve(h.pipes.size() + 1);
    } catch (const std::bad_alloc&) {
      return;
    }
    if (::pipe2(h.pipe_ends, O_CLOEXEC) != 0) {
      h.pipe_ends[0] = h.pipe_ends[1] = -1;
      return;
    }
    for (int& end : h.pipe_ends) end = own(end).release();
    if (!h.watch(h.pipe_ends[0])) {
      for (int& end : h.pipe_ends) ::close(std::exchange(end, -1));
    }
  }

  static void after_fork_in_parent() {
    Holds& h = get();
    ++h.forks;
    if (h.pipe_ends[0] >= 0) {
      ::close(h.pipe_ends[1]);
      h.pipes.push_back({h.pipe_ends[0], h.forks});
    } else if (h.count != 0) {
      // What is held now stays for ever: better than that the child reads memory that changes under it.
      if (h.last_lost == 0) h.first_lost = h.forks;
      h.last_lost = h.forks;
    }
    h.mutex.unlock();
    h.observers_mutex.unlock();
  }

  static void after_fork_in_child() {
    fork_generation.fetch_add(1, std::memory_order_relaxed);
    Holds& h = get();
    if (h.pipe_ends[0] >= 0) ::close(h.pipe_ends[0]);  // the write end stays open until this process ends
    for (Mapping* m = h.first; m != nullptr; m = m->next_) {
      if (m->holds_ != 0) m->make_private();
      m->holds_ = 0;
    }
    h.count = 0;
    // Neither is the thread here.
    for (const Pipe& pipe : h.pipes) ::close(pipe.fd);
    if (h.ends >= 0) ::close(std::exchange(h.ends, -1));
    h.pipes.clear();
    h.first_lost = h.last_lost = 0;
    // The parent's to end. Kept, not destroyed: what it refers to is shared with what else is here.
    abandon(std::move(h.deferred));
    h.deferred.clear();
    h.mutex.unlock();
    h.observers_mutex.unlock();
  }
};

void install_fork_handlers() {
  static const int rc = pthread_atfork(Holds::before_fork, Holds::after_fork_in_parent, Holds::after_fork_in_child);
  if (rc != 0) throw std::system_error(rc, std::generic_category(), "pthread_atfork");
}

Mapping::Mapping(std::shared_ptr<const Fd> file, uint64_t offset, size_t size)
    : base(map_shared(file->get(), offset, size)), size(size), file_(std::move(file)), offset_(offset) {
  Holds& h = Holds::get();
  std::lock_guard observed(h.observers_mutex);
  {
    std::lock_guard lock(h.mutex);
    next_ = h.first;
    if (next_ != nullptr) next_->previous_ = this;
    h.first = this;
  }
  for (MappingObserver* observer : h.observers) observer->tell(observer->mapped_, *this);
}

static void unmap(const std::array<PrivateView, 8>& views) {
  for (const PrivateView& view : views)
    if (view.base != nullptr) ::munmap(view.base, view.size);
}

Mapping::~Mapping() {
  Holds& h = Holds::get();
  {
    std::lock_guard observed(h.observers_mutex);
    for (MappingObserver* observer : h.observers) observer->tell(observer->unmapped_, *this);
    std::lock_guard lock(h.mutex);
    CONVEYOR_ASSERT(holds_ == 0);
    if (previous_ != nullptr) previous_->next_ = next_;
    if (next_ != nullptr) next_->previous_ = previous_;
    if (h.first == this) h.first = next_;
  }
  ::munmap(base, size);
  unmap(private_);
}

PrivateView Mapping::take_private(uint64_t offset, size_t size) {
  std::lock_guard lock(Holds::get().mutex);
  for (PrivateView& view : private_)
    if (view.base != nullptr && view.offset == offset && view.size == size) return std::exchange(view, {});
  return {};
}

PrivateView Mapping::keep_private(PrivateView view) {
  std::lock_guard lock(Holds::get().mutex);
  if (file_unused_) return view;  // it would keep the file
  // The gap that taking one has left is filled first.
  for (PrivateView& place : private_) {
    std::swap(place, view);
    if (view.base == nullptr) break;
  }
  return view;
}

MappingObserver::MappingObserver(Call mapped, Call unmapped) : mapped_(std::move(mapped)), unmapped_(std::move(unmapped)) {
  Holds& h = Holds::get();
  std::lock_guard observed(h.observers_mutex);
  h.observers.push_back(this);
  for (const Mapping* m = h.first; m != nullptr; m = m->next_) tell(mapped_, *m);
}

MappingObserver::~MappingObserver() {
  Holds& h = Holds::get();
  std::lock_guard observed(h.observers_mutex);
  std::erase(h.observers, this);
  for (const Mapping* m = h.first; m != nullptr; m = m->next_) tell(unmapped_, *m);
}

void MappingObserver::tell(const Call& call, const Mapping& mapping) const noexcept {
  if (fork_ == fork_generation.load(std::memory_order_relaxed)) call(mapping.base, mapping.size);
}

void Mapping::close_file() {
  std::shared_ptr<const Fd> closed;
  decltype(private_) idle{};
  {
    std::lock_guard lock(Holds::get().mutex);
    file_unused_ = true;
    if (holds_ == 0) closed.swap(file_);
    idle.swap(private_);
  }
  unmap(idle);
}

// In a forked child: what it writes into a value stays its own.
void Mapping::make_private() const {
  void* p = ::mmap(base, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, file_->get(), off_t(offset_));
  if (p == base) {
    ::madvise(base, size, MADV_DONTDUMP);
    return;
  }
  // Most children do without writing: they go on to exec, so this one need not end here. But were the memory
  // left writable, what it writes would appear in the parent, and in the process that the value is from,
  // without a word. Now it dies of SIGSEGV if it does write, and this says why.
  const int error = errno;
  const bool safe = ::mprotect(base, size, PROT_READ) == 0;
  char text[400];
  const int length = std::snprintf(text, sizeof text,
                                   "conveyor: %zu MiB of values that the forked child %d has inherited from its parent cannot be made its own (%s; "
                                   "RLIMIT_DATA, RLIMIT_AS and vm.overcommit_memory limit this): %s\n",
                                   size >> 20, int(::getpid()), ::strerror(error),
                                   safe ? "they can only be read there, and to write to them ends it with SIGSEGV" : "it is ended");
  if (::write(STDERR_FILENO, text, size_t(length)) < 0) {  // nobody is there to be told
  }
  if (!safe) ::abort();
}

Hold::Hold(Mapping& mapping) : mapping_(mapping) {
  Holds& h = Holds::get();
  std::lock_guard lock(h.mutex);
  if (!mapping.file_) throw std::system_error(ESHUTDOWN, std::generic_category(), "the session has been shut down, and its memory with it");
  // Both under the mutex: a fork counts for this hold, or comes before it.
  generation_ = fork_generation.load(std::memory_order_relaxed);
  born_ = h.forks;
  ++mapping.holds_, ++h.count;
}

bool Hold::pinned() const {
  Holds& h = Holds::get();
  std::lock_guard lock(h.mutex);
  return h.pinned_now(born_);
}

bool Hold::leave_now(uint64_t& left) noexcept {
  Holds& h = Holds::get();
  std::shared_ptr<const Fd> closed;
  std::lock_guard lock(h.mutex);
  CONVEYOR_ASSERT(mapping_.holds_ != 0);
  --mapping_.holds_, --h.count;
  if (mapping_.holds_ == 0 && mapping_.file_unused_) closed.swap(mapping_.file_);
  left = h.forks;
  return !h.pinned_now(born_);
}

void Hold::defer(uint64_t left, std::function<void()> end) const {
  Holds& h = Holds::get();
  std::lock_guard lock(h.mutex);
  h.deferred.push_back({born_, left, std::move(end)});
}

size_t live_holds() {
  Holds& h = Holds::get();
  std::lock_guard lock(h.mutex);
  return h.count;
}

bool release_unpinned() {
  Holds& h = Holds::get();
  std::list<Holds::Deferred> ended;
  bool more;
  {
    std::lock_guard lock(h.mutex);
    h.forget();
    for (auto at = h.deferred.begin(); at != h.deferred.end();) {
      const auto one = at++;
      if (!h.pinned(one->born, one->left)) ended.splice(ended.end(), h.deferred, one);
    }
    more = !h.pipes.empty();
    if (!more && h.ends >= 0) ::close(std::exchange(h.ends, -1));
  }
  // Without the mutex: with what they refer to may go mappings, and a process table, which has locks of its own.
  for (auto& d : ended) d.end();
  return more;
}

}  // namespace conveyor
