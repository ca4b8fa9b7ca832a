// The way of almost every execution into its graph, without a line of Python: one argument that is sent as it is.
#include <array>

#include "bind.h"
#include "exit.h"
#include "ref.h"

namespace conveyor {
namespace {

// Where the executions of a graph begin: at the window of its epoch, or at what says why there is none.
class Admission {
 public:
  nb::object window;     // invalid: it is shut
  nb::object instead;  // called then

  nb::object start(nb::handle value, nb::handle source, nb::handle type, uint64_t deadline) {
    if (!window.is_valid()) return refuse(value, source, type, deadline);
    const nb::object held = window;  // encoding runs any code, which may open another one
    return nb::inst_ptr<WindowObject>(held)->start(held, value, source, type, deadline);
  }

  nb::object start_many(nb::tuple values, nb::handle source, nb::handle type, uint64_t deadline) {
    if (!window.is_valid()) return refuse(values, source, type, deadline);
    const nb::object held = window;
    return nb::inst_ptr<WindowObject>(held)->start_many(held, values, source, type, deadline);
  }

 private:
  nb::object refuse(nb::handle value, nb::handle source, nb::handle type, uint64_t deadline) const {
    const nb::object called = instead;
    Calling python;
    return called(value, source, type, deadline);
  }
};

// A lock of Python's, if nobody has it. No bytecode runs in between, so no signal's handler can lose it.
class HeldLock {
 public:
  HeldLock(nb::handle acquire, nb::handle release, nb::handle at_once, Holder* holder) : release_(release), holder_(holder) {
    const nb::object taken = nb::steal(PyObject_Call(acquire.ptr(), at_once.ptr(), nullptr));
    if (!taken.is_valid()) throw nb::python_error();
    taken_ = taken.is(nb::handle(Py_True));
    if (taken_) holder_->thread = PyThread_get_thread_ident();
  }
  ~HeldLock() {
    if (!taken_) return;
    holder_->thread = 0;
    if (!nb::steal(PyObject_CallNoArgs(release_.ptr())).is_valid()) PyErr_WriteUnraisable(release_.ptr());
  }
  HeldLock(const HeldLock&) = delete;
  HeldLock& operator=(const HeldLock&) = delete;
  explicit operator bool() const { return taken_; }

 private:
  nb::handle release_;
  Holder* holder_;
  bool taken_ = false;
};

// Through the admission under the lock of who submits.
struct FastPath {
  nb::object admission, acquire, release, holder, source, type, serialization_error, blame;
  size_t results;  // whose refs are made, as a list; 0: of the first, alone
  // What the frames of the input edges are made of: of each the arguments, by place or by name. None: the only argument
  // is the only frame.
  nb::object inputs;
  size_t positional, named;  // how many arguments there are
  nb::object timed;    // makes the source of an execution with a deadline
  nb::object seconds;  // the deadline of those that are given none, in seconds, or None
  nb::tuple at_once = nb::make_tuple(false);

  std::array<nb::handle, 10> all() const { return {admission, acquire, release, holder, source, type, serialization_error, blame, inputs, timed}; }

