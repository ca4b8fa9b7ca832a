// Which frames are on their way between two hosts. Whoever looks for waits on several of them has to know that: a frame
// on its way is published where it comes from, and not seen where it is waited for.
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

}  // namespace conveyor::net
