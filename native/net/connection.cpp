#include "connection.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/uio.h>

namespace conveyor::net {

namespace {

constexpr size_t kStretch = 64 << 10;
// So much may wait in the kernel for the network. What is put behind it waits as long; less would let the sender run dry.
constexpr int kNotSent = 512 << 10;

[[noreturn]] void broken(const char* what) { throw Broken(std::string(what) + ": " + std::generic_category().message(errno)); }

}  // namespace

Connection::Connection(Fd fd) : fd_(std::move(fd)), in_(std::make_unique_for_overwrite<char[]>(kStretch)), in_size_(kStretch) {
  const int flags = ::fcntl(fd_.get(), F_GETFL);
  if (flags < 0 || ::fcntl(fd_.get(), F_SETFL, flags | O_NONBLOCK) != 0) throw_errno("connection");
  // A pair of sockets, behind which TLS is done, has neither.
  const int one = 1;
  ::setsockopt(fd_.get(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  ::setsockopt(fd_.get(), IPPROTO_TCP, TCP_NOTSENT_LOWAT, &kNotSent, sizeof kNotSent);
}

Connection::~Connection() {
  // What was sent goes before it. It fails where the other side has ended it already.
  if (fork_ == fork_generation.load(std::memory_order_relaxed)) ::shutdown(fd_.get(), SHUT_RDWR);
}

void Connection::attach(const char* data, size_t size, std::shared_ptr<const void> keep) {
  CONVEYOR_ASSERT(payload_left_ == 0);
  payload_ = data;
  payload_left_ = size;
  keep_ = std::move(keep);
}

bool Connection::flush() {
  while (waiting() != 0) {
    iovec parts[2] = {{out_.data() + out_at_, out_.size() - out_at_}, {const_cast<char*>(payload_), payload_left_}};
    msghdr message = {};
    message.msg_iov = parts[0].iov_len != 0 ? parts : parts + 1;
    message.msg_iovlen = (parts[0].iov_len != 0) + (payload_left_ != 0);
    const ssize_t n = ::sendmsg(fd_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == ENOBUFS) return false;
      broken("sending");
    }
    sent += uint64_t(n);
    const size_t head = std::min(size_t(n), parts[0].iov_len), rest = size_t(n) - head;
    out_at_ += head;
    payload_ += rest;
    payload_left_ -= rest;
    if (payload_left_ == 0) keep_.reset();
    if (out_at_ == out_.size()) {
      out_.clear();
      out_at_ = 0;
    }
  }
  return true;
}

size_t Connection::receive(char* to, size_t size, bool& more) {
  if (in_from_ == in_to_) {
    in_from_ = in_to_ = 0;
  } else if (in_to_ == in_size_ || in_from_ > in_size_ / 2) {
    std::memmove(in_.get(), in_.get() + in_from_, in_to_ - in_from_);
    in_to_ -= in_from_;
    in_from_ = 0;
  }
  iovec parts[2] = {{to, size}, {in_.get() + in_to_, in_size_ - in_to_}};
  for (;;) {
    const ssize_t n = size != 0 ? ::readv(fd_.get(), parts, 2) : ::read(fd_.get(), parts[1].iov_base, parts[1].iov_len);
    if (n < 0) {
      if (errno == EINTR) continue;
      more = false;
      if (errno == EAGAIN) return 0;
      broken("receiving");
    }
    if (n == 0) throw Broken("the other side has closed the connection");
    received += uint64_t(n);
    more = size_t(n) == size + parts[1].iov_len;
    const size_t there = std::min(size_t(n), size);
    in_to_ += size_t(n) - there;
    return there;
  }
}

void Connection::make_room(size_t size) {
  if (size <= in_size_) return;
  auto larger = std::make_unique_for_overwrite<char[]>(size + kStretch);
  std::memcpy(larger.get(), data(), available());
  in_to_ = available();
  in_from_ = 0;
  in_ = std::move(larger);
  in_size_ = size + kStretch;
}

}  // namespace conveyor::net