  // None: it has not begun. `limit`: the seconds that it has.
  nb::object enter(nb::handle args, nb::handle kwargs, nb::handle limit) {
    if (size_t(PyTuple_GET_SIZE(args.ptr())) != positional || size_t(PyDict_GET_SIZE(kwargs.ptr())) != named) return nb::none();
    Admission& at = *nb::inst_ptr<Admission>(admission);
    if (!at.window.is_valid() || refs_among(args, kwargs)) return nb::none();
    nb::object value, frames;
    if (inputs.is_none()) {
      // With a reference of our own, as Python code has that passes it on: see Writer::moved_refs.
      value = nb::borrow(PyTuple_GET_ITEM(args.ptr(), 0));
    } else {
      frames = frames_of(args, kwargs);
      if (!frames.is_valid()) return nb::none();
      if (PyTuple_GET_SIZE(frames.ptr()) == 1) value = nb::borrow(PyTuple_GET_ITEM(frames.ptr(), 0));
    }
    nb::object own = source;
    uint64_t deadline = 0;
    if (const nb::handle given = limit.is_none() ? seconds : limit; !given.is_none()) {
      const double has = plain_seconds(given);
      if (has == 0) return nb::none();
      deadline = now_ns() + uint64_t(has * 1e9);
      own = timed(source, deadline, has);
    }
    nb::object ref;
    try {
      const HeldLock held(acquire, release, at_once, reinterpret_cast<Holder*>(holder.ptr()));
      if (!held) return nb::none();
      ref = value.is_valid() ? at.start(value, own, type, deadline) : at.start_many(nb::borrow<nb::tuple>(frames), own, type, deadline);
    } catch (const ArenaFull&) {
      return nb::none();  // who can wait for memory tries again
    } catch (const nb::python_error& error) {
      if (!error.matches(serialization_error)) throw;
      Calling python;
      return blame(error.value(), frames.is_valid() ? nb::handle(frames) : args);
    }
    if (results == 0 || ref.is_none()) return ref;
    return ref_with_siblings(ref, results);
  }

 private:
  // 0: Python has to look at it (conveyor.checks).
  static double plain_seconds(nb::handle given) {
    double seconds = 0;
    if (PyFloat_CheckExact(given.ptr())) seconds = PyFloat_AS_DOUBLE(given.ptr());
    if (PyLong_CheckExact(given.ptr())) seconds = PyLong_AsDouble(given.ptr());
    PyErr_Clear();  // an integer beyond all limits
    return seconds >= 1e-9 && seconds <= 1e9 ? seconds : 0;
  }

  // Invalid: an argument is not there.
  nb::object frames_of(nb::handle args, nb::handle kwargs) const {
    const auto argument = [&](nb::handle key) -> PyObject* {
      if (PyLong_CheckExact(key.ptr())) return PyTuple_GET_ITEM(args.ptr(), PyLong_AsSsize_t(key.ptr()));
      return PyDict_GetItemWithError(kwargs.ptr(), key.ptr());
    };
    const Py_ssize_t n = PyTuple_GET_SIZE(inputs.ptr());
    nb::object frames = nb::steal(PyTuple_New(n));
    if (!frames.is_valid()) throw nb::python_error();
    for (Py_ssize_t i = 0; i < n; ++i) {
      PyObject* const keys = PyTuple_GET_ITEM(inputs.ptr(), i);
      const Py_ssize_t many = PyTuple_GET_SIZE(keys);
      nb::object frame = many == 0 ? nb::none() : nb::steal(PyTuple_New(many));
      if (!frame.is_valid()) throw nb::python_error();
      for (Py_ssize_t k = 0; k < many; ++k) {
        PyObject* const value = argument(PyTuple_GET_ITEM(keys, k));
        if (value == nullptr && PyErr_Occurred()) throw nb::python_error();
        if (value == nullptr) return nb::object();
        PyTuple_SET_ITEM(frame.ptr(), k, Py_NewRef(value));
      }
      PyTuple_SET_ITEM(frames.ptr(), i, frame.release().ptr());
    }
    return frames;
  }
};

// The source holds the graph, which may hold what a user makes of it.
int fast_path_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  for (const nb::handle held : nb::inst_ptr<FastPath>(self)->all()) Py_VISIT(held.ptr());
  return 0;
}

int admission_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  Py_VISIT(nb::inst_ptr<Admission>(self)->window.ptr());
  Py_VISIT(nb::inst_ptr<Admission>(self)->instead.ptr());
  return 0;
}

PyType_Slot fast_path_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(fast_path_traverse)}, {0, nullptr}};
PyType_Slot admission_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(admission_traverse)}, {0, nullptr}};

}  // namespace

