#include "pump.h"

#include <sys/epoll.h>
#include <sys/random.h>

#include <algorithm>

#include "../signals_blocked.h"
#include "eventfd.h"

namespace conveyor::net {

namespace {

uint64_t random_number() {
  uint64_t number = 0;
  while (::getrandom(&number, sizeof number, 0) != ssize_t(sizeof number)) {
  }
  return number | 1;
}

}  // namespace

HostPump::HostPump(std::shared_ptr<Board> board, uint32_t host, uint64_t window_ns, uint64_t spin_ns)
    : board_(std::move(board)), self_(host), window_ns_(window_ns), spin_ns_(spin_ns), instance_(random_number()), notice_(event_fd()), wake_(event_fd()),
      epoll_(own(::epoll_create1(EPOLL_CLOEXEC))), returned_(std::make_shared<const Fd>(event_fd())), proxies_(board_), deaths_seen_(board_->header()->deaths.load()) {
  if (host >= kMostHosts) throw std::system_error(EINVAL, std::generic_category(), "host");
  if (epoll_.get() < 0) throw_errno("epoll");
  for (const int fd : {wake_.get(), proxies_.eventfd(), returned_->get()}) {
    epoll_event event = {};
    event.events = EPOLLIN;
    event.data.fd = fd;
    if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) throw_errno("epoll");
  }
  const SignalsBlocked blocked;
  thread_ = std::thread([this] { run(); });
}

HostPump::~HostPump() { stop(); }

void HostPump::stop() {
  if (!thread_.joinable()) return;
  if (fork_ != fork_generation.load(std::memory_order_relaxed)) {
    abandon(std::move(thread_));
    // Its parent's pump goes on reading from their rings; and it may have been changing any of these when it forked.
    abandon(std::move(mirrors_));
    abandon(std::move(by_bell_));
    abandon(std::move(peers_));
    abandon(std::move(awaited_));
    return;
  }
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  ordered_.store(true, std::memory_order_release);
  write_event(wake_.get());
  thread_.join();
}

Unclaimed HostPump::unclaimed() {
  return [this](const std::string& header, uint32_t slot, uint32_t incarnation) {
    {
      std::lock_guard lock(mutex_);
      left_.push_back({header, slot, incarnation});
    }
    write_event(notice_.get());
  };
}

void HostPump::note(Event::Kind kind, uint32_t host, const std::string& reason) {
  {
    std::lock_guard lock(mutex_);
    events_.push_back({kind, host, reason});
  }
  write_event(notice_.get());
}

// --- what peers ask ---

uint32_t HostPump::host_of(uint32_t slot) const {
  const Proxy* const proxy = proxies_.find(slot);
  return proxy == nullptr ? self_ : proxy->host;
}

std::shared_ptr<Arena> HostPump::arena_of(uint32_t slot) const { return proxies_.find(slot)->arena; }

Mirror* HostPump::mirror(uint64_t id) {
  const auto found = mirrors_.find(id);
  return found == mirrors_.end() ? nullptr : found->second.get();
}

void HostPump::reconnect(uint32_t host) noexcept {
  for (const auto& [id, mirror] : mirrors_)
    if (mirror->is_on(host)) mirror->reconnected(host);
}

std::vector<Mirror*> HostPump::mirrors_of(uint32_t host) {
  std::vector<Mirror*> found;
  for (const auto& [id, mirror] : mirrors_)
    if (mirror->is_on(host)) found.push_back(mirror.get());
  return found;
}

void HostPump::tell_all(Mirror& mirror) {
  for (const uint32_t host : mirror.hosts()) peer(host).look(mirror);
}

void HostPump::died(uint32_t host, const Death& death) {
  const Proxy* const proxy = death.slot < board_->slots() ? proxies_.find(death.slot) : nullptr;
  if (proxy == nullptr || proxy->host != host || proxy->incarnation != death.incarnation) return;
  board_->slot(death.slot)->status.signal.store(death.signal, std::memory_order_relaxed);
  board_->announce_death(death.slot);
}

