// A set of numbers with room for as many as it was made for: to put one in cannot fail then. Finalizers do.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace conveyor {

class NumberSet {
 public:
  explicit NumberSet(size_t room) : places_(std::bit_ceil(2 * room + 2), kNone) {}

  bool empty() const { return count_ == 0; }
  bool contains(uint64_t number) const { return number != kNone && places_[find(number)] == number; }

  // Beyond the room it was made for this allocates, and may throw. kNone is never in it: nothing has that
  // number, but it may stand in shared memory.
  void insert(uint64_t number) {
    size_t at = find(number);
    if (number == kNone || places_[at] == number) return;
    if (2 * (count_ + 1) > places_.size()) {
      NumberSet larger(places_.size());
      for (uint64_t old : places_)
        if (old != kNone) larger.insert(old);
      *this = std::move(larger);
      at = find(number);
    }
    places_[at] = number;
    ++count_;
  }

  bool erase(uint64_t number) {
    size_t hole = find(number);
    if (number == kNone || places_[hole] != number) return false;
    --count_;
    // What lies behind it, up to the next free place, may have been meant for it or a place before it.
    for (size_t at = next(hole); places_[at] != kNone; at = next(at)) {
      const size_t home = place(places_[at]);
      const bool stays = hole < at ? hole < home && home <= at : hole < home || home <= at;
      if (stays) continue;
      places_[hole] = places_[at];
      hole = at;
    }
    places_[hole] = kNone;
    return true;
  }

  static constexpr uint64_t kNone = UINT64_MAX;

 private:
  size_t place(uint64_t number) const { return number & (places_.size() - 1); }  // they are consecutive
  size_t next(size_t at) const { return (at + 1) & (places_.size() - 1); }
  // Where it is, or the free place where it would be put: at most half of them are taken.
  size_t find(uint64_t number) const {
    size_t at = place(number);
    while (places_[at] != kNone && places_[at] != number) at = next(at);
    return at;
  }

  std::vector<uint64_t> places_;
  size_t count_ = 0;
};

}  // namespace conveyor