void bind_fast_path(nb::module_& m) {
  nb::class_<Admission>(m, "Admission", nb::type_slots(admission_slots),
      "Where the executions of a graph begin: at the window of its epoch, or, while it is shut, at what says why there is none.")
      .def(nb::init<>())
      .def("open", [](Admission& admission, nb::object window) {
             nb::cast<WindowObject*>(window);  // throws for anything else
             std::swap(admission.window, window);  // what it replaces may run any code when it goes: last
           }, "window"_a, nb::sig("def open(self, window: InFlightWindow) -> None"), "``window`` takes what comes from now on.")
      .def("shut", [](Admission& admission, nb::object instead) {
             nb::object window;
             std::swap(admission.window, window);
             std::swap(admission.instead, instead);
           }, "instead"_a, nb::sig("def shut(self, instead: Callable[..., Any]) -> None"), "``instead`` is called in place of a window's ``start``.")
      .def("start", &Admission::start, "value"_a.none(), "source"_a, "type"_a, "deadline"_a = 0,
           nb::sig("def start(self, value: Any, source: Any, type: type[_Ref], deadline: int = 0) -> _Ref | None"), R"(
           See ``InFlightWindow.start``. ``deadline`` (monotonic nanoseconds, 0: none) goes to the limits; then ``source`` is of
           this execution alone, and its ``keep_report`` is called with the execution's number before what the limits
           note of it is overwritten.)")
      .def("start_many", &Admission::start_many, "values"_a, "source"_a, "type"_a, "deadline"_a = 0,
           nb::sig("def start_many(self, values: tuple[Any, ...], source: Any, type: type[_Ref], deadline: int = 0) -> _Ref | None"),
           "Send one value on each writer, all or none; otherwise like ``start``.");

  nb::class_<FastPath>(m, "FastPath", nb::type_slots(fast_path_slots),
      "Executions of a graph whose arguments are sent as they are, while nobody else submits.")
      .def("__init__", [](FastPath* self, nb::object admission, nb::object lock, nb::object holder, nb::object source, nb::object type, nb::object serialization_error, nb::object blame, size_t results, nb::object timed, nb::object seconds, nb::object inputs, size_t positional, size_t named) {
             nb::cast<Admission*>(admission);
             as_holder(holder);
             new (self) FastPath{std::move(admission), lock.attr("acquire"), lock.attr("release"), std::move(holder), std::move(source), std::move(type), std::move(serialization_error), std::move(blame), results, std::move(inputs), positional, named, std::move(timed), std::move(seconds)};
           }, "admission"_a, "lock"_a, "holder"_a, "source"_a, "type"_a, "serialization_error"_a, "blame"_a, "results"_a, "timed"_a, "seconds"_a.none(), "inputs"_a.none() = nb::none(), "positional"_a = 1, "named"_a = 0,
           nb::sig("def __init__(self, admission: Admission, lock: Any, holder: Holder, source: Any, type: type[Any], "
                   "serialization_error: type[Exception], blame: Callable[[Any, tuple[Any, ...]], Any], results: int, "
                   "timed: Callable[[Any, int, float], Any], seconds: float | None, inputs: tuple[tuple[int | str, ...], ...] | None = None, "
                   "positional: int = 1, named: int = 0) -> None"), R"(
           ``lock``: held meanwhile, as ``holder`` is told. ``source`` and ``type``: of the refs. ``blame(error, args)``
           raises what a ``serialization_error`` becomes. ``results``: how many refs are made, as a list; 0: that of the
           first, alone. ``timed(source, deadline, seconds)`` makes the source of an execution that has a deadline
           (monotonic nanoseconds), after these ``seconds`` where it is given none. ``inputs``: for each input edge the
           arguments that its frames have, by place or by name, of so many ``positional`` and ``named`` ones; ``None``:
           the one argument is the one frame.)")
      .def("enter", [](FastPath& self, nb::tuple args, nb::dict kwargs, nb::handle deadline) { return self.enter(args, kwargs, deadline); }, "args"_a, "kwargs"_a, "deadline"_a.none() = nb::none(),
           nb::sig("def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any], deadline: float | None = None) -> Any"),
           "What ``execute`` returns; ``None``: it has not begun.");
}

}  // namespace conveyor
