// What everything else stands on: the system's calls (futex, clock, memfd, eventfds), the ends of a process, signals, forks,
// checks, and who owns an object.
#pragma once

#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <system_error>
#include <utility>

#if defined(CONVEYOR_DEBUG) && CONVEYOR_DEBUG
#define CONVEYOR_ASSERT(condition)                                                             \
  do {                                                                                         \
    if (!(condition)) {                                                                        \
      std::fprintf(stderr, "conveyor: invariant broken: %s (%s:%d)\n", #condition, __FILE__, __LINE__); \
      std::abort();                                                                            \
    }                                                                                          \
  } while (0)
#else
#define CONVEYOR_ASSERT(condition) ((void)0)
#endif

namespace conveyor {

constexpr size_t kPage = 4096;  // of the process table's layout, whatever the kernel's pages are
constexpr size_t kCacheLine = 64;

// --- the ends of a process that user code has brought into a state in which it cannot go on ---

// With exit code 1, and this as its last line.
[[noreturn, gnu::cold]] inline void end_process(const char* text) noexcept {
  for (size_t left = std::strlen(text); left != 0;) {
    const ssize_t n = ::write(STDERR_FILENO, text, left);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;  // nobody is there to be told
    text += n;
    left -= size_t(n);
  }
  ::_exit(1);
}

// Of a child that user code has forked inside of an actor, and that comes back from there. Only the parent goes on. The
// child has the same rings and the same doorbell: two processes would take the same calls and answer them, each as if it
// were alone. Python's buffers are the parent's to flush.
[[noreturn, gnu::cold]] inline void end_forked_child(const char* where) noexcept {
  char text[1024];
  std::snprintf(text, sizeof text,
                                   "conveyor: process %d, which was forked in %.500s, has come back from there. Only its parent goes on, and it ends "
                                   "here with exit code 1: let a forked child end before the method returns (os._exit), or use multiprocessing\n",
                                   int(::getpid()), where);
  end_process(text);
}

// True in an actor's process, and never changed once it has threads.
inline bool ends_without_descriptors = false;

// A descriptor of the library's own is none any more: code of this process has closed it. An actor ends, since it could
// leave others asleep. Elsewhere whoever needs the descriptor has an error.
[[gnu::cold]] inline void descriptor_lost() noexcept {
  if (!ends_without_descriptors) return;
  end_process(
      "conveyor: code of this actor has closed descriptors of conveyor's (os.closerange, or os.close of a number that was not its own), so it ends "
      "here with exit code 1: close the files that you have opened, or do what closes all descriptors in a process of its own (subprocess)\n");
}

// --- the system's calls ---

[[noreturn]] inline void throw_errno(const char* what) {
  if (errno == EBADF) descriptor_lost();
  throw std::system_error(errno, std::generic_category(), what);
}

inline uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return uint64_t(t.tv_sec) * 1'000'000'000u + uint64_t(t.tv_nsec);
}

inline size_t align_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

// The cores that this process may use; 1 if nobody says.
inline size_t usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return ::sched_getaffinity(0, sizeof set, &set) == 0 ? size_t(CPU_COUNT(&set)) : 1;
}

inline size_t kernel_page() {
  static const size_t size = size_t(::sysconf(_SC_PAGESIZE));
  return size;
}

// Whatever is mapped, made private, punched out or given advice on begins and ends at a multiple of this:
// 4 KiB, but 64 KiB on some aarch64 kernels. All processes of a session run on one kernel. A test can say
// another one (CONVEYOR_TEST_PAGE_SIZE).
inline size_t granule() {
  const size_t real = std::max(kPage, kernel_page());
  const char* said = std::getenv("CONVEYOR_TEST_PAGE_SIZE");
  if (said == nullptr || *said == 0) return real;
  const size_t simulated = std::strtoull(said, nullptr, 10);
  if (simulated >= real && (simulated & (simulated - 1)) == 0) return simulated;
  std::fprintf(stderr, "conveyor: CONVEYOR_TEST_PAGE_SIZE=%s is no power of two from %zu on\n", said, real);
  std::abort();
}
inline const size_t kGranule = granule();

// The words are shared between processes, so the futexes are not FUTEX_PRIVATE.
inline long futex_wait(std::atomic<uint32_t>* word, uint32_t expected, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT, expected, timeout, nullptr, 0);
}

