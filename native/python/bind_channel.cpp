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
    if (bit >= kBellBits) throw nb::value_error("bell bit out of range");
    targets.push_back({slot, bit});
  }
  return targets;
}

}  // namespace

void bind_channel(nb::module_& m) {
  nb::class_<Writer>(m, "Writer")
      .def("__init__", [](Writer* self, std::shared_ptr<Segment> segment, size_t offset, std::shared_ptr<Board> board,
                          const std::vector<std::pair<uint32_t, uint32_t>>& targets, std::shared_ptr<Arena> arena, nb::object sent,
                          uint32_t graph, uint32_t edge, std::string carries, std::shared_ptr<Budget> budget) {
             new (self) Writer(std::move(segment), offset, std::move(board), targets_of(targets), std::move(arena), std::move(sent));
             ReaderSet& readers = *self->ring.readers();
             readers.graph = graph;
             readers.edge = edge;
             readers.carries = std::move(carries);
             readers.budget = std::move(budget);
           }, "segment"_a, "offset"_a, "board"_a, "targets"_a, "arena"_a, "sent"_a.none(), "graph"_a = 0, "edge"_a = 0, "carries"_a = "", "budget"_a.none() = nb::none())
      .def_rw("moved_refs", &Writer::moved_refs)
      .def_rw("sent", &Writer::sent)
      .def_prop_ro("deserted", [](Writer& w) {
             const ReaderSet& readers = *w.ring.readers();
             for (uint32_t r = 0; r < readers.slots.size(); ++r)
               if (readers.gone(r)) return true;
             return false;
           })
      .def_ro("bytes", &Writer::bytes)
      .def_prop_ro("count", [](Writer& w) { return w.ring.head(); })
      .def_prop_ro("has_room", [](Writer& w) { return w.ring.has_room(); })
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
             w.send_error(meta.c_str(), meta.size(), tag);
             return true;
           }, "meta"_a, "tag"_a);

  nb::class_<Reader>(m, "Reader", nb::is_weak_referenceable())
      .def("__init__", [](Reader* self, std::shared_ptr<Segment> segment, size_t offset, uint32_t reader, std::shared_ptr<Board> board,
                          std::pair<uint32_t, uint32_t> writer, std::shared_ptr<ArenaView> view, bool readonly, std::string carries) {
             new (self) Reader(std::move(segment), offset, reader, std::move(board), Target{writer.first, writer.second}, std::move(view), readonly);
             self->ring.carries = std::move(carries);
           }, "segment"_a, "offset"_a, "reader"_a, "board"_a, "writer"_a, "view"_a, "readonly"_a, "carries"_a = "")
      .def_prop_ro("empty", [](Reader& r) { return r.ring.empty(); })
      .def_prop_ro("dry", &Reader::dry)
      .def_prop_ro("count", [](Reader& r) { return r.ring.next(); })
      .def_prop_ro("available", [](Reader& r) { return r.ring.head() - r.ring.next(); })
      .def_ro("tag", &Reader::tag)
      .def_rw("brings_work", &Reader::brings_work)
      .def_ro("given", &Reader::given)
      .def_prop_ro("front", [](Reader& r) { return r.ring.empty() ? int64_t(-1) : int64_t(r.ring.front()->tag); })
      .def("want", [](Reader& r, uint64_t tag) { r.ring.want(tag); }, "tag"_a)
      .def_prop_ro("kind", [](Reader& r) { return uint32_t(r.kind); })
      .def_ro("bytes", &Reader::bytes)
      .def("receive", [](Reader& r) { return r.ring.empty() ? nb::object(*empty) : r.receive(); })
      .def("receive_undecoded", [](Reader& r, nb::handle make) { return r.ring.empty() ? nb::object(*empty) : r.receive_undecoded(make); }, "make"_a)
      .def("receive_or_leave", [](Reader& r) { return r.ring.empty() ? nb::object(*empty) : r.receive_or_leave(); })
      .def("receive_kept", [](Reader& r) {
             while (!r.ring.empty())
               if (nb::object value = r.receive_kept(); value.is_valid()) return value;
             return nb::object(*empty);
           })
      .def("skip", [](Reader& r) {
             if (r.ring.empty()) return false;
             r.skip();
             return true;
           })
      .def("close", [](Reader& r) { r.close(); });
}

}  // namespace conveyor
