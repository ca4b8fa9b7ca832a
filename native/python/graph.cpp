// Submitting to a graph, its results, and an actor's part of it.
#include "bind.h"
#include "endpoints.h"
#include "program.h"
#include "ref.h"

namespace conveyor {
namespace {

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

// The refs of all `count` results of an execution, given that of the first.
nb::list ref_with_siblings(nb::handle self, size_t count) {
  RefCore* last = nb::inst_ptr<RefCore>(self);
  last->self = self.ptr();
  nb::list refs;
  refs.append(self);
  for (size_t reader = 1; reader < count; ++reader) {
    nb::object ref = nb::inst_alloc(self.type());
    RefCore* core = nb::inst_ptr<RefCore>(ref);
    new (core) RefCore(last->source, last->gate_object, last->number, reader);
    nb::inst_mark_ready(ref);
    core->self = ref.ptr();
    last->join(*core);
    last = core;
    refs.append(std::move(ref));
  }
  return refs;
}

// Those of the refs that `ref_with_siblings` has made with this one which are still there.
nb::list ref_siblings(nb::handle self) {
  nb::list refs;
  refs.append(self);
  const RefCore* own = nb::inst_ptr<RefCore>(self);
  for (const RefCore* ref = own->next; ref != own; ref = ref->next)
    if (Py_REFCNT(ref->self) > 0) refs.append(nb::handle(ref->self));  // else it is going just now
  return refs;
}

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

}  // namespace

void bind_graph(nb::module_& m) {
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
      .def("_with_siblings", &ref_with_siblings, "count"_a)
      .def("_siblings", &ref_siblings)
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
}

}  // namespace conveyor
