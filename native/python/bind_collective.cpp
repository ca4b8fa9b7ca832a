// Collective operations, and the reductions that they are made of.

#include "bind.h"
#include "collective/group.h"
#include "exit.h"
#include "program.h"
#include "reader.h"
#include "waiting.h"
#include "writer.h"

#include <sys/syscall.h>
#include <unistd.h>

namespace conveyor {
namespace {

// What run() has come to.
enum Outcome : int { kDone, kMismatch, kBroken, kTimedOut, kBusy, kInherited, kNotWanted };

// Addresses that Python gives, as numbers or as buffers, which are kept as long as this is.
class Addresses {
 public:
  Addresses() = default;
  Addresses(const Addresses&) = delete;
  ~Addresses() {
    for (Py_buffer& buffer : buffers_) PyBuffer_Release(&buffer);
  }
  // Of `size` bytes; null for None.
  char* of(nb::handle what, size_t size, bool writable) {
    if (what.is_none()) return nullptr;
    if (PyLong_Check(what.ptr())) {
      void* const address = PyLong_AsVoidPtr(what.ptr());
      if (address == nullptr && PyErr_Occurred()) throw nb::python_error();
      return static_cast<char*>(address);
    }
    buffers_.reserve(buffers_.size() + 1);
    Py_buffer buffer;
    if (PyObject_GetBuffer(what.ptr(), &buffer, writable ? PyBUF_CONTIG : PyBUF_CONTIG_RO) != 0) throw nb::python_error();
    buffers_.push_back(buffer);
    if (size_t(buffer.len) != size) throw nb::value_error("conveyor: a buffer has another size than what it is for");
    return static_cast<char*>(buffer.buf);
  }

