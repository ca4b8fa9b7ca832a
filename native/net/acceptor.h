// The thread that accepts connections of other hosts and reads their first message. It never takes the GIL. Whoever
// does not know the session's token gets no further, and costs the process nothing else.
#pragma once

#include <array>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "../platform.h"

namespace conveyor::net {

// The first message of the side that dials: magic, nonce, HMAC-SHA256 of both by the token. The answer is one byte.
constexpr char kAdmissionMagic[9] = "conveyor";
constexpr size_t kNonceBytes = 32, kProofBytes = 32, kAdmissionBytes = 8 + kNonceBytes + kProofBytes;
constexpr char kAdmitted = 1, kNotAdmitted = 0;

struct AcceptorLimits {
  uint64_t patience_ns = 5'000'000'000;    // for the message
  uint64_t hurried_ns = 100'000'000;       // for it, of an address that has used up its rate
  double rate = 64, burst = 128;           // connections a second from one address, and at once
  size_t most_pending = 256, most_ready = 64;
  uint64_t first_pause_ns = 10'000'000, longest_pause_ns = 500'000'000;  // where the system lets nobody be accepted
};

class Acceptor {
 public:
  // `listener` listens already.
  Acceptor(Fd listener, std::string token, AcceptorLimits limits = {});
  ~Acceptor();
  Acceptor(const Acceptor&) = delete;
  Acceptor& operator=(const Acceptor&) = delete;

  int ready_fd() const { return ready_fd_.get(); }  // readable when there is something to take
  std::vector<Fd> take();                           // connections that have been admitted; they block
  void stop();                                      // drops all others; idempotent

  struct Counts {
    uint64_t strangers = 0, dropped = 0;  // who did not prove himself; who was pushed out, or could not be accepted
  };
  Counts counts() const;
  std::vector<std::string> reasons();  // why those that came last were strangers, since the last call

 private:
  using Address = std::array<uint8_t, 16>;
  struct Pending {
    Fd fd;
    Address address;
    uint64_t deadline;
    size_t have = 0;
    char message[kAdmissionBytes];
  };
  struct Bucket {
    double tokens;
    uint64_t when;
  };
  using Pendings = std::map<uint64_t, Pending>;  // by number, the oldest first

  void run();
  void step();
  bool accept_one();
  bool turn_away();
  bool spend(const Address& address, uint64_t now);
  void make_room();
  void hear(Pendings::iterator one);
  void admit(Pendings::iterator one);
  void note(const std::string& why);
  void drop(Pendings::iterator one, const char* why);
  void watch_listener(bool on);

  Fd listener_, ready_fd_, wake_, epoll_;
  Fd spare_;  // for the moment when the process has no other descriptor
  const std::string token_;
  const AcceptorLimits limits_;
  const uint64_t fork_ = fork_generation.load(std::memory_order_relaxed);

  // The thread's.
  Pendings pending_;
  uint64_t next_ = 2;  // 0 and 1 are the listener and `wake_` in the epoll instance
  std::map<Address, Bucket> buckets_;
  uint64_t rests_until_ = 0, pause_ns_;

  mutable std::mutex mutex_;
  std::deque<Fd> ready_;
  Counts counts_;
  std::deque<std::string> reasons_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace conveyor::net
