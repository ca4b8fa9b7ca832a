// The process table, the doorbell and the death watch.

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
uint32_t checked(const ProcessTable& process_table, uint32_t slot) {
  if (slot >= process_table.slots())
    throw nb::index_error(("conveyor: no slot " + std::to_string(slot) + " of a process table of " + std::to_string(process_table.slots())).c_str());
  return slot;
}

ProcessTableSlot* slot_of(ProcessTable& process_table, uint32_t slot) { return process_table.slot(checked(process_table, slot)); }

nb::str text_of(const std::string& text) { return nb::steal<nb::str>(PyUnicode_DecodeUTF8(text.data(), Py_ssize_t(text.size()), "replace")); }

// None: it is being written. A slot that is none is a wait for nobody, and nobody waits for whom it names.
nb::object read_waits(ProcessTable& b, uint32_t slot, uint64_t work) {
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
nb::object read_all_waits(ProcessTable& b, uint32_t slot) {
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
                     checked(*inbox.process_table(), nb::cast<uint32_t>(parts[4])), nb::cast<uint64_t>(parts[5]), nb::cast<std::string>(parts[6])});
  }
  inbox.waits().note(notes);
}

}  // namespace

void bind_process_table(nb::module_& m) {
  nb::class_<ProcessTable>(m, "ProcessTable", "The session's process slots: bell, liveness futex and status page of each. Slots are not checked.")
      .def_static("create", &ProcessTable::create, "slots"_a, "A new process table with room for that many processes.")
      .def_static("attach", &ProcessTable::attach, "fd"_a,
           "The process table behind a descriptor, which is duplicated; ``OSError`` if it is none of this version.")
      .def_static("look", &ProcessTable::look, "fd"_a, "The same for who has no part in the session, and only reads: a call of what writes is a fault.")
      .def_prop_ro("fd", &ProcessTable::fd, "The process table's descriptor; stays the process table's.")
      .def_prop_ro("slots", &ProcessTable::slots, "How many slots there are.")
      .def_prop_ro("deaths", [](ProcessTable& b) { return b.header()->deaths.load(); }, "How many deaths were announced, modulo 2**32.")
      .def("set_eventfd", [](ProcessTable& b, uint32_t slot, int fd, uint32_t incarnation) { b.set_eventfd(checked(b, slot), fd, incarnation); }, "slot"_a, "fd"_a, "incarnation"_a,
           R"(
           Let this process wake the ``incarnation``-th process of ``slot`` from a poll through a duplicate of ``fd``.
           Nothing if it has that of a later one. ``IndexError``, here and below, where the process table has no such slot.)")
      .def("close_fds", &ProcessTable::close_fds, "At the end of a session: close every descriptor; the mapping stays.")
      .def("eventfd", [](ProcessTable& b, uint32_t slot) { return b.eventfd(checked(b, slot)); }, "slot"_a,
           "The descriptor kept for that process, still the process table's; -1 if there is none.")
      .def("forget_eventfd", [](ProcessTable& b, uint32_t slot) { b.forget_eventfd(checked(b, slot)); }, "slot"_a,
           "Close the duplicate that ``set_eventfd`` made, if any.")
      .def("prepare", [](ProcessTable& b, uint32_t slot, const std::string& name, uint32_t incarnation) { b.prepare(checked(b, slot), name, incarnation); }, "slot"_a, "name"_a, "incarnation"_a = 0,
           R"(
           Make the slot ready for a new process: cleared, its incarnation counted up, "starting". ``incarnation``: the
           one it has where processes are counted, which is another host; 0: here.)")
      .def("is_remote", [](ProcessTable& b, uint32_t slot) { return slot_of(b, slot)->is_remote.load(std::memory_order_relaxed) != 0; }, "slot"_a,
           "Whether the process of this slot is on another host.")
      .def("name", [](ProcessTable& b, uint32_t slot) {
             const std::string name = b.name(checked(b, slot));
             return nb::steal(PyUnicode_DecodeUTF8(name.data(), Py_ssize_t(name.size()), "replace"));
           }, "slot"_a, nb::sig("def name(self, slot: int) -> str"), "The name given to ``prepare``, at most 63 bytes of it.")
      .def("live", [](ProcessTable& b, uint32_t slot) { b.live(checked(b, slot)); }, "slot"_a,
           R"(Take the liveness futex with the calling thread, the process's main thread: "alive" until it ends.)")
      .def("alive_unwatched",
           [](ProcessTable& b, uint32_t slot) {
             slot_of(b, slot)->pid.store(uint32_t(::getpid()));
             slot_of(b, slot)->condition.store(Condition::kAlive);
           },
           "slot"_a, R"(Be "alive" without a liveness futex (the driver: it watches, nobody watches it).)")
      .def("guard_signals", [](ProcessTable& b, uint32_t slot) { b.guard_signals(checked(b, slot)); }, "slot"_a,
           "From now on announce a fatal signal of this process before a core is dumped.")
      .def("retire", [](ProcessTable& b, uint32_t slot) { b.retire(checked(b, slot)); }, "slot"_a, R"(
           Give back the liveness futex, by the thread that has taken it with ``live``: the process leaves the session and
           goes on. For everybody it is dead.)")
      .def("mark_exiting", [](ProcessTable& b, uint32_t slot) { slot_of(b, slot)->status.exiting.store(1, std::memory_order_release); }, "slot"_a,
           "Note that the process ends because user code wants it to (``SystemExit``).")
      .def("is_exiting", [](ProcessTable& b, uint32_t slot) { return slot_of(b, slot)->status.exiting.load(std::memory_order_acquire) != 0; }, "slot"_a,
           "Whether the process has noted that.")
      .def("death_number", [](ProcessTable& b, uint32_t slot) { return slot_of(b, slot)->died.load(std::memory_order_acquire); }, "slot"_a,
           "Which of the session's deaths the slot's was, from 1; 0 if none was announced.")
      .def("notify", [](ProcessTable& b, uint32_t slot, uint32_t bit) {
             if (bit >= kDoorbellBits) throw nb::index_error("conveyor: a bell has no such bit");
             b.notify(checked(b, slot), bit);
           }, "slot"_a, "bit"_a, "Set ``bit`` in the slot's bell and wake whoever sleeps on it.")
      .def("announce_death", [](ProcessTable& b, uint32_t slot) { return b.announce_death(checked(b, slot)); }, "slot"_a,
           "Mark the slot dead and ring every living process; false if it was marked already.")
      .def("free", [](ProcessTable& b, uint32_t slot) { slot_of(b, slot)->condition.store(Condition::kFree); }, "slot"_a, "Mark the slot as nobody's.")
      .def("condition", [](ProcessTable& b, uint32_t slot) { return uint32_t(slot_of(b, slot)->condition.load()); }, "slot"_a,
           "0 free, 1 starting, 2 alive, 3 dying, 4 dead.")
      .def("incarnation", [](ProcessTable& b, uint32_t slot) { return slot_of(b, slot)->incarnation.load(); }, "slot"_a,
           "How many processes have had the slot.")
      .def("memory", [](ProcessTable& b, uint32_t slot) { return slot_of(b, slot)->memory.load(std::memory_order_relaxed); }, "slot"_a,
           "Bytes with memory behind them in the arena of the process in ``slot``.")
      .def_prop_ro("session_memory", [](ProcessTable& b) { return b.header()->memory.bytes.load(std::memory_order_relaxed); },
           "The same of all processes together: what the session's cap bounds.")
      .def("is_waiting", [](ProcessTable& b, uint32_t slot) { return slot_of(b, slot)->waiting.load(std::memory_order_seq_cst) != 0; }, "slot"_a,
           "Whether the main thread of the process in ``slot`` waits for something of this library, as far as it counts that.")
      .def("starve", [](ProcessTable& b, uint32_t slot, uint32_t what) { b.starve(checked(b, slot), what); }, "slot"_a, "what"_a, R"(
           The process in ``slot`` waits for memory at a cap from now on, for ``what``, as the processes have agreed; 0:
           it does no longer. Meanwhile all processes give back at once what is free, and ring.)")
      .def("starving", [](ProcessTable& b, uint32_t slot) { return b.starving(checked(b, slot)); }, "slot"_a,
           "What the process in ``slot`` waits for memory for, at a cap.")
      .def("holders", [](ProcessTable& b, uint32_t slot) {
             nb::list found;
             for (const auto& word : slot_of(b, slot)->holders)
               if (const uint32_t holder = word.load(std::memory_order_seq_cst); holder != 0 && holder <= b.slots()) found.append(holder - 1);
             return found;
           }, "slot"_a, nb::sig("def holders(self, slot: int) -> list[int]"), R"(
           Processes, by slot, that hold values of the arena of the one in ``slot`` and run something: some, as of when
           that was last asked for memory, or somebody starves.)")
      .def("is_idle", [](ProcessTable& b, uint32_t slot) { return slot_of(b, slot)->status.state.load(std::memory_order_seq_cst) == uint32_t(State::kIdle); }, "slot"_a,
           "Whether the process in ``slot`` runs nothing.")
      .def("forget_memory", [](ProcessTable& b, uint32_t slot) { b.forget_memory(checked(b, slot)); }, "slot"_a,
           "The process in ``slot`` has ended: what it had counts no more.")
      .def_prop_rw("session", [](ProcessTable& b) { return b.header()->session.load(std::memory_order_relaxed); },
                   [](ProcessTable& b, uint64_t session) { b.header()->session.store(session, std::memory_order_relaxed); }, R"(
           A number that no other session has whose failures may be remembered. That of another host is set to the
           driver's before there is any process.)")
      .def("is_rank", [](ProcessTable& b, uint32_t slot) { return b.is_rank(checked(b, slot)); }, "slot"_a,
           "Whether that process has joined a collective group, or is on another host, of which that is not known.")
      .def("gone", [](ProcessTable& b, uint32_t slot, uint32_t incarnation) { return b.gone(checked(b, slot), incarnation); }, "slot"_a, "incarnation"_a,
           "Whether the process that had the slot as its ``incarnation``-th is no more.")
      .def("pid", [](ProcessTable& b, uint32_t slot) { return slot_of(b, slot)->pid.load(); }, "slot"_a,
           "The process's id as it sees itself, 0 before it is alive.")
      .def("publish_directory", [](ProcessTable& b, uint32_t slot) { slot_of(b, slot)->directory.store(directory_address(), std::memory_order_release); }, "slot"_a,
           "This process has that slot: say where its directory is.")
      .def("directory", [](ProcessTable& b, uint32_t slot) { return slot_of(b, slot)->directory.load(std::memory_order_acquire); }, "slot"_a,
           "Where the process's directory is, in its memory; 0: nowhere.")
      .def("announced", [](ProcessTable& b, uint32_t slot) {
             nb::list numbers;
             for (const uint64_t number : announced_by(b, checked(b, slot))) numbers.append(number);
             return numbers;
           }, "slot"_a, nb::sig("def announced(self, slot: int) -> list[int]"),
           "The numbers of the values that the process reads where they lie, as ``hazard`` has announced.")
      .def_prop_ro("used", &ProcessTable::used, "Slots from here on have never had a process.")
      .def("transfers", [](ProcessTable& b, uint32_t slot) {
             ProcessTableSlot* s = slot_of(b, slot);
             return (s->transfers_held.load() != 0 ? 1 : 0) | (s->transfers_failing.load() != 0 ? 2 : 0);
           }, "slot"_a, "Whether what that process keeps is held back from who fetches it (1), or cannot be fetched (2), or both.")
      .def("change_transfers", [](ProcessTable& b, uint32_t slot, int held, int failing) {
             ProcessTableSlot* s = slot_of(b, slot);
             s->transfers_held.fetch_add(uint32_t(held));
             s->transfers_failing.fetch_add(uint32_t(failing));
             for (uint32_t i = 0, n = b.used(); i < n; ++i)
               if (const Condition c = b.slot(i)->condition.load(); c == Condition::kAlive || c == Condition::kStarting) b.notify(i, kAttentionBit);
           }, "slot"_a, "held"_a, "failing"_a, "Add to how many want that, and have all processes look again.")
      .def("note_fetch", [](ProcessTable& b, uint32_t slot, int from, uint64_t number, uint64_t total, uint32_t others, uint64_t since_ns) {
             Fetching& f = slot_of(b, slot)->fetching;
             if (f.number.exchange(number) != number || from < 0) f.done.store(0);
             f.total.store(total);
             f.others.store(others);
             f.since_ns.store(since_ns);
             f.from.store(uint32_t(from + 1));
           }, "slot"_a, "source"_a, "number"_a = 0, "total"_a = 0, "others"_a = 0, "since_ns"_a = 0, R"(
           That process waits for a value that the process in ``source`` keeps, of ``total`` bytes, or held back; and for
           so many others. -1: for none.)")
      .def("note_fetched", [](ProcessTable& b, uint32_t slot, uint64_t number, uint64_t done) {
             Fetching& f = slot_of(b, slot)->fetching;
             if (f.number.load() == number) f.done.store(done);
           }, "slot"_a, "number"_a, "done"_a, "So many bytes of that value are there, if that process waits for it.")
      .def("fetching", [](ProcessTable& b, uint32_t slot) -> nb::object {
             const Fetching& f = slot_of(b, slot)->fetching;
             const uint32_t from = f.from.load();
             if (from == 0 || from > b.slots()) return nb::none();
             return nb::make_tuple(from - 1, f.number.load(), f.done.load(), f.total.load(), f.others.load(), f.since_ns.load());
           }, "slot"_a, nb::sig("def fetching(self, slot: int) -> tuple[int, int, int, int, int, int] | None"), R"(
           The slot of who keeps what that process waits for, the value's number, its bytes that are there and all of
           them, how many others it waits for, and since when; ``None``: for none.)")
      .def("waits", &read_waits, "slot"_a, "work"_a,
           nb::sig("def waits(self, slot: int, work: int) -> tuple[int, int, int, list[tuple[int, int, str]]] | None"), R"(
           What keeps that process from doing a work: (stamp, the question since which it has looked in vain, mode, any
           of whom it waits for as (slot, work, text)); an empty list: nothing does. ``None`` while it is being noted.)")
      .def("all_waits", &read_all_waits, "slot"_a,
           nb::sig("def all_waits(self, slot: int) -> list[tuple[int, int, int, int, int, int, str]] | None"),
           "All that the process has noted, as ``Inbox.note_waits`` takes it. ``None`` while it is being noted.")
      .def("ask", [](ProcessTable& b, uint32_t slot) {
             // Before the ring: who is woken by it must see the question.
             const uint32_t requested = slot_of(b, slot)->status.requested.fetch_add(1, std::memory_order_seq_cst) + 1;
             b.notify(slot, kAttentionBit);
             return requested;
           }, "slot"_a, "Have the waits of that process look once more; the number of the question.")
      .def("status", [](ProcessTable& b, uint32_t slot) {
             Status& s = slot_of(b, slot)->status;
             return nb::make_tuple(uint32_t(s.state.load()), s.graph.load(), s.node.load(), s.execution.load(),
                                   s.since_ns.load(), s.signal.load(), text_of(s.what.get()));
           }, "slot"_a, nb::sig("def status(self, slot: int) -> tuple[int, int, int, int, int, int, str]"),
           "(state, graph, node, execution, since in ns, fatal signal, method name); states are 0 idle, 1 running.")
      .def("decoding", [](ProcessTable& b, uint32_t slot) -> nb::object {
             const Status& s = slot_of(b, slot)->status;
             const uint64_t since = s.decoding_since_ns.load();
             return since == 0 ? nb::none() : nb::object(nb::make_tuple(since, text_of(s.importing.get())));
           }, "slot"_a, nb::sig("def decoding(self, slot: int) -> tuple[int, str] | None"), R"(
           Since when (in ns) that process decodes values in Python, and the module that is imported for it, or ``""``;
           ``None``: it decodes none.)");

  nb::class_<PumpWait>(m, "PumpWait", "How the thread that sends calls later waits: see ``native/pump_wait.h``.")
      .def(nb::init<Inbox&>(), "inbox"_a, nb::keep_alive<1, 2>())
      .def("open", &PumpWait::open)
      .def("release", &PumpWait::release)
      .def("begin", &PumpWait::begin, "sender"_a)
      .def("end", &PumpWait::end, "sender"_a)
      .def("close", &PumpWait::close)
      .def("wait", [](PumpWait& one) {
             Unlocked unlocked;
             return one.wait();
           }, "Until there may be something to send; false: it is closed.");

  nb::class_<Attending>(m, "Attending", "A thread's wait for a result, as long as it sends what waits: see ``native/pump_wait.h``.")
      .def(nb::init<PumpWait&, uint64_t, bool>(), "wait"_a, "sender"_a, "does"_a, nb::keep_alive<1, 2>())
      .def("__enter__", [](nb::object self) {
             nb::inst_ptr<Attending>(self)->enter();
             return self;
           }, nb::sig("def __enter__(self) -> Attending"))
      .def("__exit__", [](Attending& one, nb::args) { one.end(); }, nb::sig("def __exit__(self, *error: Any) -> None"))
      .def("end", &Attending::end);

  nb::class_<Inbox>(m, "Inbox", "This process's own side of its bell: what is ready, and waiting for it.")
      .def("__init__", [](Inbox* self, std::shared_ptr<ProcessTable> process_table, uint32_t slot, int eventfd, unsigned long main_thread) {
             checked(*process_table, slot);
             // Before: should an inbox be there that cannot be made whole, nobody would destroy it.
             auto leftovers = std::make_shared<Leftovers>(process_table, slot);
             new (self) Inbox(std::move(process_table), slot, eventfd, main_thread, std::move(leftovers));
           }, "process_table"_a, "slot"_a, "eventfd"_a, "main_thread"_a,
           "``eventfd`` (duplicated, non-blocking) wakes the thread ``main_thread`` (``threading.get_ident``).")
      .def_prop_ro("count", &Inbox::count, "The bell's event count, modulo 2**32: read it, look, then ``wait`` for it to move.")
      .def_prop_ro("eventfd", &Inbox::eventfd, "The descriptor that becomes readable for a sleeper that armed; stays the inbox's.")
      .def_prop_rw("spin_ns", &Inbox::spin_limit, &Inbox::set_spin_limit, "How long a wait spins at most before the thread sleeps; 0: not at all.")
      .def_prop_rw("main_thread", &Inbox::main_thread, &Inbox::set_main_thread,
           "The thread that sleeps in poll, for the sake of signal handlers; 0: none does.")
      .def_prop_ro("slot", &Inbox::slot, "The process's slot.")
      .def_prop_ro("inherited", &Inbox::inherited, "Whether this is a forked child of the process whose bell it is.")
      .def_ro("leftovers", &Inbox::leftovers)
      .def("wait", [](Inbox& i, uint32_t seen, nb::handle timeout) {
             const bool moved = wait(i, seen, deadline_after(timeout));
             check_owner(i.generation());
             return moved;
           }, "seen"_a, "timeout"_a.none() = nb::none(), nb::sig("def wait(self, seen: int, timeout: float | None = None) -> bool"), R"(
           Wait until ``count`` differs from ``seen``; false at the timeout. Raises what a signal handler raises, and
           what another thread throws into this one.)")
      .def("rest", [](Inbox& i, uint32_t seen) {
             wait(i, seen, 0, true);
             check_owner(i.generation());
           }, "seen"_a, "Like :meth:`wait`, for a thread of the library's own, into which nobody throws.")
      .def("next", [](Inbox& i, nb::handle timeout) { return next(i, deadline_after(timeout)); }, "timeout"_a.none() = nb::none(),
           nb::sig("def next(self, timeout: float | None = None) -> int"),
           "Take the next ready bit, waiting if there is none; -1 at the timeout. Raises what a signal handler raises.")
      .def("poll", &Inbox::poll, "Take the next ready bit, or -1, without waiting.")
      .def("arm", &Inbox::arm, "seen"_a, "own"_a, R"(
           Ask for the eventfd to be written at every ring from now on, for the sleeper whose relay is ``own``; true if
           ``count`` is still ``seen``: sleep only then.)")
      .def("disarm", &Inbox::disarm, "own"_a, "This sleeper is awake, and needs no event.")
      .def("close_fds", &Inbox::close_fds, "At the end of a session: close the descriptors, unless somebody sleeps on them.")
      .def("clear_event", &Inbox::clear_event, "own"_a, "The same; also make the eventfd unreadable, and wake all others that sleep on it.")
      .def("add_relay", &Inbox::add_relay, "fd"_a, R"(
           Be a sleeper that goes by this eventfd, which is written when another takes the event down that this one
           sleeps on. It stays the caller's.)")
      .def("remove_relay", &Inbox::remove_relay, "fd"_a, "Undo ``add_relay``.")
      .def("idle", [](Inbox& i) {
             i.idle();
             i.tell_starving();
           }, "Note on the status page: nothing to do, unless methods run beside the main thread.")
      .def("count_waiting", &Inbox::count_waiting, "more"_a, "Note that the main thread is in so many more waits.")
      .def("count_concurrent", &Inbox::count_concurrent, "more"_a,
           "Note that so many more methods run beside the main thread, in other threads or as coroutines. Who ends the last one rings the bell.")
      .def("running", [](Inbox& i, uint32_t graph, uint32_t node, uint64_t execution) {
             Status& s = i.status();
             s.graph.store(graph, std::memory_order_relaxed);
             s.node.store(node, std::memory_order_relaxed);
             s.execution.store(execution, std::memory_order_relaxed);
             i.begins(now_ns());
           }, "graph"_a, "node"_a, "execution"_a, "Note on the status page: runs this task of a graph, since now.")
      .def("running_call", [](Inbox& i, nb::str name, uint64_t call) {
             Status& s = i.status();
             Py_ssize_t length;
             const char* text = PyUnicode_AsUTF8AndSize(name.ptr(), &length);
             if (text == nullptr) throw nb::python_error();
             s.graph.store(0, std::memory_order_relaxed);
             s.what.set({text, size_t(length)});
             s.execution.store(call, std::memory_order_relaxed);
             i.begins(now_ns());
           }, "name"_a, "call"_a, "Note on the status page: runs the method of this name (cut at 87 bytes) for a call, since now.")
      .def_prop_ro("requested", [](Inbox& i) { return i.status().requested.load(std::memory_order_seq_cst); },
           "How many questions others have had for this process's waits.")
      .def("note_waits", &note_waits, "waits"_a, nb::sig("def note_waits(self, waits: list[tuple[int, int, int, int, int, int, str]]) -> None"), R"(
           Note on the process table what keeps this process from its work, at most ``WAIT_ROWS`` waits: the work, a stamp that
           tells its waits from earlier ones, the question since which they have looked in vain, how the work is run, and
           any of whom they wait for (slot, work there), in words.)");

  nb::class_<DeathWatch>(m, "DeathWatch", "A native thread that sees processes die by their liveness futexes and announces it. Never takes the GIL.")
      .def("__init__", [](DeathWatch* self, std::shared_ptr<ProcessTable> process_table, int eventfd) { new (self) DeathWatch(std::move(process_table), eventfd); }, "process_table"_a, "eventfd"_a = -1,
           "Starts the thread. ``eventfd``: an eventfd that it writes to whenever a liveness futex has fired; it must outlive the thread.")
      .def_static("supported", &DeathWatch::supported,
           "Whether this kernel can wait for many liveness futexes (Linux 5.16), and lets us; else only fatal signals are seen.")
      .def("add", [](DeathWatch& w, uint32_t slot) { w.add(checked(w.process_table(), slot)); }, "slot"_a,
           "Watch this process; at most 127 are watched by one thread.")
      .def("remove", &DeathWatch::remove, "slot"_a, "Watch it no more.")
      .def("stop", [](DeathWatch& w) { Unlocked unlocked; w.stop(); }, "End the thread and wait for it; safe to call again.");
}

}  // namespace conveyor
