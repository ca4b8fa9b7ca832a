// Values that stay in the arena of the process that made them, and are read there in place.
#include <algorithm>
#include <cstring>

#include "bind.h"
#include "decode.h"
#include "directory.h"
#include "hazards.h"
#include "kept.h"
#include "made_in_place.h"
#include "peer_memory.h"

namespace conveyor {
namespace {

// What keeps a value where it lies: a lease that is sure, or a hazard.
struct InPlace {
  std::shared_ptr<const void> keeps;
};

template <class Entry>
std::vector<Entry> entries_of(nb::bytes table) {
  if (table.size() % sizeof(Entry) != 0) throw nb::value_error("a table of ranges");
  std::vector<Entry> entries(table.size() / sizeof(Entry));
  if (!entries.empty()) std::memcpy(entries.data(), table.c_str(), table.size());
  return entries;
}

// Where each range lies in the arena; no bytes if none does.
nb::bytes lying_in(nb::bytes table, const Arena* arena) {
  std::vector<Lying> lying;
  if (MadeInPlace::any()) {
    const std::vector<Range> ranges = entries_of<Range>(table);
    lying.reserve(ranges.size());
    std::shared_ptr<MadeInPlace> last;
    bool any = false;
    for (const Range& range : ranges) {
      const char* data = reinterpret_cast<const char*>(range.address);
      if (!last || data < last->block->data() || data + range.length > last->block->data() + last->length) last = range.length == 0 ? nullptr : MadeInPlace::find(data, range.length, arena);
      lying.push_back(last ? Lying{last->block->offset, last->block->size, uint64_t(data - last->block->base)} : Lying{0, 0, 0});
      any |= last != nullptr;
    }
    if (!any) lying.clear();
  }
  return nb::bytes(reinterpret_cast<const char*>(lying.data()), lying.size() * sizeof(Lying));
}

// The ranges as they lie there, None for what lies elsewhere; None instead of all if a block cannot be mapped.
nb::object in_place(const InPlace& one, ArenaView& view, nb::bytes ranges, nb::bytes table) {
  const std::vector<Range> lengths = entries_of<Range>(ranges);
  const std::vector<Lying> lying = entries_of<Lying>(table);
  if (lying.size() != lengths.size()) throw nb::value_error("as many places as ranges");
  nb::list buffers;
  std::shared_ptr<Borrowed> last;
  uint64_t block = 0;
  for (size_t i = 0; i < lying.size(); ++i) {
    const auto& [offset, size, at] = lying[i];
    if (at == 0) {
      buffers.append(nb::none());
      continue;
    }
    if (at < kBlockHeader || at > size || lengths[i].length > size - at) throw nb::value_error("a range outside of its block");
    if (!last || block != offset) {
      try {
        last = std::make_shared<Borrowed>(one.keeps, view, offset, size);
      } catch (const std::system_error&) {  // no mapping or no addresses are left: it can be copied still
        return nb::none();
      }
      block = offset;
    }
    const size_t length = lengths[i].length;
    auto unshared = std::make_shared<Unshared>(last, last->mapping(), last->block() + at, length);
    buffers.append(nb::cast(Buffer{last->block() + at, length, last, nullptr, nullptr, std::move(unshared)}, nb::rv_policy::move));
  }
  return buffers;
}

}  // namespace

void bind_borrowed(nb::module_& m) {
  m.def("outlive_all", &outlive_all, "This process is the driver's: a session ends with it, so what it holds is let go of by itself alone.");
  m.def("lying_in", &lying_in, "table"_a, "arena"_a, R"(
        Where each of such ranges lies in the process's own arena: its block's offset and size, and its own place in
        the block, as 64-bit numbers; the last is 0 for one that lies elsewhere. Nothing if all do.)");
  m.def("readable", [](nb::bytes table) { return readable(entries_of<Range>(table)); }, "ranges"_a,
        "Whether other processes of this user may read these ranges of this process's memory.");
  nb::class_<InPlace>(m, "InPlace", "What keeps a value where it lies.")
      .def("buffers", &in_place, "view"_a, "ranges"_a, "lying"_a,
           nb::sig("def buffers(self, view: ArenaView, ranges: bytes, lying: bytes) -> list[Buffer | None] | None"), R"(
           The ranges of a value, which lie as ``lying_in`` has said in the arena that ``view`` shows, as read-only
           memory; ``None`` for each that lies elsewhere. ``None`` instead of all: they cannot be mapped.)");
  m.def("sure_lease", [](uint64_t number) -> nb::object {
    std::shared_ptr<Lease> lease = sure_lease(number);
    if (!lease) return nb::none();
    return nb::cast(InPlace{std::move(lease)}, nb::rv_policy::move);
  }, "number"_a, nb::sig("def sure_lease(number: int) -> InPlace | None"), R"(
        What keeps the value of that number where it lies in the arena of who has made it: the lease on the frame
        which this thread is decoding, if nobody's death but that of who has made the value can let go of it.
        ``None``: there is no such lease, and the value may go at any time.)");
  m.def("hazard", [](std::shared_ptr<ProcessTable> process_table, uint32_t slot, const ArenaView& view, int pid, uint64_t anchor, uint64_t number) -> nb::object {
    if (slot >= process_table->slots()) throw nb::value_error("no such slot");
    std::shared_ptr<Hazard> hazard = Hazard::announce(std::move(process_table), slot, number, view.returns());
    if (!hazard) return nb::none();
    // What is read from here on, by the system too, comes behind the announcement.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    try {
      read_peer(pid, {}, {}, anchor, number);
    } catch (const std::system_error& error) {
      errno = error.code().value();
      PyErr_SetFromErrno(PyExc_OSError);
      throw nb::python_error();
    }
    return nb::cast(InPlace{std::move(hazard)}, nb::rv_policy::move);
  }, "process_table"_a, "slot"_a, "view"_a, "pid"_a, "anchor"_a, "number"_a,
        nb::sig("def hazard(process_table: ProcessTable, slot: int, view: ArenaView, pid: int, anchor: int, number: int) -> InPlace | None"), R"(
        The same without a lease: this process, in ``slot``, announces that it reads the value, and the process
        ``pid``, which keeps it with that anchor in the arena that ``view`` shows, lets it be until it does so no
        more. ``None``: no more values can be announced. Raises ``OSError``: as ``read_peer``.)");
  nb::class_<Lingers>(m, "Lingers", R"(
      What is left of a value in the process's own arena when its keeper lets go of it: ``rest``, which keeps its
      memory. ``table`` are its ranges; ``names`` says the directory of it.)")
      .def("__init__", [](Lingers* self, std::shared_ptr<Arena> arena, uint64_t number, nb::bytes table, const LastingText& names, nb::object rest) {
             uint64_t bytes = 0;
             for (const Range& range : entries_of<Range>(table)) bytes += range.length;
             new (self) Lingers(std::move(arena), number, bytes, *names.text, std::move(rest));
           }, "arena"_a, "number"_a, "table"_a, "names"_a, "rest"_a)
      .def("end", &Lingers::end,
           "The value's anchor is down. The rest goes, now or when no process has announced any more that it reads the value.");
}

}  // namespace conveyor
