#include "peer_memory.h"

#include <limits.h>
#include <sys/prctl.h>

#include <algorithm>
#include <array>
#include <thread>
#include <utility>

#include "platform.h"

namespace conveyor {

namespace {

// Copy `from` to `to`, which are used up. Returns 0, or what the system says.
int copy(pid_t pid, std::vector<iovec>& from, std::vector<iovec>& to) noexcept {
  const auto pass = [](std::vector<iovec>& parts, size_t& at, size_t bytes) {
    while (at < parts.size() && bytes >= parts[at].iov_len) bytes -= parts[at++].iov_len;
    if (bytes == 0) return;
    parts[at].iov_base = static_cast<char*>(parts[at].iov_base) + bytes;
    parts[at].iov_len -= bytes;
  };
  for (size_t i = 0, j = 0; i < from.size();) {
    const ssize_t copied = ::process_vm_readv(pid, to.data() + j, std::min<size_t>(to.size() - j, IOV_MAX), &from[i], std::min<size_t>(from.size() - i, IOV_MAX), 0);
    if (copied < 0) return errno;
    const size_t before = i;
    // It stops where nothing is mapped, and after 2 GiB.
    pass(from, i, size_t(copied));
    pass(to, j, size_t(copied));
    if (copied == 0 && i == before) return EFAULT;
  }
  return 0;
}

// One core alone does not use up what memory can give: two take less than half as long for 64 MiB, since each also
// looks up the other process's pages for itself. Below, a thread takes as long to be woken as it saves.
constexpr size_t kSharedFrom = 8 << 20, kPiece = 2 << 20;
constexpr unsigned kThreads = 4;

// The next parts of `parts` from `at` on, `bytes` of them.
std::vector<iovec> cut(std::vector<iovec>& parts, size_t& at, size_t bytes) {
  std::vector<iovec> taken;
  while (bytes != 0) {
    iovec& part = parts[at];
    const size_t length = std::min(bytes, part.iov_len);
    if (length != 0) taken.push_back({part.iov_base, length});
    part.iov_base = static_cast<char*>(part.iov_base) + length;
    part.iov_len -= length;
    bytes -= length;
    if (part.iov_len == 0) ++at;
  }
  return taken;
}

// As copy(), by several threads: who is done with a piece takes the next one, so a core that has other work delays nobody.
int copy_together(pid_t pid, std::vector<iovec>& from, std::vector<iovec>& to, size_t bytes, unsigned threads) {
  std::vector<std::pair<std::vector<iovec>, std::vector<iovec>>> pieces;
  for (size_t i = 0, j = 0, left = bytes; left != 0;) {
    const size_t length = std::min(left, kPiece);
    pieces.emplace_back(cut(from, i, length), cut(to, j, length));
    left -= length;
  }
  // Relaxed: each piece is one thread's, and joining the threads orders what they have done before what follows.
  std::atomic<size_t> next{0};
  std::atomic<int> failed{0};
  const auto work = [&]() noexcept {
    for (size_t n; failed.load(std::memory_order_relaxed) == 0 && (n = next.fetch_add(1, std::memory_order_relaxed)) < pieces.size();)
      if (const int error = copy(pid, pieces[n].first, pieces[n].second)) failed.store(error, std::memory_order_relaxed);
  };
  std::vector<std::thread> others;
  others.reserve(threads);
  {
    const SignalsBlocked blocked;
    try {
      while (others.size() + 1 < threads) others.emplace_back(work);
    } catch (const std::exception&) {  // no more are to be had
    }
  }
  work();
  for (std::thread& other : others) other.join();
  return failed.load(std::memory_order_relaxed);
}

}  // namespace

void read_peer(pid_t pid, std::vector<iovec> from, std::vector<iovec> to, uint64_t anchor, uint64_t number) {
  const auto check = [](int error) {
    if (error != 0) throw std::system_error(error, std::generic_category(), "read another process's memory");
  };
  size_t bytes = 0;
  for (const iovec& part : from) bytes += part.iov_len;
  if (bytes >= kSharedFrom) {
    if (const unsigned threads = std::min<size_t>({kThreads, usable_cores(), bytes / kPiece}); threads > 1) {
      check(copy_together(pid, from, to, bytes, threads));
      from.clear();
      to.clear();
    }
  }
  // The word comes behind the last bytes: what is copied by one call is copied in this order, on ARM, too, since the
  // kernel lets go of the pages of each range by a fully ordered decrement before it takes the next one's.
  uint64_t found = 0;
  from.push_back({reinterpret_cast<void*>(anchor), sizeof found});
  to.push_back({&found, sizeof found});
  check(copy(pid, from, to));
  if (found != number) check(ESTALE);
}

void let_read(pid_t pid) noexcept {
  ::prctl(PR_SET_PTRACER, pid, 0, 0, 0);  // EINVAL: there is nothing that would keep anybody from it
}

bool readable(std::span<const Range> ranges) noexcept {
  if (::prctl(PR_GET_DUMPABLE, 0, 0, 0, 0) != 1) return false;
  // A byte of each: what this process may not read in this way of itself, nobody may.
  std::array<iovec, 64> from;
  std::array<char, from.size()> bytes;
  iovec to{bytes.data(), 0};
  for (size_t i = 0; i < ranges.size();) {
    size_t n = 0;
    for (; n < from.size() && i < ranges.size(); ++i)
      if (ranges[i].length != 0) from[n++] = {reinterpret_cast<void*>(ranges[i].address), 1};
    to.iov_len = n;
    if (n != 0 && ::process_vm_readv(::getpid(), &to, 1, from.data(), n, 0) != ssize_t(n)) return false;
  }
  return true;
}

bool may_read(pid_t pid) noexcept {
  char byte;
  const iovec to{&byte, 1}, from{nullptr, 1};
  // Whether it may is asked before what it is.
  return ::process_vm_readv(pid, &to, 1, &from, 1, 0) >= 0 || errno == EFAULT;
}

}  // namespace conveyor