Peer& HostPump::peer(uint32_t host) {
  if (host == self_ || host >= kMostHosts) throw std::system_error(EINVAL, std::generic_category(), "host");
  Known& known = peers_[host];
  if (!known.peer) known.peer = std::make_unique<Peer>(static_cast<Hub&>(*this), host, window_ns_, returned_);
  return *known.peer;
}

// --- the thread ---

void HostPump::rung(const Proxy& proxy, uint32_t bit) {
  Peer& to = peer(proxy.host);
  const auto found = by_bell_.find({proxy.slot, bit});
  bool any = false;
  if (found != by_bell_.end())
    for (Mirror* mirror : found->second) {
      // The slot's process may have come back on another host than it was on when that segment was laid.
      if (!mirror->is_on(proxy.host)) continue;
      to.look(*mirror);
      any = true;
    }
  if (!any && to.state() != Peer::State::kLost) to.ring(proxy.slot, proxy.incarnation, bit);
  if (bit != kAttentionBit) return;
  // It may be for anything, cancelled calls among it.
  for (Mirror* mirror : mirrors_of(proxy.host)) to.look(*mirror);
}

void HostPump::see_deaths() {
  const uint32_t deaths = board_->header()->deaths.load(std::memory_order_seq_cst);
  if (deaths == deaths_seen_) return;
  deaths_seen_ = deaths;
  std::vector<Death> all;
  for (uint32_t i = 0, n = board_->used(); i < n; ++i) {
    const BoardSlot* slot = board_->slot(i);
    if (slot->condition.load(std::memory_order_acquire) != Condition::kDead || proxies_.find(i) != nullptr) continue;
    const Death death = {i, slot->incarnation.load(std::memory_order_relaxed), slot->status.signal.load(std::memory_order_relaxed), 0};
    all.push_back(death);
    const bool known = std::ranges::any_of(deaths_, [&](const Death& d) { return d.slot == death.slot && d.incarnation == death.incarnation; });
    if (known) continue;
    for (auto& [host, p] : peers_) p.peer->tell_death(death);
  }
  deaths_ = std::move(all);
}

void HostPump::watch(Peer& peer) {
  Known& known = peers_[peer.host];
  const bool for_room = peer.blocked();
  if (peer.fd() < 0 || (known.watched == peer.fd() && known.for_room == for_room)) return;
  epoll_event event = {};
  event.events = EPOLLIN | (for_room ? EPOLLOUT : 0u);
  event.data.fd = peer.fd();
  if (::epoll_ctl(epoll_.get(), known.watched == peer.fd() ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, peer.fd(), &event) != 0) peer.drop("it cannot be watched");
  known.watched = peer.fd();
  known.for_room = for_room;
}

void HostPump::unwatch(uint32_t host) noexcept {
  Known& known = peers_.at(host);
  if (known.watched < 0) return;
  // Closing it would not be enough where a forked child has a copy of the socket: its end would be reported for ever, under
  // a number that nobody here has, or somebody else.
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, known.watched, nullptr);
  known.watched = -1;
}

void HostPump::bury(Peer& peer) {
  // The others learn of it from their own connections.
  for (const Proxy& p : proxies_.all())
    if (p.host == peer.host) board_->announce_death(p.slot);
}

