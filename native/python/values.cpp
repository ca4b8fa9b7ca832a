#include "values.h"

#include <atomic>
#include <cstring>

#include "exit.h"

namespace conveyor {

namespace {

constexpr int kMaxDepth = 8;
constexpr size_t kMaxTuple = 64 * 1024;
constexpr size_t kCopied = 32 * 1024;  // kept bodies up to this size are copied for each value, which may be written

PyObject* encode_hook = nullptr;
PyObject* decode_hook = nullptr;
PyObject* announce_hook = nullptr;
PyObject* discard_hook = nullptr;
PyTypeObject* ref_type = nullptr;  // lives as long as the module
PyObject* final_error = nullptr;
PyObject* arena_full = nullptr;
PyObject* held_alone = nullptr;
PyObject* state_error = nullptr;
PyObject* refused = nullptr;

// Set the Python error for what the system has refused, as Python wants to have it said.
void set_refused(int number, const char* what) noexcept {
  if (refused != nullptr) {
    Calling python;
    PyObject* error = PyObject_CallFunction(refused, "is", number, what);
    if (error == nullptr) return;  // no memory for that either: MemoryError is set
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error)), error);
    Py_DECREF(error);
  } else if (number == ENOMEM) {
    PyErr_NoMemory();
  } else {
    PyObject* args = Py_BuildValue("is", number, what);
    if (args == nullptr) return;
    PyErr_SetObject(PyExc_OSError, args);
    Py_DECREF(args);
  }
}

template <typename T>
void put(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

// One element of a tuple: codec, length, body. False if it needs the Python codec.
bool encode_element(std::string& out, PyObject* value, int depth) {
  auto head = [&](Codec codec, uint32_t length) {
    put<uint32_t>(out, uint32_t(codec) << 28 | length);
  };
  if (value == Py_None) return head(kNone, 0), true;
  if (value == Py_True) return head(kTrue, 0), true;
  if (value == Py_False) return head(kFalse, 0), true;
  PyTypeObject* type = Py_TYPE(value);
  if (type == &PyLong_Type) {
    int overflow;
    const int64_t n = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow != 0) return false;
    head(kInt, 8);
    put(out, n);
    return true;
  }
  if (type == &PyFloat_Type) {
    head(kFloat, 8);
    put(out, PyFloat_AS_DOUBLE(value));
    return true;
  }
  const char* data;
  Py_ssize_t length;
  Codec codec;
  if (type == &PyUnicode_Type) {
    data = PyUnicode_AsUTF8AndSize(value, &length);
    if (data == nullptr) return PyErr_Clear(), false;  // lone surrogates: pickle can
    codec = kStr;
  } else if (type == &PyBytes_Type) {
    data = PyBytes_AS_STRING(value);
    length = PyBytes_GET_SIZE(value);
    codec = kBytes;
  } else if (type == &PyTuple_Type && depth < kMaxDepth) {
    const size_t at = out.size();
    head(kTuple, 0);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i)
      if (!encode_element(out, PyTuple_GET_ITEM(value, i), depth + 1)) return false;
    const size_t body = out.size() - at - sizeof(uint32_t);
    if (body > kMaxTuple) return false;
    const uint32_t word = uint32_t(kTuple) << 28 | uint32_t(body);
    std::memcpy(out.data() + at, &word, sizeof word);
    return true;
  } else {
    return false;
  }
  if (size_t(length) + out.size() > kMaxTuple) return false;
  head(codec, uint32_t(length));
  out.append(data, size_t(length));
  return true;
}

[[noreturn]] void bad_frame() {
  throw std::system_error(EPROTO, std::generic_category(), "a frame's layout is not valid");
}

PyObject* decode_tuple(const char* body, size_t size, int depth);

PyObject* decode_one(uint16_t codec, const char* body, size_t size, int depth) {
  switch (codec) {
    case kNone:
      return Py_NewRef(Py_None);
    case kTrue:
      return Py_NewRef(Py_True);
    case kFalse:
      return Py_NewRef(Py_False);
    case kInt: {
      if (size != 8) bad_frame();
      int64_t n;
      std::memcpy(&n, body, sizeof n);
      return PyLong_FromLongLong(n);
    }
    case kFloat: {
      if (size != 8) bad_frame();
      double d;
      std::memcpy(&d, body, sizeof d);
      return PyFloat_FromDouble(d);
    }
    case kStr:
      return PyUnicode_DecodeUTF8(body, Py_ssize_t(size), nullptr);
    case kBytes:
      return PyBytes_FromStringAndSize(body, Py_ssize_t(size));
    case kTuple:
      if (depth > kMaxDepth) bad_frame();
      return decode_tuple(body, size, depth);
    default:
      bad_frame();
  }
}

