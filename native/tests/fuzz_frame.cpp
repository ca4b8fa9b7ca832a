// A whole frame of any bytes, through Reader as a process receives it: slot header, body in the slot or in
// an arena block, native values, tables. It gives a value or an exception. The codec in Python, to which
// pickled bytes go unread, is replaced by one that touches all it is given.
//
// Needs Python and nanobind; fuzz.sh leaves it out where they are not found.
#include <set>

#include "hooks.h"
#include "made_in_place.h"
#include "reader.h"
#include "fuzz_input.h"

using namespace conveyor;

namespace {

constexpr uint32_t kStride = 1024;
constexpr size_t kArena = 8 * kPage;

void touch_object(nb::handle value, std::set<PyObject*>& seen) {
  PyObject* v = value.ptr();
  FUZZ_CHECK(v != nullptr && Py_REFCNT(v) > 0);
  if (PyTuple_Check(v) || PyList_Check(v)) {
    if (!seen.insert(v).second) return;  // what is remembered may be in itself
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(v); ++i) touch_object(PySequence_Fast_GET_ITEM(v, i), seen);
  } else if (PyDict_Check(v)) {
    if (!seen.insert(v).second) return;
    PyObject *key, *item;
    for (Py_ssize_t at = 0; PyDict_Next(v, &at, &key, &item);) touch_object(key, seen), touch_object(item, seen);
  } else if (PyBytes_Check(v)) {
    fuzz::touch(PyBytes_AS_STRING(v), size_t(PyBytes_GET_SIZE(v)) + 1);
  } else if (PyUnicode_Check(v)) {
    fuzz::touch(static_cast<const char*>(PyUnicode_DATA(v)), size_t(PyUnicode_GET_LENGTH(v)) * size_t(PyUnicode_KIND(v)));
  }
}

void touch_object(nb::handle value) {
  std::set<PyObject*> seen;
  touch_object(value, seen);
}

nb::object touch_all(int, nb::bytes meta, nb::object buffers) {
  touch_object(meta);
  if (!buffers.is_none())
    for (nb::handle item : nb::borrow<nb::list>(buffers)) {
      const Buffer& buffer = nb::cast<const Buffer&>(item);
      FUZZ_CHECK(buffer.owner != nullptr);
      fuzz::touch(buffer.data, buffer.length);
    }
  return nb::none();
}

void touch_meta(nb::bytes meta, nb::object) { touch_object(meta); }

// The two processes in one: the writer fills the slot by hand, the reader is the real one.
struct Ends {
  std::shared_ptr<Segment> segment = Segment::create(kPage);
  std::shared_ptr<ProcessTable> process_table = ProcessTable::create(2);
  RingHeader* header = segment->make_ring(0, 1, kStride, 1, 0);
  Fd arena_fd = Arena::create_file(kArena);
  char* arena = map_shared(arena_fd.get(), 0, kArena);
  Reader reader{segment, 0, 0, process_table, Target{0, 1}, std::make_shared<ArenaView>(arena_fd.get(), kArena), false};

  SlotHeader* slot() { return reinterpret_cast<SlotHeader*>(segment->ring(0).slot(0)); }
};

// What must not be read while it exists: all of [from, to) but [at, at + size).
class Fence {
 public:
  Fence(char* from, char* to, char* at, size_t size) : from_(from), size_(size_t(to - from)) {
    __asan_poison_memory_region(from_, size_);
    __asan_unpoison_memory_region(at, size);
  }
  ~Fence() { __asan_unpoison_memory_region(from_, size_); }

 private:
  char* from_;
  size_t size_;
};

void give(Ends& ends, const Frame& frame, bool announced) {
  std::unique_ptr<Fence> block, copy;
  if (frame.lease) {
    // Of the block, the body; of a block that came with a body in the slot, all behind its header.
    char* base = frame.lease->data() - kBlockHeader - frame.lease->offset();  // all lies in one window
    const size_t size = frame.flags & kExternal ? frame.lease->capacity() : frame.size;
    block = std::make_unique<Fence>(base, base + kArena, frame.lease->data(), size);
  }
  if (frame.memory)
    copy = std::make_unique<Fence>(frame.memory->data, frame.memory->data + align_up(frame.size + 1, kBufferAlign), frame.memory->data,
                                   frame.size);
  Fence slot(reinterpret_cast<char*>(ends.slot()), reinterpret_cast<char*>(ends.header) + kPage, nullptr, 0);
  if (announced)
    announce(frame, nb::none());
  else
    touch_object(decode(frame));
}

