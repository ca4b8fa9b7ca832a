#include "hooks.h"

#include "exit.h"
#include "ref.h"
#include "waiting.h"

namespace conveyor {

Hooks hooks;

namespace {

PyTypeObject* ref_type = nullptr;  // lives as long as the module

// Set the Python error for what the system has refused, as Python wants to have it said.
void set_refused(int number, const char* what) noexcept {
  if (hooks.refused != nullptr) {
    Calling python;
    PyObject* error = PyObject_CallFunction(hooks.refused, "is", number, what);
    if (error == nullptr) return;  // no memory for that either: MemoryError is set
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error)), error);
    Py_DECREF(error);
  } else if (number == ENOMEM) {
    PyErr_NoMemory();
  } else {
    PyObject* args = Py_BuildValue("is", number, what);
    if (args == nullptr) return;
    PyErr_SetObject(PyExc_OSError, args);
    Py_DECREF(args);
  }
}

void raise_arena_full(const ArenaFull& error) {
  if (hooks.arena_full == nullptr) {
    PyErr_SetString(PyExc_MemoryError, error.what());
    return;
  }
  nb::list holdings;
  for (const Holding& h : error.holdings) {
    nb::object process = nb::steal(PyUnicode_DecodeUTF8(h.process.data(), Py_ssize_t(h.process.size()), "replace"));
    nb::list tags;
    for (uint64_t tag : h.tags) tags.append(tag);
    holdings.append(nb::make_tuple(process, h.channel->graph, h.channel->edge, nb::str(h.channel->carries.c_str()), h.bytes, tags));
  }
  Calling python;
  nb::object made = nb::steal(PyObject_CallFunction(hooks.arena_full, "sOi", error.what(), holdings.ptr(), int(error.cap)));
  if (made.is_valid()) PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made.ptr())), made.ptr());
}

}  // namespace

bool is_ref(PyObject* value) { return ref_type != nullptr && PyObject_TypeCheck(value, ref_type); }

void set_ref_type(nb::handle type) { ref_type = reinterpret_cast<PyTypeObject*>(type.ptr()); }

void check_owner(uint64_t generation) {
  if (generation == fork_generation.load(std::memory_order_relaxed)) return;
  PyErr_SetString(hooks.state_error != nullptr ? hooks.state_error : PyExc_RuntimeError,
                  "this belongs to the process that this one was forked from");
  throw nb::python_error();
}

void set_lost() {
  PyErr_SetString(hooks.state_error != nullptr ? hooks.state_error : PyExc_RuntimeError,
                  "code of this process has closed descriptors of conveyor's (os.closerange, or os.close of a number that was not its own), and "
                  "nobody can wake it any more. Close the files that you have opened, or close all descriptors before the session begins");
}

bool is_final(nb::handle exception) {
  return hooks.final_error != nullptr && PyErr_GivenExceptionMatches(exception.ptr(), hooks.final_error);
}

void set_codec(nb::object encode, nb::object decode, nb::object announce, nb::object discard, nb::object final_error, nb::object arena_full,
               nb::object storage_held_alone, nb::object state_error, nb::object refused, nb::object take, nb::object known) {
  for (PyObject** hook : {&hooks.encode, &hooks.decode, &hooks.announce, &hooks.discard, &hooks.final_error, &hooks.arena_full, &hooks.storage_held_alone,
                          &hooks.state_error, &hooks.refused, &hooks.take, &hooks.known})
    Py_CLEAR(*hook);
  hooks.encode = encode.release().ptr();
  hooks.decode = decode.release().ptr();
  hooks.announce = announce.release().ptr();
  hooks.discard = discard.release().ptr();
  hooks.final_error = final_error.release().ptr();
  hooks.arena_full = arena_full.release().ptr();
  hooks.storage_held_alone = storage_held_alone.release().ptr();
  hooks.state_error = state_error.release().ptr();
  if (!refused.is_none()) hooks.refused = refused.release().ptr();
  if (!take.is_none()) hooks.take = take.release().ptr();
  if (!known.is_none()) hooks.known = known.release().ptr();
}

void bad_frame() {
  throw std::system_error(EPROTO, std::generic_category(), "a frame's layout is not valid");
}

void set_python_error() noexcept {
  try {
    throw;
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const ArenaFull& error) {
    try {
      raise_arena_full(error);
    } catch (...) {
      if (!PyErr_Occurred()) PyErr_SetString(PyExc_MemoryError, error.what());
    }
  } catch (const std::system_error& error) {
    set_refused(error.code().value(), error.what());
  } catch (const std::bad_alloc& error) {
    set_refused(ENOMEM, error.what());
  } catch (const nb::builtin_exception& error) {
    PyObject* type = PyExc_RuntimeError;
    if (error.type() == nb::exception_type::value_error) type = PyExc_ValueError;
    if (error.type() == nb::exception_type::type_error) type = PyExc_TypeError;
    if (error.type() == nb::exception_type::index_error) type = PyExc_IndexError;
    PyErr_SetString(type, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  } catch (...) {
    PyErr_SetString(PyExc_RuntimeError, "an unknown error in the native core");
  }
}

}  // namespace conveyor
