// What Python has given the core to call, and errors on their way between C++ and Python.
#pragma once

#include <Python.h>
#include <nanobind/nanobind.h>

#include "arena/arena.h"

namespace nb = nanobind;

namespace conveyor {

// Metas of error frames for which nothing can be allocated; codec/errors.py puts them into words.
constexpr const char* kUnsaidMeta = "conveyor:unsaid";  // no memory was left to say what had gone wrong
constexpr const char* kLargeMeta = "conveyor:large";    // an error that nobody gets is too large to be kept for the log
constexpr uint32_t kMostLogged = 64 * 1024;             // bytes of an error that are kept for the log
constexpr const char* kBrokenMeta = "conveyor:broken";  // the frame is not valid

// What the codec in Python does (codec/frames.py). Null before it is set, and once the interpreter ends.
struct Hooks {
  PyObject* encode = nullptr;
  PyObject* decode = nullptr;
  PyObject* announce = nullptr;
  PyObject* discard = nullptr;
  PyObject* final_error = nullptr;  // the class of errors that will not go away by decoding again
  PyObject* arena_full = nullptr;   // (message, holdings): makes what to raise at an arena's memory cap
  PyObject* storage_held_alone = nullptr;  // (value): the address of its storage, which nothing else refers to; else 0
  PyObject* state_error = nullptr;  // the class of errors for what belongs to another process
  PyObject* refused = nullptr;      // (errno, text): makes what to raise for what the system has refused
  PyObject* known = nullptr;        // (): what a reader knows of the definitions in its channel; has a `generation` (definitions.py)
  PyObject* take = nullptr;         // (meta): the refs that a frame has claims on, to be held as long as it may be decoded
};
extern Hooks hooks;

void set_codec(nb::object encode, nb::object decode, nb::object announce, nb::object discard, nb::object final_error, nb::object arena_full,
               nb::object storage_held_alone, nb::object state_error, nb::object refused = nb::none(), nb::object take = nb::none(), nb::object known = nb::none());
// Throws if this process was forked since `generation`: rings and results are the parent's.
void check_owner(uint64_t generation);
// In a catch block: let the exception that is being handled, whatever it is, be the Python error.
void set_python_error() noexcept;
bool is_final(nb::handle exception);
[[noreturn]] void bad_frame();

// What `read` does, with every error as one of Python's: whether it is final is a question of its class.
template <class Read>
auto or_python_error(Read read) {
  try {
    return read();
  } catch (const nb::python_error&) {
    throw;
  } catch (...) {
    set_python_error();
  }
  throw nb::python_error();
}

}  // namespace conveyor
