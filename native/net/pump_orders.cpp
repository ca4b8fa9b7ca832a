// What other threads have the pump do. Each of them waits until its thread has done it.
#include <cstdio>

#include "eventfd.h"
#include "pump.h"

namespace conveyor::net {

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
  drain(wake_.get());
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
    auto made = std::make_unique<Mirror>(id, segment, board_, rings, limits, self_, static_cast<Whereabouts&>(*this));
    for (const uint32_t host : made->hosts()) peer(host);
    Mirror& mirror = *made;
    try {
      for (const Mirror::Bell& bell : mirror.bells()) by_bell_[{bell.target.slot, bell.target.bit}].insert(&mirror);
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
  for (auto at = by_bell_.begin(); at != by_bell_.end();) {
    at->second.erase(&mirror);
    at = at->second.empty() ? by_bell_.erase(at) : std::next(at);
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
  drain(notice_.get());
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

}  // namespace conveyor::net
