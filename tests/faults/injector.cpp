// Fails the k-th of the system calls, or of the native core's allocations, that a process makes while it
// is armed. Preloaded by tests/faults; told what to do, and telling what it has done, in a shared file.
#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

namespace {

enum Who : uint32_t { kNobody = 0, kPid = 1, kNewcomers = 2 };

// faults_control.py has the same layout.
struct Control {
  std::atomic<uint32_t> who;    // Who
  std::atomic<uint32_t> pid;    // of kPid
  std::atomic<uint32_t> old[6]; // processes that are no newcomers
  std::atomic<uint64_t> fail;   // which call: from 1
  std::atomic<uint64_t> seen;   // calls so far
  std::atomic<uint32_t> failed; // calls that were failed: 0 or 1
  std::atomic<uint32_t> calls;  // 1: system calls, 2: allocations of the core, 3: both
  char what[48];                // the call that was failed
  uint64_t spared;              // ranges below
  // Offsets in the core of what is nanobind's: where it has no memory it ends the process, or throws where
  // nothing can be thrown. That is not ours to mend.
  struct { uint64_t from, to; } spare[200];
};
static_assert(sizeof(Control) <= 4096);

Control* control = nullptr;
std::atomic<uintptr_t> core_base{0}, core_from{0}, core_to{0};

__attribute__((constructor)) void attach() {
  const char* path = std::getenv("CONVEYOR_FAULTS");
  const int fd = path == nullptr ? -1 : ::open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return;
  void* p = ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  ::close(fd);
  if (p != MAP_FAILED) control = static_cast<Control*>(p);
}

int note_core(dl_phdr_info* info, size_t, void*) {
  if (info->dlpi_name == nullptr || std::strstr(info->dlpi_name, "conveyor/_core.") == nullptr) return 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& ph = info->dlpi_phdr[i];
    if (ph.p_type != PT_LOAD || !(ph.p_flags & PF_X)) continue;
    core_base.store(info->dlpi_addr);
    core_to.store(info->dlpi_addr + ph.p_vaddr + ph.p_memsz);
    core_from.store(info->dlpi_addr + ph.p_vaddr);
  }
  return 1;
}

bool armed(uint32_t calls) {
  if (control == nullptr) return false;
  const uint32_t who = control->who.load(std::memory_order_relaxed);
  if (who == kNobody || !(control->calls.load(std::memory_order_relaxed) & calls)) return false;
  const uint32_t pid = uint32_t(::getpid());
  if (who == kPid) return control->pid.load(std::memory_order_relaxed) == pid;
  for (auto& old : control->old)
    if (old.load(std::memory_order_relaxed) == pid) return false;
  return true;
}

bool fails(uint32_t calls, const char* what) {
  if (!armed(calls) || control->seen.fetch_add(1) + 1 != control->fail.load()) return false;
  std::strncpy(control->what, what, sizeof control->what - 1);
  control->failed.store(1);
  return true;
}

bool from_core(void* caller) {
  if (control == nullptr || control->who.load(std::memory_order_relaxed) == kNobody) return false;
  if (core_from.load(std::memory_order_relaxed) == 0) {
    static thread_local bool looking = false;
    if (looking) return false;
    looking = true;
    dl_iterate_phdr(note_core, nullptr);
    looking = false;
  }
  const uintptr_t at = reinterpret_cast<uintptr_t>(caller);
  if (at < core_from.load(std::memory_order_relaxed) || at >= core_to.load(std::memory_order_relaxed)) return false;
  const uint64_t offset = at - core_base.load(std::memory_order_relaxed);
  for (uint64_t i = 0; i < control->spared; ++i)
    if (offset > control->spare[i].from && offset <= control->spare[i].to) return false;
  return true;
}

template <class F>
F next(const char* name) {
  return reinterpret_cast<F>(dlsym(RTLD_NEXT, name));
}

}  // namespace

#define NEXT(name) static const auto real = next<decltype(&name)>(#name)

