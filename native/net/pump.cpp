#include "pump.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <sys/epoll.h>
#include <sys/random.h>

namespace conveyor::net {

uint64_t random_number() {
  uint64_t number = 0;
  while (::getrandom(&number, sizeof number, 0) != ssize_t(sizeof number)) {
  }
  return number;
}

HostPump::HostPump(std::shared_ptr<ProcessTable> process_table, uint32_t host, uint64_t window_ns, uint64_t spin_ns)
    : process_table_(std::move(process_table)), self_(host), window_ns_(window_ns), spin_ns_(spin_ns), instance_(random_number() | 1), notice_(event_fd()), wake_(event_fd()),
      epoll_(own(::epoll_create1(EPOLL_CLOEXEC))), returned_(std::make_shared<const Fd>(event_fd())), proxies_(process_table_), deaths_seen_(process_table_->header()->deaths.load()) {
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
    abandon(std::move(by_doorbell_));
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
  const Proxy* const proxy = death.slot < process_table_->slots() ? proxies_.find(death.slot) : nullptr;
  if (proxy == nullptr || proxy->host != host || proxy->incarnation != death.incarnation) return;
  process_table_->slot(death.slot)->status.signal.store(death.signal, std::memory_order_relaxed);
  process_table_->announce_death(death.slot);
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
  const auto found = by_doorbell_.find({proxy.slot, bit});
  bool any = false;
  if (found != by_doorbell_.end())
    for (Mirror* mirror : found->second) {
      // The slot's process may have come back on another host than it was on when that segment was laid.
      if (!mirror->is_on(proxy.host)) continue;
      to.look(*mirror);
      any = true;
    }
  if (!any && to.state() != Peer::State::kLost) to.notify(proxy.slot, proxy.incarnation, bit);
  if (bit != kAttentionBit) return;
  // It may be for anything, cancelled calls among it.
  for (Mirror* mirror : mirrors_of(proxy.host)) to.look(*mirror);
}

void HostPump::see_deaths() {
  const uint32_t deaths = process_table_->header()->deaths.load(std::memory_order_seq_cst);
  if (deaths == deaths_seen_) return;
  deaths_seen_ = deaths;
  std::vector<Death> all;
  for (uint32_t i = 0, n = process_table_->used(); i < n; ++i) {
    const ProcessTableSlot* slot = process_table_->slot(i);
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
    if (p.host == peer.host) process_table_->announce_death(p.slot);
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
      drain_event(returned_->get());
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
    if (peer.has_handshake() && !known.has_handshake) note(Event::kConnected, host);
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
    known.has_handshake = peer.has_handshake();
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

std::vector<Due> HostPump::due() {
  std::vector<Due> due;
  call([&] {
    for (const auto& [id, mirror] : mirrors_)
      for (const uint32_t host : mirror->hosts())
        for (OutRing* ring : mirror->out(host))
          if (const uint64_t frames = ring->due(); frames != 0) due.push_back({host, id, ring->index, frames});
  });
  return due;
}

bool HostPump::has(uint32_t host, const std::vector<Due>& frames) {
  bool all = true;
  call([&] {
    for (const Due& one : frames) {
      const Mirror* const found = mirror(one.segment);
      all = all && (found == nullptr || found->has(host, one.ring, one.frames));
    }
  });
  return all;
}

void HostPump::tell_when_come(uint32_t host, std::vector<Due> frames, uint64_t number) {
  Awaited one{host, std::move(frames), {number}};
  call([&] {
    peer(host);
    awaited_.push_back(std::move(one));  // the turn that obeys looks at it, after what has come
  });
}

// All that can make a difference (a frame that is published, a segment that is taken down, a host that is lost) happens in
// a turn of this thread, and each turn ends here before the thread may sleep. So nothing is missed, and nobody has to ask
// again. A frame was published before `come_` is written, and that is ordered by the mutex with who fetches it: whoever is
// told so sees the frame in its ring.
void HostPump::see_awaited() noexcept {
  bool any = false;
  for (auto one = awaited_.begin(); one != awaited_.end();) {
    // What is here stays so: only the last is asked for, until it has come.
    auto& frames = one->frames;
    const auto is_here = [&](const Due& due) {
      const Mirror* const found = mirror(due.segment);
      return found == nullptr || found->has(one->host, due.ring, due.frames);
    };
    while (!frames.empty() && is_here(frames.back())) frames.pop_back();
    if (!frames.empty() && peers_.at(one->host).peer->state() != Peer::State::kLost) {
      ++one;
      continue;
    }
    std::lock_guard lock(mutex_);
    come_.splice(come_.end(), one->number);
    one = awaited_.erase(one);
    any = true;
  }
  if (any) write_event(notice_.get());
}

std::list<uint64_t> HostPump::come() {
  std::lock_guard lock(mutex_);
  return std::exchange(come_, {});
}

void HostPump::untold(std::list<uint64_t>&& come) noexcept {
  {
    std::lock_guard lock(mutex_);
    come_.splice(come_.begin(), come);
  }
  write_event(notice_.get());
}

void HostPump::check_there() const {
  if (failed_[0] != '\0') throw std::system_error(ESHUTDOWN, std::generic_category(), std::string("the pump has given all hosts up: ") + failed_);
  if (stop_ || stopped_) throw std::system_error(ESHUTDOWN, std::generic_category(), "the pump was stopped");
}

void HostPump::take_away(const std::function<void()>& what) {
  try {
    call(what);
  } catch (const std::system_error&) {
    std::lock_guard lock(mutex_);
    if (failed_[0] == '\0') throw;
  }
}

void HostPump::call(const std::function<void()>& what) {
  if (fork_ != fork_generation.load(std::memory_order_relaxed)) throw std::system_error(EPERM, std::generic_category(), "a pump belongs to the process that this one was forked from");
  std::exception_ptr raised;
  bool over = false;
  std::unique_lock<ForkMutex> lock(mutex_);
  check_there();
  orders_.push_back([&] {
    try {
      what();
    } catch (...) {
      raised = std::current_exception();
    }
    std::lock_guard told(mutex_);
    over = true;
  });
  ordered_.store(true, std::memory_order_release);
  write_event(wake_.get());
  done_.wait(lock, [&] { return over || stopped_; });
  if (!over) check_there();
  if (raised) std::rethrow_exception(raised);
}

bool HostPump::obey() {
  if (!ordered_.load(std::memory_order_acquire)) return false;
  drain_event(wake_.get());
  std::unique_lock<ForkMutex> lock(mutex_);
  ordered_.store(false, std::memory_order_relaxed);
  const std::vector<std::function<void()>> orders = std::exchange(orders_, {});
  lock.unlock();
  for (const auto& order : orders) order();
  done_.notify_all();
  return true;
}

void HostPump::add_proxy(uint32_t slot, uint32_t incarnation, uint32_t host, const std::string& name, std::shared_ptr<Arena> arena) {
  call([&] {
    if (host == self_ || host >= kMostHosts) throw std::system_error(EINVAL, std::generic_category(), "host of a proxy");
    peer(host);
    proxies_.add(slot, incarnation, host, name, std::move(arena));
  });
}

void HostPump::remove_proxy(uint32_t slot) {
  take_away([&] { proxies_.remove(slot); });
}

void HostPump::mirror(uint64_t id, std::shared_ptr<Segment> segment, std::vector<RingSpec> rings, std::vector<LimitsSpec> limits) {
  call([&] {
    if (mirrors_.count(id) != 0) throw std::system_error(EEXIST, std::generic_category(), "a segment of this number");
    auto made = std::make_unique<Mirror>(id, segment, process_table_, rings, limits, self_, static_cast<Whereabouts&>(*this));
    for (const uint32_t host : made->hosts()) peer(host);
    Mirror& mirror = *made;
    try {
      for (const Mirror::Doorbell& doorbell : mirror.doorbells()) by_doorbell_[{doorbell.target.slot, doorbell.target.bit}].insert(&mirror);
      mirrors_[id] = std::move(made);
      tell_all(mirror);
    } catch (...) {  // there is no memory for it
      leave(mirror);
      throw;
    }
  });
}

void HostPump::leave(Mirror& mirror) noexcept {
  for (const uint32_t host : mirror.hosts()) peer(host).close(mirror);
  for (auto at = by_doorbell_.begin(); at != by_doorbell_.end();) {
    at->second.erase(&mirror);
    at = at->second.empty() ? by_doorbell_.erase(at) : std::next(at);
  }
  mirrors_.erase(uint64_t(mirror.id));
}

void HostPump::unmirror(uint64_t id) {
  take_away([&] {
    const auto found = mirrors_.find(id);
    if (found == mirrors_.end()) return;
    leave(*found->second);
  });
}

void HostPump::connect(Fd fd, uint32_t host) {
  call([&] {
    Peer& to = peer(host);
    to.connect(std::move(fd));
    watch(to);
    tick_by(now_ns());
  });
}

void HostPump::disconnect(uint32_t host, const std::string& reason) {
  take_away([&] { peer(host).drop(reason); });
}

void HostPump::give_up(uint32_t host, const std::string& reason) {
  take_away([&] {
    Peer& given = peer(host);
    given.lose(reason);
    bury(given);  // at once: who has given it up counts on its processes' being dead
  });
}

std::list<Event> HostPump::events() {
  drain_event(notice_.get());
  std::lock_guard lock(mutex_);
  for (uint32_t host = 0; given_up_.any() && host < kMostHosts; ++host) {
    if (!given_up_.test(host)) continue;
    events_.push_back({Event::kLost, host, failed_});
    given_up_.reset(host);
  }
  return std::exchange(events_, {});
}

std::list<Left> HostPump::left() {
  std::lock_guard lock(mutex_);
  return std::exchange(left_, {});
}

void HostPump::untold(std::list<Event>&& events) noexcept {
  {
    std::lock_guard lock(mutex_);
    events_.splice(events_.begin(), events);
  }
  write_event(notice_.get());
}

void HostPump::untold(std::list<Left>&& left) noexcept {
  {
    std::lock_guard lock(mutex_);
    left_.splice(left_.begin(), left);
  }
  write_event(notice_.get());
}

void HostPump::fail(const char* why) noexcept {
  for (auto& [host, known] : peers_) known.peer->lose(why);
  {
    std::lock_guard lock(mutex_);
    std::snprintf(failed_, sizeof failed_, "%s", why[0] != '\0' ? why : "an error without words");
    for (const auto& [host, known] : peers_)
      if (known.state != Peer::State::kLost) given_up_.set(host);
  }
  write_event(notice_.get());
}

PeerCounts HostPump::counts(uint32_t host) {
  PeerCounts counts;
  call([&] { counts = peer(host).counts(); });
  return counts;
}

bool HostPump::connected(uint32_t host) {
  bool is = false;
  call([&] { is = peer(host).has_handshake(); });
  return is;
}

uint64_t HostPump::overslept(uint64_t within_ns) {
  uint64_t ns = 0;
  call([&] {
    const uint64_t now = now_ns();
    if (late_at_ != 0 && now - late_at_ < within_ns) ns = late_ns_;
    if (next_tick_ != 0 && now > next_tick_) ns = std::max(ns, now - next_tick_);  // it has just woken
  });
  return ns;
}

std::vector<ClockSample> HostPump::ask_clock(uint32_t host, uint32_t times, uint64_t timeout_ns) {
  uint64_t answers = 0;
  call([&] { answers = peer(host).ask_clock(times); });
  {
    std::unique_lock<ForkMutex> lock(mutex_);
    done_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), [&] { return clock_answers_[host] >= answers || stopped_; });
  }
  std::vector<ClockSample> samples;
  call([&] {
    const Peer& of = peer(host);
    const auto& all = of.clock_samples();
    // Those of this question; others may have asked, too.
    const uint64_t late = of.clock_answers() - std::min(of.clock_answers(), answers - times);
    samples.assign(all.end() - std::ptrdiff_t(std::min<uint64_t>(all.size(), late)), all.end());
  });
  return samples;
}

}  // namespace conveyor::net
