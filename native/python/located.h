// What a frame says of a value that has stayed with its maker, as `Located.pack` (codec/direct.py) has written it.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "frame.h"

namespace conveyor {

struct LocatedParts {
  uint16_t codec;  // of the value
  bool joined;
  bool snapshot;
  uint32_t slot, incarnation, pid;
  uint64_t number, anchor;
  std::string_view ranges, beside, lying, meta;
};

// Nothing where these bytes are too few; they may be anything.
std::optional<LocatedParts> read_located(std::string_view packed);
// Of a frame that keeps one value, and has its meta bytes and nothing else.
std::optional<LocatedParts> located_in(const Frame& frame);

}  // namespace conveyor