extern "C" {

#define FAILING(type, bad, error, name, parameters, arguments) \
  type name parameters {                                       \
    NEXT(name);                                                \
    if (fails(1, #name)) {                                     \
      errno = error;                                           \
      return bad;                                              \
    }                                                          \
    return real arguments;                                     \
  }

// Not the interpreter's anonymous ones, for its heap: a thread that finds no memory for its first frame
// leaves who has started it waiting for ever, whatever we do.
void* mmap(void* at, size_t n, int prot, int flags, int fd, off_t from) noexcept {
  NEXT(mmap);
  if (fd >= 0 && fails(1, "mmap")) {
    errno = ENOMEM;
    return MAP_FAILED;
  }
  return real(at, n, prot, flags, fd, from);
}

void* mmap64(void* at, size_t n, int prot, int flags, int fd, off64_t from) noexcept {
  NEXT(mmap64);
  if (fd >= 0 && fails(1, "mmap64")) {
    errno = ENOMEM;
    return MAP_FAILED;
  }
  return real(at, n, prot, flags, fd, from);
}

FAILING(int, -1, EMFILE, memfd_create, (const char* name, unsigned flags), (name, flags))
FAILING(int, -1, ENOMEM, ftruncate, (int fd, off_t n) noexcept, (fd, n))
FAILING(int, -1, ENOMEM, ftruncate64, (int fd, off64_t n) noexcept, (fd, n))
FAILING(int, -1, EMFILE, dup, (int fd) noexcept, (fd))
FAILING(int, -1, EMFILE, pipe, (int* fds) noexcept, (fds))
FAILING(int, -1, EMFILE, pipe2, (int* fds, int flags) noexcept, (fds, flags))
FAILING(int, -1, EMFILE, socketpair, (int domain, int kind, int protocol, int* fds) noexcept, (domain, kind, protocol, fds))
FAILING(ssize_t, -1, ENOBUFS, sendmsg, (int fd, const msghdr* m, int flags), (fd, m, flags))
FAILING(ssize_t, -1, ENOMEM, recvmsg, (int fd, msghdr* m, int flags), (fd, m, flags))
FAILING(int, -1, EMFILE, epoll_create1, (int flags) noexcept, (flags))
FAILING(int, -1, ENOMEM, epoll_ctl, (int fd, int op, int on, epoll_event* event) noexcept, (fd, op, on, event))
FAILING(int, -1, ENOSPC, fallocate, (int fd, int mode, off_t from, off_t n), (fd, mode, from, n))
FAILING(int, -1, ENOMEM, madvise, (void* at, size_t n, int advice) noexcept, (at, n, advice))
FAILING(int, -1, EMFILE, eventfd, (unsigned n, int flags) noexcept, (n, flags))
FAILING(int, -1, ENOMEM, mprotect, (void* at, size_t n, int prot) noexcept, (at, n, prot))
FAILING(pid_t, -1, EAGAIN, fork, () noexcept, ())

// Only of what is no file: imports open hundreds.
static bool refuses_to_open(const char* path) {
  return (std::strncmp(path, "/proc/", 6) == 0 || std::strncmp(path, "/dev/", 5) == 0) && fails(1, path);
}

#define FAILING_TO_OPEN(name)                          \
  int name(const char* path, int flags, ...) {         \
    NEXT(name);                                        \
    va_list rest;                                      \
    va_start(rest, flags);                             \
    const mode_t mode = va_arg(rest, mode_t);          \
    va_end(rest);                                      \
    if (refuses_to_open(path)) {                       \
      errno = EMFILE;                                  \
      return -1;                                       \
    }                                                  \
    return real(path, flags, mode);                    \
  }

FAILING_TO_OPEN(open)
FAILING_TO_OPEN(open64)

// Of those that have no function of their own only what makes descriptors.
long syscall(long number, ...) noexcept {
  static const auto real = next<long (*)(long, ...)>("syscall");
  va_list rest;
  va_start(rest, number);
  long a[6];
  for (long& one : a) one = va_arg(rest, long);
  va_end(rest);
  if (number == SYS_pidfd_open && fails(1, "pidfd_open")) {
    errno = EMFILE;
    return -1;
  }
  return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*), void* argument) noexcept {
  NEXT(pthread_create);
  return fails(1, "pthread_create") ? EAGAIN : real(thread, attributes, run, argument);
}

// Only what makes descriptors: the rest cannot fail where it is used.
static int control_file(int (*real)(int, int, ...), int fd, int command, void* argument) {
  if ((command == F_DUPFD || command == F_DUPFD_CLOEXEC) && fails(1, "fcntl(F_DUPFD)")) {
    errno = EMFILE;
    return -1;
  }
  if (command == F_ADD_SEALS && fails(1, "fcntl(F_ADD_SEALS)")) {
    errno = EPERM;
    return -1;
  }
  return real(fd, command, argument);
}

int fcntl(int fd, int command, ...) {
  static const auto real = next<int (*)(int, int, ...)>("fcntl");
  va_list rest;
  va_start(rest, command);
  void* argument = va_arg(rest, void*);
  va_end(rest);
  return control_file(real, fd, command, argument);
}

int fcntl64(int fd, int command, ...) {
  static const auto real = next<int (*)(int, int, ...)>("fcntl64");
  va_list rest;
  va_start(rest, command);
  void* argument = va_arg(rest, void*);
  va_end(rest);
  return control_file(real, fd, command, argument);
}

// The allocator's own entries are not behind dlsym(), which allocates.
void* __libc_malloc(size_t n);
void* __libc_calloc(size_t count, size_t n);
void* __libc_realloc(void* p, size_t n);
void* __libc_memalign(size_t alignment, size_t n);

void* malloc(size_t n) noexcept { return from_core(__builtin_return_address(0)) && fails(2, "malloc") ? nullptr : __libc_malloc(n); }
void* calloc(size_t count, size_t n) noexcept {
  return from_core(__builtin_return_address(0)) && fails(2, "calloc") ? nullptr : __libc_calloc(count, n);
}
void* realloc(void* p, size_t n) noexcept {
  return from_core(__builtin_return_address(0)) && fails(2, "realloc") ? nullptr : __libc_realloc(p, n);
}
void* aligned_alloc(size_t alignment, size_t n) noexcept {
  return from_core(__builtin_return_address(0)) && fails(2, "aligned_alloc") ? nullptr : __libc_memalign(alignment, n);
}
}

void* operator new(size_t n) {
  if (from_core(__builtin_return_address(0)) && fails(2, "operator new")) throw std::bad_alloc();
  void* p = __libc_malloc(n != 0 ? n : 1);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}
void* operator new(size_t n, const std::nothrow_t&) noexcept {
  return from_core(__builtin_return_address(0)) && fails(2, "operator new") ? nullptr : __libc_malloc(n != 0 ? n : 1);
}
