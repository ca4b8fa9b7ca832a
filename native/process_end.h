// Ends of a process that user code has brought into a state in which it cannot go on.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

namespace conveyor {

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

}  // namespace conveyor
