// Taking a lock of Python's without a moment in which a signal's handler could lose it.
#include "bind.h"
#include "platform.h"
#include "waiting.h"

namespace conveyor {
namespace {

PyTypeObject* holder_type = nullptr;  // these live as long as the module
PyObject* acquire_name = nullptr;
PyObject* release_name = nullptr;

Holder* holder_of(PyObject* self) { return reinterpret_cast<Holder*>(self); }

PyObject* holder_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* lock;
  if (!PyArg_ParseTuple(args, "O:Holder", &lock)) return nullptr;
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  Py_INCREF(lock);
  holder_of(self)->lock = lock;
  return self;
}

void holder_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  Py_CLEAR(holder_of(self)->lock);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* holder_mine(PyObject* self, PyObject*) { return PyBool_FromLong(holder_of(self)->thread == PyThread_get_thread_ident()); }

// The usual way, which waits as long as it takes: nothing is made for it.
PyObject* holder_enter(PyObject* self, PyObject*) {
  PyObject* taken = PyObject_CallMethodNoArgs(holder_of(self)->lock, acquire_name);
  if (taken != nullptr) holder_of(self)->thread = PyThread_get_thread_ident();
  return taken;
}

PyObject* holder_exit(PyObject* self, PyObject* const*, Py_ssize_t) {
  holder_of(self)->thread = 0;
  return PyObject_CallMethodNoArgs(holder_of(self)->lock, release_name);
}

PyMethodDef holder_methods[] = {{"mine", holder_mine, METH_NOARGS, nullptr},
                                {"__enter__", holder_enter, METH_NOARGS, nullptr},
                                {"__exit__", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(holder_exit)), METH_FASTCALL, nullptr},
                                {nullptr, nullptr, 0, nullptr}};
PyType_Slot holder_slots[] = {{Py_tp_new, reinterpret_cast<void*>(holder_new)},
                              {Py_tp_dealloc, reinterpret_cast<void*>(holder_dealloc)},
                              {Py_tp_methods, holder_methods},
                              {0, nullptr}};
PyType_Spec holder_spec = {"conveyor._core.Holder", sizeof(Holder), 0, Py_TPFLAGS_DEFAULT, holder_slots};

// In Python a handler that raises may run between `lock.acquire(...)` and the `try` behind it, and then nobody
// releases the lock. No bytecode runs between the two here, nor between `__enter__` and the body of `with`.
//
// The lock is waited for within Python's own `acquire`, and an interpreter that ends may unwind the waiting
// thread there (exit.h). So below that wait lies no frame of C++, of nanobind or of ours: this is a type in C,
// whose functions own nothing that is to be destroyed and are not noexcept.
struct TimedLock {
  PyObject_HEAD
  PyObject* lock;
  PyObject* holder;  // null: nobody asks who has the lock
  double timeout;
  bool taken;
};

TimedLock* as_timed_lock(PyObject* self) { return reinterpret_cast<TimedLock*>(self); }

PyObject* timed_lock_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  PyObject* lock;
  PyObject* holder = nullptr;
  double timeout = 0.0;
  if (kwargs != nullptr && PyDict_GET_SIZE(kwargs) != 0) {  // to parse them costs as much as the lock
    PyErr_SetString(PyExc_TypeError, "TimedLock takes no keyword arguments");
    return nullptr;
  }
  if (!PyArg_ParseTuple(args, "O|dO!:TimedLock", &lock, &timeout, holder_type, &holder)) return nullptr;
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  Py_INCREF(lock);
  as_timed_lock(self)->lock = lock;
  Py_XINCREF(holder);
  as_timed_lock(self)->holder = holder;
  as_timed_lock(self)->timeout = timeout;
  return self;
}

int timed_lock_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(as_timed_lock(self)->lock);
  Py_VISIT(as_timed_lock(self)->holder);
  return 0;
}

int timed_lock_clear(PyObject* self) {
  Py_CLEAR(as_timed_lock(self)->lock);
  Py_CLEAR(as_timed_lock(self)->holder);
  return 0;
}

