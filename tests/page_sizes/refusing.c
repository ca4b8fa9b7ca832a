/* Preloaded, it has the C library refuse what a kernel with large pages refuses: to map a file of Conveyor's,
   to give advice on what is mapped of it, or to punch holes into it, elsewhere than at multiples of the page
   that CONVEYOR_TEST_PAGE_SIZE says. Each refusal is named on the error output. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static unsigned long page(void) {
  const char* said = getenv("CONVEYOR_TEST_PAGE_SIZE");
  return said != NULL ? strtoul(said, NULL, 10) : 4096;
}

static int of_conveyor(int fd) {
  char link[40], target[128] = "";
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  return readlink(link, target, sizeof target - 1) > 0 && strstr(target, "memfd:conveyor") != NULL;
}

static int refuse(const char* what, unsigned long a, unsigned long b) {
  char text[160];
  int n = snprintf(text, sizeof text, "refused: %s %#lx %#lx\n", what, a, b);
  if (write(2, text, (size_t)n) < 0) return errno = EINVAL;
  return errno = EINVAL;
}

static void* checked_mmap(void* at, size_t size, int prot, int flags, int fd, off_t offset) {
  if (fd >= 0 && ((unsigned long)offset % page() || ((flags & MAP_FIXED) && (uintptr_t)at % page())) && of_conveyor(fd)) {
    refuse("mmap", (unsigned long)at, (unsigned long)offset);
    return MAP_FAILED;
  }
  return (void*)syscall(SYS_mmap, at, size, prot, flags, fd, offset);
}
void* mmap(void* at, size_t size, int prot, int flags, int fd, off_t offset) { return checked_mmap(at, size, prot, flags, fd, offset); }
void* mmap64(void* at, size_t size, int prot, int flags, int fd, off_t offset) { return checked_mmap(at, size, prot, flags, fd, offset); }

/* MADV_REMOVE is for shared files only: nobody else here uses it. */
int madvise(void* at, size_t size, int advice) {
  if (advice == MADV_REMOVE && ((uintptr_t)at % page() || size % page())) return refuse("madvise", (unsigned long)at, size), -1;
  return (int)syscall(SYS_madvise, at, size, advice);
}

/* A real kernel would only zero what is no whole page, and its memory would stay. */
static int checked_fallocate(int fd, int mode, off_t offset, off_t size) {
  if ((mode & FALLOC_FL_PUNCH_HOLE) && ((unsigned long)offset % page() || (unsigned long)size % page()) && of_conveyor(fd))
    return refuse("fallocate", (unsigned long)offset, (unsigned long)size), -1;
  return (int)syscall(SYS_fallocate, fd, mode, offset, size);
}
int fallocate(int fd, int mode, off_t offset, off_t size) { return checked_fallocate(fd, mode, offset, size); }
int fallocate64(int fd, int mode, off_t offset, off_t size) { return checked_fallocate(fd, mode, offset, size); }
