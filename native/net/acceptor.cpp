#include "acceptor.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <system_error>

#include "pump.h"
#include "sha256.h"

namespace conveyor::net {

namespace {

constexpr uint64_t kListener = 0, kWake = 1;
constexpr size_t kMostBuckets = 4096, kMostReasons = 32;
constexpr std::string_view kAdmission("conveyor admission\0", 19), kHandshake("conveyor handshake\0", 19);
constexpr char kNoProtocol[] = "something has connected that does not speak Conveyor's protocol";
constexpr char kGone[] = "the other side has gone before it had proved itself";
constexpr char kLate[] = "the other side has not finished its handshake in time";
constexpr char kWrong[] = "somebody who does not know this session's token has connected";

uint32_t number_at(std::string_view identity, size_t at, size_t bytes) {
  uint32_t number = 0;
  for (size_t i = 0; i < bytes; ++i) number = number << 8 | uint8_t(identity[at + i]);
  return number;
}

Fd spare() { return own(::open("/dev/null", O_RDONLY | O_CLOEXEC)); }

// A forked child may have a copy: its end is told to the other side all the same.
void hang_up(Fd fd) { ::shutdown(fd.get(), SHUT_RDWR); }

// Errors that keep one connection from being accepted, and not the next; see accept(2).
bool is_of_one(int error) {
  switch (error) {
    case EINTR: case ECONNABORTED: case EPROTO: case ENETDOWN: case ENOPROTOOPT: case EHOSTDOWN: case ENONET: case EHOSTUNREACH: case EOPNOTSUPP: case ENETUNREACH:
      return true;
    default:
      return false;
  }
}

}  // namespace

Acceptor::Acceptor(Fd listener, std::string token, std::string own, bool tls, AcceptorLimits limits)
    : listener_(std::move(listener)), ready_fd_(event_fd()), wake_(event_fd()), epoll_(conveyor::own(::epoll_create1(EPOLL_CLOEXEC))), spare_(spare()),
      token_(std::move(token)), own_(std::move(own)), tls_(tls), limits_(limits), pause_ns_(limits.first_pause_ns) {
  if (own_.size() != kIdentityBytes) throw std::invalid_argument("an identity has 80 bytes");
  if (epoll_.get() < 0) throw_errno("epoll");
  const int flags = ::fcntl(listener_.get(), F_GETFL);
  if (flags < 0 || ::fcntl(listener_.get(), F_SETFL, flags | O_NONBLOCK) != 0) throw_errno("listener");
  for (const auto& [fd, number] : {std::pair{listener_.get(), kListener}, std::pair{wake_.get(), kWake}}) {
    epoll_event event = {};
    event.events = EPOLLIN;
    event.data.u64 = number;
    if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) throw_errno("epoll");
  }
  const SignalsBlocked blocked;
  thread_ = std::thread([this] { run(); });
}

Acceptor::~Acceptor() { stop(); }

void Acceptor::stop() {
  if (!thread_.joinable()) return;
  if (fork_ != fork_generation.load(std::memory_order_relaxed)) {
    // Its parent's thread may have been changing these when it forked.
    abandon(std::move(thread_));
    abandon(std::move(pending_));
    abandon(std::move(buckets_));
    abandon(std::move(ready_));
    abandon(std::move(introduced_));
    abandon(std::move(reasons_));
    return;
  }
  {
    std::lock_guard lock(mutex_);  // nobody is introduced from now on
    stop_.store(true);
  }
  write_event(wake_.get());
  thread_.join();
  hang_up(std::move(listener_));
  {
    std::lock_guard lock(mutex_);
    for (Arrival& one : ready_) hang_up(std::move(one.fd));
    for (Introduced& one : introduced_) hang_up(std::move(one.fd));
    ready_.clear();
    introduced_.clear();
  }
  write_event(ready_fd_.get());  // whoever waits for more waits no longer
}

std::vector<Arrival> Acceptor::take() {
  drain_event(ready_fd_.get());
  std::vector<Arrival> taken;
  std::lock_guard lock(mutex_);
  taken.reserve(ready_.size());
  for (Arrival& one : ready_) taken.push_back(std::move(one));
  ready_.clear();
  return taken;
}

void Acceptor::introduce(Fd fd, std::string binding) {
  std::unique_lock lock(mutex_);
  if (stop_.load()) {
    lock.unlock();
    return hang_up(std::move(fd));
  }
  introduced_.push_back({std::move(fd), std::move(binding)});
  lock.unlock();
  write_event(wake_.get());
}

