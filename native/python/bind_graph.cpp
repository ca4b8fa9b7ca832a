// Submitting to a graph, its results, and an actor's part of it.
#include <algorithm>
#include <cmath>

#include "bind.h"
#include "exit.h"
#include "failures.h"
#include "hooks.h"
#include "program.h"
#include "recorder.h"
#include "ref.h"

namespace conveyor {
namespace {

// A failed ref holds its error, whose traceback holds the frames that got it, which hold the ref.
int ref_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  RefCore* ref = nb::inst_ptr<RefCore>(self);
  Py_VISIT(ref->source.ptr());
  Py_VISIT(ref->window_object.ptr());
  Py_VISIT(ref->outcome.ptr());
  Py_VISIT(ref->inner.ptr());
  Py_VISIT(ref->targets.ptr());
  return 0;
}

int ref_clear(PyObject* self) {
  if (!nb::inst_ready(self)) return 0;
  RefCore* ref = nb::inst_ptr<RefCore>(self);
  // Only the outcome and what it refers to: every cycle goes through them, and the rest is needed to drop
  // the result (which is to be dropped if there is no outcome).
  const nb::object inner = std::move(ref->inner), targets = std::move(ref->targets);
  if (!ref->outcome.is_valid()) return 0;
  nb::object outcome = std::move(ref->outcome);
  ref->outcome = nb::none();
  return 0;
}

PyType_Slot ref_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(ref_traverse)},
                           {Py_tp_clear, reinterpret_cast<void*>(ref_clear)},
                           {0, nullptr}};

// Those of the refs that `ref_with_siblings` has made with this one which are still there.
nb::list ref_siblings(nb::handle self) {
  nb::list refs;
  refs.append(self);
  const RefCore* own = nb::inst_ptr<RefCore>(self);
  for (const RefCore* ref = own->next; ref != own; ref = ref->next)
    if (Py_REFCNT(ref->self) > 0) refs.append(nb::handle(ref->self));  // else it is going just now
  return refs;
}

bool is_snapshot(nb::handle value) { return nb::inst_check(value) && nb::isinstance<Snapshot>(value); }

// Its refs are held by the ref before it is decoded, and that is done in Python.
bool has_refs(nb::handle kept) { return is_snapshot(kept) && nb::inst_ptr<Snapshot>(kept)->frame.flags & kRefs; }

// Whether an outcome gives a value without Python: a snapshot of one, or what the native codec has made, which
// never changes. Else it is an error, or nothing yet.
bool gives_value(const nb::object& outcome) {
  if (!outcome.is_valid()) return false;
  PyObject* const value = outcome.ptr();
  if (value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value) || PyFloat_CheckExact(value) || PyUnicode_CheckExact(value) ||
      PyBytes_CheckExact(value) || PyTuple_CheckExact(value))
    return true;
  return is_snapshot(outcome) && !has_refs(outcome);
}

constexpr uint64_t kFirstLookNs = 5'000'000;  // a wait that lasts longer is worth being described

struct Resolving {
  RefCore& ref;
  ~Resolving() { ref.end_resolve(this); }
};

// Have the outcome of `self` be what is here, or comes within `wait_ns`, if anything does.
void resolve_soon(nb::handle self, uint64_t wait_ns) {
  RefCore& ref = *nb::inst_ptr<RefCore>(self);
  if (!ref.outcome.is_valid() && ref.window != nullptr && ref.number >= 0 && ref.resolver == nullptr) {
    Resolving resolving{ref};
    ref.begin_resolve(&resolving);
    nb::object value;
    try {
      ref.window->window->make_hand();
      value = wait_ns == 0 ? ref.window->window->take(uint64_t(ref.number), ref.reader) : ref.window->get(ref, now_ns() + wait_ns, -1);
    } catch (nb::python_error& error) {
      // A value that cannot be decoded is this ref's outcome; anything else (Ctrl-C) ends this get only.
      Calling python;
      if (is_final(error.value())) self.attr("_fail")(error.value());
      throw;
    }
    if (ref.outcome.is_valid()) value = nb::object();  // cancelled meanwhile
    if (value.is_valid() && !nb::isinstance<ErrorFrame>(value)) ref.resolve(value);
    if (value.is_valid() && !ref.outcome.is_valid()) {
      ref.window->window->hand(uint64_t(ref.number), ref.reader, value);
      Calling python;
      self.attr("_arrived")(value);
    }
  }
}

// The value of `self` if it is here or comes soon, and nothing is to be done for it in Python; else an
// invalid object. The ref keeps what has come, not what it was decoded to, so every get gives a value of
// its own.
nb::object get_soon(nb::handle self) {
  RefCore& ref = *nb::inst_ptr<RefCore>(self);
  if (ref.targets.is_valid()) return nb::object();  // Python knows how it is received
  resolve_soon(self, kFirstLookNs);
  return gives_value(ref.outcome) ? value_of(ref.outcome) : nb::object();
}

// What needs not be checked to be a number of seconds.
bool is_plain_time(nb::handle timeout) {
  return PyLong_CheckExact(timeout.ptr()) || (PyFloat_CheckExact(timeout.ptr()) && !std::isnan(PyFloat_AS_DOUBLE(timeout.ptr())));
}