void timed_lock_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  timed_lock_clear(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// The lock, within so many seconds (less than 0: as long as it takes). Python raises what another thread throws into this
// one between two bytecodes, and here is none: so it is looked for.
PyObject* acquire(PyObject* lock, double timeout) {
  PyObject* taken = PyObject_CallMethodOneArg(lock, acquire_name, Py_False);
  const uint64_t begun = now_ns();
  while (taken == Py_False) {
    const double left = timeout < 0 ? 1.0 : timeout - double(now_ns() - begun) * 1e-9;
    if (left <= 0) break;
    PyObject* seconds = set_thrown(PyThreadState_Get()) ? nullptr : PyFloat_FromDouble(std::min(left, double(kLookNs) * 1e-9));
    if (seconds == nullptr) {
      Py_DECREF(taken);
      return nullptr;
    }
    PyObject* args[] = {lock, Py_True, seconds};
    Py_SETREF(taken, PyObject_VectorcallMethod(acquire_name, args, 3 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
    Py_DECREF(seconds);
  }
  return taken;
}

PyObject* timed_lock_enter(PyObject* self, PyObject*) {
  TimedLock* self_lock = as_timed_lock(self);
  PyObject* taken = acquire(self_lock->lock, self_lock->timeout);
  if (taken == nullptr) return nullptr;
  self_lock->taken = taken == Py_True;
  if (self_lock->taken && self_lock->holder != nullptr) reinterpret_cast<Holder*>(self_lock->holder)->thread = PyThread_get_thread_ident();
  return taken;
}

PyObject* timed_lock_exit(PyObject* self, PyObject* const*, Py_ssize_t) {
  TimedLock* self_lock = as_timed_lock(self);
  if (!self_lock->taken) Py_RETURN_NONE;
  self_lock->taken = false;
  if (self_lock->holder != nullptr) reinterpret_cast<Holder*>(self_lock->holder)->thread = 0;
  return PyObject_CallMethodNoArgs(self_lock->lock, release_name);
}

PyMethodDef timed_lock_methods[] = {{"__enter__", timed_lock_enter, METH_NOARGS, nullptr},
                              {"__exit__", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(timed_lock_exit)), METH_FASTCALL, nullptr},
                              {nullptr, nullptr, 0, nullptr}};
PyType_Slot timed_lock_slots[] = {{Py_tp_new, reinterpret_cast<void*>(timed_lock_new)},
                            {Py_tp_dealloc, reinterpret_cast<void*>(timed_lock_dealloc)},
                            {Py_tp_traverse, reinterpret_cast<void*>(timed_lock_traverse)},
                            {Py_tp_clear, reinterpret_cast<void*>(timed_lock_clear)},
                            {Py_tp_methods, timed_lock_methods},
                            {0, nullptr}};
PyType_Spec timed_lock_spec = {"conveyor._core.TimedLock", sizeof(TimedLock), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, timed_lock_slots};

}  // namespace

Holder* as_holder(nb::handle object) {
  if (!PyObject_TypeCheck(object.ptr(), holder_type)) throw nb::type_error("a Holder was expected");
  return reinterpret_cast<Holder*>(object.ptr());
}

void bind_locks(nb::module_& m) {
  acquire_name = PyUnicode_InternFromString("acquire");
  release_name = PyUnicode_InternFromString("release");
  if (acquire_name == nullptr || release_name == nullptr) nb::raise_python_error();
  nb::object holder = nb::steal(PyType_FromSpec(&holder_spec));
  if (!holder.is_valid()) nb::raise_python_error();
  holder_type = reinterpret_cast<PyTypeObject*>(nb::object(holder).release().ptr());
  m.attr("Holder") = holder;
  nb::object type = nb::steal(PyType_FromSpec(&timed_lock_spec));
  if (!type.is_valid()) nb::raise_python_error();
  m.attr("TimedLock") = type;
}

}  // namespace conveyor