Ends* ends;

}  // namespace

NB_MODULE(fuzz_types, m) {
  nb::set_leak_warnings(false);
  nb::class_<Buffer>(m, "Buffer");
  nb::class_<ErrorFrame>(m, "ErrorFrame");
  set_codec(nb::none(), nb::cpp_function(touch_all, nb::arg("codec"), nb::arg("meta"), nb::arg("buffers").none()),
            nb::cpp_function(touch_meta, nb::arg("meta"), nb::arg("known") = nb::none()),
            nb::cpp_function(touch_meta, nb::arg("meta"), nb::arg("known") = nb::none()), nb::borrow(PyExc_ValueError), nb::borrow(PyExc_MemoryError),
            nb::none(), nb::borrow(PyExc_RuntimeError));
}

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  PyPreConfig before;
  PyPreConfig_InitIsolatedConfig(&before);
  before.allocator = PYMEM_ALLOCATOR_MALLOC;  // so that AddressSanitizer knows Python's objects
  if (PyStatus_Exception(Py_PreInitialize(&before))) std::abort();
  PyConfig config;
  PyConfig_InitIsolatedConfig(&config);
  config.site_import = 0;
  config.use_hash_seed = 1;  // the same run twice
  config.hash_seed = 0;
  PyConfig_SetBytesString(&config, &config.home, FUZZ_PYTHON_HOME);
  PyImport_AppendInittab("fuzz_types", PyInit_fuzz_types);
  if (PyStatus_Exception(Py_InitializeFromConfig(&config))) std::abort();
  PyConfig_Clear(&config);
  if (PyImport_ImportModule("fuzz_types") == nullptr) {
    PyErr_Print();
    std::abort();
  }
  PyGC_Disable();
  ends = new Ends;
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  const uint8_t how = input.take<uint8_t>();
  const uint8_t pages = input.take<uint8_t>();  // those that begin with a block header
  const uint16_t in_slot = input.take<uint16_t>();
  SlotHeader* slot = ends->slot();
  char* body = reinterpret_cast<char*>(slot + 1);
  const size_t capacity = ends->reader.ring.capacity();
  std::memset(static_cast<void*>(slot), 0, kStride);
  input.take_into(slot, sizeof *slot);
  if (how & 1) slot->block = slot->block % (kArena / kPage + 2) * kPage + 1;  // near something
  input.take_into(body, in_slot % (capacity + 1));
  std::memset(ends->arena, 0, kArena);
  for (size_t page = 0; page < kArena / kPage; ++page)
    if (pages >> page & 1) *reinterpret_cast<uint32_t*>(ends->arena + page * kPage) = kBlockMagic;
  // What is left is the content of a block, where the frame says that there is one.
  const uint64_t at = slot->block - 1;
  if (at < kArena - kBlockHeader) input.take_into(ends->arena + at + kBlockHeader, kArena - at - kBlockHeader);

  ends->header->head.store(ends->reader.ring.next() + 1);
  try {
    const uint64_t number = ends->reader.ring.next();
    if (how & 2) {
      // Decoded where it lies: nothing behind the body is its own, nor is anything behind the slot.
      const size_t length = slot->size < capacity ? size_t(slot->size) : capacity;
      Fence behind(body, reinterpret_cast<char*>(ends->header) + kPage, body, ends->reader.decodes_natively() ? length : capacity);
      touch_object(ends->reader.receive());
      FUZZ_CHECK(ends->reader.ring.next() == number + 1);
    } else {
      Frame frame = ends->reader.take();
      FUZZ_CHECK(ends->reader.ring.next() == number + 1);
      give(*ends, frame, how & 4);
    }
  } catch (const std::system_error&) {
  } catch (const nb::builtin_exception&) {
  } catch (const nb::python_error& error) {
    if (!error.matches(PyExc_UnicodeDecodeError) && !error.matches(PyExc_OSError)) {  // EPROTO
      std::fprintf(stderr, "fuzz: %s\n", error.what());
      std::abort();
    }
  }
  FUZZ_CHECK(PyErr_Occurred() == nullptr);
  FUZZ_CHECK(live_leases() == 0);
  // A refused frame stays at the front; the next input takes its place.
  return 0;
}
