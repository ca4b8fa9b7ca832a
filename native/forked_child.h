// The end of a child that user code has forked inside of an actor, and that comes back from there.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>

namespace conveyor {

// Only the parent goes on. The child has the same rings and the same bell: two processes would take the same
// calls and answer them, each as if it were alone. Python's buffers are the parent's to flush.
[[noreturn, gnu::cold]] inline void end_forked_child(const char* where) noexcept {
  char text[1024];
  const int length = std::snprintf(text, sizeof text,
                                   "conveyor: process %d, which was forked in %.500s, has come back from there. Only its parent goes on, and it ends "
                                   "here with exit code 1: let a forked child end before the method returns (os._exit), or use multiprocessing\n",
                                   int(::getpid()), where);
  const char* at = text;
  size_t left = size_t(std::clamp(length, 0, int(sizeof text) - 1));
  while (left != 0) {
    const ssize_t n = ::write(STDERR_FILENO, at, left);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;  // nobody is there to be told
    at += n;
    left -= size_t(n);
  }
  ::_exit(1);
}

}  // namespace conveyor
