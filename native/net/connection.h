// One connection to another host's pump: a socket that never blocks. What is to be sent is a stretch of bytes and, behind
// it, at most one piece of somebody's memory, which is not copied; what comes is read into a stretch, or straight to where
// a payload belongs. It knows no messages.
#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "../platform.h"

namespace conveyor::net {

// The connection has ended. Another one may follow.
struct Broken : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Connection {
 public:
  // Takes the descriptor: a stream socket, of any family.
  explicit Connection(Fd fd);
  // The other side hears of the end, whoever was forked meanwhile and has a copy of the socket. In a forked child the
  // connection is the parent's, and goes on.
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;
  int fd() const { return fd_.get(); }

  // --- out ---
  void put(const void* data, size_t size) {
    const char* from = static_cast<const char*>(data);
    out_.insert(out_.end(), from, from + size);
  }
  template <class T>
  void put(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    put(&value, sizeof value);
  }
  // Behind all that was put. `keep` keeps it where it is until it is sent. Only where has_payload() is false; and nothing
  // is put until it has gone.
  void attach(const char* data, size_t size, std::shared_ptr<const void> keep);
  bool has_payload() const { return payload_left_ != 0; }
  // What is put behind it now would follow at once.
  size_t waiting() const { return out_.size() - out_at_ + payload_left_; }
  // Send what can be sent: true if nothing is left. Throws Broken.
  bool flush();

  // --- in ---
  // What has come, and was not taken.
  const char* data() const { return in_.get() + in_from_; }
  size_t available() const { return in_to_ - in_from_; }
  void take(size_t size) { in_from_ += size; }
  // Read what is there: first `size` bytes to `to` (none: null), then into the stretch. How many went to `to`, which may
  // be 0. False in `more`: nothing more is there now. Throws Broken at its end.
  size_t receive(char* to, size_t size, bool& more);
  // Have room for a message of `size` bytes in the stretch.
  void make_room(size_t size);

  uint64_t sent = 0, received = 0;  // bytes

 private:
  Fd fd_;
  const uint64_t fork_ = fork_generation.load(std::memory_order_relaxed);
  std::vector<char> out_;
  size_t out_at_ = 0;
  const char* payload_ = nullptr;
  size_t payload_left_ = 0;
  std::shared_ptr<const void> keep_;
  std::unique_ptr<char[]> in_;
  size_t in_size_, in_from_ = 0, in_to_ = 0;
};

}  // namespace conveyor::net
