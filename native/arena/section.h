// How the arena's own sources take its lock.
#pragma once

#include <array>

#include "arena.h"

namespace conveyor {

// The lock, and what lost its last user meanwhile destroyed after it: that may take any time, and other locks.
class Arena::Section {
 public:
  explicit Section(Arena& arena) : arena_(arena) { arena_.mutex_.lock(); }
  ~Section() {
    // Some of them, so that the list keeps its capacity (see Arena::block_of). That is more than one section
    // adds in the long run.
    std::array<std::shared_ptr<const void>, 16> dropped;
    arena_.take_dropped(dropped);
    arena_.mutex_.unlock();
  }
  Section(const Section&) = delete;
  Section& operator=(const Section&) = delete;
  template <class Body>
  void unlocked(Body&& body) {
    arena_.mutex_.unlock();
    struct Again {
      std::mutex& mutex;
      ~Again() { mutex.lock(); }
    } again{arena_.mutex_};
    body();
  }

 private:
  Arena& arena_;
};

}  // namespace conveyor
