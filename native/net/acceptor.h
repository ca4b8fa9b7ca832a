// The thread that accepts connections of other hosts, and does the handshake with them (cluster/handshake.py). It never
// takes the GIL, so a program that keeps the interpreter busy keeps no host out. Whoever does not know the session's token
// gets no further, and costs the process nothing else.
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

class HostPump;

// The first message of the side that dials: magic, nonce, HMAC-SHA256 of both by the token. The answer is one byte.
constexpr char kAdmissionMagic[9] = "conveyor";
constexpr size_t kNonceBytes = 32, kProofBytes = 32, kAdmissionBytes = 8 + kNonceBytes + kProofBytes;
constexpr char kAdmitted = 1, kNotAdmitted = 0;
// Then each side says who it is, in the network's byte order: magic, protocol, wire, host, Python, purpose, four zeros,
// version, nonce. The side that dials proves itself by HMAC-SHA256 over both; the other one does, with a verdict.
constexpr size_t kIdentityBytes = 80, kIdentityHost = 12, kIdentityPurpose = 18;
constexpr uint16_t kForPumps = 0;  // of the purposes, the one that this side looks at
enum class Verdict : char { kFine = 1, kOtherVersion, kNotWanted };

struct AcceptorLimits {
  uint64_t patience_ns = 5'000'000'000;    // for the message
  uint64_t hurried_ns = 100'000'000;       // for it, of an address that has used up its rate
  double rate = 64, burst = 128;           // connections a second from one address, and at once
  size_t most_pending = 256, most_admitted = 64, most_ready = 64;
  uint64_t first_pause_ns = 10'000'000, longest_pause_ns = 500'000'000;  // where the system lets nobody be accepted
};

// A connection that is Python's to go on with: the other side has proved itself. Without an identity it is only admitted.
struct Arrival {
  Fd fd;
  std::string identity;
  Verdict verdict = Verdict::kFine;
};

class Acceptor {
 public:
  // `listener` listens already. `own`: this side's identity, whose nonce is replaced each time. `tls`: Python goes on with
  // whoever is admitted.
  Acceptor(Fd listener, std::string token, std::string own, bool tls, AcceptorLimits limits = {});
  ~Acceptor();
  Acceptor(const Acceptor&) = delete;
  Acceptor& operator=(const Acceptor&) = delete;

  int ready_fd() const { return ready_fd_.get(); }  // readable when there is something to take
  std::vector<Arrival> take();                      // the connections block
  // Gives connections for it to `pump`, which lives longer. Before that they are Python's.
  void give_to(HostPump& pump) { pump_.store(&pump, std::memory_order_release); }
  // Does the handshake over `fd`, which stands for one that was admitted. `binding`: of its TLS.
  void introduce(Fd fd, std::string binding);
  void stop();  // drops all others; idempotent

  struct Counts {
    uint64_t strangers = 0, dropped = 0;  // who did not prove himself; who was pushed out, or could not be accepted
    uint64_t let_in = 0;
  };
  Counts counts() const;
  std::vector<std::string> reasons();  // why those that came last were strangers, since the last call

 private:
  using Address = std::array<uint8_t, 16>;
  enum class Awaited { kAdmission, kIdentity, kProof };
  struct Pending {
    Fd fd;
    Address address;
    uint64_t deadline;
    std::string binding = {}, said = {};  // what was said: the other side's identity and this one's
    Awaited awaited = Awaited::kAdmission;
    size_t have = 0;
    char message[kIdentityBytes] = {};  // the longest
  };
  struct Introduced {
    Fd fd;
    std::string binding;
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
  void make_room(bool admitted);
  uint64_t add(Pending one);
  void begin_introduced();
  void hear(Pendings::iterator one);
  bool say(Pendings::iterator one, std::string_view text);
  bool has_room();
  void admit(Pendings::iterator one);
  void identify(Pendings::iterator one);
  void let_in(Pendings::iterator one);
  bool is_for_pump(std::string_view identity) const;
  Verdict verdict_on(std::string_view identity) const;
  std::string proof(std::string_view role, const Pending& one, std::string_view more) const;
  void hand_over(Pendings::iterator one, std::string identity, Verdict verdict);
  void note(const std::string& why);
  void drop(Pendings::iterator one, const char* why);
  void watch_listener(bool on);

  Fd listener_, ready_fd_, wake_, epoll_;
  Fd spare_;  // for the moment when the process has no other descriptor
  const std::string token_, own_;
  const bool tls_;
  const AcceptorLimits limits_;
  const uint64_t fork_ = fork_generation.load(std::memory_order_relaxed);

  // The thread's.
  Pendings pending_;
  uint64_t next_ = 2;  // 0 and 1 are the listener and `wake_` in the epoll instance
  std::map<Address, Bucket> buckets_;
  uint64_t rests_until_ = 0, pause_ns_;

  mutable std::mutex mutex_;
  std::deque<Arrival> ready_;
  std::deque<Introduced> introduced_;
  Counts counts_;
  std::deque<std::string> reasons_;
  std::atomic<HostPump*> pump_{nullptr};
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace conveyor::net
