#include "inbox.h"

#include <algorithm>
#include <bit>

namespace conveyor {

bool Inbox::wait(uint32_t seen, uint64_t deadline) {
  const uint64_t start = now_ns();
  if (waiter_.spin(seen, start)) return true;
  const bool moved = waiter_.park(seen, deadline);
  waiter_.learn_parked(start);
  return moved;
}

bool Inbox::poll_once(uint64_t end, const sigset_t& blocked) {
  timespec left;
  if (end != UINT64_MAX) {
    const uint64_t now = now_ns();
    left = to_timespec(end > now ? end - now : 0);
  }
  pollfd p[2] = {{eventfd_.get(), POLLIN, 0}, {main_relay_.get(), POLLIN, 0}};
  const int n = ::ppoll(p, 2, end != UINT64_MAX ? &left : nullptr, &blocked);
  if (n == 0) return true;
  if (n > 0 && ((p[0].revents | p[1].revents) & POLLNVAL) != 0) {
    descriptor_lost();
    lost_ = true;
  }
  if (n > 0 && p[1].revents != 0) drain_event(main_relay_.get());
  if (n > 0 && p[0].revents != 0)
    clear_event(main_relay_.get());
  else
    disarm(main_relay_.get());
  return false;
}

void Inbox::drain_event(int fd) {
  uint64_t n;
  while (::read(fd, &n, sizeof n) < 0 && errno == EINTR) {
  }
}

void Inbox::set_awake(int own) {
  bool asleep = false;
  for (Sleeper& s : sleepers_) {
    if (s.relay == own) s.asleep = false;
    asleep |= s.asleep;
  }
  if (!asleep && !inherited()) waiter_.disarm_event();
}

bool Inbox::arm(uint32_t seen, int own) {
  if (inherited()) return true;
  {
    std::lock_guard lock(sleepers_mutex_);
    const auto me = std::ranges::find(sleepers_, own, &Sleeper::relay);
    CONVEYOR_ASSERT(me != sleepers_.end());
    // Before the flag: from now on nobody lowers it, and who takes an event down that was written for us
    // finds us here and wakes us.
    me->asleep = true;
    if (waiter_.arm_event(seen)) return true;
  }
  disarm(own);
  return false;
}

void Inbox::disarm(int own) {
  std::lock_guard lock(sleepers_mutex_);
  set_awake(own);
  close_unused();
}

void Inbox::clear_event(int own) {
  if (inherited()) return;
  std::lock_guard lock(sleepers_mutex_);
  // The flag before the event: a notifier that finds it down has moved the count, and the caller looks at
  // that again. (Were it the other way round, an event would be left for the next sleep, no more.)
  set_awake(own);
  if (eventfd_.get() >= 0) drain_event(eventfd_.get());
  for (const Sleeper& s : sleepers_)
    if (s.asleep) write_event(s.relay);
  close_unused();
}

void Inbox::close_fds() {
  std::lock_guard lock(sleepers_mutex_);
  closing_ = true;
  close_unused();
}

void Inbox::close_unused() {
  if (!closing_ || sleepers_.size() > 1 || sleepers_.front().asleep) return;
  eventfd_.reset();
  main_relay_.reset();
  sleepers_.front().relay = -1;  // the number may be another's soon
}

void Inbox::add_relay(int fd) {
  std::lock_guard lock(sleepers_mutex_);
  sleepers_.push_back({fd, false});
}

void Inbox::remove_relay(int fd) {
  std::lock_guard lock(sleepers_mutex_);
  set_awake(fd);
  std::erase_if(sleepers_, [fd](const Sleeper& s) { return s.relay == fd; });
  close_unused();
}

int Inbox::poll() {
  came_back();
  // A whole sweep is served before the next one is taken, so that a busy channel starves no other.
  for (int sweep = 0; sweep < 2; ++sweep) {
    for (size_t i = 0; i < kDoorbellWords && pending_words_ != 0; ++i) {
      if (pending_[i] == 0) continue;
      const int bit = std::countr_zero(pending_[i]);
      pending_[i] &= pending_[i] - 1;
      if (pending_[i] == 0) --pending_words_;
      return int(i * 64) + bit;
    }
    for (size_t i = 0; i < kDoorbellWords; ++i) {
      if (self_->doorbell.ready[i].load(std::memory_order_relaxed) == 0) continue;
      // Acquire pairs with the notifier's release: what it published is visible.
      pending_[i] = self_->doorbell.ready[i].exchange(0, std::memory_order_acquire);
      if (pending_[i] != 0) ++pending_words_;
    }
    if (pending_words_ == 0) return -1;
  }
  return -1;
}

}  // namespace conveyor
