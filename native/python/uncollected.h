// Pauses of the garbage collector, while many objects are made of which none is garbage.
#pragma once

#include <Python.h>

#include <cstddef>
#include <utility>

namespace conveyor {

// Who turns the collector off meanwhile, in another thread, finds it on. With the GIL.
class Uncollected {
 public:
  Uncollected() : began_(PyGC_Disable() != 0) {
    if (began_) ++under_way_;
  }
  ~Uncollected() { end(); }
  Uncollected(const Uncollected&) = delete;
  Uncollected& operator=(const Uncollected&) = delete;

  // May come before the end of the object. In a child that was forked meanwhile it has ended.
  void end() noexcept {
    if (!std::exchange(began_, false) || forks_seen_ != forks_) return;
    --under_way_;
    PyGC_Enable();
  }

  // A child of fork has one thread: those that had paused the collector are not there to turn it on. Where that thread
  // has done so itself, the child goes on without a pause.
  static void in_child() noexcept {
    ++forks_;
    if (std::exchange(under_way_, 0) != 0) PyGC_Enable();
  }

 private:
  static inline size_t under_way_ = 0;  // of those that have found it on
  static inline size_t forks_ = 0;      // on the way down to this process
  const size_t forks_seen_ = forks_;
  bool began_;
};

}  // namespace conveyor