Acceptor::Counts Acceptor::counts() const {
  std::lock_guard lock(mutex_);
  return counts_;
}

std::vector<std::string> Acceptor::reasons() {
  std::lock_guard lock(mutex_);
  std::vector<std::string> told(reasons_.begin(), reasons_.end());
  reasons_.clear();
  return told;
}

void Acceptor::run() {
  while (!stop_.load()) {
    try {
      step();
    } catch (const std::bad_alloc&) {  // whoever is dropped for it tries again
      while (!pending_.empty()) drop(pending_.begin(), nullptr);
    }
  }
  while (!pending_.empty()) drop(pending_.begin(), nullptr);
}

void Acceptor::step() {
  uint64_t next = rests_until_ == 0 ? UINT64_MAX : rests_until_;
  for (const auto& [number, one] : pending_) next = std::min(next, one.deadline);
  const uint64_t before = now_ns();
  const int timeout = next == UINT64_MAX ? -1 : next <= before ? 0 : int(std::min<uint64_t>((next - before + 999'999) / 1'000'000, 60'000));
  epoll_event events[64];
  const int count = ::epoll_wait(epoll_.get(), events, 64, timeout);
  const uint64_t now = now_ns();
  for (int i = 0; i < count; ++i) {
    if (events[i].data.u64 == kWake) {
      drain_event(wake_.get());
      begin_introduced();
    } else if (events[i].data.u64 == kListener) {
      // Not until nobody is left: those that have come are heard in between.
      for (int turn = 0; turn < 64 && accept_one(); ++turn) {
      }
    } else if (const auto one = pending_.find(events[i].data.u64); one != pending_.end()) {
      hear(one);
    }
  }
  for (auto one = pending_.begin(); one != pending_.end();) {
    const auto next_one = std::next(one);
    if (one->second.deadline <= now) drop(one, kLate);
    one = next_one;
  }
  if (rests_until_ != 0 && rests_until_ <= now) watch_listener(true);
}

// Whether to go on.
bool Acceptor::accept_one() {
  sockaddr_storage from = {};
  socklen_t size = sizeof from;
  Fd fd = own(::accept4(listener_.get(), reinterpret_cast<sockaddr*>(&from), &size, SOCK_CLOEXEC));
  if (fd.get() < 0) {
    const int error = errno;
    if (error == EAGAIN || error == EWOULDBLOCK) return false;
    if ((error == EMFILE || error == ENFILE) && turn_away()) return true;
    note(std::string("a connection could not be accepted: ") + std::generic_category().message(error));
    if (is_of_one(error)) return true;
    watch_listener(false);
    return false;
  }
  pause_ns_ = limits_.first_pause_ns;
  if (spare_.get() < 0) spare_ = spare();
  Address address = {};
  if (from.ss_family == AF_INET6)
    std::memcpy(address.data(), &reinterpret_cast<const sockaddr_in6&>(from).sin6_addr, 16);
  else
    std::memcpy(address.data(), &reinterpret_cast<const sockaddr_in&>(from).sin_addr, 4);
  const uint64_t now = now_ns();
  const uint64_t patience = spend(address, now) ? limits_.patience_ns : std::min(limits_.patience_ns, limits_.hurried_ns);
  make_room(false);
  const uint64_t number = add({std::move(fd), address, now + patience});
  // A host's message comes right behind its connection.
  if (const auto one = pending_.find(number); one != pending_.end()) hear(one);
  return true;
}

uint64_t Acceptor::add(Pending added) {
  const uint64_t number = next_++;
  const auto one = pending_.emplace(number, std::move(added)).first;
  epoll_event event = {};
  event.events = EPOLLIN;
  event.data.u64 = number;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, one->second.fd.get(), &event) != 0) drop(one, nullptr);
  return number;
}

void Acceptor::begin_introduced() {
  std::deque<Introduced> all;
  {
    std::lock_guard lock(mutex_);
    all.swap(introduced_);
  }
  for (Introduced& one : all) {
    make_room(true);
    add({std::move(one.fd), {}, now_ns() + limits_.patience_ns, std::move(one.binding), {}, Awaited::kIdentity});
  }
}

