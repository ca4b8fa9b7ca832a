// Which frames are on their way between two hosts. Whoever looks for waits on several of them has to know that: a frame
// on its way is published where it comes from, and not seen where it is waited for.
#include "eventfd.h"
#include "pump.h"

namespace conveyor::net {

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

}  // namespace conveyor::net
