// Taking a lock of Python's without a moment in which a signal's handler could lose it.
#include "bind.h"

namespace conveyor {
namespace {

// In Python a handler that raises may run between `lock.acquire(...)` and the `try` behind it, and then nobody
// releases the lock. No bytecode runs between the two here, nor between `__enter__` and the body of `with`.
//
// The lock is waited for within Python's own `acquire`, and an interpreter that ends may unwind the waiting
// thread there (exit.h). So below that wait lies no frame of C++, of nanobind or of ours: this is a type in C,
// whose functions own nothing that is to be destroyed and are not noexcept.
struct Turn {
  PyObject_HEAD
  PyObject* lock;
  double timeout;
  bool taken;
};

Turn* as_turn(PyObject* self) { return reinterpret_cast<Turn*>(self); }

PyObject* turn_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* const names[] = {"lock", "timeout", nullptr};
  PyObject* lock;
  double timeout = 0.0;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|d:Turn", const_cast<char**>(names), &lock, &timeout)) return nullptr;
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  Py_INCREF(lock);
  as_turn(self)->lock = lock;
  as_turn(self)->timeout = timeout;
  return self;
}

int turn_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(as_turn(self)->lock);
  return 0;
}

int turn_clear(PyObject* self) {
  Py_CLEAR(as_turn(self)->lock);
  return 0;
}

void turn_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  turn_clear(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* acquire_name = nullptr;  // these live as long as the module
PyObject* release_name = nullptr;

PyObject* turn_enter(PyObject* self, PyObject*) {
  Turn* turn = as_turn(self);
  PyObject* taken;
  if (turn->timeout == 0) {
    taken = PyObject_CallMethodOneArg(turn->lock, acquire_name, Py_False);
  } else {
    PyObject* seconds = PyFloat_FromDouble(turn->timeout);
    if (seconds == nullptr) return nullptr;
    PyObject* args[] = {turn->lock, Py_True, seconds};
    taken = PyObject_VectorcallMethod(acquire_name, args, 3 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
    Py_DECREF(seconds);
  }
  if (taken != nullptr) turn->taken = taken == Py_True;
  return taken;
}

PyObject* turn_exit(PyObject* self, PyObject* const*, Py_ssize_t) {
  Turn* turn = as_turn(self);
  if (!turn->taken) Py_RETURN_NONE;
  turn->taken = false;
  return PyObject_CallMethodNoArgs(turn->lock, release_name);
}

PyMethodDef turn_methods[] = {{"__enter__", turn_enter, METH_NOARGS, nullptr},
                              {"__exit__", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(turn_exit)), METH_FASTCALL, nullptr},
                              {nullptr, nullptr, 0, nullptr}};
PyType_Slot turn_slots[] = {{Py_tp_new, reinterpret_cast<void*>(turn_new)},
                            {Py_tp_dealloc, reinterpret_cast<void*>(turn_dealloc)},
                            {Py_tp_traverse, reinterpret_cast<void*>(turn_traverse)},
                            {Py_tp_clear, reinterpret_cast<void*>(turn_clear)},
                            {Py_tp_methods, turn_methods},
                            {0, nullptr}};
PyType_Spec turn_spec = {"conveyor._core.Turn", sizeof(Turn), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, turn_slots};

}  // namespace

void bind_turn(nb::module_& m) {
  acquire_name = PyUnicode_InternFromString("acquire");
  release_name = PyUnicode_InternFromString("release");
  if (acquire_name == nullptr || release_name == nullptr) nb::raise_python_error();
  nb::object type = nb::steal(PyType_FromSpec(&turn_spec));
  if (!type.is_valid()) nb::raise_python_error();
  m.attr("Turn") = type;
}

}  // namespace conveyor
