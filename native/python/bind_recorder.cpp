// Counters and trace events.
#include "bind.h"
#include "recorder.h"

namespace conveyor {
namespace {

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

void bind_recorder(nb::module_& m) {
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
}

}  // namespace conveyor