// What this thread's get has left for fetching what has stayed elsewhere, which is part of decoding.
struct FetchLimit {
  double seconds = -1;  // negative: as long as it takes
  uint64_t since = 0;   // 0: from now on
};
thread_local FetchLimit fetch_limit;

constexpr double kMostSeconds = 1e9;  // longer is as good as no limit

class FetchLimited {
 public:
  explicit FetchLimited(nb::handle timeout) {
    if (timeout.is_none()) return;
    const double seconds = PyFloat_AsDouble(timeout.ptr());
    if (PyErr_Occurred())
      PyErr_Clear();  // an integer beyond all limits, or no number, which is refused elsewhere
    else  // -1 is no limit, and any other negative number a budget that is used up (conveyor.checks)
      fetch_limit = {seconds == -1 || seconds > kMostSeconds ? -1.0 : std::max(seconds, 0.0), 0};
  }
  ~FetchLimited() { fetch_limit = before_; }
  FetchLimited(const FetchLimited&) = delete;
  void begin() const {
    if (fetch_limit.seconds >= 0) fetch_limit.since = now_ns();
  }

 private:
  const FetchLimit before_ = fetch_limit;
};

nb::object seconds_to_fetch() {
  if (fetch_limit.seconds < 0) return nb::none();
  if (fetch_limit.since == 0) fetch_limit.since = now_ns();  // what is here is decoded at once
  const double gone = double(now_ns() - fetch_limit.since) / 1e9;
  return nb::float_(std::max(fetch_limit.seconds - gone, 0.0));
}

nb::object with_fetch_limit(nb::handle timeout, nb::handle function, nb::args args) {
  const FetchLimited limited(timeout);
  limited.begin();
  Calling python;
  nb::object result = nb::steal(PyObject_CallObject(function.ptr(), args.ptr()));
  if (!result.is_valid()) throw nb::python_error();
  return result;
}

nb::object ref_get(nb::handle self, nb::handle timeout) {
  RefCore& ref = *nb::inst_ptr<RefCore>(self);
  const FetchLimited limited(timeout);
  if (timeout.is_none() || (gives_value(ref.outcome) && is_plain_time(timeout)))
    if (nb::object value = get_soon(self); value.is_valid()) return value;
  limited.begin();
  Calling python;
  return self.attr("_get")(timeout);
}

PyObject* own_get = nullptr;   // both live as long as the module
PyObject* get_name = nullptr;  // made once: that is half of what the look at a type costs

bool gets_natively(nb::handle ref) {
  const nb::object get = nb::steal(PyObject_GetAttr(reinterpret_cast<PyObject*>(Py_TYPE(ref.ptr())), get_name));
  if (!get.is_valid()) throw nb::python_error();
  return get.ptr() == own_get;
}

// The values of the first of the refs in a list: of those before one that is not soon there, or takes Python
// to be got. None if there is anything else than refs.
nb::object refs_get_soon(nb::list refs) {
  PyObject* const list = refs.ptr();
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i)
    if (!is_ref(PyList_GET_ITEM(list, i))) return nb::none();
  nb::list values;
  // Decoding may run any code: whoever changes the list then gets what is in it.
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
    const nb::object ref = nb::borrow(PyList_GET_ITEM(list, i));
    if (!is_ref(ref.ptr()) || !gets_natively(ref)) break;
    nb::object value = get_soon(ref);
    if (!value.is_valid()) break;
    values.append(std::move(value));
  }
  return values;
}

// Whether refs are done, for those of which several are asked one after the other.
class Done {
 public:
  // Refs of calls have a source of type `link`; `own` is the `done` that those have which do not override it.
  Done(nb::handle link, nb::handle own) : link_(link), own_(own) {}

  bool operator()(nb::handle h) {
    RefCore& ref = *nb::inst_ptr<RefCore>(h);
    if (!is_own(Py_TYPE(h.ptr()))) return ask(h.attr("done")());
    if (ref.outcome.is_valid()) return true;
    // As Ref.done: where Python code was asked, another thread may have taken it from the source meanwhile.
    if (ref.source.type().ptr() != link_.ptr()) return ask(ref.source.attr("is_ready")(h)) || ref.outcome.is_valid();
    // As Link.is_ready, but that the link is asked once whether it is gone.
    if (ref.number < 0) return false;
    return ref.window->window->ready(uint64_t(ref.number), ref.reader) || is_gone(ref.source) || ref.outcome.is_valid();
  }

 private:
  static bool ask(const nb::object& answer) { return nb::cast<bool>(answer); }
  bool is_own(PyTypeObject* type) {
    if (type != type_) {
      type_ = type;
      type_is_own_ = nb::handle(reinterpret_cast<PyObject*>(type)).attr("done").is(own_);
    }
    return type_is_own_;
  }
  bool is_gone(const nb::object& link) {
    for (const auto& [known, gone] : links_)
      if (known.is(link)) return gone;
    links_.emplace_back(link, ask(link.attr("gone")));
    return links_.back().second;
  }

  nb::handle link_, own_;
  PyTypeObject* type_ = nullptr;
  bool type_is_own_ = false;
  std::vector<std::pair<nb::object, bool>> links_;
};

