// Taking a lock of Python's without a moment in which a signal's handler could lose it.
#include <utility>

#include "bind.h"

namespace conveyor {
namespace {

// In Python a handler that raises may run between `lock.acquire(...)` and the `try` behind it, and then nobody
// releases the lock. No bytecode runs between the two here, nor between `__enter__` and the body of `with`.
struct Turn {
  nb::object lock;
  double timeout;
  bool taken = false;
};

}  // namespace

void bind_turn(nb::module_& m) {
  nb::class_<Turn>(m, "Turn")
      .def("__init__", [](Turn* self, nb::object lock, double timeout) { new (self) Turn{std::move(lock), timeout}; }, "lock"_a, "timeout"_a = 0.0)
      .def("__enter__", [](Turn& self) {
             self.taken = nb::cast<bool>(self.timeout == 0 ? self.lock.attr("acquire")(false) : self.lock.attr("acquire")(true, self.timeout));
             return self.taken;
           })
      .def("__exit__", [](Turn& self, nb::args) {
             if (std::exchange(self.taken, false)) self.lock.attr("release")();
           });
}

}  // namespace conveyor
