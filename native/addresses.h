// Which addresses of an arena are nobody's: neighbours are one, so what small blocks gave back can serve
// a large one. Strong: what throws has changed nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace conveyor {

class FreeAddresses {
 public:
  explicit FreeAddresses(uint64_t size) { add(0, size); }

  // The start of `size` bytes that are free no more; from the smallest gap that holds them, so that the
  // large ones stay. `window`: they lie within one window of this size; 0: anywhere. `alignment`: a power of two.
  std::optional<uint64_t> take(uint64_t size, uint64_t window, uint64_t alignment = 1) {
    // A gap may be cut by a window's end, or begin anywhere, so a few are looked at; the last is the largest.
    int looks = 16;
    for (auto gap = by_size_.lower_bound({size, 0}); gap != by_size_.end(); ++gap) {
      if (--looks == 0) gap = std::prev(by_size_.end());
      const auto [length, start] = *gap;
      uint64_t at = (start + alignment - 1) & ~(alignment - 1);
      if (window != 0 && at % window + size > window) at = (at / window + 1) * window;
      if (at + size > start + length) continue;
      const uint64_t before = at - start, after = start + length - at - size;
      if (before != 0 && after != 0) add(at + size, after);
      if (before != 0)
        move(start, length, start, before);
      else if (after != 0)
        move(start, length, at + size, after);
      else
        remove(start, length);
      return at;
    }
    return std::nullopt;
  }

  // Throws only if it has no neighbour.
  void give(uint64_t at, uint64_t size) {
    const auto next = by_start_.lower_bound(at);
    const bool joins_next = next != by_start_.end() && next->first == at + size;
    if (next != by_start_.begin()) {
      const auto [start, length] = *std::prev(next);
      if (start + length == at) {
        if (joins_next) {
          const auto [other, more] = *next;
          remove(other, more);
          size += more;
        }
        return move(start, length, start, length + size);
      }
    }
    if (!joins_next) return add(at, size);
    const auto [start, length] = *next;
    move(start, length, at, size + length);
  }

  size_t gaps() const { return by_start_.size(); }

 private:
  void add(uint64_t start, uint64_t length) {
    const auto added = by_start_.emplace(start, length).first;
    try {
      by_size_.emplace(length, start);
    } catch (...) {
      by_start_.erase(added);
      throw;
    }
  }
  // A gap that changes keeps its nodes: this cannot fail.
  void move(uint64_t start, uint64_t length, uint64_t to, uint64_t new_length) {
    auto by_start = by_start_.extract(start);
    by_start.key() = to;
    by_start.mapped() = new_length;
    by_start_.insert(std::move(by_start));
    auto by_size = by_size_.extract({length, start});
    by_size.value() = {new_length, to};
    by_size_.insert(std::move(by_size));
  }
  void remove(uint64_t start, uint64_t length) {
    by_start_.erase(start);
    by_size_.erase({length, start});
  }
  std::map<uint64_t, uint64_t> by_start_;
  std::set<std::pair<uint64_t, uint64_t>> by_size_;
};

}  // namespace conveyor
