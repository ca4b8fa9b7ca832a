// Segments, arenas, and what lies in them.
#include <sys/stat.h>

#include <cstring>

#include "arena/pins.h"
#include "bind.h"
#include "decode.h"
#include "encode.h"
#include "execution_limits.h"
#include "exit.h"
#include "made_in_place.h"

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

// --- snapshots that are made here, and those of other processes ---

void place(Snapshot& s, std::shared_ptr<OwnedMemory> memory) {
  s.frame.memory = std::move(memory);
  s.frame.body = s.frame.memory->data;
  s.frame.kept = true;
}

// `sent` has carried nothing; `share_from`: the size from which its body lies in a file.
Snapshot snapshot(nb::handle value, nb::handle sent, size_t share_from) {
  Encoded e;
  encode(e, value, sent, 0, nullptr);
  Snapshot s;
  s.frame.codec = e.codec;
  s.frame.flags = e.flags & ~uint32_t(kBound);  // `sent` is its own: it brings its definitions
  s.frame.size = e.size;
  if (e.attached) s.frame.attached = std::make_shared<const Held>(std::move(e.keeps), std::move(e.attached));
  const auto make = [&] {
    std::shared_ptr<OwnedMemory> memory;
    if (share_from != 0 && e.size >= share_from) {
      s.fd = std::make_shared<const Fd>(make_memfd("conveyor-value", align_up(e.size, kGranule)));
      memory = std::make_shared<OwnedMemory>(s.fd, e.size);
    } else {
      memory = std::make_shared<OwnedMemory>(e.size);
    }
    e.write_body(memory->data);
    return memory;
  };
  // As in Writer::prepare(): `e` keeps what is copied. What is shared goes to other processes, with the GIL: an actor that
  // ends waits for nobody who is just making it.
  place(s, share_from != 0 ? make() : unlocked_from(e.size, make));
  e.sent = nb::object();
  return s;
}

// One of another process: its body is in `data`, or in the file `fd` (else -1), which is duplicated.
Snapshot received_snapshot(uint16_t codec, uint32_t flags, size_t size, nb::handle data, int fd) {
  Snapshot s;
  s.frame.codec = codec;
  s.frame.flags = flags & ~uint32_t(kExternal | kSure);
  s.frame.size = size;
  if (fd >= 0) {
    const off_t length = ::lseek(fd, 0, SEEK_END);
    if (size == 0 || length < 0 || size_t(length) < size) throw std::system_error(EPROTO, std::generic_category(), "snapshot size");
    s.fd = std::make_shared<const Fd>(dup_cloexec(fd));
    place(s, std::make_shared<OwnedMemory>(s.fd, size));
    return s;
  }
  if (!PyBytes_CheckExact(data.ptr()) || size_t(PyBytes_GET_SIZE(data.ptr())) != size)
    throw std::system_error(EPROTO, std::generic_category(), "snapshot size");
  place(s, unlocked_from(size, [&] {
    auto memory = std::make_shared<OwnedMemory>(size);
    std::memcpy(memory->data, PyBytes_AS_STRING(data.ptr()), size);
    return memory;
  }));
  return s;
}

// --- blocks that this process has pinned for a device ---

// The block that a buffer lies in, if it is in use by its owner: it does not come back to its writer meanwhile.
struct InBlock {
  std::shared_ptr<Mapping> mapping{};
  char* base = nullptr;
  uint32_t use = 0;  // which value it is of those that the block has had
  std::shared_ptr<Returns> returns{};
};

InBlock block_of(const Buffer& b, const std::shared_ptr<ProcessTable>& process_table, uint32_t slot) {
  if (b.lease && !b.lease->inherited()) return {b.lease->shared_mapping(), b.lease->block(), b.lease->generation(), b.lease->returns()};
  if (!b.made || b.made->sent || b.made->inherited()) return {};
  const Block& block = *b.made->block;
  return {block.mapping, block.base, block.generation + 1, {process_table, &process_table->slot(slot)->returns}};
}

}  // namespace

