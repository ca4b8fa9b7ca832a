// The board, the bell and the death watch.

#include "bind.h"
#include "death_watch.h"
#include "directory.h"
#include "exit.h"
#include "hazards.h"
#include "hooks.h"
#include "inbox.h"
#include "leftovers.h"
#include "pump_wait.h"
#include "waiting.h"

namespace conveyor {
namespace {

// Every index that comes from Python: it may have come from shared memory before, where peers write.
uint32_t checked(const Board& board, uint32_t slot) {
  if (slot >= board.slots())
    throw nb::index_error(("conveyor: no slot " + std::to_string(slot) + " on a board of " + std::to_string(board.slots())).c_str());
  return slot;
}

BoardSlot* slot_of(Board& board, uint32_t slot) { return board.slot(checked(board, slot)); }

nb::str text_of(const std::string& text) { return nb::steal<nb::str>(PyUnicode_DecodeUTF8(text.data(), Py_ssize_t(text.size()), "replace")); }

// None: it is being written. A slot that is none is a wait for nobody, and nobody waits for whom it names.
nb::object read_waits(Board& b, uint32_t slot, uint64_t work) {
  const std::optional<std::vector<WaitNote>> notes = slot_of(b, slot)->waits.of(work);
  if (!notes) return nb::none();
  nb::list waits;
  for (const WaitNote& note : *notes) {
    if (note.slot >= b.slots()) return nb::make_tuple(0, 0, 0, nb::list());
    waits.append(nb::make_tuple(note.slot, note.target, text_of(note.text)));
  }
  if (notes->empty()) return nb::make_tuple(0, 0, 0, waits);
  const WaitNote& first = notes->front();  // all say the same but whom they wait for
  return nb::make_tuple(first.stamp, first.answered, first.mode, waits);
}

// All of a process, as they were noted. None: they are being written.
nb::object read_all_waits(Board& b, uint32_t slot) {
  const std::optional<std::vector<WaitNote>> notes = slot_of(b, slot)->waits.all();
  if (!notes) return nb::none();
  nb::list rows;
  for (const WaitNote& note : *notes) {
    if (note.slot >= b.slots()) return nb::list();
    rows.append(nb::make_tuple(note.work, note.stamp, note.answered, note.mode, note.slot, note.target, text_of(note.text)));
  }
  return rows;
}

void note_waits(Inbox& inbox, nb::list rows) {
  if (rows.size() > kWaitRows) throw nb::value_error("conveyor: too many waits");
  std::vector<WaitNote> notes;  // whatever may fail comes before the first write
  for (nb::handle row : rows) {
    const nb::tuple parts = nb::cast<nb::tuple>(row);
    if (parts.size() != 7) throw nb::value_error("conveyor: a wait is a work, a stamp, an answer, a mode, a slot, a work there and a text");
    notes.push_back({nb::cast<uint64_t>(parts[0]), nb::cast<uint64_t>(parts[1]), nb::cast<uint32_t>(parts[2]), nb::cast<uint32_t>(parts[3]),
                     checked(*inbox.board(), nb::cast<uint32_t>(parts[4])), nb::cast<uint64_t>(parts[5]), nb::cast<std::string>(parts[6])});
  }
  inbox.waits().note(notes);
}

}  // namespace

void bind_board(nb::module_& m) {
  nb::class_<Board>(m, "Board")
      .def_static("create", &Board::create, "slots"_a)
      .def_static("attach", &Board::attach, "fd"_a)
      .def_static("look", &Board::look, "fd"_a)
      .def_prop_ro("fd", &Board::fd)
      .def_prop_ro("slots", &Board::slots)
      .def_prop_ro("deaths", [](Board& b) { return b.header()->deaths.load(); })
      .def("set_eventfd", [](Board& b, uint32_t slot, int fd, uint32_t incarnation) { b.set_eventfd(checked(b, slot), fd, incarnation); }, "slot"_a, "fd"_a, "incarnation"_a)
      .def("close_fds", &Board::close_fds)
      .def("eventfd", [](Board& b, uint32_t slot) { return b.eventfd(checked(b, slot)); }, "slot"_a)
      .def("forget_eventfd", [](Board& b, uint32_t slot) { b.forget_eventfd(checked(b, slot)); }, "slot"_a)
      .def("prepare", [](Board& b, uint32_t slot, const std::string& name, uint32_t incarnation) { b.prepare(checked(b, slot), name, incarnation); }, "slot"_a, "name"_a, "incarnation"_a = 0)
      .def("elsewhere", [](Board& b, uint32_t slot) { return slot_of(b, slot)->elsewhere.load(std::memory_order_relaxed) != 0; }, "slot"_a)
      .def("name", [](Board& b, uint32_t slot) {
             const std::string name = b.name(checked(b, slot));
             return nb::steal(PyUnicode_DecodeUTF8(name.data(), Py_ssize_t(name.size()), "replace"));
           }, "slot"_a)
      .def("live", [](Board& b, uint32_t slot) { b.live(checked(b, slot)); }, "slot"_a)
      .def("alive_unwatched",
           [](Board& b, uint32_t slot) {
             slot_of(b, slot)->pid.store(uint32_t(::getpid()));
             slot_of(b, slot)->condition.store(Condition::kAlive);
           },
           "slot"_a)
      .def("guard_signals", [](Board& b, uint32_t slot) { b.guard_signals(checked(b, slot)); }, "slot"_a)
      .def("retire", [](Board& b, uint32_t slot) { b.retire(checked(b, slot)); }, "slot"_a)
      .def("leave", [](Board& b, uint32_t slot) { slot_of(b, slot)->status.leaving.store(1, std::memory_order_release); }, "slot"_a)
      .def("leaving", [](Board& b, uint32_t slot) { return slot_of(b, slot)->status.leaving.load(std::memory_order_acquire) != 0; }, "slot"_a)
      .def("death_number", [](Board& b, uint32_t slot) { return slot_of(b, slot)->died.load(std::memory_order_acquire); }, "slot"_a)
      .def("ring", [](Board& b, uint32_t slot, uint32_t bit) {
             if (bit >= kBellBits) throw nb::index_error("conveyor: a bell has no such bit");
             b.ring(checked(b, slot), bit);
           }, "slot"_a, "bit"_a)
      .def("announce_death", [](Board& b, uint32_t slot) { return b.announce_death(checked(b, slot)); }, "slot"_a)
      .def("free", [](Board& b, uint32_t slot) { slot_of(b, slot)->condition.store(Condition::kFree); }, "slot"_a)
      .def("condition", [](Board& b, uint32_t slot) { return uint32_t(slot_of(b, slot)->condition.load()); }, "slot"_a)
      .def("incarnation", [](Board& b, uint32_t slot) { return slot_of(b, slot)->incarnation.load(); }, "slot"_a)
      .def("memory", [](Board& b, uint32_t slot) { return slot_of(b, slot)->memory.load(std::memory_order_relaxed); }, "slot"_a)
      .def_prop_ro("session_memory", [](Board& b) { return b.header()->memory.bytes.load(std::memory_order_relaxed); })
      .def("is_waiting", [](Board& b, uint32_t slot) { return slot_of(b, slot)->waiting.load(std::memory_order_seq_cst) != 0; }, "slot"_a)
      .def("starve", [](Board& b, uint32_t slot, uint32_t what) { b.starve(checked(b, slot), what); }, "slot"_a, "what"_a)
      .def("starving", [](Board& b, uint32_t slot) { return b.starving(checked(b, slot)); }, "slot"_a)
      .def("holders", [](Board& b, uint32_t slot) {
             nb::list found;
             for (const auto& word : slot_of(b, slot)->holders)
               if (const uint32_t holder = word.load(std::memory_order_seq_cst); holder != 0 && holder <= b.slots()) found.append(holder - 1);
             return found;
           }, "slot"_a)
      .def("is_idle", [](Board& b, uint32_t slot) { return slot_of(b, slot)->status.state.load(std::memory_order_seq_cst) == uint32_t(State::kIdle); }, "slot"_a)
      .def("forget_memory", [](Board& b, uint32_t slot) { b.forget_memory(checked(b, slot)); }, "slot"_a)
      .def_prop_rw("session", [](Board& b) { return b.header()->session.load(std::memory_order_relaxed); },
                   [](Board& b, uint64_t session) { b.header()->session.store(session, std::memory_order_relaxed); })
      .def("is_rank", [](Board& b, uint32_t slot) { return b.is_rank(checked(b, slot)); }, "slot"_a)
      .def("gone", [](Board& b, uint32_t slot, uint32_t incarnation) { return b.gone(checked(b, slot), incarnation); }, "slot"_a, "incarnation"_a)
      .def("pid", [](Board& b, uint32_t slot) { return slot_of(b, slot)->pid.load(); }, "slot"_a)
      .def("publish_directory", [](Board& b, uint32_t slot) { slot_of(b, slot)->directory.store(directory_address(), std::memory_order_release); }, "slot"_a)
      .def("directory", [](Board& b, uint32_t slot) { return slot_of(b, slot)->directory.load(std::memory_order_acquire); }, "slot"_a)
      .def("announced", [](Board& b, uint32_t slot) {
             nb::list numbers;
             for (const uint64_t number : announced_by(b, checked(b, slot))) numbers.append(number);
             return numbers;
           }, "slot"_a)
      .def_prop_ro("used", &Board::used)
      .def("transfers", [](Board& b, uint32_t slot) {
             BoardSlot* s = slot_of(b, slot);
             return (s->transfers_held.load() != 0 ? 1 : 0) | (s->transfers_failing.load() != 0 ? 2 : 0);
           }, "slot"_a)
      .def("change_transfers", [](Board& b, uint32_t slot, int held, int failing) {
             BoardSlot* s = slot_of(b, slot);
             s->transfers_held.fetch_add(uint32_t(held));
             s->transfers_failing.fetch_add(uint32_t(failing));
             for (uint32_t i = 0, n = b.used(); i < n; ++i)
               if (const Condition c = b.slot(i)->condition.load(); c == Condition::kAlive || c == Condition::kStarting) b.ring(i, kAttentionBit);
           }, "slot"_a, "held"_a, "failing"_a)
      .def("note_fetch", [](Board& b, uint32_t slot, int from, uint64_t number, uint64_t total, uint32_t others, uint64_t since_ns) {
             Fetching& f = slot_of(b, slot)->fetching;
             if (f.number.exchange(number) != number || from < 0) f.done.store(0);
             f.total.store(total);
             f.others.store(others);
             f.since_ns.store(since_ns);
             f.from.store(uint32_t(from + 1));
           }, "slot"_a, "source"_a, "number"_a = 0, "total"_a = 0, "others"_a = 0, "since_ns"_a = 0)
      .def("note_fetched", [](Board& b, uint32_t slot, uint64_t number, uint64_t done) {
             Fetching& f = slot_of(b, slot)->fetching;
             if (f.number.load() == number) f.done.store(done);
           }, "slot"_a, "number"_a, "done"_a)
      .def("fetching", [](Board& b, uint32_t slot) -> nb::object {
             const Fetching& f = slot_of(b, slot)->fetching;
             const uint32_t from = f.from.load();
             if (from == 0 || from > b.slots()) return nb::none();
             return nb::make_tuple(from - 1, f.number.load(), f.done.load(), f.total.load(), f.others.load(), f.since_ns.load());
           }, "slot"_a)
      .def("waits", &read_waits, "slot"_a, "work"_a)
      .def("all_waits", &read_all_waits, "slot"_a)
      .def("ask", [](Board& b, uint32_t slot) {
             // Before the ring: who is woken by it must see the question.
             const uint32_t asked = slot_of(b, slot)->status.asked.fetch_add(1, std::memory_order_seq_cst) + 1;
             b.ring(slot, kAttentionBit);
             return asked;
           }, "slot"_a)
      .def("status", [](Board& b, uint32_t slot) {
             Status& s = slot_of(b, slot)->status;
             return nb::make_tuple(uint32_t(s.state.load()), s.graph.load(), s.node.load(), s.execution.load(),
                                   s.since_ns.load(), s.signal.load(), text_of(s.what.get()));
           }, "slot"_a)
      .def("decoding", [](Board& b, uint32_t slot) -> nb::object {
             const Status& s = slot_of(b, slot)->status;
             const uint64_t since = s.decoding_since_ns.load();
             return since == 0 ? nb::none() : nb::object(nb::make_tuple(since, text_of(s.importing.get())));
           }, "slot"_a);

  nb::class_<PumpWait>(m, "PumpWait")
      .def(nb::init<Inbox&>(), "inbox"_a, nb::keep_alive<1, 2>())
      .def("open", &PumpWait::open)
      .def("release", &PumpWait::release)
      .def("begin", &PumpWait::begin, "sender"_a)
      .def("end", &PumpWait::end, "sender"_a)
      .def("close", &PumpWait::close)
      .def("wait", [](PumpWait& one) {
             Unlocked unlocked;
             return one.wait();
           });

  nb::class_<Attending>(m, "Attending")
      .def(nb::init<PumpWait&, uint64_t, bool>(), "wait"_a, "sender"_a, "does"_a, nb::keep_alive<1, 2>())
      .def("__enter__", [](nb::object self) {
             nb::inst_ptr<Attending>(self)->enter();
             return self;
           })
      .def("__exit__", [](Attending& one, nb::args) { one.end(); })
      .def("end", &Attending::end);

  nb::class_<Inbox>(m, "Inbox")
      .def("__init__", [](Inbox* self, std::shared_ptr<Board> board, uint32_t slot, int eventfd, unsigned long main_thread) {
             checked(*board, slot);
             // Before: should an inbox be there that cannot be made whole, nobody would destroy it.
             auto leftovers = std::make_shared<Leftovers>(board, slot);
             new (self) Inbox(std::move(board), slot, eventfd, main_thread, std::move(leftovers));
           }, "board"_a, "slot"_a, "eventfd"_a, "main_thread"_a)
      .def_prop_ro("count", &Inbox::count)
      .def_prop_ro("eventfd", &Inbox::eventfd)
      .def_prop_rw("spin_ns", &Inbox::spin_limit, &Inbox::set_spin_limit)
      .def_prop_rw("main_thread", &Inbox::main_thread, &Inbox::set_main_thread)
      .def_prop_ro("slot", &Inbox::slot)
      .def_prop_ro("inherited", &Inbox::inherited)
      .def_ro("leftovers", &Inbox::leftovers)
      .def("wait", [](Inbox& i, uint32_t seen, nb::handle timeout) {
             const bool moved = wait(i, seen, deadline_after(timeout));
             check_owner(i.generation());
             return moved;
           }, "seen"_a, "timeout"_a.none() = nb::none())
      .def("rest", [](Inbox& i, uint32_t seen) {
             wait(i, seen, 0, true);
             check_owner(i.generation());
           }, "seen"_a)
      .def("next", [](Inbox& i, nb::handle timeout) { return next(i, deadline_after(timeout)); }, "timeout"_a.none() = nb::none())
      .def("poll", &Inbox::poll)
      .def("arm", &Inbox::arm, "seen"_a, "own"_a)
      .def("disarm", &Inbox::disarm, "own"_a)
      .def("close_fds", &Inbox::close_fds)
      .def("clear_event", &Inbox::clear_event, "own"_a)
      .def("add_relay", &Inbox::add_relay, "fd"_a)
      .def("remove_relay", &Inbox::remove_relay, "fd"_a)
      .def("idle", [](Inbox& i) {
             i.idle();
             i.tell_starving();
           })
      .def("count_waiting", &Inbox::count_waiting, "more"_a)
      .def("count_beside", &Inbox::count_beside, "more"_a)
      .def("running", [](Inbox& i, uint32_t graph, uint32_t node, uint64_t execution) {
             Status& s = i.status();
             s.graph.store(graph, std::memory_order_relaxed);
             s.node.store(node, std::memory_order_relaxed);
             s.execution.store(execution, std::memory_order_relaxed);
             i.begins(now_ns());
           }, "graph"_a, "node"_a, "execution"_a)
      .def("running_call", [](Inbox& i, nb::str name, uint64_t call) {
             Status& s = i.status();
             Py_ssize_t length;
             const char* text = PyUnicode_AsUTF8AndSize(name.ptr(), &length);
             if (text == nullptr) throw nb::python_error();
             s.graph.store(0, std::memory_order_relaxed);
             s.what.set({text, size_t(length)});
             s.execution.store(call, std::memory_order_relaxed);
             i.begins(now_ns());
           }, "name"_a, "call"_a)
      .def_prop_ro("asked", [](Inbox& i) { return i.status().asked.load(std::memory_order_seq_cst); })
      .def("note_waits", &note_waits, "waits"_a);

  nb::class_<DeathWatch>(m, "DeathWatch")
      .def("__init__", [](DeathWatch* self, std::shared_ptr<Board> board, int told) { new (self) DeathWatch(std::move(board), told); }, "board"_a, "told"_a = -1)
      .def_static("supported", &DeathWatch::supported)
      .def("add", [](DeathWatch& w, uint32_t slot) { w.add(checked(w.board(), slot)); }, "slot"_a)
      .def("remove", &DeathWatch::remove, "slot"_a)
      .def("stop", [](DeathWatch& w) { Unlocked unlocked; w.stop(); });
}

}  // namespace conveyor