// The element at `at`, and `at` behind it. The body may change under us, so what was checked once is
// checked again when it is read again.
struct Element {
  uint16_t codec;
  const char* body;
  size_t size;
};

Element next_element(const char* body, size_t size, size_t& at) {
  if (size - at < sizeof(uint32_t)) bad_frame();
  uint32_t word;
  std::memcpy(&word, body + at, sizeof word);
  at += sizeof word;
  const Element element{uint16_t(word >> 28), body + at, word & 0xfffffff};
  if (element.size > size - at) bad_frame();
  at += element.size;
  return element;
}

PyObject* decode_tuple(const char* body, size_t size, int depth) {
  size_t count = 0;
  for (size_t at = 0; at < size; ++count) next_element(body, size, at);
  nb::object tuple = nb::steal(PyTuple_New(Py_ssize_t(count)));
  if (!tuple.is_valid()) throw nb::python_error();
  size_t at = 0;
  for (size_t i = 0; i < count; ++i) {
    const Element element = next_element(body, size, at);
    PyObject* item = decode_one(element.codec, element.body, element.size, depth + 1);
    if (item == nullptr) throw nb::python_error();
    PyTuple_SET_ITEM(tuple.ptr(), Py_ssize_t(i), item);
  }
  return tuple.release().ptr();
}

std::vector<MadeInPlace*>& made_in_place() {
  static auto* all = new std::vector<MadeInPlace*>;
  return *all;
}

// Of blocks that nobody has any more, neither here nor in a forked child. Any thread puts them here, and they
// are dropped with the GIL, because Python may own an arena. Not under a mutex, which a thread could hold at
// a fork.
std::atomic<MadeInPlace::LastRef*> last_refs{nullptr};

void drop_last_refs() {
  if (last_refs.load(std::memory_order_relaxed) == nullptr) return;
  for (auto* ref = last_refs.exchange(nullptr, std::memory_order_acquire); ref != nullptr;) delete std::exchange(ref, ref->next);
}

Block* allocate_in_place(Arena& arena, size_t bytes) {
  drop_last_refs();
  Block* block;
  {
    Unlocked unlocked;  // the system may have to find the memory
    block = arena.allocate(bytes);
  }
  try {
    auto& all = made_in_place();
    if (all.size() == all.capacity()) all.reserve(2 * all.size() + 8);
  } catch (...) {
    arena.release(block);
    throw;
  }
  return block;
}

// Whether nothing but `value` itself refers to its memory: then, if that was made in our arena, the
// block itself can travel. `value` is an array over a Buffer of ours, or something Python must judge.
bool alone(PyObject* value) {
  // Of other types, an attribute of this name may be anything, and to ask for it may run any code.
  if (std::strcmp(Py_TYPE(value)->tp_name, "numpy.ndarray") == 0) {
    nb::object base = nb::steal(PyObject_GetAttrString(value, "base"));
    if (!base.is_valid()) throw nb::python_error();
    return nb::isinstance<Buffer>(base) && Py_REFCNT(base.ptr()) <= 2;  // the array's reference and ours
  }
  Calling python;
  nb::object answer = nb::steal(PyObject_CallFunctionObjArgs(held_alone, value, nullptr));
  if (!answer.is_valid()) throw nb::python_error();
  return answer.is(nb::bool_(true));
}

}  // namespace

Hold MadeInPlace::hold_of(Arena& arena, Block* block) {
  try {
    return Hold(*block->mapping);
  } catch (...) {  // the session was shut down meanwhile
    arena.release(block);
    throw;
  }
}

MadeInPlace::MadeInPlace(std::shared_ptr<Arena> owner, size_t bytes)
    : arena(std::move(owner)), last_(new LastRef(arena)), block(allocate_in_place(*arena, bytes)), length(bytes), mapping_(block->mapping), hold_(hold_of(*arena, block)) {
  made_in_place().push_back(this);  // there is room
}