// Drop who has waited longest by way of the spare descriptor: without one the system would go on telling of it.
bool Acceptor::turn_away() {
  spare_.reset();
  Fd fd = own(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
  const int error = errno;
  const bool came = fd.get() >= 0;
  if (came) {
    hang_up(std::move(fd));
    std::lock_guard lock(mutex_);
    ++counts_.dropped;
  }
  spare_ = spare();
  return came || error == EAGAIN || error == EWOULDBLOCK;  // else another thread was quicker to take the descriptor
}

void Acceptor::watch_listener(bool on) {
  rests_until_ = on ? 0 : now_ns() + pause_ns_;
  if (!on) pause_ns_ = std::min(pause_ns_ + pause_ns_ / 2, limits_.longest_pause_ns);
  epoll_event event = {};
  event.events = on ? uint32_t(EPOLLIN) : 0;
  event.data.u64 = kListener;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, listener_.get(), &event);
}

// A connection from this address: whether it is within the address's rate.
bool Acceptor::spend(const Address& address, uint64_t now) {
  const auto full_at = [&](const Bucket& bucket) { return bucket.tokens + double(now - bucket.when) * 1e-9 * limits_.rate >= limits_.burst; };
  if (buckets_.size() >= kMostBuckets) std::erase_if(buckets_, [&](const auto& one) { return full_at(one.second); });
  if (buckets_.size() >= kMostBuckets) buckets_.clear();
  Bucket& bucket = buckets_.try_emplace(address, Bucket{limits_.burst, now}).first->second;
  bucket.tokens = std::min(bucket.tokens + double(now - bucket.when) * 1e-9 * limits_.rate, limits_.burst);
  bucket.when = now;
  if (bucket.tokens < 1) return false;
  bucket.tokens -= 1;
  return true;
}

// For one more of those that are admitted, or of the others. The oldest of the address that has most goes: a flood pushes
// out its own.
void Acceptor::make_room(bool admitted) {
  const auto is_alike = [&](const Pending& one) { return (one.awaited != Awaited::kAdmission) == admitted; };
  const size_t most = admitted ? limits_.most_admitted : limits_.most_pending;
  if (pending_.size() < most || size_t(std::ranges::count_if(pending_, [&](const auto& one) { return is_alike(one.second); })) < most) return;
  std::map<Address, std::pair<size_t, uint64_t>> by_address;  // how many, and the oldest
  for (const auto& [number, one] : pending_)
    if (is_alike(one)) ++by_address.try_emplace(one.address, 0, number).first->second.first;
  // Of addresses that have as many, the one that has waited longest.
  const auto goes = std::ranges::max_element(by_address, {}, [](const auto& one) { return std::pair(one.second.first, UINT64_MAX - one.second.second); });
  drop(pending_.find(goes->second.second), nullptr);
}

void Acceptor::hear(Pendings::iterator one) {
  Pending& p = one->second;
  const size_t size = p.awaited == Awaited::kAdmission ? kAdmissionBytes : p.awaited == Awaited::kIdentity ? kIdentityBytes : kProofBytes;
  const ssize_t n = ::recv(p.fd.get(), p.message + p.have, size - p.have, MSG_DONTWAIT);  // what follows is not its own
  if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
  if (n <= 0) return drop(one, kGone);
  p.have += size_t(n);
  if (p.awaited != Awaited::kProof && std::memcmp(p.message, kAdmissionMagic, std::min<size_t>(p.have, 8)) != 0) return drop(one, kNoProtocol);
  if (p.have < size) return;
  p.have = 0;
  switch (p.awaited) {
    case Awaited::kAdmission: return admit(one);
    case Awaited::kIdentity: return identify(one);
    case Awaited::kProof: return let_in(one);
  }
}

// Whether it could be said; else the connection is dropped.
bool Acceptor::say(Pendings::iterator one, std::string_view text) {
  if (::send(one->second.fd.get(), text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT) == ssize_t(text.size())) return true;
  drop(one, kGone);
  return false;
}

// For one more that Python is to go on with. Who is dropped for it before it has proved itself tries again.
bool Acceptor::has_room() {
  std::lock_guard lock(mutex_);
  return ready_.size() < limits_.most_ready;
}

