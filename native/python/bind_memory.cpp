// Segments, arenas, and what lies in them.
#include <sys/stat.h>

#include <cstring>

#include "bind.h"
#include "execution_limits.h"
#include "exit.h"
#include "located.h"
#include "made_in_place.h"
#include "snapshot.h"

namespace conveyor {
namespace {

int buffer_get(PyObject* self, Py_buffer* view, int flags) {
  Buffer* b = nb::inst_ptr<Buffer>(self);
  try {
    b->unshare();
  } catch (const std::bad_alloc&) {
    view->obj = nullptr;
    PyErr_NoMemory();
    return -1;
  } catch (const std::exception& error) {
    view->obj = nullptr;
    PyErr_SetString(PyExc_BufferError, error.what());
    return -1;
  }
  return PyBuffer_FillInfo(view, self, b->data, Py_ssize_t(b->length), 0, flags);
}

PyType_Slot buffer_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(buffer_get)}, {0, nullptr}};

// Duplicates of descriptors. A handler of Python's that raises runs between any two bytecodes: a list of numbers
// could be lost before it is noted, or on its way to be closed.
struct Duplicates {
  explicit Duplicates(nb::sequence of) {
    for (nb::handle fd : of) fds.push_back(dup_cloexec(nb::cast<int>(fd)));
  }
  Duplicates(const Duplicates&) = delete;
  nb::list numbers() const {
    nb::list found;
    for (const Fd& fd : fds) found.append(fd.get());
    return found;
  }
  std::vector<Fd> fds;
};

}  // namespace

