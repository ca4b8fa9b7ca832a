// Objects of Python that are kept as long as somebody has a frame (kKeeps). The last of them is done at any time, on
// any thread, which may not have the GIL: what is kept for nobody any more is put aside here, and a thread of
// Python's lets go of it (runtime/keeping.py).
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <memory>

namespace nb = nanobind;

namespace conveyor {

// A reference to `object`, which must be taken with the GIL, and may be let go of without.
std::shared_ptr<const void> kept(nb::object object);
// Let go of what has been put aside. With the GIL; runs any code, and needs no memory.
void let_go_of_kept();

// Who waits for something to be put aside. Any number of them may.
class KeptWait {
 public:
  // Until something has been put aside. False: stop() was called, now or before, and nothing is kept that was then.
  // Without the GIL.
  bool wait();
  // Whether somebody has to go on waiting: something is kept still.
  bool stop();

 private:
  std::atomic<bool> stopped_{false};
  std::atomic<bool> goes_on_{false};
};

}  // namespace conveyor
