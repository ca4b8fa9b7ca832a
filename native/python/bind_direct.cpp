// What stays where it was made, and is read there by others.
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>

#include "bind.h"
#include "body.h"
#include "decode.h"
#include "directory.h"
#include "exit.h"
#include "hazards.h"
#include "hooks.h"
#include "kept.h"
#include "made_in_place.h"
#include "peer_memory.h"
#include "platform.h"
#include "process_table.h"

namespace conveyor {
namespace {

// A checksum of memory, to see whether somebody has written to it. Not against who means harm.
namespace checksum_parts {

constexpr uint64_t kPrimes[] = {0x9e3779b185ebca87, 0xc2b2ae3d27d4eb4f, 0x165667b19e3779f9, 0x85ebca77c2b2ae63, 0x27d4eb2f165667c5};

inline uint64_t word_at(const char* at) {
  uint64_t word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

inline uint64_t round(uint64_t lane, uint64_t word) { return std::rotl(lane + word * kPrimes[1], 31) * kPrimes[0]; }

// In the manner of xxHash: lanes that do not wait for each other, so that memory is what takes the time.
inline uint64_t of(const char* at, size_t size, uint64_t seed) {
  constexpr size_t kLanes = 4, kStripe = kLanes * sizeof(uint64_t);
  uint64_t lanes[kLanes] = {seed + kPrimes[0] + kPrimes[1], seed + kPrimes[1], seed, seed - kPrimes[0]};
  size_t left = size;
  for (; left >= kStripe; left -= kStripe, at += kStripe)
    for (size_t i = 0; i < kLanes; ++i) lanes[i] = round(lanes[i], word_at(at + i * sizeof(uint64_t)));
  uint64_t sum = size + kPrimes[4];
  for (const uint64_t lane : lanes) sum = (sum ^ round(0, lane)) * kPrimes[0] + kPrimes[3];
  for (; left >= sizeof(uint64_t); left -= sizeof(uint64_t), at += sizeof(uint64_t)) sum = std::rotl(sum ^ round(0, word_at(at)), 27) * kPrimes[0] + kPrimes[3];
  for (; left != 0; --left, ++at) sum = std::rotl(sum ^ (uint8_t(*at) * kPrimes[4]), 11) * kPrimes[0];
  sum = (sum ^ sum >> 33) * kPrimes[1];
  sum = (sum ^ sum >> 29) * kPrimes[2];
  return sum ^ sum >> 32;
}

}  // namespace checksum_parts

// Of all parts, in their order; never 0. Others may be writing to them: then it is that of anything.
#if defined(__SANITIZE_THREAD__)
__attribute__((no_sanitize("thread")))
#endif
inline uint64_t checksum_of(std::span<const iovec> parts) {
  uint64_t sum = 1;
  for (const iovec& part : parts) sum = checksum_parts::of(static_cast<const char*>(part.iov_base), part.iov_len, sum);
  return sum == 0 ? 1 : sum;
}

constexpr size_t kReleaseGilFrom = 32 * 1024;

// A table of ranges, as Python packs it.
std::vector<iovec> ranges_of(std::string_view table) {
  if (table.size() % sizeof(Range) != 0) throw nb::value_error("a table of ranges");
  std::vector<iovec> ranges(table.size() / sizeof(Range));
  for (size_t i = 0; i < ranges.size(); ++i) {
    Range range;
    std::memcpy(&range, table.data() + i * sizeof range, sizeof range);
    ranges[i] = {reinterpret_cast<void*>(range.address), size_t(range.length)};
  }
  return ranges;
}

// How much room ranges take that lie one behind the other, each aligned as buffers are. What is no memory of anybody's
// must not come to little by running over.
size_t packed_size(const std::vector<iovec>& ranges) {
  constexpr size_t kMost = SIZE_MAX / 2;
  size_t size = 0;
  for (const iovec& range : ranges) {
    if (size > kMost || range.iov_len > kMost) throw nb::value_error("ranges of more memory than there can be");
    size += align_up(range.iov_len, kBufferAlign);
  }
  return size;
}

std::vector<iovec> ranges_of(nb::bytes table) { return ranges_of(std::string_view(table.c_str(), table.size())); }

// The bytes of ranges that are to be copied to these. They are given by whoever made the value: nothing is written beside.
size_t as_long(const std::vector<iovec>& from, const std::vector<iovec>& to) {
  if (from.size() != to.size()) throw nb::value_error("as much room as ranges");
  size_t bytes = 0;
  for (size_t i = 0; i < from.size(); ++i) {
    if (from[i].iov_len != to[i].iov_len) throw nb::value_error("a room is not as long as its range");
    bytes += to[i].iov_len;
  }
  return bytes;
}

// Whether this process looks for writes to what is kept.
std::atomic<bool> checks_writes{false};

// `whole`: all of the value, so that its checksum can be compared. EBADMSG: it is not the value's as it was kept.
void read(int pid, std::vector<iovec> from, std::vector<iovec> to, uint64_t anchor, uint64_t number, size_t bytes, bool whole = true) {
  const bool checks = whole && checks_writes.load(std::memory_order_relaxed);
  std::vector<iovec> parts;
  if (checks) parts = to;
  const auto copy = [&] {
    read_peer(pid, std::move(from), std::move(to), anchor, number);
    if (!checks) return;
    if (const uint64_t sum = checksum_at(pid, anchor, number); sum != 0 && sum != checksum_of(parts)) throw std::system_error(EBADMSG, std::generic_category(), "compare what was read");
  };
  try {
    if (bytes < kReleaseGilFrom) return copy();
    Unlocked unlocked;
    copy();
  } catch (const std::system_error& error) {
    // What the system says is what the caller goes by, also where it would mean something else of a frame.
    errno = error.code().value();
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
  }
}

// The memory of a small value: its codec, its meta bytes and a buffer for each range. None where it takes more than
// to read, where something is to be noted, and where it cannot be had: whoever asks in all ways is told why.
nb::object fetch_small(nb::bytes meta, const ProcessTable& process_table, uint32_t own_slot) {
  const auto where = read_located({meta.c_str(), meta.size()});
  if (!where || where->joined || !where->beside.empty() || !where->lying.empty() || where->slot == own_slot || where->slot >= process_table.slots() || process_table.gone(where->slot, where->incarnation)) return nb::none();
  const ProcessTableSlot* const keeper = process_table.slot(where->slot);
  if (keeper->is_remote.load(std::memory_order_relaxed) != 0) return nb::none();  // another host's memory
  if (keeper->transfers_held.load() != 0 || keeper->transfers_failing.load() != 0 || checks_writes.load(std::memory_order_relaxed)) return nb::none();
  std::vector<iovec> from = ranges_of(where->ranges), to;
  size_t size = 0;
  for (const iovec& range : from) {
    if (range.iov_len >= kReleaseGilFrom - size) return nb::none();
    size += align_up(range.iov_len, kBufferAlign);
    if (size >= kReleaseGilFrom) return nb::none();
  }
  const auto memory = std::make_shared<OwnedMemory>(size);
  to.reserve(from.size());
  char* at = memory->data;
  nb::list buffers;
  for (const iovec& range : from) {
    to.push_back({at, range.iov_len});
    buffers.append(nb::cast(Buffer{at, range.iov_len, memory, nullptr, nullptr}, nb::rv_policy::move));
    at += align_up(range.iov_len, kBufferAlign);
  }
  try {
    read_peer(pid_t(where->pid), std::move(from), std::move(to), where->anchor, where->number);
  } catch (const std::system_error&) {
    return nb::none();
  }
  return nb::make_tuple(where->codec, nb::bytes(where->meta.data(), where->meta.size()), buffers);
}

nb::tuple listed(int pid, uint64_t address) {
  std::optional<DirectoryReading> reading;
  try {
    Unlocked unlocked;
    reading = read_directory(pid, address);
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
  }
  nb::list kept, held, sent;
  for (const KeptValue& one : reading->kept) kept.append(nb::make_tuple(one.number, one.bytes, one.since, nb::bytes(one.names.data(), one.names.size())));
  for (const uint64_t number : reading->held) held.append(number);
  for (const auto& one : reading->sent) sent.append(nb::make_tuple(one.number, one.reader.slot, one.reader.incarnation));
  return nb::make_tuple(kept, held, sent);
}

struct Views {
  ~Views() {
    for (Py_buffer& view : all) PyBuffer_Release(&view);
  }
  std::vector<Py_buffer> all;
};

// --- values that stay in the arena of the process that made them, and are read there in place ---

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
nb::bytes ranges_in_arena(nb::bytes table, const Arena* arena) {
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

void bind_direct(nb::module_& m) {
  m.def("release_held", &release_held, "Drop what was kept as long as somebody had a frame, and is no longer. Needs no memory.");
  nb::class_<ReleaseWait>(m, "ReleaseWait", "Waits for something to drop.")
      .def(nb::init<>())
      .def("wait", [](ReleaseWait& one) {
             Unlocked unlocked;
             return one.wait();
           }, "Wait until there is something. False: ``stop`` was called, now or before, and nothing is kept.")
      .def("stop", &ReleaseWait::stop, "Have it end. True: it goes on until nothing is kept any more.");

  m.def("let_read", &let_read, "pid"_a, "Let that process, and what descends from it, read this one's memory, where the system limits who may.");
  m.def("may_read", &may_read, "pid"_a, "Whether the system lets this process read the memory of that one.");

  nb::class_<LastingText>(m, "LastingText", "Text that is there as long as this process, once for all that is alike.")
      .def("__init__", [](LastingText* self, nb::bytes text) { new (self) LastingText{&lasting({text.c_str(), text.size()})}; }, "text"_a);
  nb::class_<Anchor>(m, "Anchor", R"(
      A word of this process that holds ``number`` as long as this is: whoever reads memory of ours reads it behind
      that, to see whether the memory was still what it took it for. It is an entry of the directory, which says
      when it was made, how much the ranges of ``table`` are, and ``names``.)")
      .def("__init__", [](Anchor* self, uint64_t number, nb::bytes table, const LastingText* names, uint64_t checksum) {
             uint64_t bytes = 0;
             for (const iovec& range : ranges_of(table)) bytes += range.iov_len;
             new (self) Anchor(number, bytes, names == nullptr ? nullptr : names->text, checksum);
           }, "number"_a, "table"_a.sig("b''") = nb::bytes("", 0), "names"_a.none() = nb::none(), "checksum"_a = 0)
      .def_prop_ro("address", &Anchor::address, "Where it lies.");
  m.def("check_writes", [](bool on) { checks_writes.store(on, std::memory_order_relaxed); }, "on"_a, R"(
        Whether this process looks for writes to what is kept, here and elsewhere. Where it does, what reads all of a
        value that has a checksum raises ``OSError`` with ``EBADMSG`` if that is another one's.)");
  m.def("checks_writes", [] { return checks_writes.load(std::memory_order_relaxed); }, "What ``check_writes`` was told last.");
  m.def("checksum_of", [](nb::bytes table) {
    const std::vector<iovec> ranges = ranges_of(table);
    Unlocked unlocked;
    return checksum_of(ranges);
  }, "table"_a, "That of what lies in the ranges of the table, which must be there.");
  m.def("read_directory", &listed, "pid"_a, "address"_a, nb::sig("def read_directory(pid: int, address: int) -> Directory"), R"(
        That of the process ``pid``, which lies there (``ProcessTable.directory``). Raises ``OSError``: as ``read_peer``, and
        ``EPROTO`` if there is none.)");

  m.def("ranges_of", [](nb::sequence buffers) {
    std::vector<Range> ranges;
    const size_t count = nb::len(buffers);
    ranges.reserve(count);
    for (size_t i = 0; i < count; ++i) {
      Py_buffer view;
      const nb::object buffer = buffers[i];
      if (PyObject_GetBuffer(buffer.ptr(), &view, PyBUF_ANY_CONTIGUOUS) != 0) throw nb::python_error();
      ranges.push_back({reinterpret_cast<uintptr_t>(view.buf), uint64_t(view.len)});
      PyBuffer_Release(&view);
    }
    return nb::bytes(reinterpret_cast<const char*>(ranges.data()), ranges.size() * sizeof(Range));
  }, "buffers"_a, nb::sig("def ranges_of(buffers: Sequence[Any]) -> bytes"),
        "Where contiguous buffers lie: a table of addresses and lengths, as 64-bit numbers.");
  m.def("lengths_of", [](nb::bytes table) {
    nb::list lengths;
    for (const iovec& range : ranges_of(table)) lengths.append(range.iov_len);
    return lengths;
  }, "table"_a, nb::sig("def lengths_of(table: bytes) -> list[int]"), "The length of each of them.");
  m.def("packed_size", [](nb::bytes table) { return packed_size(ranges_of(table)); }, "table"_a,
        "The bytes that ``read_peer`` needs for such a table's memory.");
  m.def("fetch_peer", [](int pid, nb::bytes table, uint64_t anchor, uint64_t number, std::shared_ptr<Arena> arena) {
    std::vector<iovec> from = ranges_of(table), to;
    const size_t size = packed_size(from);
    auto made = std::make_shared<MadeInPlace>(std::move(arena), size);
    to.reserve(from.size());
    char* at = made->block->data();
    nb::list buffers;
    for (const iovec& range : from) {
      to.push_back({at, range.iov_len});
      buffers.append(nb::cast(Buffer{at, range.iov_len, made, nullptr, made}, nb::rv_policy::move));
      at += align_up(range.iov_len, kBufferAlign);
    }
    read(pid, std::move(from), std::move(to), anchor, number, size);
    return buffers;
  }, "pid"_a, "table"_a, "anchor"_a, "number"_a, "arena"_a,
        nb::sig("def fetch_peer(pid: int, table: bytes, anchor: int, number: int, arena: Arena) -> list[Buffer]"),
        "``read_peer`` into new memory of ``arena``. Raises what its ``allocate`` does, too.");
  m.def("fetch_small", &fetch_small, "meta"_a, "process_table"_a, "own_slot"_a,
        nb::sig("def fetch_small(meta: bytes, process_table: ProcessTable, own_slot: int) -> tuple[int, bytes, list[Buffer]] | None"), R"(
        What the codec's ``decode`` takes, of a value that another process than that of ``own_slot`` keeps, as
        ``Located.pack`` has written it. ``None``: it is not small, or more is to be done for it than to read, or it
        cannot be read.)");
  m.def("read_peer_joined", [](int pid, nb::bytes table, uint64_t anchor, uint64_t number, nb::object into) {
    std::vector<iovec> from = ranges_of(table);
    Views views;
    Py_buffer view;
    if (PyObject_GetBuffer(into.ptr(), &view, PyBUF_WRITABLE | PyBUF_ANY_CONTIGUOUS) != 0) throw nb::python_error();
    views.all.push_back(view);
    const size_t room = size_t(view.len);
    size_t size = 0;
    for (const iovec& range : from) {
      if (range.iov_len > room || size > room - range.iov_len) throw nb::value_error("there is no room for the ranges");
      size += range.iov_len;
    }
    read(pid, std::move(from), {{view.buf, size}}, anchor, number, size, false);
  }, "pid"_a, "table"_a, "anchor"_a, "number"_a, "into"_a, "The same, to the beginning of ``into``, a buffer, one range behind the other.");
  m.def("untouched", [](nb::object memory) {
    Views views;
    Py_buffer view;
    if (PyObject_GetBuffer(memory.ptr(), &view, PyBUF_ANY_CONTIGUOUS) != 0) throw nb::python_error();
    views.all.push_back(view);
    const size_t page = size_t(::sysconf(_SC_PAGESIZE));
    const auto* at = static_cast<const char*>(view.buf);
    constexpr size_t kPages = 1 << 16;
    std::vector<unsigned char> there(kPages);
    for (size_t left = size_t(view.len); left > 0;) {
      const size_t bytes = std::min(left, kPages * page), pages = (bytes + page - 1) / page;
      if (::mincore(const_cast<char*>(at), bytes, there.data()) != 0) throw_errno("look at pages");
      if (std::any_of(there.begin(), there.begin() + ptrdiff_t(pages), [](unsigned char one) { return one & 1; })) return false;
      at += bytes;
      left -= bytes;
    }
    return true;
  }, "memory"_a, "Whether nobody has read or written any page of ``memory``, a private anonymous mapping, since it was made.");
  m.def("read_peer", [](int pid, nb::bytes table, uint64_t anchor, uint64_t number, const Buffer& into) {
    std::vector<iovec> from = ranges_of(table), to;
    to.reserve(from.size());
    size_t at = 0;
    nb::list buffers;
    for (const iovec& range : from) {
      if (range.iov_len > into.length || at > into.length - range.iov_len) throw nb::value_error("there is no room for the ranges");
      to.push_back({into.data + at, range.iov_len});
      buffers.append(nb::cast(Buffer{into.data + at, range.iov_len, into.owner, into.lease, into.made}, nb::rv_policy::move));
      at += align_up(range.iov_len, kBufferAlign);
    }
    read(pid, std::move(from), std::move(to), anchor, number, at);
    return buffers;
  }, "pid"_a, "table"_a, "anchor"_a, "number"_a, "into"_a,
        nb::sig("def read_peer(pid: int, table: bytes, anchor: int, number: int, into: Buffer) -> list[Buffer]"), R"(
        Copy memory of the process ``pid``, all ranges of the table, to ``into``; a buffer for each.

        Raises ``OSError``: ``ESTALE`` if the word at ``anchor`` does not hold ``number`` afterwards, ``ESRCH`` if
        there is no such process, ``EPERM`` if this one may not read it, ``EFAULT`` if nothing is mapped there.)");
  m.def("read_peer_into", [](int pid, nb::bytes table, uint64_t anchor, uint64_t number, nb::bytes into) {
    std::vector<iovec> from = ranges_of(table), to = ranges_of(into);
    const size_t bytes = as_long(from, to);
    read(pid, std::move(from), std::move(to), anchor, number, bytes);
  }, "pid"_a, "table"_a, "anchor"_a, "number"_a, "into"_a,
        "The same, to the ranges of this process that ``into`` has, each as long as the other. ``ValueError`` if one is not.");
  m.def("copy_into", [](nb::list buffers, nb::bytes into) {
    std::vector<iovec> from, to = ranges_of(into);
    for (const nb::handle buffer : buffers) {
      const auto* const one = nb::cast<const Buffer*>(buffer);
      from.push_back({one->data, one->length});
    }
    as_long(from, to);
    Unlocked unlocked;
    for (size_t i = 0; i < to.size(); ++i)
      if (to[i].iov_len != 0) std::memcpy(to[i].iov_base, from[i].iov_base, to[i].iov_len);
  }, "buffers"_a, "into"_a, nb::sig("def copy_into(buffers: list[Buffer], into: bytes) -> None"), "Copy ``buffers`` to such ranges.");

  m.def("outlive_all", &outlive_all, "This process is the driver's: a session ends with it, so what it holds is let go of by itself alone.");
  m.def("ranges_in_arena", &ranges_in_arena, "table"_a, "arena"_a, R"(
        Where each of such ranges lies in the process's own arena: its block's offset and size, and its own place in
        the block, as 64-bit numbers; the last is 0 for one that lies elsewhere. Nothing if all do.)");
  m.def("readable", [](nb::bytes table) { return readable(entries_of<Range>(table)); }, "ranges"_a,
        "Whether other processes of this user may read these ranges of this process's memory.");
  nb::class_<InPlace>(m, "InPlace", "What keeps a value where it lies.")
      .def("buffers", &in_place, "view"_a, "ranges"_a, "lying"_a,
           nb::sig("def buffers(self, view: ArenaView, ranges: bytes, lying: bytes) -> list[Buffer | None] | None"), R"(
           The ranges of a value, which lie as ``ranges_in_arena`` has said in the arena that ``view`` shows, as read-only
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
