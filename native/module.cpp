// The Python face of the native core. Names and meanings: src/conveyor/_core.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "endpoints.h"
#include "program.h"
#include "ref.h"
#include "service.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace conveyor;

namespace {

struct Empty {};
nb::object* empty = nullptr;  // never destroyed: it may be asked for while the interpreter ends

uint64_t deadline_after(nb::handle timeout) {
  if (timeout.is_none()) return 0;
  const double seconds = PyFloat_AsDouble(timeout.ptr());
  if (seconds == -1.0 && PyErr_Occurred()) throw nb::python_error();
  if (!(seconds < 1e9)) return 0;
  return now_ns() + (seconds > 0 ? uint64_t(seconds * 1e9) : 0);
}

int buffer_get(PyObject* self, Py_buffer* view, int flags) {
  Buffer* b = nb::inst_ptr<Buffer>(self);
  return PyBuffer_FillInfo(view, self, b->data, Py_ssize_t(b->length), b->readonly, flags);
}

PyType_Slot buffer_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(buffer_get)}, {0, nullptr}};

// A private copy-on-write mapping of the pages behind a buffer of leased memory. What is written there
// is dropped with it.
Buffer private_pages(const Buffer& b) {
  if (!b.lease) {  // not shared memory: a copy
    auto copy = std::make_shared<OwnedMemory>(b.length);
    std::memcpy(copy->data, b.data, b.length);
    return Buffer{copy->data, b.length, false, copy, nullptr, nullptr};
  }
  // The address within the arena: the block's offset, its header, and where the buffer lies in it.
  const size_t in_block = size_t(b.data - b.lease->data()) + kBlockHeader;
  const uint64_t at = b.lease->offset() + in_block;
  const uint64_t first = at / kPage * kPage;
  const size_t length = size_t(at - first) + b.length;
  void* p = ::mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE, b.lease->view()->fd(), off_t(first));
  if (p == MAP_FAILED) throw_errno("mmap");
  ::madvise(p, length, MADV_DONTDUMP);
  auto pages = std::make_shared<PrivatePages>(b.lease, static_cast<char*>(p), length);
  return Buffer{static_cast<char*>(p) + (at - first), b.length, false, pages, nullptr, nullptr};
}

// A failed ref holds its error, whose traceback holds the frames that got it, which hold the ref.
int ref_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  RefCore* ref = nb::inst_ptr<RefCore>(self);
  Py_VISIT(ref->source.ptr());
  Py_VISIT(ref->gate_object.ptr());
  Py_VISIT(ref->outcome.ptr());
  return 0;
}

int ref_clear(PyObject* self) {
  if (!nb::inst_ready(self)) return 0;
  RefCore* ref = nb::inst_ptr<RefCore>(self);
  // Only the outcome: every cycle goes through it, and the rest is needed to drop the result (which is
  // to be dropped if there is no outcome).
  if (!ref->outcome.is_valid()) return 0;
  nb::object outcome = std::move(ref->outcome);
  ref->outcome = nb::none();
  return 0;
}

PyType_Slot ref_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(ref_traverse)},
                           {Py_tp_clear, reinterpret_cast<void*>(ref_clear)},
                           {0, nullptr}};

constexpr uint64_t kFirstLookNs = 5'000'000;  // a wait that lasts longer is worth being described

struct Claim {
  RefCore& ref;
  ~Claim() { ref.unclaim(); }
};

// ref.get(timeout): what is here or comes soon is returned from here; the rest is Python's.
nb::object ref_get(nb::handle self, nb::handle timeout) {
  RefCore& ref = *nb::inst_ptr<RefCore>(self);
  if (!ref.outcome.is_valid() && ref.gate != nullptr && ref.number >= 0 && timeout.is_none() && ref.claim()) {
    Claim claim{ref};
    nb::object value;
    try {
      value = ref.gate->get(uint64_t(ref.number), ref.reader, now_ns() + kFirstLookNs, -1);
    } catch (nb::python_error& error) {
      // A value that cannot be decoded is this ref's outcome; anything else (Ctrl-C) ends this get only.
      if (is_final(error.value())) self.attr("_fail")(error.value());
      throw;
    }
    if (ref.outcome.is_valid()) value = nb::object();  // cancelled meanwhile
    if (value.is_valid() && !nb::isinstance<ErrorFrame>(value)) {
      ref.settle(value);
      return value;
    }
    if (value.is_valid()) {
      ref.gate->gate->hand(uint64_t(ref.number), ref.reader, value);
      self.attr("_arrived")(value);
    }
  }
  return self.attr("_get")(timeout);
}