// Takes the first `most` of the refs that are done out of a list, in their order; None, and the list as it was, if fewer
// than `least` are. In the usual loop (`ready, rest = wait(rest)`) the list is long and one is taken: no other is
// counted up or down for it. Nobody else has the list.
nb::object take_done(nb::list refs, size_t least, size_t most, nb::handle link, nb::handle own) {
  static uint64_t looks = 0;
  const uint64_t look = ++looks;
  const size_t n = nb::len(refs);
  const PyTypeObject* known = nullptr;
  for (size_t i = 0; i < n; ++i) {
    const nb::handle ref = PyList_GET_ITEM(refs.ptr(), Py_ssize_t(i));
    if (Py_TYPE(ref.ptr()) != known && !is_ref(ref.ptr())) throw nb::type_error((std::string("wait takes a list of refs; one is a ") + nb::cast<std::string>(ref.type().attr("__name__"))).c_str());
    known = Py_TYPE(ref.ptr());
    if (!nb::inst_ready(ref)) throw nb::type_error("wait takes a list of refs; one was never made whole");
    if (std::exchange(nb::inst_ptr<RefCore>(ref)->looked, look) == look) throw nb::value_error("wait takes each ref once");
  }
  std::vector<size_t> done;
  {
    Done is_done(link, own);
    for (size_t i = 0; i < n && done.size() < most; ++i)
      if (is_done(PyList_GET_ITEM(refs.ptr(), Py_ssize_t(i)))) done.push_back(i);
  }
  if (done.size() < least) return nb::none();
  nb::list taken;
  for (size_t i : done) taken.append(nb::handle(PyList_GET_ITEM(refs.ptr(), Py_ssize_t(i))));
  // The others move up, those that are taken to the end: each is in the list once, whatever fails.
  PyObject** const items = PySequence_Fast_ITEMS(refs.ptr());
  size_t end = done.empty() ? n : done.front();
  for (size_t k = 0; k < done.size(); ++k) {
    const size_t next = k + 1 < done.size() ? done[k + 1] : n;
    end = size_t(std::copy(items + done[k] + 1, items + next, items + end) - items);
  }
  for (size_t k = 0; k < done.size(); ++k) items[end + k] = PyList_GET_ITEM(taken.ptr(), Py_ssize_t(k));
  if (PyList_SetSlice(refs.ptr(), Py_ssize_t(end), Py_ssize_t(n), nullptr) != 0) throw nb::python_error();
  return taken;
}

// Every window that has leftovers looks at its rings.
void sweep(Leftovers& leftovers) {
  std::vector<nb::object> windows;  // held: discarding a frame may drop the last reference to any of them
  try {
    leftovers.begin([&](Leftover& one) { windows.push_back(nb::find(*static_cast<WindowLeftover&>(one).window)); });
  } catch (const std::bad_alloc&) {  // the next sweep finds the others
  }
  for (nb::object& held : windows) {
    InFlightWindow& window = *nb::inst_ptr<WindowObject>(held)->window;
    try {
      window.sweep();
    } catch (nb::python_error& error) {
      error.discard_as_unraisable("dropped results");
    } catch (const std::bad_alloc&) {  // the next sweep tries again
    } catch (const std::system_error&) {  // a broken ring, of which whoever waits for it is told
      window.forget_leftovers();
    }
    window.swept();
  }
  windows.clear();
  leftovers.end();
}

// --- counters and trace events ---

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

}  // namespace

