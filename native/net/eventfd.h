// The eventfds by which the pump's thread is told of something, and tells others.
#pragma once

#include <sys/eventfd.h>

#include "../platform.h"

namespace conveyor::net {

inline Fd event_fd() {
  Fd fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (fd.get() < 0) throw_errno("eventfd");
  return fd;
}

inline void write_event(int fd) noexcept {
  const uint64_t one = 1;
  while (::write(fd, &one, sizeof one) < 0 && errno == EINTR) {
  }
}

inline void drain(int fd) noexcept {
  uint64_t n;
  while (::read(fd, &n, sizeof n) < 0 && errno == EINTR) {
  }
}

}  // namespace conveyor::net
