// The board, the bell and the death watch.
#include "bind.h"
#include "inbox.h"
#include "service.h"

namespace conveyor {

void bind_board(nb::module_& m) {
  nb::class_<Board>(m, "Board")
      .def_static("create", &Board::create, "slots"_a)
      .def_static("attach", &Board::attach, "fd"_a)
      .def_prop_ro("fd", &Board::fd)
      .def_prop_ro("slots", &Board::slots)
      .def_prop_ro("deaths", [](Board& b) { return b.header()->deaths.load(); })
      .def("set_eventfd", &Board::set_eventfd, "slot"_a, "fd"_a)
      .def("close_fds", &Board::close_fds)
      .def("forget_eventfd", &Board::forget_eventfd, "slot"_a)
      .def("prepare", &Board::prepare, "slot"_a, "name"_a)
      .def("name", [](Board& b, uint32_t slot) { return nb::steal(PyUnicode_DecodeUTF8(b.slot(slot)->name, Py_ssize_t(::strnlen(b.slot(slot)->name, sizeof b.slot(slot)->name)), "replace")); }, "slot"_a)
      .def("live", &Board::live, "slot"_a)
      .def("alive_unwatched",
           [](Board& b, uint32_t slot) {
             b.slot(slot)->pid.store(uint32_t(::getpid()));
             b.slot(slot)->condition.store(Condition::kAlive);
           },
           "slot"_a)
      .def("guard_signals", &Board::guard_signals, "slot"_a)
      .def("leave", [](Board& b, uint32_t slot) { b.slot(slot)->status.leaving.store(1, std::memory_order_release); }, "slot"_a)
      .def("leaving", [](Board& b, uint32_t slot) { return b.slot(slot)->status.leaving.load(std::memory_order_acquire) != 0; }, "slot"_a)
      .def("death_number", [](Board& b, uint32_t slot) { return b.slot(slot)->died.load(std::memory_order_acquire); }, "slot"_a)
      .def("ring", nb::overload_cast<uint32_t, uint32_t>(&Board::ring), "slot"_a, "bit"_a)
      .def("announce_death", &Board::announce_death, "slot"_a)
      .def("free", [](Board& b, uint32_t slot) { b.slot(slot)->condition.store(Condition::kFree); }, "slot"_a)
      .def("condition", [](Board& b, uint32_t slot) { return uint32_t(b.slot(slot)->condition.load()); }, "slot"_a)
      .def("incarnation", [](Board& b, uint32_t slot) { return b.slot(slot)->incarnation.load(); }, "slot"_a)
      .def("gone", &Board::gone, "slot"_a, "incarnation"_a)
      .def("pid", [](Board& b, uint32_t slot) { return b.slot(slot)->pid.load(); }, "slot"_a)
      .def("waits", [](Board& b, uint32_t slot) {
             Status& s = b.slot(slot)->status;
             const int64_t target = int64_t(s.waits_for.load(std::memory_order_seq_cst)) - 1;
             return nb::make_tuple(target, s.waits.load(), s.checks.load());
           }, "slot"_a)
      .def("status", [](Board& b, uint32_t slot) {
             Status& s = b.slot(slot)->status;
             char what[sizeof s.what];
             // A seqlock: take the text only if nobody wrote it meanwhile; a writer that died half way
             // leaves an odd version, and then the text may be torn but is still terminated.
             for (int attempt = 0; attempt < 100; ++attempt) {
               const uint32_t version = s.what_version.load(std::memory_order_acquire);
               std::memcpy(what, s.what, sizeof what);
               std::atomic_thread_fence(std::memory_order_acquire);
               if (!(version & 1) && s.what_version.load(std::memory_order_relaxed) == version) break;
             }
             what[sizeof what - 1] = 0;
             nb::object text = nb::steal(PyUnicode_DecodeUTF8(what, Py_ssize_t(std::strlen(what)), "replace"));
             return nb::make_tuple(uint32_t(s.state.load()), s.graph.load(), s.node.load(), s.execution.load(),
                                   s.since_ns.load(), s.signal.load(), text);
           }, "slot"_a);

  nb::class_<Inbox>(m, "Inbox")
      .def("__init__", [](Inbox* self, std::shared_ptr<Board> board, uint32_t slot, int eventfd, unsigned long main_thread) {
             if (slot >= board->slots()) throw nb::value_error("no such slot");
             new (self) Inbox(std::move(board), slot, eventfd, main_thread);
           }, "board"_a, "slot"_a, "eventfd"_a, "main_thread"_a)
      .def_prop_ro("count", &Inbox::count)
      .def_prop_ro("eventfd", &Inbox::eventfd)
      .def_prop_rw("spin_ns", &Inbox::spin_limit, &Inbox::set_spin_limit)
      .def_prop_rw("main_thread", &Inbox::main_thread, &Inbox::set_main_thread)
      .def_prop_ro("slot", &Inbox::slot)
      .def("wait", [](Inbox& i, uint32_t seen, nb::handle timeout) { return i.wait(seen, deadline_after(timeout)); }, "seen"_a, "timeout"_a.none() = nb::none())
      .def("next", [](Inbox& i, nb::handle timeout) { return i.next(deadline_after(timeout)); }, "timeout"_a.none() = nb::none())
      .def("poll", &Inbox::poll)
      .def("arm", &Inbox::arm, "seen"_a)
      .def("close_fds", &Inbox::close_fds)
      .def("clear_event", &Inbox::clear_event, "own"_a)
      .def("add_relay", &Inbox::add_relay, "fd"_a)
      .def("remove_relay", &Inbox::remove_relay, "fd"_a)
      .def("idle", [](Inbox& i) { i.status().state.store(uint32_t(State::kIdle), std::memory_order_relaxed); })
      .def("running", [](Inbox& i, uint32_t graph, uint32_t node, uint64_t execution) {
             Status& s = i.status();
             s.graph.store(graph, std::memory_order_relaxed);
             s.node.store(node, std::memory_order_relaxed);
             s.execution.store(execution, std::memory_order_relaxed);
             s.since_ns.store(now_ns(), std::memory_order_relaxed);
             s.state.store(uint32_t(State::kRunning), std::memory_order_release);
           }, "graph"_a, "node"_a, "execution"_a)
      .def("running_call", [](Inbox& i, nb::str name, uint64_t call) {
             Status& s = i.status();
             Py_ssize_t length;
             const char* text = PyUnicode_AsUTF8AndSize(name.ptr(), &length);
             if (text == nullptr) throw nb::python_error();
             s.graph.store(0, std::memory_order_relaxed);
             const uint32_t version = s.what_version.load(std::memory_order_relaxed);
             s.what_version.store(version + 1, std::memory_order_relaxed);
             std::atomic_thread_fence(std::memory_order_release);
             const size_t n = std::min(size_t(length), sizeof s.what - 1);
             std::memcpy(s.what, text, n);
             s.what[n] = 0;
             s.what_version.store(version + 2, std::memory_order_release);
             s.execution.store(call, std::memory_order_relaxed);
             s.since_ns.store(now_ns(), std::memory_order_relaxed);
             s.state.store(uint32_t(State::kRunning), std::memory_order_release);
           }, "name"_a, "call"_a)
      .def("waiting_for", [](Inbox& i, int64_t slot) {
             Status& s = i.status();
             s.waits.fetch_add(1, std::memory_order_seq_cst);
             s.waits_for.store(uint32_t(slot + 1), std::memory_order_seq_cst);
           }, "slot"_a);

  nb::class_<DeathWatch>(m, "DeathWatch")
      .def("__init__", [](DeathWatch* self, std::shared_ptr<Board> board) { new (self) DeathWatch(std::move(board)); }, "board"_a)
      .def_static("supported", &DeathWatch::supported)
      .def("add", &DeathWatch::add, "slot"_a)
      .def("remove", &DeathWatch::remove, "slot"_a)
      .def("stop", [](DeathWatch& w) { nb::gil_scoped_release unlocked; w.stop(); });
}

}  // namespace conveyor
