// Objects of Python that are kept as long as somebody has a frame (kKeeps). A frame may end on any thread, also on one
// without the GIL. So what it kept is put aside here, and a thread of Python's lets go of it (runtime/process.py).
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <list>
#include <memory>
#include <vector>

#include "arena/arena.h"
#include "frame.h"

namespace nb = nanobind;

namespace conveyor {

// A reference to `object`, which must be taken with the GIL, and may be let go of without.
std::shared_ptr<const void> kept(nb::object object);
// Add the numbers of the values that `keeper` keeps: what keeps one, a frame or a ref that refers to such, or a list of
// them. What is none of these adds nothing.
void add_numbers_of(nb::handle keeper, std::vector<uint64_t>& numbers);
// Whether all that `keeper` keeps is kept as long as this process has `frames`, to which are added those that it is kept
// by, whoever else dies than the processes that have made the values (kSure): the values that are kept here, and, where
// this process is the last of a session to die, what others keep for it.
bool keeps_surely(nb::handle keeper, std::vector<Frame>& frames);
bool keeps_surely(const Frame& frame);
// This process is the driver's: a session ends with it.
void outlive_all();
// Let go of what has been put aside. With the GIL; runs any code, and needs no memory.
void release_held();

// Text of the directory's, as Python has it.
struct LastingText {
  const std::string* text;
};

// What is left of a value in this process's arena when its keeper lets go of it. Somebody may read it there still
// (hazards.h). All that its end needs is had before, since that cannot fail.
class Lingers {
 public:
  // `rest`: what keeps the memory. `bytes` and `names`: what the directory says of the value.
  Lingers(std::shared_ptr<Arena> arena, uint64_t number, uint64_t bytes, const std::string& names, nb::object rest);
  ~Lingers();
  Lingers(const Lingers&) = delete;
  // The value's anchor is down. Lets go of the rest, now or when nobody reads it any more. With the GIL; runs any code.
  void end();

 private:
  std::shared_ptr<Arena> arena_;
  std::list<Lingering> one_;
  struct Rest;
  Rest* rest_ = nullptr;  // lies in the one
  uint64_t bytes_, since_;
  const std::string& names_;
};

// A thread that waits for something to be put aside. There may be any number of them.
class ReleaseWait {
 public:
  // Until something has been put aside. False: stop() was called, now or before, and nothing is kept that was then.
  // Without the GIL.
  bool wait();
  // Whether somebody has to go on waiting: something is kept still.
  bool stop();

 private:
  std::atomic<uint32_t> stopped_{0};  // futex word
  std::atomic<bool> goes_on_{false};
  uint64_t returned_ns_ = 0;  // when it has last had something
};

}  // namespace conveyor