bool HostPump::turn() {
  bool any = obey();
  any |= proxies_.take([this](const Proxy& proxy, uint32_t bit) { rung(proxy, bit); });
  see_deaths();
  epoll_event events[32];
  const int n = ::epoll_wait(epoll_.get(), events, 32, 0);
  for (int i = 0; i < n; ++i) {
    if (events[i].data.fd == proxies_.eventfd()) proxies_.drain();
    if (events[i].data.fd == returned_->get()) {
      drain(returned_->get());
      for (auto& [host, known] : peers_) known.peer->look_at_returning();
    }
    for (auto& [host, known] : peers_)
      if (known.peer->fd() == events[i].data.fd && (events[i].events & ~uint32_t(EPOLLOUT)) != 0) any |= known.peer->receive();
  }
  // What was published for processes here may have been answered meanwhile: see to that first. All that this turn finds due
  // is due by this time: where the process is stopped behind it, the next turn sees that.
  const uint64_t now = now_ns();
  const bool due = next_tick_ != 0 && now >= next_tick_;
  if (due) {
    // Who has slept too long himself cannot say that the others have. What has come meanwhile was read just now.
    const uint64_t late = now - next_tick_;
    if (late > window_ns_ / 8) {
      for (auto& [host, known] : peers_) known.peer->excuse(late);
      late_ns_ = late;
      late_at_ = now;
    }
    next_tick_ = 0;
  }
  for (auto& [host, known] : peers_) {
    Peer& peer = *known.peer;
    any |= peer.send();
    if (due)
      if (const uint64_t next = peer.tick(now); next != 0) tick_by(next);
    watch(peer);
    if (peer.greeted() && !known.greeted) note(Event::kConnected, host);
    // A connection may have come and broken within this turn: who was to connect has done so, and is told to do it again.
    const uint64_t connections = peer.connections();
    if (peer.state() != known.state || (peer.state() == Peer::State::kDown && connections != known.connections)) {
      if (peer.state() == Peer::State::kDown) {
        tick_by(now);
        note(Event::kDisconnected, host, peer.reason());
      }
      if (peer.state() == Peer::State::kLost) {
        bury(peer);
        note(Event::kLost, host, peer.reason());
      }
    }
    if (peer.clock_answers() != known.clock_answers) {
      std::lock_guard lock(mutex_);
      clock_answers_[host] = known.clock_answers = peer.clock_answers();
      done_.notify_all();
    }
    known.greeted = peer.greeted();
    known.state = peer.state();
    known.connections = connections;
  }
  see_awaited();
  return any;
}

void HostPump::sleep() {
  if (!proxies_.arm()) return proxies_.disarm();
  int timeout = -1;
  if (next_tick_ != 0) {
    const uint64_t now = now_ns();
    timeout = next_tick_ <= now ? 0 : int(std::min<uint64_t>((next_tick_ - now) / 1'000'000 + 1, 60'000));
  }
  epoll_event events[8];
  if (!ordered_.load(std::memory_order_acquire)) ::epoll_wait(epoll_.get(), events, 8, timeout);
  proxies_.disarm();
}

void HostPump::run() noexcept {
  try {
    work();
    for (auto& [host, known] : peers_) known.peer->say_bye();
  } catch (const std::bad_alloc&) {
    fail("this process has no memory left for what goes to them, and comes from there");
  } catch (const std::exception& error) {
    fail(error.what());
  }
  while (!proxies_.all().empty()) proxies_.remove(proxies_.all().back().slot);
  peers_.clear();
  mirrors_.clear();
  std::lock_guard lock(mutex_);
  stopped_ = true;
  done_.notify_all();
}

void HostPump::work() {
  uint64_t budget = spin_ns_, idle_since = now_ns();
  for (;;) {
    if (turn()) {
      idle_since = now_ns();
      continue;
    }
    {
      std::lock_guard lock(mutex_);
      if (stop_ && orders_.empty()) break;
    }
    uint64_t now = now_ns();
    if (now - idle_since < budget) {
      ::sched_yield();
      continue;
    }
    sleep();
    // As Waiter does: what comes soon after is worth spinning for next time.
    now = now_ns();
    budget = now - idle_since < 4 * spin_ns_ ? spin_ns_ : std::min(spin_ns_, std::max<uint64_t>(budget / 2, 2'000));
    idle_since = now;
  }
}

}  // namespace conveyor::net
