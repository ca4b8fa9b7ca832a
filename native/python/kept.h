// Objects of Python that are kept as long as somebody has a frame (kKeeps). The last of them is done at any time, on
// any thread, which may not have the GIL: what is kept for nobody any more is put aside here, and a thread of
// Python's lets go of it (runtime/keeping.py).
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

namespace nb = nanobind;

namespace conveyor {

// A reference to `object`, which must be taken with the GIL, and may be let go of without.
std::shared_ptr<const void> kept(nb::object object);
// What has been put aside since the last time. With the GIL.
nb::list no_longer_kept();
// Wait until something has been put aside. False: never mind, because of a call of the other. Without the GIL.
bool wait_for_no_longer_kept();
void stop_waiting_for_no_longer_kept();

}  // namespace conveyor