inline void futex_wake_all(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

inline timespec to_timespec(uint64_t ns) {
  return {time_t(ns / 1'000'000'000u), long(ns % 1'000'000'000u)};
}

// A descriptor that closes itself.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = other.fd_;
      other.fd_ = -1;
    }
    return *this;
  }
  ~Fd() { reset(); }
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }
  void reset() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

 private:
  int fd_ = -1;
};

// The library's own descriptors have numbers from here on. Where a process's own code closes all descriptors
// (os.closerange, as daemons do), its next files have the lowest numbers: nothing of ours is then written to those, read
// from them, or closes them, and what we use is EBADF.
inline constexpr int kFirstOwn = 512;
// Read and written in single steps that order nothing: no std::atomic, which tests of interleavings make a step of theirs.
inline int first_own = kFirstOwn;
inline int last_own = kFirstOwn;  // the highest that there was

inline void note_own(int fd) noexcept {
  for (int last = __atomic_load_n(&last_own, __ATOMIC_RELAXED);
       last < fd && !__atomic_compare_exchange_n(&last_own, &last, fd, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED);) {
  }
}

// A duplicate of `fd` under such a number; under any where the process's limit leaves none. -1: not even that.
inline int dup_own(int fd) noexcept {
  const int copy = ::fcntl(fd, F_DUPFD_CLOEXEC, __atomic_load_n(&first_own, __ATOMIC_RELAXED));
  if (copy < 0) return ::fcntl(fd, F_DUPFD_CLOEXEC, 3);
  note_own(copy);
  return copy;
}

// `fd` under such a number, with FD_CLOEXEC, if one is to be had. -1 stays -1.
inline Fd own(int fd) {
  if (fd < 0) return Fd(fd);
  if (fd < __atomic_load_n(&first_own, __ATOMIC_RELAXED)) {
    const int moved = dup_own(fd);
    if (moved >= 0) {
      ::close(fd);
      return Fd(moved);
    }
  }
  ::fcntl(fd, F_SETFD, FD_CLOEXEC);
  note_own(fd);
  return Fd(fd);
}

// The descriptors of a session were closed by others, and some of what has had them will close their numbers once more:
// later ones have other numbers.
inline void skip_own() noexcept { __atomic_store_n(&first_own, __atomic_load_n(&last_own, __ATOMIC_RELAXED) + 1, __ATOMIC_RELAXED); }

