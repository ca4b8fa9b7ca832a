#include "located.h"

#include <array>
#include <cstring>

namespace conveyor {

namespace {

constexpr uint16_t kJoined = 1 << 15;
constexpr std::string_view kSnapshot{"\0snapshot", 9};

}  // namespace

std::optional<LocatedParts> read_located(std::string_view packed) {
  struct [[gnu::packed]] {
    uint16_t codec, names;
    uint32_t slot, incarnation, pid, ranges, beside, lying;
    uint64_t number, anchor;
  } head;
  static_assert(sizeof head == 44);
  if (packed.size() < sizeof head) return std::nullopt;
  std::memcpy(&head, packed.data(), sizeof head);
  packed.remove_prefix(sizeof head);
  std::array<std::string_view, 4> parts;
  const std::array<size_t, 4> sizes{head.names, head.ranges, head.beside, head.lying};
  for (size_t i = 0; i < parts.size(); ++i) {
    if (sizes[i] > packed.size()) return std::nullopt;
    parts[i] = packed.substr(0, sizes[i]);
    packed.remove_prefix(sizes[i]);
  }
  const auto& [names, ranges, beside, lying] = parts;
  const auto codec = uint16_t(head.codec & ~kJoined);
  return LocatedParts{codec, (head.codec & kJoined) != 0, names.ends_with(kSnapshot), head.slot, head.incarnation, head.pid, head.number, head.anchor, ranges, beside, lying, packed};
}

std::optional<LocatedParts> located_in(const Frame& frame) {
  if (frame.codec != kDirect || frame.kind == Kind::kError || !(frame.flags & kKeeps) || (frame.flags & kExternal) || frame.body == nullptr) return std::nullopt;
  const auto table = read_table(frame.body, frame.size, 0);
  return table ? read_located({table->meta, table->meta_length}) : std::nullopt;
}

}  // namespace conveyor
