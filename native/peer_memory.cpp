#include "peer_memory.h"

#include <limits.h>
#include <sys/prctl.h>

#include <algorithm>
#include <mutex>

#include "fork_mutex.h"
#include "platform.h"

namespace conveyor {

namespace {

constexpr size_t kChunk = 512;  // words that are mapped at a time

// Words that hold nothing. Never destroyed: values may outlive static destructors.
struct FreeWords {
  ForkMutex mutex;
  std::vector<std::atomic<uint64_t>*> all;

  static FreeWords& get() {
    static auto* words = new FreeWords;
    return *words;
  }
};

}  // namespace

Anchor::Anchor(uint64_t number) {
  FreeWords& words = FreeWords::get();
  std::lock_guard lock(words.mutex);
  if (words.all.empty()) {
    words.all.reserve(kChunk + words.all.capacity());  // also for those that come back
    auto* more = new std::atomic<uint64_t>[kChunk]();
    for (size_t i = 0; i < kChunk; ++i) words.all.push_back(more + i);
  }
  word_ = words.all.back();
  words.all.pop_back();
  // Release: what others may read by this number is there.
  word_->store(number, std::memory_order_release);
}

Anchor::~Anchor() {
  // Before that memory is anybody else's: those who copy it look at this afterwards.
  word_->store(0, std::memory_order_seq_cst);
  FreeWords& words = FreeWords::get();
  std::lock_guard lock(words.mutex);
  words.all.push_back(word_);
}

void read_peer(pid_t pid, std::vector<iovec> from, std::vector<iovec> to, uint64_t anchor, uint64_t number) {
  uint64_t found = 0;
  from.push_back({reinterpret_cast<void*>(anchor), sizeof found});
  to.push_back({&found, sizeof found});
  const auto pass = [](std::vector<iovec>& parts, size_t& at, size_t bytes) {
    while (at < parts.size() && bytes >= parts[at].iov_len) bytes -= parts[at++].iov_len;
    if (bytes == 0) return;
    parts[at].iov_base = static_cast<char*>(parts[at].iov_base) + bytes;
    parts[at].iov_len -= bytes;
  };
  // The word comes with the last bytes, and behind them: what is copied by one call is copied in this order.
  for (size_t i = 0, j = 0; i < from.size();) {
    const ssize_t copied = ::process_vm_readv(pid, &to[j], std::min<size_t>(to.size() - j, IOV_MAX), &from[i], std::min<size_t>(from.size() - i, IOV_MAX), 0);
    if (copied < 0) throw_errno("read another process's memory");
    const size_t before = i;
    // It stops where nothing is mapped, and after 2 GiB.
    pass(from, i, size_t(copied));
    pass(to, j, size_t(copied));
    if (copied == 0 && i == before) throw std::system_error(EFAULT, std::generic_category(), "read another process's memory");
  }
  if (found != number) throw std::system_error(ESTALE, std::generic_category(), "read another process's memory");
}

void let_read(pid_t pid) noexcept {
  ::prctl(PR_SET_PTRACER, pid, 0, 0, 0);  // EINVAL: there is nothing that would keep anybody from it
}

bool may_read(pid_t pid) noexcept {
  char byte;
  const iovec to{&byte, 1}, from{nullptr, 1};
  // Whether it may is asked before what it is.
  return ::process_vm_readv(pid, &to, 1, &from, 1, 0) >= 0 || errno == EFAULT;
}

}  // namespace conveyor
