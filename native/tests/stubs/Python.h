// What python/waiting.cpp needs of Python, for test_interleavings_*: no signals, nothing that other threads
// throw (looks for that would end a sleep that nobody ends), and no lock that would hide a schedule.
#pragma once

namespace model {
unsigned long thread_ident();
}

inline int PyErr_CheckSignals() { return 0; }
inline unsigned long PyThread_get_thread_ident() { return model::thread_ident(); }

struct PyObject;
struct PyThreadState {
  PyObject* async_exc;
};
inline PyThreadState* PyThreadState_Get() { return nullptr; }
constexpr int Py_file_input = 0;
inline PyObject* PyDict_New() { return nullptr; }
inline PyObject* PyRun_String(const char*, int, PyObject*, PyObject*) { return nullptr; }
inline void Py_DECREF(PyObject*) {}
inline void Py_XDECREF(PyObject*) {}