 private:
  std::vector<Py_buffer> buffers_;
};

template <class T>
T checked(int value, uint8_t end, const char* what) {
  if (value < 0 || value >= end) throw nb::value_error(what);
  return T(value);
}

ElementType type_of(int type) { return checked<ElementType>(type, kElementTypes, "conveyor: no such type of elements"); }
ReduceOp op_of(int op) { return checked<ReduceOp>(op, kReduceOps, "conveyor: no such reduction"); }

std::vector<CollectiveGroup::Member> members_of(const std::vector<std::pair<uint32_t, uint32_t>>& members) {
  std::vector<CollectiveGroup::Member> made;
  for (auto [slot, incarnation] : members) made.push_back({slot, incarnation});
  return made;
}

// What `until` says of an execution that has failed; see worker/control.py.
constexpr int64_t kFailedElsewhere = -2;

// What is being raised, in a word that no code of the user's has to give.
const char* raised_here() {
  try {
    throw;
  } catch (const nb::python_error& error) {
    return reinterpret_cast<PyTypeObject*>(error.type().ptr())->tp_name;
  } catch (...) {
    return "an error";
  }
}

// What the process's page tells, and `until`, is of that thread.
bool on_main_thread() {
  static thread_local const bool is_main = ::getpid() == pid_t(::syscall(SYS_gettid));
  return is_main;
}

// Sleep on the doorbell until its count is no longer `seen`, or it is `wake` (0: at no time). What that has come to, if it is
// the operation's end for this rank; `absent`: whom it waits for, in words for those who know the names. Tells who is at
// fault where sleeping raises, which is what a signal handler has raised.
template <class Absent>
std::optional<Outcome> rest(CollectiveGroup& group, Inbox& inbox, uint64_t deadline, nb::handle until, uint32_t seen, uint64_t wake, const Absent& absent) {
  if (deadline != 0 && now_ns() >= deadline) {
    group.leave(Cause::kTimedOut, absent().c_str());
    return kTimedOut;
  }
  // A cancellation after this look rings, and so ends the sleep.
  const int64_t ends = until.is_none() || !on_main_thread() ? 0 : nb::cast<int64_t>(until());
  if (inbox.inherited()) return kInherited;  // a handler that ran in there has forked
  if (ends < 0) {
    // A rank that raises breaks the group before its execution is marked as failed.
    if (group.broken()) return {};
    group.leave(Cause::kInterrupted, ends == kFailedElsewhere ? "the failure of its execution" : "its cancellation or deadline");
    return kNotWanted;
  }
  if (ends > 0 && (wake == 0 || uint64_t(ends) < wake)) wake = uint64_t(ends);
  sleep(inbox, seen, wake);
  if (inbox.inherited()) return kInherited;
  return {};
}

// Whatever `what` raises: the others must not wait for this rank.
template <class What>
Outcome guarded(CollectiveGroup& group, Inbox& inbox, const What& what) {
  try {
    return what();
  } catch (...) {
    // A handler may have forked, and then the rank is the parent.
    if (!inbox.inherited()) group.leave(Cause::kInterrupted, raised_here());
    throw;
  }
}

// Note for which execution of a graph the process calls, which runs one thing at a time.
void note_execution(CollectiveCall& call, Inbox& inbox) {
  if (!on_main_thread()) return;
  const Status& status = inbox.status();
  call.graph = status.graph.load(std::memory_order_relaxed);
  if (call.graph == 0) return;
  call.execution = status.execution.load(std::memory_order_relaxed);
  call.skipped = last_skipped(call.graph);
}

// What was begun, to its end.
Outcome finish(CollectiveGroup& group, Inbox& inbox, uint64_t deadline, nb::handle until) {
  const auto absent = [&] {
    std::string numbers;
    for (uint32_t rank : group.absent()) numbers += (numbers.empty() ? "" : " ") + std::to_string(rank);
    return numbers;
  };
  return guarded(group, inbox, [&] {
    for (;;) {
      CollectiveGroup::Progress progress;
      {
        Unlocked unlocked;
        progress = group.go_on();
      }
      switch (progress) {
        case CollectiveGroup::Progress::kDone: return kDone;
        case CollectiveGroup::Progress::kMismatch: return kMismatch;
        case CollectiveGroup::Progress::kBroken: return kBroken;
        case CollectiveGroup::Progress::kSleep: break;
      }
      if (const auto outcome = rest(group, inbox, deadline, until, group.seen(), group.wake_at(), absent)) return *outcome;
    }
  });
}

int run(CollectiveGroup& group, Inbox& inbox, int operation, int op, int type, uint64_t count, nb::tuple shape, uint64_t tensors, uint64_t shapes, int root, nb::tuple in, nb::tuple out, nb::handle timeout, nb::handle until) {
  CollectiveCall call;
  call.operation = checked<Collective>(operation, kCollectives, "conveyor: no such operation");
  call.op = op_of(op);
  call.type = type_of(type);
  const size_t dims = shape.size();
  call.dims = uint8_t(std::min<size_t>(dims, 255));
  for (size_t i = 0; i < std::min(dims, CollectiveCall::kMostDims); ++i) call.shape[i] = nb::cast<int64_t>(shape[i]);
  call.tensors = tensors;
  call.shapes = shapes;
  call.count = count;
  call.root = root;
  if (root >= int(group.ranks())) throw nb::value_error("conveyor: no such rank");
  const size_t size = count * size_of(call.type);
  Addresses addresses;
  CollectiveData data;
  for (nb::handle what : in) data.in.push_back(addresses.of(what, size, false));
  for (nb::handle what : out) data.out.push_back(addresses.of(what, size, true));
  group.check(call, data);
  if (!until.is_none()) note_execution(call, inbox);
  if (inbox.inherited()) return kInherited;
  const uint64_t deadline = deadline_after(timeout);
  const CollectiveGroup::Entered entered(group);
  if (!entered) return kBusy;
  group.begin(call, std::move(data), deadline);
  return finish(group, inbox, deadline, until);
}

// What `reader` has before frame `number` was not taken by whom it was for, who was interrupted, or did not call the same.
void let_go(Reader& reader, uint64_t number) {
  while (!reader.ring.empty() && read_once(reader.ring.front()->tag) < number) reader.skip();
}

// Behind the barrier of an exchange: until the values that come from other hosts are there, too.
Outcome await_values(CollectiveGroup& group, Inbox& inbox, uint64_t deadline, nb::handle until, const std::vector<Reader*>& readers, uint64_t number,
                     const std::vector<bool>& takes) {
  return guarded(group, inbox, [&] {
    for (;;) {
      const uint32_t seen = inbox.count();
      // A value of another host that was not for this rank may have come since the exchange began, ahead of what is.
      for (Reader* reader : readers) let_go(*reader, number);
      uint32_t lacking = 0;
      for (; lacking < readers.size(); ++lacking)
        if (takes[lacking] && !group.here(lacking) && readers[lacking]->ring.empty()) break;
      if (lacking == readers.size()) return kDone;
      if (group.broken()) return kBroken;
      if (group.is_gone(lacking) && readers[lacking]->ring.empty()) {
        group.lost(lacking);
        return kBroken;
      }
      if (const auto outcome = rest(group, inbox, deadline, until, seen, 0, [&] { return std::to_string(lacking); })) return *outcome;
    }
  });
}

// The values of an exchange, from the ranks of `takes`. Whatever is raised, nothing stays in the rings.
nb::list taken(const std::vector<Reader*>& readers, uint64_t number, const std::vector<bool>& takes) {
  nb::list values;
  std::exception_ptr raised;
  for (size_t r = 0; r < readers.size(); ++r) {
    try {
      if (takes[r] && !raised) {
        if (readers[r]->ring.empty() || read_once(readers[r]->ring.front()->tag) != number)
          throw std::system_error(EPROTO, std::generic_category(), "conveyor: a rank has come to an exchange without its value");
        values.append(readers[r]->receive());
      } else {
        let_go(*readers[r], number + 1);
      }
    } catch (...) {
      if (!raised) raised = std::current_exception();
    }
  }
  if (raised) std::rethrow_exception(raised);
  return values;
}

std::vector<Reader*> readers_of(nb::tuple objects) {
  std::vector<Reader*> readers;
  for (nb::handle object : objects) readers.push_back(nb::cast<Reader*>(object));
  return readers;
}

// Each rank that gives something publishes it before the barrier, under the number of that; so behind it all is there.
// The operation is held until all is taken, since what another thread began would let go of it.
nb::object exchange(CollectiveGroup& group, Inbox& inbox, uint64_t form, int root, bool gives, nb::list given, nb::tuple from, Writer& writer, nb::tuple ends, nb::handle timeout, nb::handle until) {
  CollectiveCall call;
  call.operation = Collective::kExchange;
  call.tensors = form;
  call.root = root;
  group.check(call, {});
  if (!until.is_none()) note_execution(call, inbox);
  if (given.size() != 1) throw nb::value_error("conveyor: one value is given");
  const std::vector<Reader*> readers = readers_of(ends);
  if (readers.size() != group.ranks()) throw nb::value_error("conveyor: a reader for each rank is needed");
  std::vector<bool> takes(readers.size());
  for (nb::handle rank : from) takes.at(nb::cast<size_t>(rank)) = true;
  if (inbox.inherited()) return nb::int_(int(kInherited));
  const uint64_t deadline = deadline_after(timeout);
  const CollectiveGroup::Entered entered(group);
  if (!entered) return nb::int_(int(kBusy));
  const uint64_t number = group.barrier() + 1;
  for (Reader* reader : readers) let_go(*reader, number);
  if (gives && !group.broken()) {
    Encoded e;
    // Without a reference of our own: what only the list refers to may move.
    writer.encode_value(e, PyList_GET_ITEM(given.ptr(), 0));
    writer.prepare(e);
    if (!writer.ring.has_room()) throw std::system_error(EPROTO, std::generic_category(), "conveyor: a rank has not taken what it was given before");
    writer.commit(e, number, Kind::kValue);
  }
  if (inbox.inherited()) return nb::int_(int(kInherited));  // what encodes the value has forked
  group.begin(call, {}, deadline);
  Outcome outcome = finish(group, inbox, deadline, until);
  if (outcome == kDone) outcome = await_values(group, inbox, deadline, until, readers, number, takes);
  if (outcome == kDone) return taken(readers, number, takes);
  if (outcome != kInherited)
    for (Reader* reader : readers) let_go(*reader, number + 1);
  return nb::int_(int(outcome));
}

// After a mismatch: what other ranks have given to what they took for an exchange is let go of. Where another thread has
// entered it, that one does it.
void forget(CollectiveGroup& group, nb::tuple ends) {
  const CollectiveGroup::Entered entered(group);
  if (!entered) return;
  for (Reader* reader : readers_of(ends)) let_go(*reader, group.barrier() + 1);
}

nb::list list_of(const std::vector<uint32_t>& ranks) {
  nb::list list;
  for (const uint32_t rank : ranks) list.append(rank);
  return list;
}

RankHosts hosts_of(const std::vector<uint32_t>& hosts) {
  if (hosts.empty() || hosts.size() > kMaxRanks || std::ranges::any_of(hosts, [&](uint32_t host) { return host >= hosts.size(); }))
    throw nb::value_error("conveyor: no group can have such ranks");
  return RankHosts(hosts);
}

nb::list rings_of(const std::vector<uint32_t>& hosts) {
  const RankHosts of = hosts_of(hosts);
  nb::list rings;
  const auto add = [&](uint32_t writer, size_t at, uint32_t slots, uint32_t stride, const std::vector<uint32_t>& readers) {
    rings.append(nb::make_tuple(writer, at, slots, stride, nb::tuple(list_of(readers))));
  };
  std::vector<uint32_t> all(of.ranks());
  for (uint32_t r = 0; r < of.ranks(); ++r) all[r] = r;
  for (uint32_t r = 0; r < of.ranks(); ++r) {
    add(r, CollectiveGroup::ring_at(of.ranks(), r), CollectiveGroup::kRingSlots, CollectiveGroup::kRingStride, all);
    for (uint32_t h = 0; h < of.hosts() && of.hosts() > 1; ++h)
      if (h != of[r])
        add(r, CollectiveGroup::links_at(of.ranks()) + CollectiveLinks::ring_at(of, r, h), CollectiveLinks::kSlots, CollectiveLinks::kStride, of.on(h));
  }
  return rings;
}

// What comes from other hosts is taken no more. Where another thread is in an operation, the group's end does it.
void close_links(CollectiveGroup& group) {
  const CollectiveGroup::Entered entered(group);
  if (entered) group.close();
}

nb::tuple called(CollectiveGroup& group, uint32_t rank) {
  if (rank >= group.ranks()) throw nb::index_error("conveyor: no such rank");
  const CollectiveCall call = group.called(rank);
  nb::list shape;
  for (size_t i = 0; i < std::min<size_t>(call.dims, CollectiveCall::kMostDims); ++i) shape.append(call.shape[i]);
  return nb::make_tuple(int(call.operation), int(call.op), int(call.type), call.count, nb::tuple(shape), call.tensors, call.root);
}

void reduce_buffers(nb::tuple to, nb::tuple from, int type, int op) {
  const ElementType elements = type_of(type);
  const ReduceOp reduction = op_of(op);
  if (!can_reduce(elements, reduction)) throw nb::value_error("conveyor: integers have no average");
  if (from.size() == 0) throw nb::value_error("conveyor: nothing to reduce");
  Py_buffer first;
  if (PyObject_GetBuffer(from[0].ptr(), &first, PyBUF_CONTIG_RO) != 0) throw nb::python_error();
  const size_t size = size_t(first.len);
  PyBuffer_Release(&first);
  if (size % size_of(elements) != 0) throw nb::value_error("conveyor: a buffer does not hold whole elements");
  Addresses addresses;
  std::vector<const char*> sources;
  std::vector<char*> destinations;
  for (nb::handle what : from) sources.push_back(addresses.of(what, size, false));
  for (nb::handle what : to) destinations.push_back(addresses.of(what, size, true));
  Unlocked unlocked;
  reduce(elements, reduction, destinations.data(), destinations.size(), sources.data(), sources.size(), size / size_of(elements));
}

}  // namespace

void bind_collective(nb::module_& m) {
  m.def("reduce", &reduce_buffers, "to"_a, "sources"_a, "type"_a, "op"_a,
        nb::sig("def reduce(to: tuple[Any, ...], sources: tuple[Any, ...], type: int, op: int) -> None"), R"(
        Reduce ``sources`` into each of ``to``, without the GIL: buffers of one size whose elements are of a type of
        ``conveyor.dag.collective.kernels.ELEMENT_TYPES``, by number. ``op`` is a ``ReduceOp``'s value. What is
        written to may be one of the sources. ``ValueError`` for what does not fit, and for the average of integers.)");
  m.attr("MOST_RANKS") = int(kMaxRanks);
  nb::class_<CollectiveGroup>(m, "CollectiveGroup", "One rank of a group of processes that do collective operations over one segment.")
      .def_static("bytes", [](const std::vector<uint32_t>& hosts) { return CollectiveGroup::bytes(hosts_of(hosts)); }, "hosts"_a,
           "Of the segment of a group whose ranks are on these hosts, which are counted from 0 on.")
      .def_static("prepare", [](Segment& segment, const std::vector<uint32_t>& hosts) { CollectiveGroup::prepare(segment, hosts_of(hosts)); }, "segment"_a, "hosts"_a,
           "Lay out a fresh segment, and give it its memory; ``OSError`` if there is none.")
      .def_static("rings", &rings_of, "hosts"_a, nb::sig("def rings(hosts: Sequence[int]) -> list[tuple[int, int, int, int, tuple[int, ...]]]"),
           "The rings of such a group: the rank that writes, where it lies, its slots and the size of one, and the ranks that read.")
      .def_static("ring_at", &CollectiveGroup::ring_at, "ranks"_a, "rank"_a, "Where the ring lies in it that ``rank`` writes, and all ranks read.")
      .def_static("destroy", [](Segment& segment, ProcessTable& process_table, const std::vector<std::pair<uint32_t, uint32_t>>& members, bool session) {
            CollectiveGroup::destroy(segment, process_table, members_of(members), session ? Cause::kEnded : Cause::kDestroyed);
          }, "segment"_a, "process_table"_a, "members"_a, "session"_a = false, "Break the group, for its end. ``session``: that of the session.")
      .def_static("waits", [](Segment& segment) {
            nb::list waits;
            for (const auto& [barrier, ranks] : CollectiveGroup::waits(segment)) waits.append(nb::make_tuple(barrier, list_of(ranks)));
            return waits;
          }, "segment"_a, nb::sig("def waits(segment: Segment) -> list[tuple[int, list[int]]]"),
           "Of each rank the last barrier that it has come to, and if it sleeps there, for which ranks.")
      .def_static("tell_of_waits", &CollectiveGroup::tell_of_waits, "segment"_a, "slot"_a,
           "Have ranks ring the process in ``slot`` from now on when they go to sleep in an operation.")
      .def("__init__", [](CollectiveGroup* self, std::shared_ptr<Segment> segment, const Inbox& inbox, uint32_t rank, const std::vector<std::pair<uint32_t, uint32_t>>& members,
                          const std::vector<uint32_t>& hosts, std::shared_ptr<Arena> arena, const std::vector<std::shared_ptr<ArenaView>>& views, uint32_t bit) {
             std::unique_ptr<CollectiveLinks> links;
             if (const RankHosts of = hosts_of(hosts); of.hosts() > 1) {
               std::vector<Target> doorbells;
               for (const auto& [slot, incarnation] : members) doorbells.push_back({slot, bit});
               links = std::make_unique<CollectiveLinks>(segment, CollectiveGroup::links_at(of.ranks()), inbox.process_table(), of, rank, doorbells, arena, views);
             }
             new (self) CollectiveGroup(std::move(segment), inbox.process_table(), inbox, rank, members_of(members), std::move(links));
           }, "segment"_a, "inbox"_a, "rank"_a, "members"_a, "hosts"_a, "arena"_a, "views"_a, "bit"_a, nb::keep_alive<1, 3>(), R"(
           ``members`` are slot and incarnation of each rank's process; ``inbox`` and ``arena`` are this one's.
           ``views``: of each rank's arena. ``bit`` is rung where a rank of another host has come.)")
      .def("close", &close_links, "Take nothing more from ranks of other hosts.")
      .def_prop_ro("rank", &CollectiveGroup::rank)
      .def_prop_ro("ranks", &CollectiveGroup::ranks)
      .def("run", &run, "inbox"_a, "operation"_a, "op"_a, "type"_a, "count"_a, "shape"_a, "tensors"_a, "shapes"_a, "root"_a, "sources"_a, "to"_a, "timeout"_a.none(), "until"_a.none(),
           nb::sig("def run(self, inbox: Inbox, operation: int, op: int, type: int, count: int, shape: tuple[int, ...], tensors: int, "
                   "shapes: int, root: int, sources: tuple[Any, ...], to: tuple[Any, ...], timeout: float | None, "
                   "until: Callable[[], int] | None) -> int"), R"(
           One operation: 0 done, 1 the ranks have not called the same (see ``called``), 2 the group is broken (see
           ``broken``), 3 timed out, 4 another thread is in one, 5 this is a forked child, 6 nobody waits for it. Tensors
           are addresses or buffers, each of ``count`` elements. ``until``, asked before each sleep, says when what runs
           here is over at the latest, in ns; 0: at no time; below: it is. ``None``: this process runs several things
           side by side, and none of them is known to call.)")
      .def("exchange", &exchange, "inbox"_a, "form"_a, "root"_a, "gives"_a, "given"_a, "takes"_a, "writer"_a, "readers"_a, "timeout"_a.none(), "until"_a.none(),
           nb::sig("def exchange(self, inbox: Inbox, form: int, root: int, gives: bool, given: list[Any], takes: Sequence[int], writer: Writer, "
                   "readers: tuple[Reader, ...], timeout: float | None, until: Callable[[], int] | None) -> int | list[Any]"), R"(
           The values of the ranks ``takes``, in that order of ranks; or what it has come to, as ``run`` says it. The
           value in the list ``given`` is sent if this rank ``gives`` one. All ranks name the same ``form`` and ``root``.
           ``writer`` and ``readers`` are this rank's ends of the rings of all ranks.)")
      .def("forget", &forget, "readers"_a, nb::sig("def forget(self, readers: tuple[Reader, ...]) -> None"),
           "After a mismatch: let go of what the others have given.")
      .def("called", &called, "rank"_a, nb::sig("def called(self, rank: int) -> tuple[int, int, int, int, tuple[int, ...], int, int]"),
           "What a rank has called that has come to the last barrier that this one has come to: operation, op, type, count, shape, tensors, root.")
      .def_prop_ro("absent", [](CollectiveGroup& group) { return list_of(group.absent()); }, nb::sig("def absent(self) -> list[int]"),
           "The ranks that have not come to the last barrier that this one has come to.")
      .def("raised", [](CollectiveGroup& group, const std::string& why, bool running) { group.raised(why.c_str(), running ? group.execution() : Execution()); }, "why"_a, "running"_a,
           R"(
           What may have come to an operation here, or an operation, has raised: that breaks the group, unless it is
           broken already. ``running``: what this process runs has; else something that has not begun.)")
      .def_prop_ro("broken", [](CollectiveGroup& group) -> nb::object {
        const auto broken = group.broken();
        if (!broken) return nb::none();
        return nb::make_tuple(int(broken->cause), broken->rank, nb::steal(PyUnicode_DecodeUTF8(broken->why.data(), Py_ssize_t(broken->why.size()), "replace")));
      }, nb::sig("def broken(self) -> tuple[int, int, str] | None"), "Why nothing can be done any more: the cause, the rank, and more in words.")
      .def_prop_ro("failed_in_execution", [](const CollectiveGroup& group) -> nb::object {
        const auto in = group.failed_in_execution();
        return in ? nb::object(nb::make_tuple(in->graph, in->number)) : nb::none();
      }, nb::sig("def failed_in_execution(self) -> tuple[int, int] | None"),
           "The graph and the execution that this rank runs a step of, if the group was broken by what another one has raised in that.");
}

}  // namespace conveyor