void bind_memory(nb::module_& m) {
  nb::class_<Duplicates>(m, "Duplicates",
      "Duplicates of descriptors. They are closed when nobody has this object any more, whatever a signal handler has broken off.")
      .def(nb::init<nb::sequence>(), "fds"_a, nb::sig("def __init__(self, fds: Sequence[int]) -> None"),
           "Duplicate all of ``fds``, or none. Raises OSError.")
      .def("numbers", &Duplicates::numbers, nb::sig("def numbers(self) -> list[int]"), "Their numbers, which they have as long as this object.")
      .def("taken", [](Duplicates& d) {
             nb::list taken = d.numbers();
             for (Fd& fd : d.fds) fd.release();
             d.fds.clear();
             return taken;
           }, nb::sig("def taken(self) -> list[int]"), "Give them to the caller, who closes them.")
      .def("close", [](Duplicates& d) { d.fds.clear(); }, "Close those that are left.");
  nb::class_<Segment>(m, "Segment", "Shared memory that holds rings.")
      .def_static("create", &Segment::create, "size"_a, "New memory of at least ``size`` bytes, all zero.")
      .def_static("attach", &Segment::attach, "fd"_a, "The segment behind a descriptor, which stays the caller's; none is kept.")
      .def_static("ring_bytes", [](uint32_t slots, uint32_t stride, uint32_t readers) { return align_up(RingHeader::bytes(slots, stride, readers), kCacheLine); }, "slots"_a, "stride"_a, "readers"_a,
           "What a ring takes, a multiple of 64.")
      .def_prop_ro("fd", &Segment::fd, "The descriptor of a segment that was created here, -1 after ``close_fd``; stays the segment's.")
      .def("close_fd", &Segment::close_fd, "Close the descriptor; the memory stays.")
      .def_prop_ro("size", &Segment::size, "In bytes, whole pages.")
      .def("make_ring", [](Segment& s, size_t offset, uint32_t slots, uint32_t stride, uint32_t readers, uint32_t flags) { s.make_ring(offset, slots, stride, readers, flags); }, "offset"_a, "slots"_a, "stride"_a, "readers"_a, "flags"_a = 0,
           "Lay a ring there: ``slots`` a power of two, ``offset`` and ``stride`` multiples of 64; else ``OSError``.")
      .def("slots", [](Segment& s, size_t offset) { return s.ring(offset).slots; }, "offset"_a,
           "How many slots the ring there has, a power of two. Raises ``OSError`` if there is none.")
      .def("progress", [](Segment& s, size_t offset) {
             const Ring ring = s.ring(offset);
             nb::list taken;
             for (uint32_t i = 0; i < ring.readers; ++i) taken.append(ring.cursor(i).next.load(std::memory_order_acquire));
             return nb::make_tuple(ring.header->head.load(std::memory_order_acquire), taken);
           }, "offset"_a, nb::sig("def progress(self, offset: int) -> tuple[int, list[int]]"),
           "Of the ring there: frames published, and frames taken by each reader; ``OSError`` where no ring is.");

  nb::class_<Limits>(m, "Limits", "Deadlines and cancellations of the executions (or calls) that are under way, in a segment.")
      .def("__init__", [](Limits* self, std::shared_ptr<Segment> segment, size_t offset, uint32_t sets, uint32_t tasks) {
             new (self) Limits(std::move(segment), offset, sets, tasks);
           }, "segment"_a, "offset"_a, "sets"_a, "tasks"_a,
           "``sets``: a power of two, at least the depth; ``tasks``: of the graph. ``OSError`` where the segment has no room.")
      .def_static("bytes", &Limits::bytes, "sets"_a, "tasks"_a, "What they take, a multiple of 64; all zero: no limits.")
      .def("cancel", &Limits::cancel, "number"_a, "Mark an execution as cancelled; then ring those who should look.")
      .def("cancelled", &Limits::cancelled, "number"_a, "Whether it is, as long as it is under way.")
      .def("count_failure", &Limits::count_failure, "Before the executor is told of a task that has failed: how many there were before.")
      .def("uncount_failure", &Limits::uncount_failure, "It could not be told.")
      .def("fail", &Limits::fail, "number"_a, "Mark an execution as failed, which counts as cancelled; after the executor has been told.")
      .def("failed", &Limits::failed, "number"_a, "Whether it is so marked, as long as it is under way.")
      .def_prop_ro("cancellations", &Limits::cancellations, "How often ``cancel`` was called.")
      .def("drop_stream", &Limits::drop_stream, "number"_a, "task"_a,
           "Nobody wants more items of a generator task of an execution; then notify its actor.")
      .def("stream_dropped", &Limits::stream_dropped, "number"_a, "task"_a, "Whether that is so, of an execution that is under way.")
      .def("deadline", &Limits::deadline, "number"_a, "In nanoseconds of the monotonic clock; 0: none.")
      .def("ended", [](Limits& l, uint64_t number) { return l.look(number, now_ns()) != Limits::Verdict::kGoOn; }, "number"_a,
           "Whether it is cancelled or its deadline has passed.")
      .def("report", [](const Limits& l, uint64_t number) {
        const auto [node, others] = l.report(number);
        nb::list tasks;
        for (uint32_t task : others) tasks.append(task);
        return nb::make_tuple(node, tasks);
      }, "number"_a, nb::sig("def report(self, number: int) -> tuple[int, list[int]]"),
           "Of an execution with a deadline: the task skipped first (-1: none), and those that ran.");
  m.attr("CANCELLED") = nb::bytes(kCancelledMeta);
  m.attr("OVERDUE") = nb::bytes(kOverdueMeta);

  nb::class_<Arena>(m, "Arena", R"(
      Where this process puts its large payloads. A thread of its own, which starts with the first of them and never
      takes the GIL, gives back what has been free for some seconds.)")
      .def(nb::new_([](int fd, size_t size, size_t cap, std::shared_ptr<ProcessTable> process_table, uint32_t slot, double idle) {
             if (slot >= process_table->slots()) throw nb::value_error("no such slot");
             return std::make_shared<Arena>(fd, size, cap, std::move(process_table), slot, uint64_t(idle * 1e9));
           }), "fd"_a, "size"_a, "cap"_a, "process_table"_a, "slot"_a, "idle"_a = double(Arena::kIdleNs) / 1e9, R"(
           The file behind ``fd`` (duplicated), ``size`` bytes of addresses, of the process in ``slot``; at most ``cap``
           bytes of memory behind all arenas that are counted on ``process_table``. What has been free for ``idle`` seconds is
           given back.)")
      .def_static("create_fd", [](size_t size) {
             Fd fd = Arena::create_file(size / kWindow * kWindow);
             return fd.release();
           }, "size"_a, "A new sealed, sparse file, rounded down to 64 MiB; the caller closes it.")
      .def("allocate", [](std::shared_ptr<Arena> arena, size_t size, bool may_wait) {
             auto made = std::make_shared<MadeInPlace>(arena, size, may_wait);
             return Buffer{made->block->data(), size, made, nullptr, made};
           }, "size"_a, "may_wait"_a = true, R"(
           Memory to make a value in; given back when garbage, unless the value was sent. Raises the ``arena_full`` of
           ``set_codec`` if there is none. ``may_wait``: for other processes, at the cap.)")
      .def_prop_ro_static("AS_MUCH", [](nb::handle) { return Arena::kAsMuch; },
           "For ``note_given``: a result is passed on, which takes its own place.")
      .def_static("note_given", [](size_t bytes) { return std::exchange(Arena::given, bytes); }, "bytes"_a, R"(
           Return what was noted last, and note that the method which this thread runs was given so many bytes of other
           processes' arenas: what it sends crosses a memory cap if the rest is not above it. A reader with
           ``brings_work``, and a program, note that by themselves.)")
      .def_static("let_first_cross", [](bool may) { Arena::first_may_cross = may; }, "may"_a, R"(
           Whether what this thread allocates from now on crosses a memory cap if nothing else of its arena is in use.)")
      .def_prop_ro("has_nothing_out", &Arena::has_nothing_out, "Whether nothing of it is in use.")
      .def_prop_ro("returned", &Arena::returned, "Count of values that were let go of while somebody starved, in any arena.")
      .def("give_back", [](Arena& a) {
             Unlocked unlocked;
             a.give_back(0);
           }, "Take back every block whose readers are done, and free the memory of all that are free.")
      .def("give_back_soon", [](Arena& a) {
             a.give_back_soon();
             OwnedMemory::give_back_soon();
           }, "Have the arena's thread do so, and that of what was put.")
      .def("close", [](Arena& a) {
             Unlocked unlocked;
             a.close();
             OwnedMemory::give_back_soon();
           }, "At the end of a session: nothing more can be allocated, and what is free is given back.")
      .def("leave_slot", &Arena::leave_slot, "Count what is left of it for the session alone: its slot is about to be another process's.")
      .def_prop_ro("file", [](const Arena& a) {
             const auto [fd, inode] = a.file();
             return nb::make_tuple(fd, inode);
           }, nb::sig("def file(self) -> tuple[int, int]"),
           "The number of its descriptor in this process, and its file's, which no other arena has. -1: it is closed.")
      .def("holders", [](const Arena& a, const Budget* of) {
             nb::list found;
             for (const uint32_t slot : a.holders(of)) found.append(slot);
             return found;
           }, "of"_a.none() = nb::none(), nb::sig("def holders(self, of: MemoryBudget | None = None) -> list[int]"),
           "The processes, by slot, that still hold values of this arena. ``of``: only those of this budget.")
      .def_prop_ro("news", &Arena::news, "Changes when memory has been given back: of any arena, or this one's part of a graph's.")
      .def_prop_ro("bytes_touched", &Arena::bytes_touched, "Bytes that may have memory behind them.")
      .def_prop_ro("bytes_out", &Arena::bytes_out, "Bytes of published blocks that were not seen free yet.")
      .def_prop_ro("blocks_out", &Arena::blocks_out, "Published blocks that were not seen free yet.")
      .def_prop_ro("cap", &Arena::cap, "Of all arenas of the session.");

  nb::class_<Budget>(m, "MemoryBudget", "What some channels' values may take of an arena, all together.")
      .def(nb::new_([](size_t cap) { return std::make_shared<Budget>(cap); }), "cap"_a)
      .def_ro("cap", &Budget::cap, "In bytes.")
      .def_prop_ro("out", [](Budget& b) { return b.out.load(std::memory_order_relaxed); },
           "Bytes of values that were sent and were not seen to be let go of yet.");

  nb::class_<ArenaView>(m, "ArenaView", "Another process's arena as this one reads it, mapped where it is used.")
      .def(nb::new_([](int fd, size_t size, std::shared_ptr<ProcessTable> process_table, uint32_t slot) {
             if (slot >= process_table->slots()) throw nb::value_error("no such slot");
             return ArenaView::of(fd, size, process_table, slot);
           }), "fd"_a, "size"_a, "process_table"_a, "slot"_a, R"(
           The file behind ``fd`` (duplicated), ``size`` bytes of addresses, of the process in ``slot``, which is told of
           leases that have ended. Where this process has a view of that file it is this one.)")
      .def_prop_ro("fd", &ArenaView::fd, "The duplicate, which stays the view's.");

  nb::class_<Buffer>(m, "Buffer", nb::type_slots(buffer_slots), R"(
      A window of received (leased) or own memory; exports the buffer protocol.

      What is exported may be written to, and nobody else sees it: memory that others read as well is exported as
      private pages over it, or as a copy.

      Holds the lease of the block it lies in until it is garbage. In a forked child it is inert.)")
      .def_static("own", [](size_t size) {
             auto memory = unlocked_from(size, [size] { return std::make_shared<OwnedMemory>(size); });
             return Buffer{memory->data, size, memory, nullptr, nullptr};
           }, "size"_a, "New memory of this process alone.")
      .def_static("copy_of", [](int fd, size_t size) {
             struct stat about;
             if (::fstat(fd, &about) != 0) throw_errno("fstat");
             if (about.st_size < 0 || size > size_t(about.st_size)) throw nb::value_error("conveyor: the file is shorter");
             auto memory = OwnedMemory::copy_of(fd, size);
             return Buffer{memory->data, size, memory, nullptr, nullptr};
           }, "fd"_a, "size"_a, R"(
           What is at the beginning of a file. Its pages are shared until this process writes to them, which nobody else
           sees; the descriptor is not needed any more. ``ValueError``: the file is shorter.)")
      .def_ro("nbytes", &Buffer::length, "Its length in bytes.")
      .def_prop_ro("address", [](Buffer& b) { return reinterpret_cast<uintptr_t>(b.data); }, "Where it lies in this process.")
      .def("made_for", [](Buffer& b, uintptr_t storage) {
             if (!b.made) throw nb::value_error("conveyor: the buffer was not made in place");
             b.made->storage = storage;
           }, "storage"_a, "Note the one storage of torch's, by its address, that memory made in place is for.")
      .def("part", [](const Buffer& b, size_t offset, size_t length) {
             if (offset > b.length || length > b.length - offset) throw nb::index_error("a part lies outside of its buffer");
             Buffer part = b;
             part.data += offset;
             part.length = length;
             return part;
           }, "offset"_a, "length"_a, "A part of it, which holds the same.");

  nb::class_<Snapshot>(m, "Snapshot",
      "An encoded value, to be decoded any number of times; also what a ref keeps of a result that has come. To send it is to send the value.")
      .def("__init__", [](Snapshot* self, nb::handle value, nb::handle sent, size_t share_from) { new (self) Snapshot(snapshot(value, sent, share_from)); },
           "value"_a.none(), "sent"_a.none(), "share_from"_a = 0, R"(
           ``sent`` has carried nothing. From ``share_from`` bytes on (0: never) it lies in a file that others can be
           given. Raises what the codec raises for ``value``.)")
      .def_static("received", &received_snapshot, "codec"_a, "flags"_a, "size"_a, "data"_a.none(), "fd"_a,
           nb::sig("def received(codec: int, flags: int, size: int, data: bytes | None, fd: int) -> Snapshot"),
           "Another process's: its ``parts`` and ``fd`` (-1: none), which is duplicated. ``OSError`` if they do not fit.")
      .def_prop_ro("parts", [](Snapshot& s) {
             nb::object data = nb::none();
             if (!s.fd) data = nb::bytes(s.frame.body, s.frame.size);
             return nb::make_tuple(s.frame.codec, s.frame.flags, s.frame.size, data);
           }, nb::sig("def parts(self) -> tuple[int, int, int, bytes | None]"), "What ``received`` takes, but for the descriptor.")
      .def_prop_ro("size", [](Snapshot& s) { return s.frame.size; }, "How many bytes its body has, of what is not kept elsewhere.")
      .def_prop_ro("goes_as_it_is", [](Snapshot& s) { return (s.frame.flags & (kRefs | kBound | kKeeps | kExternal)) == 0; },
           "Whether it is sent on as it has come: nothing is decoded or kept for that.")
      .def_prop_ro("fd", [](Snapshot& s) { return s.fd ? s.fd->get() : -1; }, "The file that it lies in, or -1; stays the snapshot's.")
      .def_prop_ro("has_refs", [](Snapshot& s) { return (s.frame.flags & kRefs) != 0; },
           "Whether its value refers to refs, which its meta bytes name.")
      .def_prop_ro("codec", [](Snapshot& s) { return s.frame.codec; }, "What it is encoded by.")
      .def_prop_ro("keeps", [](Snapshot& s) { return (s.frame.flags & kKeeps) != 0; },
           "Whether something is kept for it where it was made: as long as this is, or whatever stands for it.")
      .def_prop_ro("meta", [](Snapshot& s) { return meta_of(s.frame); }, "Of a value that the codec has encoded.")
      .def_prop_ro("shared_at", [](Snapshot& s) -> nb::object {
             const auto where = located_in(s.frame);
             return where && !where->snapshot ? nb::object(nb::make_tuple(where->slot, where->incarnation)) : nb::none();
           }, nb::sig("def shared_at(self) -> tuple[int, int] | None"),
           "Of a value that has stayed with its maker, and of which its later writes are seen: that process's slot and incarnation.")
      .def("note_held", [](Snapshot& s, uint64_t number) { s.frame.attached = std::make_shared<const Held>(Numbers{number}, nullptr); }, "number"_a,
           "It has come from another process, and refers to the value of that number: have the directory say that this process holds a reference.")
      .def("loose", [](Snapshot& s) -> nb::object {
             if (s.frame.codec < kFirstPython || s.frame.codec == kArguments || (s.frame.flags & (kRefs | kBound))) return nb::none();
             return nb::make_tuple(s.frame.codec, meta_of(s.frame), buffers_of(s.frame, table_of(s.frame), true));
           }, nb::sig("def loose(self) -> tuple[int, bytes, list[Buffer] | None] | None"), R"(
           What the codec's ``decode`` takes, to be sent inside of another value. ``None`` if it was encoded natively, or
           could not be decoded elsewhere.)")
      .def("decode", [](Snapshot& s, bool fetches) { return decode(s.frame, fetches); }, "fetches"_a = true,
           nb::sig("def decode(self, fetches: bool = True) -> Any"), R"(
           A value equal to the one at the time of the snapshot; they share the snapshot's memory. Not ``fetches``: what
           has stayed in another process is not fetched.)");
  m.def("fetches", &fetches, "Whether what has stayed elsewhere is fetched in the frame that this thread is decoding.");

  nb::class_<ErrorFrame>(m, "ErrorFrame", "What an error frame is received as.")
      .def("__init__", [](ErrorFrame* self, nb::bytes meta) { new (self) ErrorFrame{std::move(meta)}; }, "meta"_a,
           "``meta``: what ``send_error`` was given.")
      .def_ro("meta", &ErrorFrame::meta, "The encoded exception.")
      .def_prop_ro("others", [](ErrorFrame& e) -> nb::object {
        if (!e.told) return nb::none();
        nb::list others;
        const auto told = e.told;
        for (size_t i = 1; i < told->size(); ++i) others.append(nb::bytes((*told)[i].data(), (*told)[i].size()));
        return others;
      }, nb::sig("def others(self) -> list[bytes] | None"), "Of an execution that fails as one: what else is known to have failed in it, encoded.");

  nb::class_<BlockPin>(m, "BlockPin",
      "A mark of this process on a block of an arena: none of the block's memory is given back as long as it is there.")
      .def_prop_ro("address", [](BlockPin& p) { return reinterpret_cast<uintptr_t>(p.address()); }, "Where the block lies in this process.")
      .def_prop_ro("nbytes", &BlockPin::size, "How much of it has memory: whole pages.")
      .def_prop_ro("inherited", &BlockPin::inherited, "Whether this process was forked since.")
      .def("release", &BlockPin::release, "Take the mark away: no device has the memory any more.");

  nb::class_<PinWords>(m, "PinWords", "How a process marks blocks that it pins for a device, and how it hears that memory is short.")
      .def("__init__", [](PinWords* self, std::shared_ptr<ProcessTable> process_table, uint32_t slot) {
             if (slot >= process_table->slots()) throw nb::value_error("no such slot");
             new (self) PinWords(std::move(process_table), slot);
           }, "process_table"_a, "slot"_a)
      .def("hold", &PinWords::hold, "some"_a, "Whether there is anything to ask this process for.")
      .def("wait", [](PinWords& words, double seconds) {
             Unlocked unlocked;
             return words.wait(uint64_t(seconds * 1e9));
           }, "seconds"_a, "Sleep until woken, or for that long (0: no limit). True: somebody waits for :meth:`answer`.")
      .def("answer", &PinWords::answer, "What could be let go of has been.")
      .def("wake", &PinWords::wake, "Have the thread in :meth:`wait` look.")
      .def("block", [](PinWords& words, const Buffer& b) -> nb::object {
             const InBlock found = block_of(b, words.process_table(), words.slot());
             if (found.base == nullptr) return nb::none();
             const size_t backed = reinterpret_cast<const BlockHeader*>(found.base)->backed;
             return nb::make_tuple(reinterpret_cast<uintptr_t>(found.base), backed, found.use);
           }, "buffer"_a, nb::sig("def block(self, buffer: Buffer) -> tuple[int, int, int] | None"), R"(
           Of the block that a buffer lies in: its address, how many bytes of it have memory, and which of the block's
           values it has now. ``None``: it lies in none, or the block has been sent.)")
      .def("mark", [](PinWords& words, const Buffer& b) -> nb::object {
             InBlock found = block_of(b, words.process_table(), words.slot());
             if (found.base == nullptr) return nb::none();
             try {
               return nb::cast(new BlockPin(std::move(found.mapping), found.base, std::move(found.returns), words.process_table(), words.slot()), nb::rv_policy::take_ownership);
             } catch (const std::system_error& error) {  // as many have marked it as can
               if (error.code().value() != ENOSPC) throw;
               return nb::none();
             }
           }, "buffer"_a, nb::sig("def mark(self, buffer: Buffer) -> BlockPin | None"),
           "Mark the block that a buffer lies in. ``None``: there is none, or as many processes have marked it as can.");
}

}  // namespace conveyor
