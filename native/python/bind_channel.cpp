// The ends of a channel.
#include "bind.h"
#include "hooks.h"
#include "reader.h"
#include "writer.h"

namespace conveyor {
namespace {

std::vector<Target> targets_of(const std::vector<std::pair<uint32_t, uint32_t>>& pairs) {
  std::vector<Target> targets;
  for (auto [slot, bit] : pairs) {
    if (bit >= kDoorbellBits) throw nb::value_error("bell bit out of range");
    targets.push_back({slot, bit});
  }
  return targets;
}

}  // namespace

void bind_channel(nb::module_& m) {
  nb::class_<Writer>(m, "Writer", "The writing end of a ring.")
      .def("__init__", [](Writer* self, std::shared_ptr<Segment> segment, size_t offset, std::shared_ptr<ProcessTable> process_table,
                          const std::vector<std::pair<uint32_t, uint32_t>>& targets, std::shared_ptr<Arena> arena, nb::object sent,
                          uint32_t graph, uint32_t edge, std::string carries, std::shared_ptr<Budget> budget) {
             new (self) Writer(std::move(segment), offset, std::move(process_table), targets_of(targets), std::move(arena), std::move(sent));
             ReaderSet& readers = *self->ring.readers();
             readers.graph = graph;
             readers.edge = edge;
             readers.carries = std::move(carries);
             readers.budget = std::move(budget);
           }, "segment"_a, "offset"_a, "process_table"_a, "targets"_a, "arena"_a, "sent"_a.none(), "graph"_a = 0, "edge"_a = 0, "carries"_a = "", "budget"_a.none() = nb::none(),
           R"(
           ``targets``: (slot, bit) of each reader in turn; ``sent`` is handed to the codec. ``graph``, ``edge`` and
           ``carries`` name the channel where its values fill the arena. ``budget``: what its values may take of it,
           together with those of others who have the same. ``OSError`` where no such ring is.)")
      .def_rw("moved_refs", &Writer::moved_refs, "A value with at most so many references was let go by its maker: its block may travel uncopied.")
      .def_rw("sent", &Writer::sent, nb::for_getter(nb::sig("def sent(self) -> Any")),
           "What the codec is handed to know which definitions the readers have.")
      .def_prop_ro("deserted", [](Writer& w) {
             const ReaderSet& readers = *w.ring.readers();
             for (uint32_t r = 0; r < readers.slots.size(); ++r)
               if (readers.gone(r)) return true;
             return false;
           }, "Whether the process of a reader is gone.")
      .def_ro("bytes", &Writer::bytes, "Bytes of all bodies sent by this end.")
      .def_prop_ro("count", [](Writer& w) { return w.ring.head(); }, "Frames published in this ring.")
      .def_prop_ro("has_room", [](Writer& w) { return w.ring.has_room(); },
           "Whether ``send`` would find a free slot; readers that closed or died do not count.")
      .def("wants_room", [](Writer& w) { w.ring.wants_room(); },
           "Be rung when a reader takes a frame (``RING_WRITER_MAY_WAIT``); look at ``has_room`` again after this.")
      .def_prop_ro("wanted", [](Writer& w) { return w.ring.wanted(); }, "Frames with lower tags are wanted by no reader any more.")
      .def("send", [](Writer& w, nb::handle value, uint64_t tag, uint16_t kind) {
             const Kind k = kind_of(kind);
             if (!w.ring.has_room()) return false;
             Encoded e;
             w.encode_value(e, value);
             w.prepare(e);
             if (!w.ring.has_room()) return false;  // encoding runs Python code, which may have sent something
             w.commit(e, tag, k);
             return true;
           }, "value"_a.none(), "tag"_a, "kind"_a = uint16_t(Kind::kValue), R"(
           Publish ``value``; false, with nothing done, if the ring is full. Raises what the codec raises, or its
           ``arena_full``, with nothing sent.)")
      .def("send_error", [](Writer& w, nb::bytes meta, uint64_t tag) {
             if (!w.ring.has_room()) return false;
             w.send_error(meta.c_str(), meta.size(), tag);
             return true;
           }, "meta"_a, "tag"_a, "Publish an encoded exception; false, with nothing done, if the ring is full.");

  nb::class_<Reader>(m, "Reader", nb::is_weak_referenceable(), "A reading end of a ring.")
      .def("__init__", [](Reader* self, std::shared_ptr<Segment> segment, size_t offset, uint32_t reader, std::shared_ptr<ProcessTable> process_table,
                          std::pair<uint32_t, uint32_t> writer, std::shared_ptr<ArenaView> view, bool readonly, std::string carries) {
             new (self) Reader(std::move(segment), offset, reader, std::move(process_table), Target{writer.first, writer.second}, std::move(view), readonly);
             self->ring.carries = std::move(carries);
           }, "segment"_a, "offset"_a, "reader"_a, "process_table"_a, "writer"_a, "view"_a, "readonly"_a, "carries"_a = "", R"(
           End number ``reader``; ``writer``: the (slot, bit) to ring for room, ``view``: of its arena, ``carries``: what
           goes over it, for errors. ``OSError`` where no such ring is; from everything that looks at the ring, where a
           process has written over its head.)")
      .def_prop_ro("empty", [](Reader& r) { return r.ring.empty(); }, "Whether ``receive`` would find nothing.")
      .def_prop_ro("dry", &Reader::dry, "The same, and nothing is being decoded that was received.")
      .def_prop_ro("count", [](Reader& r) { return r.ring.next(); }, "Frames taken from this ring by this reader.")
      .def_prop_ro("available", [](Reader& r) { return r.ring.head() - r.ring.next(); }, "Frames that can be received now.")
      .def_ro("tag", &Reader::tag, "Of the frame received last.")
      .def_rw("brings_work", &Reader::brings_work, "This process's loop takes its work from here alone: it runs nothing while ``receive`` decodes.")
      .def_ro("given", &Reader::given, "Bytes of the writer's arena that the frame received last lies in.")
      .def_prop_ro("front", [](Reader& r) { return r.ring.empty() ? int64_t(-1) : int64_t(r.ring.front()->tag); },
           "The tag of the next frame, -1 if there is none.")
      .def("want", [](Reader& r, uint64_t tag) { r.ring.want(tag); }, "tag"_a,
           "Tell the writer that frames with lower tags are not wanted any more.")
      .def_prop_ro("kind", [](Reader& r) { return uint32_t(r.kind); }, "Of the frame received last: one of the ``KIND_`` numbers.")
      .def_ro("bytes", &Reader::bytes, "Bytes of all bodies taken by this end.")
      .def("receive", [](Reader& r) { return r.ring.empty() ? nb::object(*empty) : r.receive(); }, nb::sig("def receive(self) -> Any"),
           "The next frame's value, an ``ErrorFrame`` if it is one, ``EMPTY`` if there is no frame; raises what decoding raises.")
      .def("receive_undecoded", [](Reader& r, nb::handle make) { return r.ring.empty() ? nb::object(*empty) : r.receive_undecoded(make); }, "make"_a,
           nb::sig("def receive_undecoded(self, make: Callable[[Snapshot], Any]) -> Any"), R"(
           As ``receive``, but for what something of may have stayed in another process comes what ``make`` makes of a
           ``Snapshot``, which is to be decoded once; that may be tried again if it raises.)")
      .def("receive_or_leave", [](Reader& r) { return r.ring.empty() ? nb::object(*empty) : r.receive_or_leave(); },
           nb::sig("def receive_or_leave(self) -> Any"), "The next frame's value, or ``EMPTY``. If this raises the frame is still there.")
      .def("receive_snapshot", [](Reader& r) {
             while (!r.ring.empty())
               if (nb::object value = r.receive_snapshot(); value.is_valid()) return value;
             return nb::object(*empty);
           }, nb::sig("def receive_snapshot(self) -> Any"), R"(
           The next frame as a ref keeps it: its value if that is immutable, an ``ErrorFrame``, else a ``Snapshot``;
           ``EMPTY`` if there is no frame.)")
      .def("skip", [](Reader& r) {
             if (r.ring.empty()) return false;
             r.skip();
             return true;
           }, "Drop the next frame, but for the definitions in it; false if there is none.")
      .def("close", [](Reader& r) { r.close(); }, R"(
           Take no more: the writer does not wait for this reader, and large values that it has not taken, or that still
           come, are free again. The end of the object does the same.)");
}

}  // namespace conveyor
