// What the pump is asked: of connections, of itself, and of the clocks of other hosts.
#include <algorithm>
#include <chrono>

#include "pump.h"

namespace conveyor::net {

PeerCounts HostPump::counts(uint32_t host) {
  PeerCounts counts;
  call([&] { counts = peer(host).counts(); });
  return counts;
}

bool HostPump::connected(uint32_t host) {
  bool is = false;
  call([&] { is = peer(host).greeted(); });
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
