// Two hosts with one segment.
#pragma once

#include "net_setup.h"

namespace conveyor {

using Shapes = std::vector<Host::Shape>;
constexpr uint64_t kId = 7;

struct Two {
  Shapes rings;
  Host a, b;
  Two(const Homes& homes, const Shapes& rings, uint64_t window = 20 * kSecond, size_t cap = 512 * kMiB)
      : rings(rings), a(0, homes, window, cap), b(1, homes, window, cap) {
    a.mirror(kId, rings);
    b.mirror(kId, rings);
  }
};

}  // namespace conveyor
