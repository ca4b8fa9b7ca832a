// How the clocks of other hosts are asked for, by the pump.
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