void bind_memory(nb::module_& m) {
  nb::class_<Duplicates>(m, "Duplicates")
      .def(nb::init<nb::sequence>(), "fds"_a)
      .def("numbers", &Duplicates::numbers)
      .def("taken", [](Duplicates& d) {
             nb::list taken = d.numbers();
             for (Fd& fd : d.fds) fd.release();
             d.fds.clear();
             return taken;
           })
      .def("close", [](Duplicates& d) { d.fds.clear(); });
  nb::class_<Segment>(m, "Segment")
      .def_static("create", &Segment::create, "size"_a)
      .def_static("attach", &Segment::attach, "fd"_a)
      .def_static("ring_bytes", [](uint32_t slots, uint32_t stride, uint32_t readers) { return align_up(RingHeader::bytes(slots, stride, readers), kCacheLine); }, "slots"_a, "stride"_a, "readers"_a)
      .def_prop_ro("fd", &Segment::fd)
      .def("close_fd", &Segment::close_fd)
      .def_prop_ro("size", &Segment::size)
      .def("make_ring", [](Segment& s, size_t offset, uint32_t slots, uint32_t stride, uint32_t readers, uint32_t flags) { s.make_ring(offset, slots, stride, readers, flags); }, "offset"_a, "slots"_a, "stride"_a, "readers"_a, "flags"_a = 0)
      .def("slots", [](Segment& s, size_t offset) { return s.ring(offset).slots; }, "offset"_a)
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
      .def("count_failure", &Limits::count_failure)
      .def("uncount_failure", &Limits::uncount_failure)
      .def("fail", &Limits::fail, "number"_a)
      .def("failed", &Limits::failed, "number"_a)
      .def_prop_ro("cancellations", &Limits::cancellations)
      .def("drop_stream", &Limits::drop_stream, "number"_a, "task"_a)
      .def("stream_dropped", &Limits::stream_dropped, "number"_a, "task"_a)
      .def("deadline", &Limits::deadline, "number"_a)
      .def("stopped", [](Limits& l, uint64_t number) { return l.look(number, now_ns()) != Limits::Verdict::kGoOn; }, "number"_a)
      .def("report", [](const Limits& l, uint64_t number) {
        const auto [node, others] = l.report(number);
        nb::list tasks;
        for (uint32_t task : others) tasks.append(task);
        return nb::make_tuple(node, tasks);
      }, "number"_a);
  m.attr("CANCELLED") = nb::bytes(kCancelledMeta);
  m.attr("OVERDUE") = nb::bytes(kOverdueMeta);

  nb::class_<Arena>(m, "Arena")
      .def(nb::new_([](int fd, size_t size, size_t cap, std::shared_ptr<Board> board, uint32_t slot, double idle) {
             if (slot >= board->slots()) throw nb::value_error("no such slot");
             return std::make_shared<Arena>(fd, size, cap, std::move(board), slot, uint64_t(idle * 1e9));
           }), "fd"_a, "size"_a, "cap"_a, "board"_a, "slot"_a, "idle"_a = double(Arena::kIdleNs) / 1e9)
      .def_static("create_fd", [](size_t size) {
             Fd fd = Arena::create_file(size / kWindow * kWindow);
             return fd.release();
           }, "size"_a)
      .def("allocate", [](std::shared_ptr<Arena> arena, size_t size, bool may_wait) {
             auto made = std::make_shared<MadeInPlace>(arena, size, may_wait);
             return Buffer{made->block->data(), size, made, nullptr, made};
           }, "size"_a, "may_wait"_a = true)
      .def_prop_ro_static("AS_MUCH", [](nb::handle) { return Arena::kAsMuch; })
      .def_static("note_given", [](size_t bytes) { return std::exchange(Arena::given, bytes); }, "bytes"_a)
      .def_prop_ro("returned", &Arena::returned)
      .def("give_back", [](Arena& a) {
             Unlocked unlocked;
             a.give_back(0);
           })
      .def("give_back_soon", [](Arena& a) {
             a.give_back_soon();
             OwnedMemory::give_back_soon();
           })
      .def("close", [](Arena& a) {
             Unlocked unlocked;
             a.close();
             OwnedMemory::give_back_soon();
           })
      .def("leave_slot", &Arena::leave_slot)
      .def_prop_ro("file", [](const Arena& a) {
             const auto [fd, inode] = a.file();
             return nb::make_tuple(fd, inode);
           })
      .def("holders", [](const Arena& a, const Budget* of) {
             nb::list found;
             for (const uint32_t slot : a.holders(of)) found.append(slot);
             return found;
           }, "of"_a.none() = nb::none())
      .def_prop_ro("news", &Arena::news)
      .def_prop_ro("bytes_touched", &Arena::bytes_touched)
      .def_prop_ro("bytes_out", &Arena::bytes_out)
      .def_prop_ro("blocks_out", &Arena::blocks_out)
      .def_prop_ro("cap", &Arena::cap);

  nb::class_<Budget>(m, "MemoryBudget").def(nb::new_([](size_t cap) { return std::make_shared<Budget>(cap); }), "cap"_a).def_ro("cap", &Budget::cap).def_prop_ro("out", [](Budget& b) { return b.out.load(std::memory_order_relaxed); });

  nb::class_<ArenaView>(m, "ArenaView").def(nb::new_([](int fd, size_t size, std::shared_ptr<Board> board, uint32_t slot) {
             if (slot >= board->slots()) throw nb::value_error("no such slot");
             return ArenaView::of(fd, size, board, slot);
           }), "fd"_a, "size"_a, "board"_a, "slot"_a)
      .def_prop_ro("fd", &ArenaView::fd);

  nb::class_<Buffer>(m, "Buffer", nb::type_slots(buffer_slots))
      .def_static("own", [](size_t size) {
             auto memory = std::make_shared<OwnedMemory>(size);
             return Buffer{memory->data, size, memory, nullptr, nullptr};
           }, "size"_a)
      .def_static("copy_of", [](int fd, size_t size) {
             struct stat about;
             if (::fstat(fd, &about) != 0) throw_errno("fstat");
             if (about.st_size < 0 || size > size_t(about.st_size)) throw nb::value_error("conveyor: the file is shorter");
             auto memory = OwnedMemory::copy_of(fd, size);
             return Buffer{memory->data, size, memory, nullptr, nullptr};
           }, "fd"_a, "size"_a)
      .def_ro("nbytes", &Buffer::length)
      .def_prop_ro("address", [](Buffer& b) { return reinterpret_cast<uintptr_t>(b.data); })
      .def("made_for", [](Buffer& b, uintptr_t storage) {
             if (!b.made) throw nb::value_error("conveyor: the buffer was not made in place");
             b.made->storage = storage;
           }, "storage"_a)
      .def("part", [](const Buffer& b, size_t offset, size_t length) {
             if (offset > b.length || length > b.length - offset) throw nb::index_error("a part lies outside of its buffer");
             Buffer part = b;
             part.data += offset;
             part.length = length;
             return part;
           }, "offset"_a, "length"_a);

  nb::class_<Snapshot>(m, "Snapshot")
      .def("__init__", [](Snapshot* self, nb::handle value, nb::handle sent, size_t share_from) { new (self) Snapshot(snapshot(value, sent, share_from)); },
           "value"_a.none(), "sent"_a.none(), "share_from"_a = 0)
      .def_static("received", &received_snapshot, "codec"_a, "flags"_a, "size"_a, "data"_a.none(), "fd"_a)
      .def_prop_ro("parts", [](Snapshot& s) {
             nb::object data = nb::none();
             if (!s.fd) data = nb::bytes(s.frame.body, s.frame.size);
             return nb::make_tuple(s.frame.codec, s.frame.flags, s.frame.size, data);
           })
      .def_prop_ro("size", [](Snapshot& s) { return s.frame.size; })
      .def_prop_ro("goes_as_it_is", [](Snapshot& s) { return (s.frame.flags & (kRefs | kBound | kKeeps | kExternal)) == 0; })
      .def_prop_ro("fd", [](Snapshot& s) { return s.fd ? s.fd->get() : -1; })
      .def_prop_ro("has_refs", [](Snapshot& s) { return (s.frame.flags & kRefs) != 0; })
      .def_prop_ro("codec", [](Snapshot& s) { return s.frame.codec; })
      .def_prop_ro("keeps", [](Snapshot& s) { return (s.frame.flags & kKeeps) != 0; })
      .def_prop_ro("meta", [](Snapshot& s) { return meta_of(s.frame); })
      .def_prop_ro("shared_at", [](Snapshot& s) -> nb::object {
             const auto where = located_in(s.frame);
             return where && !where->snapshot ? nb::object(nb::make_tuple(where->slot, where->incarnation)) : nb::none();
           })
      .def("note_kept", [](Snapshot& s, uint64_t number) { s.frame.attached = std::make_shared<const Held>(Numbers{number}, nullptr); }, "number"_a)
      .def("loose", [](Snapshot& s) -> nb::object {
             if (s.frame.codec < kFirstPython || s.frame.codec == kArguments || (s.frame.flags & (kRefs | kBound))) return nb::none();
             return nb::make_tuple(s.frame.codec, meta_of(s.frame), buffers_of(s.frame, table_of(s.frame), true));
           })
      .def("decode", [](Snapshot& s, bool fetches) { return decode(s.frame, fetches); }, "fetches"_a = true);
  m.def("fetches", &fetches);

  nb::class_<ErrorFrame>(m, "ErrorFrame").def("__init__", [](ErrorFrame* self, nb::bytes meta) { new (self) ErrorFrame{std::move(meta)}; }, "meta"_a)
      .def_ro("meta", &ErrorFrame::meta)
      .def_prop_ro("others", [](ErrorFrame& e) -> nb::object {
        if (!e.told) return nb::none();
        nb::list others;
        const auto told = e.told;
        for (size_t i = 1; i < told->size(); ++i) others.append(nb::bytes((*told)[i].data(), (*told)[i].size()));
        return others;
      });
}

}  // namespace conveyor
