// The eventfds by which the pump's thread is told of something, and tells others.
#pragma once

#include <sys/eventfd.h>

#include "../platform.h"

namespace conveyor::net {

inline Fd event_fd() {
  Fd fd = own(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (fd.get() < 0) throw_errno("eventfd");
  return fd;
}

inline void drain(int fd) noexcept {
  uint64_t n;
  while (::read(fd, &n, sizeof n) < 0 && errno == EINTR) {
  }
}

}  // namespace conveyor::net