MadeInPlace::~MadeInPlace() {
  std::erase(made_in_place(), this);
  if (hold_.inherited()) return;
  hold_.leave([last = last_.release(), block = block, sent = sent, mapping = std::move(mapping_)] {
    if (!sent) last->arena->release(block, false);
    last->next = last_refs.load(std::memory_order_relaxed);
    while (!last_refs.compare_exchange_weak(last->next, last, std::memory_order_release, std::memory_order_relaxed)) {
    }
  });
  drop_last_refs();
}

bool MadeInPlace::any() { return !made_in_place().empty(); }

std::shared_ptr<MadeInPlace> MadeInPlace::find(const char* data, size_t size, const Arena* arena) {
  for (MadeInPlace* made : made_in_place())
    // An earlier session's arena is another file: what lies there is copied.
    if (made->arena.get() == arena && !made->sent && !made->hold_.inherited() && data >= made->block->data() && data + size <= made->block->data() + made->length)
      // What a forked child may read stays as it is: a copy is sent.
      return made->hold_.pinned() ? nullptr : made->shared_from_this();
  return nullptr;
}

Encoded::~Encoded() {
  for (Py_buffer& view : views) PyBuffer_Release(&view);
  if (block != nullptr) arena->release(block);  // prepared and never published
  if (made && !made->sent) made->arena->uncharge(made->block);
  if ((flags & kDefinitions) && !raw && sent.is_valid() && !sent.is_none()) {
    // Never published: what it would have defined is still unknown to the readers. Or some of them had left.
    nb::error_scope keep;
    Calling python;
    char left[kMaxReaders];  // their numbers in the ring
    Py_ssize_t count = 0;
    for (uint32_t i = 0; i < kMaxReaders; ++i)
      if (unclaimed[i]) left[count++] = char(i);
    const nb::object numbers = nb::steal(PyBytes_FromStringAndSize(left, count));
    nb::object result;
    if (numbers.is_valid())
      result = nb::steal(count == 0 ? PyObject_CallMethod(sent.ptr(), "undo", "O", meta.ptr())
                                    : PyObject_CallMethod(sent.ptr(), "unclaimed", "OO", meta.ptr(), numbers.ptr()));
    if (!result.is_valid()) PyErr_WriteUnraisable(sent.ptr());
  }
}

void Encoded::write_body(char* to) const {
  if (codec < kFirstPython || raw) {
    std::memcpy(to, data, size);
    return;
  }
  const TableHeader head{uint32_t(PyBytes_GET_SIZE(meta.ptr())), uint32_t(views.size())};
  std::memcpy(to, &head, sizeof head);
  if (!views.empty()) std::memcpy(to + sizeof head, layout.entries.data(), layout.entries.size() * sizeof(BufferEntry));
  std::memcpy(to + layout.meta_at, PyBytes_AS_STRING(meta.ptr()), head.meta_length);
  if (made) return;  // the only buffer lies in the block already
  for (size_t i = 0; i < views.size(); ++i)
    if (views[i].len != 0) std::memcpy(to + layout.entries[i].offset, views[i].buf, size_t(views[i].len));
}

void check_owner(uint64_t generation) {
  if (generation == fork_generation.load(std::memory_order_relaxed)) return;
  PyErr_SetString(state_error != nullptr ? state_error : PyExc_RuntimeError,
                  "this belongs to the process that this one was forked from");
  throw nb::python_error();
}

void raise_arena_full(const ArenaFull& error) {
  if (arena_full == nullptr) {
    PyErr_SetString(PyExc_MemoryError, error.what());
    return;
  }
  nb::list holdings;
  for (const Holding& h : error.holdings) {
    nb::object process = nb::steal(PyUnicode_DecodeUTF8(h.process.data(), Py_ssize_t(h.process.size()), "replace"));
    nb::list tags;
    for (uint64_t tag : h.tags) tags.append(tag);
    holdings.append(nb::make_tuple(process, h.channel->graph, h.channel->edge, nb::str(h.channel->carries.c_str()), h.bytes, tags));
  }
  Calling python;
  nb::object made = nb::steal(PyObject_CallFunction(arena_full, "sO", error.what(), holdings.ptr()));
  if (made.is_valid()) PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made.ptr())), made.ptr());
}

