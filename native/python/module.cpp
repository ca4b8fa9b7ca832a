// The Python face of the native core. Names and meanings: src/conveyor/_core.pyi.
#include "bind.h"
#include "decode.h"
#include "encode.h"
#include "exit.h"
#include "process_end.h"
#include "hooks.h"
#include "native_values.h"
#include "ring.h"

#include <sys/epoll.h>

#include <cstdlib>

namespace conveyor {
namespace {

struct Empty {};

// A new descriptor, which is the caller's to close.
int made(int fd) {
  if (fd >= 0) return own(fd).release();
  PyErr_SetFromErrno(PyExc_OSError);
  throw nb::python_error();
}

}  // namespace

nb::object* empty = nullptr;

uint64_t deadline_after(nb::handle timeout) {
  if (timeout.is_none()) return 0;
  const double seconds = PyFloat_AsDouble(timeout.ptr());
  if (seconds == -1.0 && PyErr_Occurred()) throw nb::python_error();
  if (!(seconds < 1e9)) return 0;
  return now_ns() + (seconds > 0 ? uint64_t(seconds * 1e9) : 0);
}

Kind kind_of(uint16_t kind) {
  if (kind < 1 || kind > uint16_t(Kind::kControl)) throw nb::value_error("no such kind of frame");
  return Kind(kind);
}

}  // namespace conveyor

using namespace conveyor;

// The module's own PyInit, which asks first: nanobind keeps its types for the process, not for an interpreter.
#define PyInit__core init_in_main_interpreter
NB_MODULE(_core, m) {
#ifdef Py_GIL_DISABLED
  // What the bindings share is guarded by the GIL, which the import of this module turns on.
  if (!nb::cast<bool>(nb::module_::import_("sys").attr("_is_gil_enabled")())) throw nb::import_error("conveyor needs the GIL: start this free-threaded Python without PYTHON_GIL=0 and -X gil=0");
#endif
  install_fork_handlers();
  ::pthread_atfork(nullptr, nullptr, Exit::in_child);
  // Refs and values may live until the interpreter ends, and so may what they hold.
  nb::set_leak_warnings(false);
  m.doc() = "The native core of conveyor.";

  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const ArenaFull&) {
      set_python_error();
    } catch (const std::system_error&) {
      set_python_error();
    } catch (const std::bad_alloc&) {
      set_python_error();
    }
  });

  nb::class_<Empty>(m, "Empty").def("__repr__", [](const Empty&) { return "EMPTY"; }).def("__bool__", [](const Empty&) { return false; });
  empty = new nb::object(nb::cast(Empty{}));
  m.attr("EMPTY") = *empty;

  m.attr("KIND_VALUE") = int(Kind::kValue);
  m.attr("KIND_CALL") = int(Kind::kCall);
  m.attr("KIND_CONTROL") = int(Kind::kControl);
  m.attr("BELL_BITS") = int(kBellBits);
  m.attr("ATTENTION_BIT") = int(kAttentionBit);
  m.attr("WAIT_ROWS") = int(kWaitRows);
  m.attr("RING_WRITER_MAY_WAIT") = int(kWriterMayWait);
  m.attr("MAX_READERS") = int(kMaxReaders);
  #if defined(CONVEYOR_DEBUG) && CONVEYOR_DEBUG
  m.attr("DEBUG") = true;
#else
  m.attr("DEBUG") = false;
#endif

  m.def("set_codec", &set_codec, "encode"_a, "decode"_a, "announce"_a, "discard"_a, "final_error"_a, "arena_full"_a, "storage_held_alone"_a, "state_error"_a, "refused"_a,
        "take"_a.none() = nb::none(), "known"_a.none() = nb::none());
  m.def("show_decoding_on", &show_decoding_on, "board"_a.none(), "slot"_a);
  m.def("note_import", &note_import, "module"_a);
  m.def("end_import", &end_import);
  m.def("bytes_of", &bytes_of, "buffer"_a);
  m.def("text_of", &text_of, "buffer"_a);
  nb::class_<Untold>(m, "Untold", nb::is_weak_referenceable())
      .def(nb::init<>())
      .def("add", &Untold::add, "tokens"_a)
      .def("take", &Untold::take, "most"_a)
      .def("__len__", &Untold::size);
  m.attr("UNSAID") = nb::bytes(kUnsaidMeta);
  m.attr("LARGE") = nb::bytes(kLargeMeta);
  m.attr("MOST_LOGGED") = kMostLogged;
  m.attr("BROKEN") = nb::bytes(kBrokenMeta);
  m.def("refcount", [](nb::handle h) { return Py_REFCNT(h.ptr()); }, "value"_a.none());
  m.def("live_leases", &live_leases);
  m.def("monotonic_ns", &now_ns);
  m.def("monotonic", [] { return double(now_ns()) / 1e9; });
  m.def("begin_exit", &Exit::begin, "patience"_a);
  m.def("die_of_interrupt", &Exit::die_of_interrupt);
  m.def("own_descriptor", [](int fd) { return own(fd).release(); }, "fd"_a);
  m.def("duplicate_descriptor", [](int fd) { return dup_cloexec(fd).release(); }, "fd"_a);
  m.def("event_descriptor", [] { return made(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)); });
  m.def("epoll_descriptor", [] { return made(::epoll_create1(EPOLL_CLOEXEC)); });
  m.def("memory_file", [](const std::string& name) { return made(::memfd_create(name.c_str(), MFD_CLOEXEC)); }, "name"_a);
  m.def("skip_descriptors", &skip_own);
  m.def("end_without_descriptors", [] { ends_without_descriptors = true; });
  m.def("end_forked_child", &end_forked_child, "where"_a);
  std::atexit(&Exit::last);
  m.def("sleep_for_ever", [] {
    Unlocked unlocked;
    Exit::sleep_for_ever();
  });

  bind_board(m);
  bind_memory(m);
  bind_pins(m);
  bind_recorder(m);
  bind_channel(m);
  bind_graph(m);
  bind_door(m);
  bind_turn(m);
  bind_will(m);
  bind_collective(m);
  bind_direct(m);
  bind_net(m);
  bind_borrowed(m);
}
#undef PyInit__core

extern "C" NB_EXPORT PyObject* PyInit__core() {
  if (PyInterpreterState_Get() == PyInterpreterState_Main()) return init_in_main_interpreter();
  PyErr_SetString(PyExc_ImportError,
                  "conveyor cannot be imported in a subinterpreter: its native core belongs to the main interpreter of the process "
                  "(mod_wsgi: WSGIApplicationGroup %{GLOBAL}; uWSGI: single-interpreter = true)");
  return nullptr;
}