// (total, largest, [(least value, first value beyond, count), ...]) of the buckets that are not empty.
nb::tuple contents(const Histogram& h) {
  nb::list buckets;
  for (size_t i = 0; i < Histogram::kBuckets; ++i)
    if (const uint64_t count = value_of(h.buckets[i]))
      buckets.append(nb::make_tuple(Histogram::lowest(i), Histogram::lowest(i + 1), count));
  return nb::make_tuple(value_of(h.total), value_of(h.largest), buckets);
}

void check_index(uint32_t index, uint32_t count) {
  if (index >= count) throw nb::index_error("no such counter");
}

std::vector<Target> targets_of(const std::vector<std::pair<uint32_t, uint32_t>>& pairs) {
  std::vector<Target> targets;
  for (auto [slot, bit] : pairs) {
    if (bit >= kBellBits) throw nb::value_error("bell bit out of range");
    targets.push_back({slot, bit});
  }
  return targets;
}

Kind kind_of(uint16_t kind) {
  if (kind < 1 || kind > uint16_t(Kind::kClose)) throw nb::value_error("no such kind of frame");
  return Kind(kind);
}

}  // namespace

NB_MODULE(_core, m) {
  install_fork_handlers();
  // Refs and values may live until the interpreter ends, and so may what they hold.
  nb::set_leak_warnings(false);
  m.doc() = "The native core of conveyor.";

  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const ArenaFull& e) {
      raise_arena_full(e);
    } catch (const std::system_error& e) {
      nb::object args = nb::make_tuple(e.code().value(), nb::str(e.what()));
      PyErr_SetObject(PyExc_OSError, args.ptr());
    }
  });

  nb::class_<Empty>(m, "Empty").def("__repr__", [](const Empty&) { return "EMPTY"; }).def("__bool__", [](const Empty&) { return false; });
  empty = new nb::object(nb::cast(Empty{}));
  m.attr("EMPTY") = *empty;

  m.attr("KIND_VALUE") = int(Kind::kValue);
  m.attr("KIND_ERROR") = int(Kind::kError);
  m.attr("KIND_CALL") = int(Kind::kCall);
  m.attr("KIND_CONTROL") = int(Kind::kControl);
  m.attr("KIND_CLOSE") = int(Kind::kClose);
  m.attr("BELL_BITS") = int(kBellBits);
  m.attr("ATTENTION_BIT") = int(kAttentionBit);
  m.attr("RING_WRITER_MAY_WAIT") = int(kWriterMayWait);
  m.attr("MAX_READERS") = int(kMaxReaders);
  #if defined(CONVEYOR_DEBUG) && CONVEYOR_DEBUG
  m.attr("DEBUG") = true;
#else
  m.attr("DEBUG") = false;
