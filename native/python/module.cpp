// The Python face of the native core. The names, types and docstrings in the bindings are those of _core.pyi, which the build generates.
#include "bind.h"
#include "decode.h"
#include "encode.h"
#include "exit.h"
#include "hooks.h"
#include "native_values.h"
#include "platform.h"
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
  m.doc() = R"(
      The native core: what must be fast or atomic, and nothing else.

      Slots are process table slots, bits are doorbell bits, offsets and sizes are bytes, timeouts are seconds (``None``: none). A
      failed system call raises ``OSError``; an integer that does not fit its field raises ``TypeError``.)";

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

  nb::class_<Empty>(m, "Empty", "The type of ``EMPTY``; false.")
      .def("__repr__", [](const Empty&) { return "EMPTY"; })
      .def("__bool__", [](const Empty&) { return false; });
  empty = new nb::object(nb::cast(Empty{}));
  m.attr("EMPTY") = *empty;

  m.attr("KIND_VALUE") = int(Kind::kValue);
  m.attr("KIND_CALL") = int(Kind::kCall);
  m.attr("KIND_CONTROL") = int(Kind::kControl);
  m.attr("DOORBELL_BITS") = int(kDoorbellBits);
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
        "take"_a.none() = nb::none(), "known"_a.none() = nb::none(),
        nb::sig("def set_codec(encode: Callable[[Any, Any], tuple[int, int, bytes, Sequence[Any] | None] | tuple[int, int, bytes, Sequence[Any] | None, Any]], "
                "decode: Callable[[int, bytes, list[Buffer] | None], Any], announce: Callable[[bytes, Any], None], discard: Callable[..., None], "
                "final_error: type[Exception], arena_full: Callable[[str, list[Holding], int], Exception], "
                "storage_held_alone: Callable[[Any], int], state_error: type[Exception], refused: Callable[[int, str], Exception], "
                "take: Callable[[bytes], Any] | None = None, known: Callable[[], Any] | None = None) -> None"), R"(
        Set what serves values that are not encoded natively, for the whole process.

        ``encode(value, sent)`` gives ``(codec, flags, meta, buffers)``, the codec's number being 16 or more;
        ``decode(codec, meta, buffers)`` gives the value; ``announce(meta, known)`` learns a frame's definitions,
        ``known`` being what ``known()`` has made for its reader, ``discard(meta[, known])`` hears of one that nobody
        will decode. ``final_error`` is the class of errors that decoding again would not mend, ``arena_full(message,
        holdings, cap)`` makes what is raised at an arena's cap (``cap``: what has no room now; 1: the graph's, 2: the
        session's, 0: it is too large), ``state_error`` is raised in forked children; ``refused(errno, text)`` makes
        what is raised for what the system has refused; ``storage_held_alone(value)`` gives the address of a tensor's
        storage that nothing else refers to, or 0. ``take(meta)`` gives the refs that a frame which is decoded later
        has claims on, to be held until then.)");
  m.def("show_decoding_on", &show_decoding_on, "process_table"_a.none(), "slot"_a,
        "Have that slot's status say from now on when this process decodes values; ``None``: no slot's.");
  m.def("note_import", &note_import, "module"_a, R"(
        If this thread decodes a value: have the status say that ``module`` is imported for it, until
        :func:`end_import`. ``False``: it decodes none, or the status names another module.)");
  m.def("end_import", &end_import, "Have the status name no module.");
  m.def("bytes_of", &bytes_of, "buffer"_a, nb::sig("def bytes_of(buffer: Any) -> bytes"),
        "A copy of a contiguous buffer, in huge pages where the system has them.");
  m.def("text_of", &text_of, "buffer"_a, nb::sig("def text_of(buffer: Any) -> str"),
        "The text in a contiguous buffer, in UTF-8 as pickles have it.");
  nb::class_<Uncollected>(m, "Uncollected", "Pause the garbage collector until it ends or is let go of.")
      .def(nb::init<>())
      .def("end", &Uncollected::end, "Have the collector go on, if it was on before.");
  m.def("go_on_collecting", &Uncollected::in_child, "Have the collector of a forked child go on, which a thread of its parent may have paused.");
  nb::class_<Untold>(m, "Untold", nb::is_weak_referenceable(), "Definitions that are gone, of which a channel's next frames have to tell.")
      .def(nb::init<>())
      .def("add", &Untold::add, "tokens"_a, nb::sig("def add(self, tokens: Sequence[bytes]) -> None"), "Have them told.")
      .def("take", &Untold::take, "most"_a, nb::sig("def take(self, most: int) -> tuple[bytes, ...]"), "Take out the first ``most`` of them.")
      .def("__len__", &Untold::size);
  m.attr("UNSAID") = nb::bytes(kUnsaidMeta);
  m.attr("LARGE") = nb::bytes(kLargeMeta);
  m.attr("MOST_LOGGED") = kMostLogged;
  m.attr("BROKEN") = nb::bytes(kBrokenMeta);
  m.def("refcount", [](nb::handle h) { return Py_REFCNT(h.ptr()); }, "value"_a.none(), "The value's reference count, with none of this call's own.");
  m.def("live_leases", &live_leases, "How many leases this process holds that were not inherited over a fork.");
  m.def("monotonic_ns", &now_ns, "Return the clock of deadlines and status pages, in nanoseconds (``CLOCK_MONOTONIC``).");
  m.def("monotonic", [] { return double(now_ns()) / 1e9; },
        "Return the same in seconds. Tests that replace the functions of ``time`` do not stop this clock.");
  m.def("begin_exit", &Exit::begin, "time_limit"_a, R"(
        This thread ends the interpreter: no other gets out of this module into Python any more. Waits, at most
        ``patience`` seconds, for those that are between the two; false if one still is.)");
  m.def("die_of_interrupt", &Exit::die_of_interrupt, "Have this process die of SIGINT instead of exiting, once everything in it has ended.");
  m.def("own_descriptor", [](int fd) { return own(fd).release(); }, "fd"_a, R"(
        Give ``fd`` a number of the library's own (:mod:`conveyor.descriptors`), and ``FD_CLOEXEC``. It stays as it is
        where the process's limit leaves no such number.)");
  m.def("duplicate_descriptor", [](int fd) { return dup_cloexec(fd).release(); }, "fd"_a,
        "Duplicate ``fd``, under such a number; the caller closes it, as what those below return. ``OSError`` where there is none.");
  m.def("event_descriptor", [] { return made(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)); }, "Make an eventfd, which does not block.");
  m.def("epoll_descriptor", [] { return made(::epoll_create1(EPOLL_CLOEXEC)); }, "Make an epoll instance.");
  m.def("memory_file", [](const std::string& name) { return made(::memfd_create(name.c_str(), MFD_CLOEXEC)); }, "name"_a,
        "Make a file without a place in any directory.");
  m.def("skip_descriptors", &skip_own,
        "Give later descriptors higher numbers than all that there were: others have closed those, and what has had them may close them once more.");
  m.def("end_without_descriptors", [] { ends_without_descriptors = true; }, R"(
        Have this process, an actor's, say so on stderr and end where its code has closed the library's descriptors:
        it could leave others asleep.)");
  m.def("end_forked_child", &end_forked_child, "where"_a, nb::sig("def end_forked_child(where: str) -> NoReturn"), R"(
        Say on stderr that this process, which was forked in ``where``, has come back from there, and end it with exit
        code 1: nothing of Python's is flushed.)");
  std::atexit(&Exit::last);
  m.def("sleep_for_ever", [] {
    Unlocked unlocked;
    Exit::sleep_for_ever();
  }, nb::sig("def sleep_for_ever() -> NoReturn"), "Without the GIL.");

  bind_process_table(m);
  bind_memory(m);
  bind_channel(m);
  bind_graph(m);
  bind_fast_path(m);
  bind_locks(m);
  bind_finalizers(m);
  bind_collective(m);
  bind_direct(m);
  bind_net(m);
}
#undef PyInit__core

extern "C" NB_EXPORT PyObject* PyInit__core() {
  if (PyInterpreterState_Get() == PyInterpreterState_Main()) return init_in_main_interpreter();
  PyErr_SetString(PyExc_ImportError,
                  "conveyor cannot be imported in a subinterpreter: its native core belongs to the main interpreter of the process "
                  "(mod_wsgi: WSGIApplicationGroup %{GLOBAL}; uWSGI: single-interpreter = true)");
  return nullptr;
}