void Acceptor::admit(Pendings::iterator one) {
  Pending& p = one->second;
  const std::string_view said(p.message, 8 + kNonceBytes), proved(p.message + said.size(), kProofBytes);
  const bool good = same(view(hmac_sha256(token_, std::string(kAdmission).append(said))), proved);
  if (good && tls_ && !has_room()) return drop(one, nullptr);
  if (good && !tls_) make_room(true);
  const char answer = good ? kAdmitted : kNotAdmitted;
  if (!say(one, {&answer, 1})) return;
  if (!good) return drop(one, kWrong);
  if (tls_) return hand_over(one, {}, Verdict::kFine);
  p.deadline = now_ns() + limits_.patience_ns;
  p.awaited = Awaited::kIdentity;
}

void Acceptor::identify(Pendings::iterator one) {
  Pending& p = one->second;
  const std::string_view identity(p.message, kIdentityBytes);
  if (!is_for_pump(identity) && !has_room()) return drop(one, nullptr);
  p.said.assign(identity).append(own_, 0, kIdentityBytes - kNonceBytes);
  for (size_t i = 0; i < kNonceBytes; i += sizeof(uint64_t)) {
    const uint64_t number = random_number();
    p.said.append(reinterpret_cast<const char*>(&number), sizeof number);
  }
  if (!say(one, std::string_view(p.said).substr(kIdentityBytes))) return;
  p.awaited = Awaited::kProof;
}

void Acceptor::let_in(Pendings::iterator one) {
  Pending& p = one->second;
  if (!same(proof("dials", p, {}), {p.message, kProofBytes})) return drop(one, kWrong);
  const std::string identity = p.said.substr(0, kIdentityBytes);
  const Verdict verdict = verdict_on(identity);
  const char last = char(verdict);
  if (!say(one, proof("listens", p, {&last, 1}) + last)) return;
  hand_over(one, identity, verdict);
}

// Whether it goes on without Python.
bool Acceptor::is_for_pump(std::string_view identity) const {
  return number_at(identity, kIdentityPurpose, 2) == kForPumps && pump_.load(std::memory_order_acquire) != nullptr;
}

Verdict Acceptor::verdict_on(std::string_view identity) const {
  // From the magic's end to the host's number: protocol and wire. Then Python, and what is behind the purpose.
  for (const auto& [from, to] : {std::pair<size_t, size_t>{8, 12}, {16, 18}, {24, kIdentityBytes - kNonceBytes}})
    if (identity.substr(from, to - from) != std::string_view(own_).substr(from, to - from)) return Verdict::kOtherVersion;
  return number_at(identity, kIdentityHost, 4) == number_at(own_, kIdentityHost, 4) ? Verdict::kNotWanted : Verdict::kFine;
}

// Good for these two, this connection and this role alone.
std::string Acceptor::proof(std::string_view role, const Pending& one, std::string_view more) const {
  std::string text = std::string(kHandshake).append(role);
  if (!one.binding.empty()) text.append(" over TLS");
  text.append(1, '\0').append(one.binding).append(one.said).append(more);
  return std::string(view(hmac_sha256(token_, text)));
}

void Acceptor::hand_over(Pendings::iterator one, std::string identity, Verdict verdict) {
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, one->second.fd.get(), nullptr);
  Fd fd = std::move(one->second.fd);
  pending_.erase(one);
  const bool proved = !identity.empty() && verdict == Verdict::kFine;
  if (proved) {
    std::lock_guard lock(mutex_);
    ++counts_.let_in;
  }
  if (proved && is_for_pump(identity)) {
    try {
      pump_.load(std::memory_order_acquire)->connect(dup_cloexec(fd.get()), number_at(identity, kIdentityHost, 4));
    } catch (const std::system_error&) {  // the host was given up, or this one ends
      hang_up(std::move(fd));
    }
    return;
  }
  {
    std::lock_guard lock(mutex_);
    ready_.push_back({std::move(fd), std::move(identity), verdict});
  }
  write_event(ready_fd_.get());
}

// `why`: what was wrong; none: it makes room for another one.
void Acceptor::drop(Pendings::iterator one, const char* why) {
  if (why != nullptr) {
    note(why);
  } else {
    std::lock_guard lock(mutex_);
    ++counts_.dropped;
  }
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, one->second.fd.get(), nullptr);
  hang_up(std::move(one->second.fd));
  pending_.erase(one);
}

void Acceptor::note(const std::string& why) {
  std::lock_guard lock(mutex_);
  ++counts_.strangers;
  reasons_.push_back(why);
  if (reasons_.size() > kMostReasons) reasons_.pop_front();
}

}  // namespace conveyor::net