void bind_graph(nb::module_& m) {
  m.attr("EVENT_BYTES") = int(sizeof(Event));
  m.attr("RECORDING_CONTROL_BYTES") = int(sizeof(RecordingControl));

  nb::class_<Recorder>(m, "Recorder", R"(
      What one process of a graph notes: counters, and events while the graph is traced. Made by that process to
      write and by the driver to read; times are nanoseconds. Not thread-safe: keep the GIL.)")
      .def(nb::new_([](std::shared_ptr<Segment> segment, size_t control, size_t offset, size_t events, uint32_t capacity,
                          uint32_t tasks, uint32_t receives, uint32_t sends, uint32_t outputs, uint32_t slots, bool threads, std::string whose) {
             return std::make_shared<Recorder>(std::move(segment), RecorderPlace{control, offset, events, capacity, tasks, receives, sends, outputs, slots}, threads, std::move(whose));
           }), "segment"_a, "control"_a, "offset"_a, "events"_a, "capacity"_a, "tasks"_a, "receives"_a, "sends"_a, "outputs"_a, "slots"_a, "threads"_a, "whose"_a = "",
           R"(
           At ``offset``, with a ring of ``capacity`` events (a power of two) at ``events``; ``control`` is shared by all
           recorders of a graph. ``outputs`` of the sends go to the driver, and the time of each of their last ``slots``
           (a power of two) is kept. ``threads``: events name theirs. ``whose`` it is, for errors. ``OSError`` where the
           segment has no such place.)")
      .def_static("bytes", [](uint32_t tasks, uint32_t receives, uint32_t sends, uint32_t outputs, uint32_t slots) {
             return RecorderPlace{0, 0, 0, 1, tasks, receives, sends, outputs, slots}.bytes();
           }, "tasks"_a, "receives"_a, "sends"_a, "outputs"_a, "slots"_a, "What the counters take at ``offset``, a multiple of 64.")
      .def("task", [](Recorder& r, uint32_t i) {
             check_index(i, r.place().tasks);
             return nb::make_tuple(value_of(r.task(i).errors), value_of(r.task(i).skipped), contents(r.task(i).running));
           }, "index"_a, nb::sig("def task(self, index: int) -> tuple[int, int, _Histogram]"),
           "(runs that raised, times it was skipped, running times).")
      .def("receive", [](Recorder& r, uint32_t i) {
             check_index(i, r.place().receives);
             return contents(r.received(i).waiting);
           }, "index"_a, nb::sig("def receive(self, index: int) -> _Histogram"), "Waiting times.")
      .def("send", [](Recorder& r, uint32_t i) {
             check_index(i, r.place().sends);
             return nb::make_tuple(value_of(r.sent(i).frames), value_of(r.sent(i).errors), value_of(r.sent(i).bytes));
           }, "index"_a, nb::sig("def send(self, index: int) -> tuple[int, int, int]"), "(frames, frames that carry an error, bytes).")
      .def_prop_ro("running", [](Recorder& r) -> nb::object {
             const RecorderHeader& h = r.header();
             const uint64_t task = h.running.load(std::memory_order_acquire);
             if (task == 0 || task > r.place().tasks) return nb::none();
             return nb::make_tuple(task - 1, value_of(h.running_execution), value_of(h.running_since));
           }, nb::sig("def running(self) -> tuple[int, int, int] | None"),
           "(task, execution, since) while a task runs, or if the process has ended in it.")
      .def_prop_rw("tracing", &Recorder::tracing, &Recorder::set_tracing,
           "Whether events are noted: of all recorders with the same ``control``. Set by the driver.")
      .def("collect", &Recorder::collect, "limit"_a, "Forget the events that are there; keep at most ``limit`` from now on.")
      .def("drain", &Recorder::drain, "Take the events out of the ring. ``OSError``, once, where a process has written over its head.")
      .def("take_events", [](Recorder& r) {
             const std::vector<Event> events = r.take_events();
             return nb::bytes(reinterpret_cast<const char*>(events.data()), events.size() * sizeof(Event));
           }, "The events taken out of the ring, once: ``EVENT_BYTES`` each.")
      .def_prop_ro("dropped", &Recorder::dropped, "Events since ``collect`` that found no room, in the ring or within the limit.")
      .def("free_events", &Recorder::free_events, "Give back the memory of the ring.")
      .def("note_task", [](Recorder& r, uint32_t i, uint64_t execution, uint64_t begin, uint64_t end, bool failed) {
             check_index(i, r.place().tasks);
             r.note_task(i, execution, begin, end, failed);
           }, "index"_a, "execution"_a, "begin"_a, "end"_a, "failed"_a, "A task has run.")
      .def("note_send", [](Recorder& r, uint32_t i, uint64_t execution, uint64_t begin, uint64_t end, uint64_t bytes, bool failed) {
             check_index(i, r.place().sends);
             r.note_send(i, execution, begin, end, bytes, failed);
           }, "index"_a, "execution"_a, "begin"_a, "end"_a, "bytes"_a, "failed"_a, "A frame was sent.")
      .def("count_out_of_band", [](Recorder& r, uint32_t i, uint64_t bytes) {
             check_index(i, r.place().sends);
             r.count_out_of_band(i, bytes);
           }, "index"_a, "bytes"_a, "Count what goes beside the frames of a send.")
      .def("note_room", [](Recorder& r, uint64_t execution, uint64_t begin, bool traced) {
             check_index(1, r.place().tasks);
             const uint64_t end = now_ns();
             r.task(1).running.note(end - begin);
             if (traced && r.tracing()) r.trace({begin, end, execution, 0, 0, 0, EventKind::kRoom, 0, 0});
           }, "execution"_a, "begin"_a, "traced"_a,
           "An execution has waited for room until now: task 1 of the driver. ``traced``: on a thread that did nothing else meanwhile.");

  nb::class_<Leftovers>(m, "Leftovers", "The windows of one process that have dropped results which may still come.")
      .def("wait", [](Leftovers& l, double quiet) {
             Unlocked unlocked;
             return l.wait(uint64_t(quiet * 1e9));
           }, "quiet"_a,
           "Sleep until they should look, ``quiet`` seconds after there was a reason, or at once where memory is short; False: until ``stop``.")
      .def("sweep", &sweep, "Have each of them let go of what was dropped and has come.")
      .def("note_more", &Leftovers::note_more, "Make a sweep due: there is more to be said than this knows. Finalizers may call it.")
      .def("take_unseen", [](Leftovers& l) {
             nb::list taken;
             for (const Unseen& one : l.take_unseen()) taken.append(nb::make_tuple(nb::bytes(one.error.data(), one.error.size()), one.more));
             return taken;
           }, nb::sig("def take_unseen(self) -> list[tuple[bytes, bool]]"), R"(
           The errors that have been let go of and that nobody has got, since this was last asked; and of each whether
           more was sent to where it came from, after what it is the result of.)")
      .def("stop", &Leftovers::stop);

  nb::class_<WindowObject>(m, "InFlightWindow", "Submits under consecutive numbers, and finds each number's result on each reader.")
      .def("__init__", [](WindowObject* self, nb::list writers, nb::list readers, uint32_t depth, uint16_t kind, nb::object inbox, uint64_t first) {
             std::vector<Writer*> w;
             std::vector<Reader*> r;
             for (nb::handle h : writers) w.push_back(nb::cast<Writer*>(h));
             for (nb::handle h : readers) r.push_back(nb::cast<Reader*>(h));
             new (self) WindowObject{std::make_unique<InFlightWindow>(std::move(w), std::move(r), depth, kind_of(kind), first), nb::make_tuple(writers, readers, inbox),
                              nb::cast<Inbox*>(inbox)};
             self->window->set_leftovers(self->inbox->leftovers, self);
           }, "writers"_a, "readers"_a, "depth"_a, "kind"_a, "inbox"_a, "first"_a = 0,
           nb::sig("def __init__(self, writers: list[Writer], readers: list[Reader], depth: int, kind: int, inbox: Inbox, first: int = 0) -> None"),
           "At most ``depth`` submissions are under way; frames go out as ``kind``; ``get`` waits on ``inbox``; numbers begin with ``first``.")
      .def("start", [](nb::handle self, nb::handle value, nb::handle source, nb::handle type) {
             return nb::inst_ptr<WindowObject>(self)->start(self, value, source, type, 0);
           }, "value"_a.none(), "source"_a, "type"_a, nb::sig("def start(self, value: Any, source: Any, type: type[_Ref]) -> _Ref | None"), R"(
           Like ``submit``, and make the ref of the first reader's result: an instance of ``type``, with ``source``.
           ``None`` if there is no room, if ``value`` is a ref, and if somebody has died.)")
      .def_rw("deaths", &WindowObject::deaths, "``ProcessTable.deaths`` when all who take part were known to live; -1: ``start`` does not look.")
      .def("submit", [](WindowObject& g, nb::handle value) { return g.window->submit(value, 0); }, "value"_a.none(),
           "Send ``value`` on the first writer: its number, -1 if there is no room. Raises as ``Writer.send`` does.")
      .def("set_limits", [](WindowObject& g, nb::object limits) {
             g.window->set_limits(nb::cast<Limits*>(limits));
             g.timed.resize(nb::cast<Limits*>(limits)->sets());
             g.limits = std::move(limits);
           }, "limits"_a, nb::sig("def set_limits(self, limits: Limits) -> None"), "Where deadlines are written.")
      .def("set_failures", [](WindowObject& g, nb::object readers, bool together, const std::vector<size_t>& siblings) { g.window->set_failures(std::move(readers), together, siblings); },
           "readers"_a, "together"_a, "siblings"_a,
           nb::sig("def set_failures(self, readers: list[Reader], together: bool, siblings: Sequence[int]) -> None"), R"(
           Hear of tasks that have failed, on these readers: frames as ``FailureTeller`` sends them. With ``together``
           each execution fails as one, and the results that are ``siblings`` (by their readers) come when it is known of
           all of them whether they have failed. After ``set_limits``.)")
      .def("failed", [](WindowObject& g, uint64_t number, size_t reader) { return g.window->failed(number, reader); }, "number"_a, "reader"_a,
           "Of a result that is here: whether it is an error.")
      .def("hear", [](WindowObject& g) { return g.window->hear(); }, "Hear of what has failed since: whether there was anything.")
      .def("failures", [](WindowObject& g) { return g.window->failures(); }, nb::sig("def failures(self) -> list[tuple[int, list[bytes]]]"),
           "Executions under way in which tasks have failed, with the errors in the order of coming.")
      .def("get", [](WindowObject& g, const RefCore& ref, nb::handle timeout, int64_t deaths) {
             nb::object value = g.get(ref, deadline_after(timeout), deaths);
             if (!value.is_valid()) return *empty;
             g.window->hand(uint64_t(ref.number), ref.reader, value);
             return value;
           }, "ref"_a, "timeout"_a.none() = nb::none(), "deaths"_a = -1,
           nb::sig("def get(self, ref: RefCore, timeout: float | None = None, deaths: int = -1) -> Any"), R"(
           Wait for the result of ``ref``, which was submitted here, and take it, as ``Reader.receive_snapshot`` gives it;
           ``EMPTY`` at the timeout, when closed, when the ref has an outcome, or when ``ProcessTable.deaths`` is not
           ``deaths`` (-1: any).)")
      .def("await_ready", [](WindowObject& g, const RefCore& ref, double seconds) { g.await_ready(ref, now_ns() + uint64_t(seconds * 1e9)); }, "ref"_a, "seconds"_a,
           nb::sig("def await_ready(self, ref: RefCore, seconds: float) -> None"),
           "Wait until the result of ``ref`` is here, for so long. It is not taken; what ends ``get`` ends this.")
      .def("take", [](WindowObject& g, uint64_t number, size_t reader) {
             g.window->make_hand();
             nb::object value = g.window->take(number, reader);
             if (!value.is_valid()) return nb::object(*empty);
             g.window->hand(number, reader, value);
             return value;
           }, "number"_a, "reader"_a, nb::sig("def take(self, number: int, reader: int) -> Any"),
           "Take a result that is here, as ``Reader.receive_snapshot`` gives it, else ``EMPTY``.")
      .def("ready", [](WindowObject& g, uint64_t number, size_t reader) { return g.window->ready(number, reader); }, "number"_a, "reader"_a,
           "Whether the result is here.")
      .def("drop", [](WindowObject& g, uint64_t number, size_t reader) { g.window->drop(number, reader); }, "number"_a, "reader"_a,
           "The result is not wanted, now or when it comes; it can be taken no more.")
      .def("drop_cancelled", [](WindowObject& g, uint64_t number, size_t reader) { g.window->drop_cancelled(number, reader); }, "number"_a, "reader"_a,
           "The same, by who has cancelled the submission: an error that comes of it is not logged.")
      .def("drain", [](WindowObject& g) { g.window->drain(); }, "Move what has come out of the rings, so that their slots are free.")
      .def("leave", [](WindowObject& g) { g.window->leave(); }, "``drain``, and take nothing that comes later: the readers are closed.")
      .def_rw("closed", &WindowObject::closed, "Whether ``get`` no longer waits; set it, then ring this process's bell.")
      .def_prop_ro("has_room", [](WindowObject& g) { return g.window->has_room(); }, "Whether a submission would be accepted now.")
      .def_prop_ro("submitted", [](WindowObject& g) { return g.window->submitted(); }, "How many submissions there were; the next one's number.")
      .def_prop_ro("completed", [](WindowObject& g) { return g.window->completed(); }, "How many submissions have all their results.")
      .def_prop_ro("requested", [](WindowObject& g) { return g.window->requested(); }, "Results that were asked for in vain, and may still be got.")
      .def_prop_ro("stashed", [](WindowObject& g) { return g.window->stashed(); }, "Results out of the rings that nobody has taken yet.")
      .def_prop_ro("stashed_bytes", [](WindowObject& g) { return g.window->stashed_bytes(); }, "The size of their bodies.")
      .def("record", [](WindowObject& g, std::shared_ptr<Recorder> own, std::vector<std::pair<std::shared_ptr<Recorder>, uint32_t>> outputs,
                        std::vector<std::shared_ptr<Recorder>> all) { g.window->record(std::move(own), std::move(outputs), std::move(all)); }, "own"_a, "outputs"_a, "all"_a,
           R"(
           Note in ``own`` what goes through: receives and sends in the order of the readers and writers, whole
           executions as task 0 (see ``Recorder.note_execution``). ``outputs``: the recorder of each reader's writer, and
           which of its outputs it is. While the graph is traced, take the events of ``all`` in time.)")
      .def("count_completed", [](WindowObject& g) { g.window->count_completed(); }, "Note the time of the executions that have been completed since.");

  nb::class_<RefCore>(m, "RefCore", nb::is_weak_referenceable(), nb::type_slots(ref_slots),
      "The native part of ``refs.ref.Ref``: ``get`` returns from here what comes soon.")
      .def(nb::init<nb::object, nb::object, int64_t, size_t>(), "source"_a.none(), "window"_a.none(), "number"_a, "reader"_a,
           nb::sig("def __init__(self, source: Any, window: InFlightWindow | None, number: int, reader: int) -> None"), "``number`` -1: not submitted yet.")
      .def("get", &ref_get, "timeout"_a.none() = nb::none(), nb::sig("def get(self, timeout: float | None = None) -> Any"),
           "The result; asks the subclass (``_get``) where it does not come soon.")
      .def("_resolved_now", [](nb::handle self) {
             resolve_soon(self, 0);
             const nb::object& outcome = nb::inst_ptr<RefCore>(self)->outcome;
             return outcome.is_valid() ? outcome : *empty;
           }, nb::sig("def _resolved_now(self) -> Any"), "``_outcome``, which is what has come if anything has.")
      .def("_with_siblings", &ref_with_siblings, "count"_a, nb::sig("def _with_siblings(self, count: int) -> list[Any]"),
           "The refs of all ``count`` results of the execution, this one, of reader 0, among them.")
      .def("_siblings", &ref_siblings, nb::sig("def _siblings(self) -> list[Any]"), "Those of them that are still there.")
      .def("_begin_resolve", [](RefCore& ref, nb::handle by) { return ref.begin_resolve(by.ptr()); }, "by"_a,
           "Take the right to resolve the ref; false if somebody has it.")
      .def("_end_resolve", [](RefCore& ref, nb::handle by) { return ref.end_resolve(by.ptr()); }, "by"_a,
           "Give it back, if it was taken by this, and wake those who were refused; true if somebody else has to wake them.")
      .def("_move", [](nb::handle self, nb::object source, nb::object window, nb::dict from, nb::handle to) {
             RefCore& ref = *nb::inst_ptr<RefCore>(self);
             const nb::object entry = nb::borrow(PyDict_GetItemWithError(from.ptr(), self.ptr()));
             if (!entry.is_valid()) {
               if (PyErr_Occurred()) throw nb::python_error();
               return;
             }
             CONVEYOR_ASSERT(ref.number < 0);
             WindowObject* const window_object = nb::cast<WindowObject*>(window);
             // All of it without a bytecode in between, where a signal's handler could raise: it waits in one place.
             if (!nb::steal(PyObject_CallMethod(to.ptr(), "append", "(O)", entry.ptr())).is_valid() || PyDict_DelItem(from.ptr(), self.ptr()) != 0)
               throw nb::python_error();
             ref.window = window_object;
             std::swap(ref.source, source);  // what they replace may run any code when it goes: last
             std::swap(ref.window_object, window);
           }, "source"_a, "window"_a, "waiting"_a, "pending"_a,
           nb::sig("def _move(self, source: Any, window: InFlightWindow, waiting: dict[Any, Any], pending: deque[Any]) -> None"), R"(
           Move what ``waiting`` has for this to the end of ``pending``, and have the result come from there, in one
           step; nothing happens if ``waiting`` has nothing. It has not been submitted yet.)")
      .def_ro("_source", &RefCore::source, nb::sig("def _source(self) -> Any"), "What the subclass asks to wait.")
      .def_ro("_window", &RefCore::window_object, nb::sig("def _window(self) -> InFlightWindow"),
           "Where the result comes from; none where there is nothing to come.")
      .def_rw("_number", &RefCore::number, "Of the submission; -1: there was none yet.")
      .def_ro("_reader", &RefCore::reader, "Which of the window's readers the result comes from.")
      .def_rw("_passed", &RefCore::passed, "To whom it was passed (``calls.pending``).")
      .def_prop_rw("_inner", [](RefCore& r) { return r.inner.is_valid() ? r.inner : nb::none(); }, [](RefCore& r, nb::object value) { std::swap(r.inner, value); }, nb::for_setter("value"_a.none()),
           nb::for_getter(nb::sig("def _inner(self) -> Any")), "The refs that the value refers to, once they are held; else ``None``.")
      .def_prop_rw("_targets", [](RefCore& r) { return r.targets.is_valid() ? r.targets : nb::none(); }, [](RefCore& r, nb::object value) {
             if (value.is_none()) value = nb::object();
             std::swap(r.targets, value);
           }, nb::for_setter("value"_a.none()), nb::for_getter(nb::sig("def _targets(self) -> Any")),
           "What the value is received into by ``get``, which asks the subclass then; else ``None``.")
      .def_prop_rw("_outcome", [](RefCore& r) { return r.outcome.is_valid() ? r.outcome : *empty; }, [](RefCore& r, nb::object value) { r.resolve(std::move(value)); }, nb::for_setter("value"_a.none()),
           nb::for_getter(nb::sig("def _outcome(self) -> Any")),
           "``EMPTY`` until the ref is resolved; a ``Snapshot`` of what has come, or its value if that is immutable.");

  set_ref_type(m.attr("RefCore"));
  own_get = m.attr("RefCore").attr("get").ptr();
  get_name = nb::str("get").release().ptr();
  PyUnicode_InternInPlace(&get_name);
  m.def("seconds_to_fetch", &seconds_to_fetch, nb::sig("def seconds_to_fetch() -> float | None"),
        "What the ``get`` that this thread is in has left; ``None``: as long as it takes.");
  m.def("with_fetch_limit", &with_fetch_limit, "timeout"_a.none(), "function"_a, "args"_a,
        nb::sig("def with_fetch_limit(timeout: float | None, function: Callable[..., _T], *args: Any) -> _T"),
        "``function(*args)``, in which a fetch has no longer than that.");
  m.def("refs_get_soon", &refs_get_soon, "refs"_a, nb::sig("def refs_get_soon(refs: list[Any]) -> list[Any] | None"), R"(
        The values of the first of ``refs``: of those before one that is not soon there, or has failed. ``None`` if
        there is anything else than refs.)");
  m.def("take_done", &take_done, "refs"_a, "least"_a, "most"_a, "link"_a, "own"_a,
        nb::sig("def take_done(refs: list[Any], least: int, most: int, link: type, own: Callable[[Any], bool]) -> list[Any] | None"), R"(
        Take the first ``most`` of ``refs`` that are done out of the list, in their order; ``None``, and the list stays
        as it was, if fewer than ``least`` are. Nobody else has the list. ``link``: the type of the sources of calls'
        refs. ``own``: the ``done`` of refs that do not override it.

        ``TypeError``: one is no ref. ``ValueError``: one is there twice.)");
  m.def("refs_among", [](nb::tuple args, nb::handle kwargs) { return refs_among(args, kwargs); }, "args"_a, "kwargs"_a.none(),
        nb::sig("def refs_among(args: tuple[Any, ...], kwargs: Any) -> bool"),
        "Whether one of the arguments is itself a ref; ``kwargs``: a dict, or ``None``.");

  nb::class_<Program>(m, "Program", "The steps of one actor's part of a graph.")
      .def(nb::init<nb::object, uint32_t, uint32_t, size_t, nb::object, nb::object, std::shared_ptr<Recorder>>(), "inbox"_a, "graph"_a, "bit"_a, "registers"_a, "encode_error"_a, "check_elements"_a, "recorder"_a,
           nb::sig("def __init__(self, inbox: Inbox, graph: int, bit: int, registers: int, "
                   "encode_error: Callable[[BaseException, str, int], bytes], check_elements: Callable[[Any, int, str], tuple[Any, ...]], "
                   "recorder: Recorder) -> None"), R"(
           ``bit`` is rung when the program wants another turn. What it does is noted in ``recorder``: its tasks,
           receives and sends in the order in which they are added.)")
      .def("add_receive", &Program::add_receive, "reader"_a, "reg"_a, "spread"_a, "label"_a, "arrived"_a.none() = nb::none(),
           nb::sig("def add_receive(self, reader: Reader, reg: int, spread: Sequence[int], label: str, "
                   "arrived: Callable[[Any, int], Any] | None = None) -> None"), R"(
           One frame to ``reg``, or its elements to the registers in ``spread`` (-1: not used). With ``arrived``, the
           frame is only the head of a value whose tensors come by another way: what ``arrived(head, execution)`` returns
           is in the register until ``add_await`` has the value.)")
      .def("add_try", &Program::add_try, "receive"_a, "time_limit"_a, "most"_a, "vain"_a, "most_left_out"_a, R"(
           From here on, take the frame of the ``receive``-th receive, which is added later, as soon as it is there;
           ``conveyor.plan.model.Try`` says for how long it is waited for.)")
      .def("add_await", &Program::add_await, "receive"_a, "take"_a,
           nb::sig("def add_await(self, receive: int, take: Callable[[Any], Any]) -> None"), R"(
           Wait for the tensors of the ``receive``-th receive that was added: ``take(register)`` gives the value, or
           ``NotImplemented``, and is called again when the program is rung. ``ValueError`` where there is no such
           receive with ``arrived``.)")
      .def("add_call", &Program::add_call, "method"_a, "node"_a, "label"_a, "args"_a, "constants"_a, "uses"_a, "invoke"_a.none(), "start"_a.none(), "out"_a, "outs"_a, "num_returns"_a,
           nb::sig("def add_call(self, method: Callable[..., Any], node: int, label: str, args: Sequence[int], constants: list[Any], "
                   "uses: Sequence[int], invoke: Callable[[list[Any]], Any] | None, start: Callable[[list[Any]], None] | None, out: int, "
                   "outs: Sequence[int], num_returns: int) -> None"), R"(
           A call; an argument is a register, or -1 - the index of a constant. ``invoke`` and ``start`` are called with
           all registers in its place; ``start`` suspends the program.)")
      .def("add_send", &Program::add_send, "writer"_a, "reg"_a, "last"_a, "only_done"_a, "label"_a, "output"_a, "pack"_a.none() = nb::none(), "posted"_a.none() = nb::none(),
           nb::sig("def add_send(self, writer: Writer, reg: int, last: bool, only_done: bool, label: str, output: bool, "
                   "pack: Callable[[Any], Any] | None = None, posted: Callable[[], None] | None = None) -> None"), R"(
           Publish a register; ``last``: nothing later in the execution needs it; ``only_done``: ``None`` in its place,
           unless it is an error; ``output``: the driver reads it. With ``pack`` and ``posted``, ``pack(value)`` is sent,
           and ``posted()`` called when it has been.)")
      .def_prop_ro("given", &Program::given, "Bytes of the blocks that this execution's inputs lie in.")
      .def("set_shortage", &Program::set_shortage, "wait"_a, nb::sig("def set_shortage(self, wait: Callable[[BaseException, Any], Any]) -> None"), R"(
           Have ``wait(error, before)`` called where what is sent has no memory: it returns what is passed as ``before``
           next time, when it is to be tried again; or ``None``, and then the program goes on when it is rung and
           ``before.ready()``, calls ``before.tries()`` first, and sends what ``before.take(value)`` returns. It raises
           if it is not to be tried again. ``before.end()`` is called in the end.)")
      .def("set_progress", &Program::set_progress, "progress"_a, nb::sig("def set_progress(self, progress: Callable[[], None]) -> None"),
           "Have this called whenever the program is rung; it goes on with what is beside the frames.")
      .def("set_fetching", &Program::set_fetching, "begin"_a, "take"_a,
           nb::sig("def set_fetching(self, begin: Callable[[Snapshot], object], take: Callable[[], Any]) -> None"), R"(
           Have ``begin(snapshot)`` called for an input of which something may have stayed elsewhere, then ``take()`` for
           its value: it may give ``NotImplemented``, and is asked again when the bit is rung.)")
      .def("set_limits", &Program::set_limits, "limits"_a, "cancel"_a,
           nb::sig("def set_limits(self, limits: Limits, cancel: Callable[[], None]) -> None"),
           "Look at these before every call; ``cancel`` ends the coroutine that runs.")
      .def("advance", nb::overload_cast<>(&Program::advance), "Run as far as input is there, for a turn at most.")
      .def("resume", &Program::resume, "value"_a.none(), "error"_a.none(),
           nb::sig("def resume(self, value: Any, error: BaseException | None) -> None"), "The coroutine of the suspended call has ended.")
      .def("start_at", &Program::start_at, "execution"_a, "Set the number of the first execution; before the first ``advance``.")
      .def("pause_after_tasks", &Program::pause_after_tasks,
           "From now on ``resume`` only sends what the task has made: the next one waits for ``advance``.")
      .def("close", &Program::close, "The graph is taken down.")
      .def_prop_ro("execution", &Program::execution, "The number of the execution that it is in.")
      .def_prop_ro("bit", &Program::bit, "The bit that was given.");
}

}  // namespace conveyor