inline Fd event_fd() {
  Fd fd = own(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (fd.get() < 0) throw_errno("eventfd");
  return fd;
}

// Make the eventfd readable. It cannot overflow: 2^64 rings before its reader runs.
inline void write_event(int fd) noexcept {
  const uint64_t one = 1;
  while (::write(fd, &one, sizeof one) < 0) {
    if (errno == EBADF) descriptor_lost();
    if (errno != EINTR) return;
  }
}

// Make it unreadable.
inline void drain_event(int fd) noexcept {
  uint64_t n;
  while (::read(fd, &n, sizeof n) < 0 && errno == EINTR) {
  }
}

inline Fd dup_cloexec(int fd) {
  const int copy = dup_own(fd);
  if (copy < 0) throw_errno("dup");
  return Fd(copy);
}

// A sealed, sparse memory file: its size is fixed for ever, so no peer can make a mapping fault by
// truncating it.
inline Fd make_memfd(const char* name, size_t size) {
  Fd fd = own(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (fd.get() < 0) throw_errno("memfd_create");
  if (::ftruncate(fd.get(), off_t(size)) != 0) throw_errno("ftruncate");
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) throw_errno("F_ADD_SEALS");
  return fd;
}

// What one entry of a page table's next level covers, here and on aarch64: 2 MiB where pages have 4 KiB.
inline const size_t kHugePage = kernel_page() * (kernel_page() / 8);

// Only there can the kernel map a huge page of the file as one.
inline bool is_aligned_for_huge_pages(const void* base, uint64_t offset) { return (reinterpret_cast<uintptr_t>(base) - offset) % kHugePage == 0; }

// Memory to read and write, of a file from `offset` on; MAP_FAILED if there is none. It lies as the file does to
// multiples of kGranule and, if it is large and there are addresses enough, of kHugePage.
inline void* map_file(int fd, size_t offset, size_t length, int flags) {
  const size_t page = kernel_page();
  const auto map_aligned = [&](size_t alignment) -> void* {
    const size_t whole = align_up(length, page), reserved = whole + alignment;
    char* const from = static_cast<char*>(::mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (from == MAP_FAILED) return from;
    char* const at = from + (offset - reinterpret_cast<uintptr_t>(from)) % alignment;
    void* const p = ::mmap(at, length, PROT_READ | PROT_WRITE, flags | MAP_FIXED, fd, off_t(offset));
    const int error = errno;
    if (p == MAP_FAILED) {
      ::munmap(from, reserved);
    } else {
      if (at != from) ::munmap(from, size_t(at - from));
      ::munmap(at + whole, size_t(from + reserved - (at + whole)));
    }
    errno = error;
    return p;
  };
  void* p = MAP_FAILED;
  if (length >= kHugePage) p = map_aligned(std::max(kHugePage, kGranule));
  if (p == MAP_FAILED && kGranule > std::max(page, kPage)) p = map_aligned(kGranule);  // in a test: where a kernel with such pages would map it
  else if (p == MAP_FAILED) p = ::mmap(nullptr, length, PROT_READ | PROT_WRITE, flags, fd, off_t(offset));
  // Without this one core dump allocates every page of a sparse mapping.
  if (p != MAP_FAILED) ::madvise(p, length, MADV_DONTDUMP);
  return p;
}

inline char* map_shared(int fd, size_t offset, size_t length) {
  void* p = map_file(fd, offset, length, MAP_SHARED);
  if (p == MAP_FAILED) throw_errno("mmap");
  return static_cast<char*>(p);
}

// A file's memory from its begin on, which who maps it cannot write.
inline char* map_to_look(int fd, size_t length) {
  void* p = ::mmap(nullptr, length, PROT_READ, MAP_SHARED, fd, 0);
  if (p == MAP_FAILED) throw_errno("mmap");
  return static_cast<char*>(p);
}

// Signals are for the threads of the program: a thread of ours is started while they are blocked, and inherits that.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

// --- forks ---

// Lets `value` never be destroyed. Allocates nothing: a child that has no memory right after fork() must not
// end for that.
template <class T>
void abandon(T&& value) noexcept {
  alignas(T) static unsigned char grave[sizeof(T)];  // one is enough: nobody visits
  new (grave) T(std::move(value));
}

// Counts forks on the way down to this process: an object made under another generation was
// inherited and must not act on shared memory. Bumped by an atfork handler (holds.cpp).
extern std::atomic<uint64_t> fork_generation;
void install_fork_handlers();

// A mutex that a fork finds free. A child that is forked while another thread of its parent holds a
// mutex would wait for ever: it has the mutex, and not the thread.
//
// All of them are held across fork(), the newest first: who holds one may take an older one, and never a
// newer one.
class ForkMutex {
 public:
  ForkMutex() {
    install_fork_handlers();  // first, so that its lock is taken after these: who has one of them may take it
    static const int rc = ::pthread_atfork(take_all, give_all_back, give_all_back);
    if (rc != 0) throw std::system_error(rc, std::generic_category(), "pthread_atfork");
    std::lock_guard lock(list());
    next_ = first_;
    if (next_ != nullptr) next_->previous_ = this;
    first_ = this;
  }
  ~ForkMutex() {
    std::lock_guard lock(list());
    if (previous_ != nullptr) previous_->next_ = next_;
    if (next_ != nullptr) next_->previous_ = previous_;
    if (first_ == this) first_ = next_;
  }
  ForkMutex(const ForkMutex&) = delete;
  ForkMutex& operator=(const ForkMutex&) = delete;

  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  static std::mutex& list() {
    // Never destroyed: objects that have such a mutex may outlive static destructors.
    static std::mutex* mutex = new std::mutex;
    return *mutex;
  }
  static void take_all() {
    list().lock();
    for (ForkMutex* m = first_; m != nullptr; m = m->next_) m->lock();
  }
  static void give_all_back() {
    for (ForkMutex* m = first_; m != nullptr; m = m->next_) m->unlock();
    list().unlock();
  }

  static inline ForkMutex* first_ = nullptr;
  ForkMutex* next_ = nullptr;
  ForkMutex* previous_ = nullptr;
  std::mutex mutex_;
};

// --- objects that have several owners, in C++ and in Python ---

// Made by std::make_shared, here and for Python: so whoever has a reference can be an owner of its own, and any
// thread may be the last. Not by the names that std::enable_shared_from_this gives: nanobind looks for them, and
// keeps such objects alive in a way that ends the process where there is no memory.
template <class T>
class Shareable : public std::enable_shared_from_this<T> {
 public:
  std::shared_ptr<T> owner() { return std::enable_shared_from_this<T>::shared_from_this(); }

 private:
  using std::enable_shared_from_this<T>::shared_from_this;
  using std::enable_shared_from_this<T>::weak_from_this;
};

}  // namespace conveyor