void raise_final(const char* message) {
  PyErr_SetString(final_error != nullptr ? final_error : PyExc_RuntimeError, message);
  throw nb::python_error();
}

bool is_final(nb::handle exception) {
  return final_error != nullptr && PyErr_GivenExceptionMatches(exception.ptr(), final_error);
}

void set_codec(nb::object encode, nb::object decode, nb::object announce, nb::object discard, nb::object final, nb::object full, nb::object sole,
               nb::object state, nb::object no) {
  clear_codec();
  encode_hook = encode.release().ptr();
  decode_hook = decode.release().ptr();
  announce_hook = announce.release().ptr();
  discard_hook = discard.release().ptr();
  final_error = final.release().ptr();
  arena_full = full.release().ptr();
  held_alone = sole.release().ptr();
  state_error = state.release().ptr();
  if (!no.is_none()) refused = no.release().ptr();
}

void clear_codec() {
  Py_CLEAR(encode_hook);
  Py_CLEAR(decode_hook);
  Py_CLEAR(announce_hook);
  Py_CLEAR(discard_hook);
  Py_CLEAR(final_error);
  Py_CLEAR(arena_full);
  Py_CLEAR(held_alone);
  Py_CLEAR(state_error);
  Py_CLEAR(refused);
}

void set_python_error() noexcept {
  try {
    throw;
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const ArenaFull& error) {
    try {
      raise_arena_full(error);
    } catch (...) {
      if (!PyErr_Occurred()) PyErr_SetString(PyExc_MemoryError, error.what());
    }
  } catch (const std::system_error& error) {
    set_refused(error.code().value(), error.what());
  } catch (const std::bad_alloc& error) {
    set_refused(ENOMEM, error.what());
  } catch (const nb::builtin_exception& error) {
    PyObject* type = PyExc_RuntimeError;
    if (error.type() == nb::exception_type::value_error) type = PyExc_ValueError;
    if (error.type() == nb::exception_type::type_error) type = PyExc_TypeError;
    if (error.type() == nb::exception_type::index_error) type = PyExc_IndexError;
    PyErr_SetString(type, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  } catch (...) {
    PyErr_SetString(PyExc_RuntimeError, "an unknown error in the native core");
  }
}

namespace {

TableView table_of(const Frame& frame) {
  const bool external = frame.flags & kExternal;
  auto table = read_table(frame.body, frame.size, external ? frame.block_room() : 0);
  if (!table) bad_frame();
  return std::move(*table);
}

// None where there is none.
nb::object buffers_of(const Frame& frame, const TableView& table) {
  if (table.entries.empty()) return nb::none();
  std::shared_ptr<OwnedMemory> copied;
  nb::list list;
  for (const BufferEntry& e : table.entries) {
    const bool in_block = e.offset & kInBlock;
    Buffer buffer{nullptr, size_t(e.length), false, nullptr, nullptr, nullptr};
    if (frame.lease && (in_block || !frame.memory)) {
      buffer.data = in_block ? frame.lease->data() : const_cast<char*>(frame.body);
      buffer.owner = frame.lease;
      buffer.lease = frame.lease;
      buffer.readonly = frame.readonly;
    } else if (frame.kept && frame.size <= kCopied) {
      if (!copied) {
        copied = std::make_shared<OwnedMemory>(frame.size);
        std::memcpy(copied->data, frame.body, frame.size);
      }
      buffer.data = copied->data;
      buffer.owner = copied;
    } else {
      buffer.data = const_cast<char*>(frame.body);
      buffer.owner = frame.memory;  // a copy of its own
      buffer.readonly = frame.kept;
    }
    buffer.data += e.offset & ~kInBlock;
    list.append(nb::cast(std::move(buffer), nb::rv_policy::move));
  }
  return list;
}

// Have `out`, whose meta is set, take these buffers (None: none) along.
void take_buffers(Encoded& out, nb::handle buffers) {
  std::vector<size_t> lengths;
  if (!buffers.is_none()) {
    nb::object fast = nb::steal(PySequence_Fast(buffers.ptr(), "conveyor: codec buffers"));
    if (!fast.is_valid()) throw nb::python_error();
    const Py_ssize_t n = PySequence_Fast_GET_SIZE(fast.ptr());
    if (size_t(n) > kMaxBuffers) throw nb::value_error("conveyor: a value has more than 65536 buffers");
    out.views.reserve(size_t(n));
    for (Py_ssize_t i = 0; i < n; ++i) {
      Py_buffer view;
      // Fortran order too: the meta bytes say which; what matters is one run of memory.
      if (PyObject_GetBuffer(PySequence_Fast_GET_ITEM(fast.ptr(), i), &view, PyBUF_ANY_CONTIGUOUS) != 0) throw nb::python_error();
      out.views.push_back(view);
      lengths.push_back(size_t(view.len));
    }
  }
  out.layout = lay_out_table(size_t(PyBytes_GET_SIZE(out.meta.ptr())), lengths);
  out.size = out.layout.total;
}

}  // namespace

void encode(Encoded& out, nb::handle value, nb::handle sent, Py_ssize_t moved_refs, const Arena* arena) {
  PyObject* v = value.ptr();
  PyTypeObject* type = Py_TYPE(v);
  if (type == &PyUnicode_Type) {
    Py_ssize_t length;
    out.data = PyUnicode_AsUTF8AndSize(v, &length);
    if (out.data != nullptr) {
      out.codec = kStr;
      out.size = size_t(length);
      out.source = nb::borrow(value);
      return;
    }
    PyErr_Clear();
  } else if (type == &PyBytes_Type) {
    out.codec = kBytes;
    out.data = PyBytes_AS_STRING(v);
    out.size = size_t(PyBytes_GET_SIZE(v));
    out.source = nb::borrow(value);
    return;
  } else if (v == Py_None) {
    out.codec = kNone;
    return;
  } else if (v == Py_True || v == Py_False) {
    out.codec = v == Py_True ? kTrue : kFalse;
    return;
  } else if (type == &PyLong_Type) {
    int overflow;
    const int64_t n = PyLong_AsLongLongAndOverflow(v, &overflow);
    if (overflow == 0) {
      std::memcpy(out.small, &n, sizeof n);
      out.codec = kInt;
      out.data = out.small;
      out.size = sizeof n;
      return;
    }
  } else if (type == &PyFloat_Type) {
    const double d = PyFloat_AS_DOUBLE(v);
    std::memcpy(out.small, &d, sizeof d);
    out.codec = kFloat;
    out.data = out.small;
    out.size = sizeof d;
    return;
  } else if (type == &PyTuple_Type) {
    out.scratch.clear();
    if (encode_element(out.scratch, v, 0)) {
      out.codec = kTuple;
      out.data = out.scratch.data() + sizeof(uint32_t);  // the outermost length is the body's size
      out.size = out.scratch.size() - sizeof(uint32_t);
      return;
    }
  }
  if (nb::isinstance<Snapshot>(value)) {
    const Frame& frame = nb::inst_ptr<Snapshot>(value)->frame;
    if (frame.flags & (kRefs | kBound)) {
      // Its bytes are not understood elsewhere: the value itself is sent.
      const nb::object alive = nb::borrow(value);
      const nb::object decoded = decode(frame);
      encode(out, decoded, sent, 0, nullptr);
      out.source = decoded;
      return;
    }
    out.codec = frame.codec;
    out.flags = frame.flags & ~uint32_t(kExternal);
    out.source = nb::borrow(value);
    if (frame.flags & kExternal) {
      const TableView table = table_of(frame);
      out.meta = nb::bytes(table.meta, table.meta_length);
      take_buffers(out, buffers_of(frame, table));
      return;
    }
    out.size = frame.size;
    out.data = frame.body;
    out.raw = true;
    return;
  }
  // Before the codec adds references of its own.
  const bool let_go = Py_REFCNT(v) <= moved_refs && MadeInPlace::any() && alone(v);
  if (encode_hook == nullptr) throw nb::type_error("conveyor: no codec is set for this type of value");
  Calling python;
  nb::object result = nb::steal(PyObject_CallFunctionObjArgs(encode_hook, v, sent.ptr(), nullptr));
  if (!result.is_valid()) throw nb::python_error();
  PyObject *codec, *flags, *meta, *buffers;
  if (!PyTuple_CheckExact(result.ptr()) || PyTuple_GET_SIZE(result.ptr()) != 4) throw nb::type_error("conveyor: codec result");
  codec = PyTuple_GET_ITEM(result.ptr(), 0);
  flags = PyTuple_GET_ITEM(result.ptr(), 1);
  meta = PyTuple_GET_ITEM(result.ptr(), 2);
  buffers = PyTuple_GET_ITEM(result.ptr(), 3);
  if (!PyBytes_CheckExact(meta)) throw nb::type_error("conveyor: codec meta");
  if (uint64_t(PyBytes_GET_SIZE(meta)) > UINT32_MAX) throw nb::value_error("the pickled part of a value is larger than 4 GiB");
  out.meta = nb::borrow(meta);
  out.codec = uint16_t(PyLong_AsUnsignedLong(codec));
  out.flags = uint32_t(PyLong_AsUnsignedLong(flags));
  if (PyErr_Occurred()) throw nb::python_error();
  take_buffers(out, buffers);
  if (let_go && out.views.size() == 1 && out.views[0].len != 0) {
    const char* data = static_cast<const char*>(out.views[0].buf);
    out.made = MadeInPlace::find(data, size_t(out.views[0].len), arena);
    if (out.made) {
      out.layout = lay_out_table(size_t(PyBytes_GET_SIZE(meta)), {0});
      out.layout.entries[0] = {kInBlock | uint64_t(data - out.made->block->data()), uint64_t(out.views[0].len)};
      out.size = out.layout.total;
    }
  }
}

namespace {
nb::object decode_natively(uint16_t codec, const char* body, size_t size) {
#if PY_VERSION_HEX < 0x030c0000
  // Before 3.12 a new tuple may start a collection, and that runs finalizers; since then they wait until
  // we are back in Python.
  struct NoCollection {
    const bool was = PyGC_Disable();
    ~NoCollection() {
      if (was) PyGC_Enable();
    }
  } none;
#endif
  PyObject* value = decode_one(codec, body, size, 0);
  if (value == nullptr) throw nb::python_error();
  return nb::steal(value);
}

nb::object decode_frame(const Frame& frame) {
  if (frame.kind == Kind::kError)
    return nb::cast(ErrorFrame{nb::bytes(frame.body, frame.size)}, nb::rv_policy::move);
  if (frame.codec < kFirstPython) return decode_natively(frame.codec, frame.body, frame.size);
  const TableView table = table_of(frame);
  nb::bytes meta(table.meta, table.meta_length);
  nb::object buffers = buffers_of(frame, table);
  nb::object codec = nb::int_(frame.codec);
  Calling python;
  nb::object value = nb::steal(PyObject_CallFunctionObjArgs(decode_hook, codec.ptr(), meta.ptr(), buffers.ptr(), nullptr));
  if (!value.is_valid()) throw nb::python_error();
  return value;
}

void tell_header(const Frame& frame, PyObject* hook) {
  if (hook == nullptr) return;  // the interpreter ends
  auto table = read_table(frame.body, frame.size, frame.block_room());
  if (!table) bad_frame();
  nb::bytes meta(table->meta, table->meta_length);
  Calling python;
  nb::object result = nb::steal(PyObject_CallFunctionObjArgs(hook, meta.ptr(), nullptr));
  if (!result.is_valid()) throw nb::python_error();
}

// What `read` does, with every error as one of Python's: whether it is final is a question of its class.
template <class Read>
auto or_python_error(Read read) {
  try {
    return read();
  } catch (const nb::python_error&) {
    throw;
  } catch (...) {
    set_python_error();
  }
  throw nb::python_error();
}
}  // namespace

nb::object decode_native(uint16_t codec, const char* body, size_t size) {
  return or_python_error([&] { return decode_natively(codec, body, size); });
}

nb::object decode(const Frame& frame) {
  return or_python_error([&] { return decode_frame(frame); });
}

nb::bytes meta_of(const Frame& frame) {
  const TableView table = table_of(frame);
  return nb::bytes(table.meta, table.meta_length);
}

nb::object loose_buffers(const Frame& frame) {
  nb::object buffers = buffers_of(frame, table_of(frame));
  if (!buffers.is_none())
    for (nb::handle buffer : buffers) nb::inst_ptr<Buffer>(buffer)->readonly = false;
  return buffers;
}

nb::object keep(const Frame& frame) {
  if (frame.kind == Kind::kError || frame.codec < kFirstPython) return decode(frame);
  return or_python_error([&] {
    Frame kept = frame;
    kept.kept = kept.readonly = true;
    return nb::cast(Snapshot{std::move(kept), Fd()}, nb::rv_policy::move);
  });
}

nb::object value_of(nb::handle kept) {
  if (nb::inst_check(kept) && nb::isinstance<Snapshot>(kept)) {
    nb::object alive = nb::borrow(kept);  // decoding runs any code
    return decode(nb::inst_ptr<Snapshot>(kept)->frame);
  }
  return nb::borrow(kept);
}

void announce(const Frame& frame) {
  if (!(frame.flags & kDefinitions) || frame.kind == Kind::kError) return;
  or_python_error([&] { tell_header(frame, announce_hook); });
}

void discard(const Frame& frame) {
  if (!(frame.flags & kDefinitions) || frame.kind == Kind::kError) return;
  or_python_error([&] { tell_header(frame, frame.flags & kRefs ? discard_hook : announce_hook); });
}

nb::object claims_of(const char* body, size_t size, size_t in_block) noexcept {
  try {
    if (const auto table = read_table(body, size, in_block)) return nb::bytes(table->meta, table->meta_length);
  } catch (nb::python_error& error) {
    error.discard_as_unraisable("the refs in a value that could not be read");
  } catch (const std::exception&) {  // there is no memory for this either: they are kept as long as this process lives
  }
  return nb::object();
}

void give_up_claims(nb::object claims) noexcept {
  if (!claims.is_valid() || discard_hook == nullptr) return;
  Calling python;
  for (int tries = 0; tries < 3; ++tries) {
    const nb::object result = nb::steal(PyObject_CallFunctionObjArgs(discard_hook, claims.ptr(), nullptr));
    if (result.is_valid()) return;
    const bool broken_off = !PyErr_ExceptionMatches(PyExc_Exception);
    PyErr_WriteUnraisable(discard_hook);
    // What a signal handler has broken off is done again: more than once is as good as once (see Exports._use).
    if (!broken_off) return;
  }
}

bool is_ref(PyObject* value) { return ref_type != nullptr && PyObject_TypeCheck(value, ref_type); }

void set_ref_type(nb::handle type) { ref_type = reinterpret_cast<PyTypeObject*>(type.ptr()); }

namespace {
void place(Snapshot& s, std::shared_ptr<OwnedMemory> memory) {
  s.frame.memory = std::move(memory);
  s.frame.body = s.frame.memory->data;
  s.frame.kept = true;
}
}  // namespace

Snapshot snapshot(nb::handle value, nb::handle sent, size_t share_from) {
  Encoded e;
  encode(e, value, sent, 0, nullptr);
  Snapshot s;
  s.frame.codec = e.codec;
  s.frame.flags = e.flags & ~uint32_t(kBound);  // `sent` is its own: it brings its definitions
  s.frame.size = e.size;
  if (share_from != 0 && e.size >= share_from) {
    s.fd = make_memfd("conveyor-value", align_up(e.size, kGranule));
    place(s, std::make_shared<OwnedMemory>(s.fd.get(), e.size));
  } else {
    place(s, std::make_shared<OwnedMemory>(e.size));
  }
  e.write_body(s.frame.memory->data);
  e.sent = nb::object();
  return s;
}

Snapshot received_snapshot(uint16_t codec, uint32_t flags, size_t size, nb::handle data, int fd) {
  Snapshot s;
  s.frame.codec = codec;
  s.frame.flags = flags & ~uint32_t(kExternal);
  s.frame.size = size;
  if (fd >= 0) {
    const off_t length = ::lseek(fd, 0, SEEK_END);
    if (size == 0 || length < 0 || size_t(length) < size) throw std::system_error(EPROTO, std::generic_category(), "snapshot size");
    place(s, std::make_shared<OwnedMemory>(fd, size));
    s.fd = dup_cloexec(fd);
    return s;
  }
  if (!PyBytes_CheckExact(data.ptr()) || size_t(PyBytes_GET_SIZE(data.ptr())) != size)
    throw std::system_error(EPROTO, std::generic_category(), "snapshot size");
  place(s, std::make_shared<OwnedMemory>(size));
  std::memcpy(s.frame.memory->data, PyBytes_AS_STRING(data.ptr()), size);
  return s;
}

}  // namespace conveyor