#endif

  m.def("set_codec", &set_codec, "encode"_a, "decode"_a, "announce"_a, "final_error"_a, "arena_full"_a, "held_alone"_a, "state_error"_a);
  m.def("clear_codec", &clear_codec);
  m.def("refcount", [](nb::handle h) { return Py_REFCNT(h.ptr()); }, "value"_a.none());
  m.def("live_leases", &live_leases);
  m.def("release_unpinned", &release_unpinned);
  m.def("monotonic_ns", &now_ns);

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

  nb::class_<Segment>(m, "Segment")
      .def_static("create", &Segment::create, "size"_a)
      .def_static("attach", &Segment::attach, "fd"_a)
      .def_static("ring_bytes", [](uint32_t slots, uint32_t stride, uint32_t readers) { return align_up(RingHeader::bytes(slots, stride, readers), kCacheLine); }, "slots"_a, "stride"_a, "readers"_a)
      .def_prop_ro("fd", &Segment::fd)
      .def("close_fd", &Segment::close_fd)
      .def_prop_ro("size", &Segment::size)
      .def("make_ring", [](Segment& s, size_t offset, uint32_t slots, uint32_t stride, uint32_t readers, uint32_t flags) { s.make_ring(offset, slots, stride, readers, flags); }, "offset"_a, "slots"_a, "stride"_a, "readers"_a, "flags"_a = 0)
      .def("progress", [](Segment& s, size_t offset) {
             const Ring ring = s.ring(offset);
             nb::list taken;
             for (uint32_t i = 0; i < ring.readers; ++i) taken.append(ring.cursor(i).next.load(std::memory_order_acquire));
             return nb::make_tuple(ring.header->head.load(std::memory_order_acquire), taken);
           }, "offset"_a);

  nb::class_<Limits>(m, "Limits")
      .def("__init__", [](Limits* self, std::shared_ptr<Segment> segment, size_t offset, uint32_t sets, uint32_t tasks) {
             new (self) Limits(std::move(segment), offset, sets, tasks);
           }, "segment"_a, "offset"_a, "sets"_a, "tasks"_a)
      .def_static("bytes", &Limits::bytes, "sets"_a, "tasks"_a)
      .def("cancel", &Limits::cancel, "number"_a)
      .def("cancelled", &Limits::cancelled, "number"_a)
      .def_prop_ro("cancellations", &Limits::cancellations)
      .def("deadline", &Limits::deadline, "number"_a)
      .def("stopped", [](Limits& l, uint64_t number) { return l.look(number, now_ns()) != Limits::Verdict::kGoOn; }, "number"_a)
      .def("report", &Limits::report, "number"_a);
  m.attr("CANCELLED") = nb::bytes(kCancelledMeta);
  m.attr("OVERDUE") = nb::bytes(kOverdueMeta);

  nb::class_<Arena>(m, "Arena")
      .def("__init__", [](Arena* self, int fd, size_t size, size_t cap) { new (self) Arena(fd, size, cap); }, "fd"_a, "size"_a, "cap"_a)
      .def_static("create_fd", [](size_t size) {
             Fd fd = Arena::create_file(size / kWindow * kWindow);
             return ::fcntl(fd.get(), F_DUPFD_CLOEXEC, 3);
           }, "size"_a)
      .def("allocate", [](std::shared_ptr<Arena> arena, size_t size) {
             auto made = std::make_shared<MadeInPlace>(arena, size);
             return Buffer{made->block->data(), size, false, made, nullptr, made};
           }, "size"_a)
      .def("trim", [](Arena& a, double idle) { a.reclaim(SIZE_MAX); a.trim(uint64_t(idle * 1e9)); }, "idle"_a = 0.0)
      .def("reclaim", [](Arena& a) { a.reclaim(SIZE_MAX); })
      .def("close_fd", &Arena::close_fd)
      .def_prop_ro("bytes_touched", &Arena::bytes_touched)
      .def_prop_ro("bytes_out", &Arena::bytes_out)
      .def_prop_ro("blocks_out", &Arena::blocks_out)
      .def_prop_ro("cap", &Arena::cap);

  nb::class_<ArenaView>(m, "ArenaView").def("__init__", [](ArenaView* self, int fd, size_t size) { new (self) ArenaView(fd, size); }, "fd"_a, "size"_a);

  nb::class_<Buffer>(m, "Buffer", nb::type_slots(buffer_slots))
      .def_ro("nbytes", &Buffer::length)
      .def_ro("readonly", &Buffer::readonly)
      .def_prop_ro("address", [](Buffer& b) { return reinterpret_cast<uintptr_t>(b.data); })
      .def("private", &private_pages);

  nb::class_<Snapshot>(m, "Snapshot")
      .def("__init__", [](Snapshot* self, nb::handle value, nb::handle sent, size_t share_from) { new (self) Snapshot(snapshot(value, sent, share_from)); },
           "value"_a.none(), "sent"_a.none(), "share_from"_a = 0)
      .def_static("received", &received_snapshot, "codec"_a, "flags"_a, "size"_a, "data"_a.none(), "fd"_a)
      .def_prop_ro("parts", [](Snapshot& s) {
             nb::object data = nb::none();
             if (s.fd.get() < 0) data = nb::bytes(s.frame.body, s.frame.size);
             return nb::make_tuple(s.frame.codec, s.frame.flags, s.frame.size, data);
           })
      .def_prop_ro("fd", [](Snapshot& s) { return s.fd.get(); })
      .def("decode", [](Snapshot& s) { return decode(s.frame); });

  nb::class_<ErrorFrame>(m, "ErrorFrame").def("__init__", [](ErrorFrame* self, nb::bytes meta) { new (self) ErrorFrame{std::move(meta)}; }, "meta"_a).def_ro("meta", &ErrorFrame::meta);

  m.attr("EVENT_BYTES") = int(sizeof(Event));
  m.attr("RECORDING_CONTROL_BYTES") = int(sizeof(RecordingControl));

  nb::class_<Recorder>(m, "Recorder")
      .def("__init__", [](Recorder* self, std::shared_ptr<Segment> segment, size_t control, size_t offset, size_t events, uint32_t capacity,
                          uint32_t tasks, uint32_t receives, uint32_t sends, uint32_t outputs, uint32_t slots, bool threads) {
             new (self) Recorder(std::move(segment), RecorderPlace{control, offset, events, capacity, tasks, receives, sends, outputs, slots}, threads);
           }, "segment"_a, "control"_a, "offset"_a, "events"_a, "capacity"_a, "tasks"_a, "receives"_a, "sends"_a, "outputs"_a, "slots"_a, "threads"_a)
      .def_static("bytes", [](uint32_t tasks, uint32_t receives, uint32_t sends, uint32_t outputs, uint32_t slots) {
             return RecorderPlace{0, 0, 0, 1, tasks, receives, sends, outputs, slots}.bytes();
           }, "tasks"_a, "receives"_a, "sends"_a, "outputs"_a, "slots"_a)
      .def("task", [](Recorder& r, uint32_t i) {
             check_index(i, r.place().tasks);
             return nb::make_tuple(value_of(r.task(i).errors), value_of(r.task(i).skipped), contents(r.task(i).running));
           }, "index"_a)
      .def("receive", [](Recorder& r, uint32_t i) {
             check_index(i, r.place().receives);
             return contents(r.received(i).waiting);
           }, "index"_a)
      .def("send", [](Recorder& r, uint32_t i) {
             check_index(i, r.place().sends);
             return nb::make_tuple(value_of(r.sent(i).frames), value_of(r.sent(i).errors), value_of(r.sent(i).bytes));
           }, "index"_a)
      .def_prop_ro("running", [](Recorder& r) -> nb::object {
             const RecorderHeader& h = r.header();
             const uint64_t task = h.running.load(std::memory_order_acquire);
             if (task == 0) return nb::none();
             return nb::make_tuple(task - 1, value_of(h.running_execution), value_of(h.running_since));
           })
      .def_prop_ro("memory", [](Recorder& r) { return value_of(r.header().memory); })
      .def_prop_rw("tracing", &Recorder::tracing, &Recorder::set_tracing)
      .def("collect", &Recorder::collect, "limit"_a)
      .def("drain", &Recorder::drain)
      .def("take_events", [](Recorder& r) {
             const std::vector<Event> events = r.take_events();
             return nb::bytes(reinterpret_cast<const char*>(events.data()), events.size() * sizeof(Event));
           })
      .def_prop_ro("dropped", &Recorder::dropped)
      .def("free_events", &Recorder::free_events)
      .def("note_task", [](Recorder& r, uint32_t i, uint64_t execution, uint64_t begin, uint64_t end, bool failed) {
             check_index(i, r.place().tasks);
             r.note_task(i, execution, begin, end, failed);
           }, "index"_a, "execution"_a, "begin"_a, "end"_a, "failed"_a)
      .def("note_skipped", [](Recorder& r, uint32_t i) {
             check_index(i, r.place().tasks);
             r.task_skipped(i);
           }, "index"_a)
      .def("note_receive", [](Recorder& r, uint32_t i, uint64_t execution, uint64_t begin, uint64_t end, uint64_t bytes, bool failed) {
             check_index(i, r.place().receives);
             r.received(i).waiting.note(0);
             if (r.tracing()) r.trace({begin, end, execution, bytes, i, 0, EventKind::kReceive, uint16_t(failed ? kFailed : 0), 0});
           }, "index"_a, "execution"_a, "begin"_a, "end"_a, "bytes"_a, "failed"_a)
      .def("note_send", [](Recorder& r, uint32_t i, uint64_t execution, uint64_t begin, uint64_t end, uint64_t bytes, bool failed) {
             check_index(i, r.place().sends);
             r.note_send(i, execution, begin, end, bytes, failed);
           }, "index"_a, "execution"_a, "begin"_a, "end"_a, "bytes"_a, "failed"_a)
      .def("note_execution", [](Recorder& r, uint64_t execution, uint64_t begin, uint64_t end) {
             check_index(0, r.place().tasks);
             r.task(0).running.note(end - begin);
             if (r.tracing()) r.trace({begin, end, execution, 0, 0, 0, EventKind::kExecute, 0, 0});
           }, "execution"_a, "begin"_a, "end"_a)
      .def("note_room", [](Recorder& r, uint64_t execution, uint64_t begin, bool traced) {
             check_index(1, r.place().tasks);
             const uint64_t end = now_ns();
             r.task(1).running.note(end - begin);
             if (traced && r.tracing()) r.trace({begin, end, execution, 0, 0, 0, EventKind::kRoom, 0, 0});
           }, "execution"_a, "begin"_a, "traced"_a);

  nb::class_<Writer>(m, "Writer")
      .def("__init__", [](Writer* self, std::shared_ptr<Segment> segment, size_t offset, std::shared_ptr<Board> board,
                          const std::vector<std::pair<uint32_t, uint32_t>>& targets, std::shared_ptr<Arena> arena, nb::object sent,
                          uint32_t graph, uint32_t edge, std::string carries) {
             new (self) Writer(std::move(segment), offset, std::move(board), targets_of(targets), std::move(arena), std::move(sent));
             ReaderSet& readers = *self->ring.readers();
             readers.graph = graph;
             readers.edge = edge;
             readers.carries = std::move(carries);
           }, "segment"_a, "offset"_a, "board"_a, "targets"_a, "arena"_a, "sent"_a.none(), "graph"_a = 0, "edge"_a = 0, "carries"_a = "")
      .def_rw("moved_refs", &Writer::moved_refs)
      .def_rw("sent", &Writer::sent)
      .def_ro("bytes", &Writer::bytes)
      .def_prop_ro("count", [](Writer& w) { return w.ring.head(); })
      .def_prop_ro("has_room", [](Writer& w) { return w.ring.has_room(); })
      .def_prop_ro("all_readers_closed", [](Writer& w) { return w.ring.all_readers_closed(); })
      .def("wants_room", [](Writer& w) { w.ring.wants_room(); })
      .def_prop_ro("wanted", [](Writer& w) { return w.ring.wanted(); })
      .def("send", [](Writer& w, nb::handle value, uint64_t tag, uint16_t kind) {
             const Kind k = kind_of(kind);
             if (!w.ring.has_room()) return false;
             Encoded e;
             w.encode_value(e, value);
             w.prepare(e);
             if (!w.ring.has_room()) return false;  // encoding runs Python code, which may have sent something
             w.commit(e, tag, k);
             return true;
           }, "value"_a.none(), "tag"_a, "kind"_a = uint16_t(Kind::kValue))
      .def("send_error", [](Writer& w, nb::bytes meta, uint64_t tag) {
             if (!w.ring.has_room()) return false;
             Encoded e;
             e.codec = kBytes;
             e.data = meta.c_str();
             e.size = meta.size();
             w.prepare(e, true);
             w.commit(e, tag, Kind::kError);
             return true;
           }, "meta"_a, "tag"_a);

  nb::class_<Reader>(m, "Reader")
      .def("__init__", [](Reader* self, std::shared_ptr<Segment> segment, size_t offset, uint32_t reader, std::shared_ptr<Board> board,
                          std::pair<uint32_t, uint32_t> writer, std::shared_ptr<ArenaView> view, bool readonly) {
             new (self) Reader(std::move(segment), offset, reader, std::move(board), Target{writer.first, writer.second}, std::move(view), readonly);
           }, "segment"_a, "offset"_a, "reader"_a, "board"_a, "writer"_a, "view"_a, "readonly"_a)
      .def_prop_ro("empty", [](Reader& r) { return r.ring.empty(); })
      .def_prop_ro("count", [](Reader& r) { return r.ring.next(); })
      .def_prop_ro("available", [](Reader& r) { return r.ring.head() - r.ring.next(); })
      .def_ro("tag", &Reader::tag)
      .def_prop_ro("front", [](Reader& r) { return r.ring.empty() ? int64_t(-1) : int64_t(r.ring.front()->tag); })
      .def("want", [](Reader& r, uint64_t tag) { r.ring.want(tag); }, "tag"_a)
      .def_prop_ro("kind", [](Reader& r) { return uint32_t(r.kind); })
      .def_ro("bytes", &Reader::bytes)
      .def("receive", [](Reader& r) { return r.ring.empty() ? nb::object(*empty) : r.receive(); })
      .def("skip", [](Reader& r) {
             if (r.ring.empty()) return false;
             r.take_announced();
             return true;
           })
      .def("close", [](Reader& r) { r.ring.close(); });

  nb::class_<Gated>(m, "Gate")
      .def("__init__", [](Gated* self, nb::list writers, nb::list readers, uint32_t depth, uint16_t kind, nb::object inbox, uint64_t first) {
             std::vector<Writer*> w;
             std::vector<Reader*> r;
             for (nb::handle h : writers) w.push_back(nb::cast<Writer*>(h));
             for (nb::handle h : readers) r.push_back(nb::cast<Reader*>(h));
             new (self) Gated{std::make_unique<Gate>(std::move(w), std::move(r), depth, kind_of(kind), first), nb::make_tuple(writers, readers, inbox),
                              nb::cast<Inbox*>(inbox)};
           }, "writers"_a, "readers"_a, "depth"_a, "kind"_a, "inbox"_a, "first"_a = 0)
      .def("start", [](nb::handle self, nb::handle value, nb::handle source, nb::handle type, uint64_t deadline) -> nb::object {
             Gated& g = *nb::inst_ptr<Gated>(self);
             const int64_t number = g.gate->submit(value, deadline);
             if (number < 0) return nb::none();
             nb::object ref = nb::inst_alloc(type);
             new (nb::inst_ptr<RefCore>(ref)) RefCore(nb::borrow(source), nb::borrow(self), number, 0);
             nb::inst_mark_ready(ref);
             return ref;
           }, "value"_a.none(), "source"_a, "type"_a, "deadline"_a = 0)
      .def("submit", [](Gated& g, nb::handle value, uint64_t deadline) { return g.gate->submit(value, deadline); }, "value"_a.none(), "deadline"_a = 0)
      .def("submit_many", [](Gated& g, nb::tuple values, uint64_t deadline) { return g.gate->submit_many(values, deadline); }, "values"_a, "deadline"_a = 0)
      .def("set_limits", [](Gated& g, nb::object limits) {
             g.gate->set_limits(nb::cast<Limits*>(limits));
             g.limits = std::move(limits);
           }, "limits"_a)
      .def("interrupt", [](Gated& g) {
             ++g.interruptions;
             g.inbox->board()->ring(g.inbox->slot(), kAttentionBit);
           })
      .def("get", [](Gated& g, uint64_t number, size_t reader, nb::handle timeout, int64_t deaths) {
             nb::object value = g.get(number, reader, deadline_after(timeout), deaths);
             if (!value.is_valid()) return *empty;
             g.gate->hand(number, reader, value);
             return value;
           }, "number"_a, "reader"_a, "timeout"_a.none() = nb::none(), "deaths"_a = -1)
      .def("take", [](Gated& g, uint64_t number, size_t reader) {
             nb::object value = g.gate->take(number, reader);
             if (!value.is_valid()) return nb::object(*empty);
             g.gate->hand(number, reader, value);
             return value;
           }, "number"_a, "reader"_a)
      .def("ready", [](Gated& g, uint64_t number, size_t reader) { return g.gate->ready(number, reader); }, "number"_a, "reader"_a)
      .def("drop", [](Gated& g, uint64_t number, size_t reader) { g.gate->drop(number, reader); }, "number"_a, "reader"_a)
      .def("drain", [](Gated& g) { g.gate->drain(); })
      .def_rw("closed", &Gated::closed)
      .def_prop_ro("has_room", [](Gated& g) { return g.gate->has_room(); })
      .def_prop_ro("submitted", [](Gated& g) { return g.gate->submitted(); })
      .def_prop_ro("completed", [](Gated& g) { return g.gate->completed(); })
      .def_prop_ro("stashed", [](Gated& g) { return g.gate->stashed(); })
      .def_prop_ro("stashed_bytes", [](Gated& g) { return g.gate->stashed_bytes(); })
      .def("record", [](Gated& g, std::shared_ptr<Recorder> own, std::vector<std::pair<std::shared_ptr<Recorder>, uint32_t>> outputs,
                        std::vector<std::shared_ptr<Recorder>> all) { g.gate->record(std::move(own), std::move(outputs), std::move(all)); }, "own"_a, "outputs"_a, "all"_a)
      .def("count_completed", [](Gated& g) { g.gate->count_completed(); });

  nb::class_<RefCore>(m, "RefCore", nb::is_weak_referenceable(), nb::type_slots(ref_slots))
      .def(nb::init<nb::object, nb::object, int64_t, size_t>(), "source"_a.none(), "gate"_a.none(), "number"_a, "reader"_a)
      .def("get", &ref_get, "timeout"_a.none() = nb::none())
      .def("_claim", &RefCore::claim)
      .def("_unclaim", &RefCore::unclaim)
      .def_ro("_source", &RefCore::source)
      .def_ro("_gate", &RefCore::gate_object)
      .def_rw("_number", &RefCore::number)
      .def_ro("_reader", &RefCore::reader)
      .def_prop_rw("_outcome", [](RefCore& r) { return r.outcome.is_valid() ? r.outcome : *empty; }, [](RefCore& r, nb::object value) { r.settle(std::move(value)); }, nb::for_setter("value"_a.none()));

  nb::class_<Program>(m, "Program")
      .def(nb::init<nb::object, uint32_t, uint32_t, size_t, nb::object, nb::object, std::shared_ptr<Recorder>>(), "inbox"_a, "graph"_a, "bit"_a, "registers"_a, "encode_error"_a, "check_elements"_a, "recorder"_a)
      .def("add_receive", &Program::add_receive, "reader"_a, "reg"_a, "spread"_a, "label"_a)
      .def("add_call", &Program::add_call, "method"_a, "node"_a, "label"_a, "args"_a, "constants"_a, "uses"_a, "invoke"_a.none(), "start"_a.none(), "out"_a, "outs"_a, "num_returns"_a)
      .def("add_send", &Program::add_send, "writer"_a, "reg"_a, "last"_a, "only_done"_a, "label"_a, "output"_a)
      .def("set_limits", &Program::set_limits, "limits"_a, "cancel"_a)
      .def("advance", &Program::advance)
      .def("resume", &Program::resume, "value"_a.none(), "error"_a.none())
      .def("start_at", &Program::start_at, "execution"_a)
      .def("close", &Program::close)
      .def_prop_ro("execution", &Program::execution)
      .def_prop_ro("bit", &Program::bit);

  nb::class_<DeathWatch>(m, "DeathWatch")
      .def("__init__", [](DeathWatch* self, std::shared_ptr<Board> board) { new (self) DeathWatch(std::move(board)); }, "board"_a)
      .def_static("supported", &DeathWatch::supported)
      .def("add", &DeathWatch::add, "slot"_a)
      .def("remove", &DeathWatch::remove, "slot"_a)
      .def("stop", [](DeathWatch& w) { nb::gil_scoped_release unlocked; w.stop(); });
}
