// The way of almost every execution into its graph, without a line of Python: one argument that is sent as it is.
#include <array>

#include "bind.h"
#include "exit.h"
#include "holder.h"
#include "ref.h"

namespace conveyor {
namespace {

// Where the executions of a graph begin: at the gate of its epoch, or at what says why there is none.
struct Door {
  nb::object gate;     // invalid: it is shut
  nb::object instead;  // called then

  nb::object start(nb::handle value, nb::handle source, nb::handle type, uint64_t deadline) {
    if (!gate.is_valid()) {
      const nb::object called = instead;
      Calling python;
      return called(value, source, type, deadline);
    }
    const nb::object held = gate;  // encoding runs any code, which may open another one
    return nb::inst_ptr<Gated>(held)->start(held, value, source, type, deadline);
  }
};

// A lock of Python's, if nobody has it. No bytecode runs in between, so no signal's handler can lose it.
class Turn {
 public:
  Turn(nb::handle acquire, nb::handle release, nb::handle at_once, Holder* holder) : release_(release), holder_(holder) {
    const nb::object taken = nb::steal(PyObject_Call(acquire.ptr(), at_once.ptr(), nullptr));
    if (!taken.is_valid()) throw nb::python_error();
    taken_ = taken.is(nb::handle(Py_True));
    if (taken_) holder_->thread = PyThread_get_thread_ident();
  }
  ~Turn() {
    if (!taken_) return;
    holder_->thread = 0;
    if (!nb::steal(PyObject_CallNoArgs(release_.ptr())).is_valid()) PyErr_WriteUnraisable(release_.ptr());
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;
  explicit operator bool() const { return taken_; }

 private:
  nb::handle release_;
  Holder* holder_;
  bool taken_ = false;
};

// Through the door under the lock of who submits.
struct ShortWay {
  nb::object door, acquire, release, holder, source, type, serialization_error, blame;
  size_t results;  // whose refs are made, as a list; 0: of the first, alone
  nb::tuple at_once = nb::make_tuple(false);

  std::array<nb::handle, 8> all() const { return {door, acquire, release, holder, source, type, serialization_error, blame}; }

  // None: it has not begun.
  nb::object enter(nb::handle args, nb::handle kwargs) {
    if (PyTuple_GET_SIZE(args.ptr()) != 1 || PyDict_GET_SIZE(kwargs.ptr()) != 0) return nb::none();
    Door& at = *nb::inst_ptr<Door>(door);
    if (!at.gate.is_valid()) return nb::none();
    // With a reference of our own, as Python code has that passes it on: see Writer::moved_refs.
    const nb::object value = nb::borrow(PyTuple_GET_ITEM(args.ptr(), 0));
    nb::object ref;
    try {
      const Turn turn(acquire, release, at_once, reinterpret_cast<Holder*>(holder.ptr()));
      if (!turn) return nb::none();
      ref = at.start(value, source, type, 0);
    } catch (const ArenaFull&) {
      return nb::none();  // who can wait for memory tries again
    } catch (const nb::python_error& error) {
      if (!error.matches(serialization_error)) throw;
      Calling python;
      return blame(error.value(), args);
    }
    if (results == 0 || ref.is_none()) return ref;
    return ref_with_siblings(ref, results);
  }
};

// The source holds the graph, which may hold what a user makes of it.
int way_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  for (const nb::handle held : nb::inst_ptr<ShortWay>(self)->all()) Py_VISIT(held.ptr());
  return 0;
}

int door_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  Py_VISIT(nb::inst_ptr<Door>(self)->gate.ptr());
  Py_VISIT(nb::inst_ptr<Door>(self)->instead.ptr());
  return 0;
}

PyType_Slot way_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(way_traverse)}, {0, nullptr}};
PyType_Slot door_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(door_traverse)}, {0, nullptr}};

}  // namespace

void bind_door(nb::module_& m) {
  nb::class_<Door>(m, "Door", nb::type_slots(door_slots))
      .def(nb::init<>())
      .def("open", [](Door& door, nb::object gate) {
             nb::cast<Gated*>(gate);  // throws for anything else
             std::swap(door.gate, gate);  // what it replaces may run any code when it goes: last
           }, "gate"_a)
      .def("shut", [](Door& door, nb::object instead) {
             nb::object gate;
             std::swap(door.gate, gate);
             std::swap(door.instead, instead);
           }, "instead"_a)
      .def("start", &Door::start, "value"_a.none(), "source"_a, "type"_a, "deadline"_a = 0);

  nb::class_<ShortWay>(m, "ShortWay", nb::type_slots(way_slots))
      .def("__init__", [](ShortWay* self, nb::object door, nb::object lock, nb::object holder, nb::object source, nb::object type, nb::object serialization_error, nb::object blame, size_t results) {
             nb::cast<Door*>(door);
             as_holder(holder);
             new (self) ShortWay{std::move(door), lock.attr("acquire"), lock.attr("release"), std::move(holder), std::move(source), std::move(type), std::move(serialization_error), std::move(blame), results};
           }, "door"_a, "lock"_a, "holder"_a, "source"_a, "type"_a, "serialization_error"_a, "blame"_a, "results"_a)
      .def("enter", [](ShortWay& self, nb::tuple args, nb::dict kwargs) { return self.enter(args, kwargs); }, "args"_a, "kwargs"_a);
}

}  // namespace conveyor
