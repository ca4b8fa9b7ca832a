#include "encode.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "decode.h"
#include "exit.h"
#include "hooks.h"
#include "kept.h"
#include "native_values.h"

namespace conveyor {

namespace {

// How `value` may have memory alone that was made in our arena: then the block itself can travel. There are two ways, and
// in each all that can reach the memory is counted. An array lies over a Buffer (0); a tensor has the storage that
// the memory was made for (its address). None: something else refers to it, or that cannot be known, as where a
// tensor lies over an array, which others may have as well.
std::optional<uintptr_t> alone(PyObject* value) {
  // Of other types, an attribute of this name may be anything, and to ask for it may run any code.
  if (std::strcmp(Py_TYPE(value)->tp_name, "numpy.ndarray") == 0) {
    nb::object base = nb::steal(PyObject_GetAttrString(value, "base"));
    if (!base.is_valid()) throw nb::python_error();
    if (!nb::isinstance<Buffer>(base) || Py_REFCNT(base.ptr()) > 2) return std::nullopt;  // the array's reference and ours
    return 0;
  }
  Calling python;
  nb::object answer = nb::steal(PyObject_CallFunctionObjArgs(hooks.storage_held_alone, value, nullptr));
  if (!answer.is_valid()) throw nb::python_error();
  const uintptr_t storage = nb::cast<uintptr_t>(answer);
  return storage == 0 ? std::nullopt : std::optional(storage);
}

// The block that goes with a value whose only buffer is `view`, which has its memory alone in that way.
std::shared_ptr<MadeInPlace> moving(uintptr_t way, const Py_buffer& view, const Arena* arena) {
  if (view.len == 0) return nullptr;
  std::shared_ptr<MadeInPlace> made = MadeInPlace::find(static_cast<const char*>(view.buf), size_t(view.len), arena);
  return made && made->storage == way && MadeInPlace::of_one_buffer(made) ? made : nullptr;
}

// Forget what `sent` has noted: definitions are sent again, and what was set for one value is not there for the next.
// It runs no bytecode, so no signal handler can raise in the middle of it.
void forget_notes(nb::handle sent) {
  if (!sent.is_valid() || sent.is_none()) return;
  nb::error_scope keep;
  const nb::object groups = nb::steal(PyObject_GetAttrString(sent.ptr(), "groups"));
  if (!groups.is_valid() || PySet_Clear(groups.ptr()) != 0) PyErr_WriteUnraisable(sent.ptr());
  for (const char* name : {"collected", "checker"})
    if (PyObject_SetAttrString(sent.ptr(), name, Py_None) != 0) PyErr_WriteUnraisable(sent.ptr());
  if (PyObject_SetAttrString(sent.ptr(), "in_band", Py_False) != 0) PyErr_WriteUnraisable(sent.ptr());
}

// Python notes definitions as sent before its result is here, and a signal handler may raise in between.
struct Unnoted {
  nb::handle sent;
  bool reached_end = false;
  ~Unnoted() {
    if (!reached_end) forget_notes(sent);
  }
};

// Whether `value`, or an argument in it, has many parts.
bool has_many_parts(PyObject* value, int depth = 0) {
  constexpr Py_ssize_t kMany = 256;
  if (PyDict_CheckExact(value)) return PyDict_GET_SIZE(value) >= kMany;
  if (!PyTuple_CheckExact(value)) return PyList_CheckExact(value) && PyList_GET_SIZE(value) >= kMany;
  if (PyTuple_GET_SIZE(value) >= kMany) return true;
  if (depth == 2) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i)
    if (has_many_parts(PyTuple_GET_ITEM(value, i), depth + 1)) return true;
  return false;
}

[[noreturn]] void refuse_buffers(Py_ssize_t n) {
  PyErr_Format(hooks.final_error != nullptr ? hooks.final_error : PyExc_ValueError,
               "a value with %zd tensors and arrays cannot be sent, as one takes %zu of them at most: put them together (numpy.stack, torch.cat), "
               "send several values, or have it stay with its maker (tensor_transport=\"auto\")",
               n, kMaxBuffers);
  throw nb::python_error();
}

// Have `out`, whose meta is set, take these buffers (None: none) along. A Buffer of a block that was made in `arena`
// (null: in none) is handed over: the block goes with the frame.
void take_buffers(Encoded& out, nb::handle buffers, const Arena* arena) {
  std::vector<size_t> lengths;
  if (!buffers.is_none()) {
    nb::object fast = nb::steal(PySequence_Fast(buffers.ptr(), "conveyor: codec buffers"));
    if (!fast.is_valid()) throw nb::python_error();
    const Py_ssize_t n = PySequence_Fast_GET_SIZE(fast.ptr());
    if (size_t(n) > kMaxBuffers) refuse_buffers(n);
    out.views.reserve(size_t(n));
    for (Py_ssize_t i = 0; i < n; ++i) {
      Py_buffer view;
      // Fortran order too: the meta bytes say which; what matters is one run of memory.
      nb::handle item = PySequence_Fast_GET_ITEM(fast.ptr(), i);
      if (PyObject_GetBuffer(item.ptr(), &view, PyBUF_ANY_CONTIGUOUS) != 0) throw nb::python_error();
      out.views.push_back(view);
      lengths.push_back(size_t(view.len));
      if (arena == nullptr || PyMemoryView_Check(item.ptr()) || !nb::isinstance<Buffer>(item)) continue;
      const std::shared_ptr<MadeInPlace>& made = nb::inst_ptr<Buffer>(item)->made;
      if (made && made->arena.get() == arena && !made->sent && !made->inherited() && (!out.made || out.made == made)) out.made = made;
    }
  }
  if (out.made) return out.lay_out_in_block();
  out.layout = lay_out_table(size_t(PyBytes_GET_SIZE(out.meta.ptr())), lengths);
  out.size = out.layout.total;
}

// Frames that name values which have stayed with their makers. As an element of a tuple such a frame is its meta
// bytes, and who passes it on keeps it.
class PassedOn : public Nests {
 public:
  std::optional<Nested> of(PyObject* value) override {
    if (!nb::inst_check(value) || !nb::isinstance<Snapshot>(value)) return std::nullopt;
    // What is passed twice comes as one object, which is a pickle's to say.
    if (std::find(seen_.begin(), seen_.end(), value) != seen_.end()) return std::nullopt;
    const Frame& frame = nb::inst_ptr<Snapshot>(value)->frame;
    constexpr uint32_t kOthers = kDefinitions | kExternal | kRefs | kBound;
    if (frame.codec != kDirect || frame.kind == Kind::kError || (frame.flags & (kKeeps | kOthers)) != kKeeps || frame.body == nullptr) return std::nullopt;
    const auto table = read_table(frame.body, frame.size, 0);
    if (!table || !table->entries.empty()) return std::nullopt;
    seen_.push_back(value);
    frames_.push_back(frame);
    return Nested{frame.codec, table->meta, table->meta_length};
  }
  bool any() const { return !frames_.empty(); }
  // Have `out` keep them.
  void keep(Encoded& out) && {
    out.flags = kKeeps;
    if (std::all_of(frames_.begin(), frames_.end(), [](const Frame& frame) { return keeps_surely(frame); })) out.flags |= kSure;
    for (const Frame& frame : frames_) {
      const Numbers numbers = frame.keeps();
      out.keeps.insert(out.keeps.end(), numbers.begin(), numbers.end());
    }
    out.attached = std::make_shared<const std::vector<Frame>>(std::move(frames_));
  }

 private:
  std::vector<PyObject*> seen_;
  std::vector<Frame> frames_;
};

}  // namespace

Encoded::~Encoded() {
  for (Py_buffer& view : views) PyBuffer_Release(&view);
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
                                    : PyObject_CallMethod(sent.ptr(), "withdraw_borrows", "OO", meta.ptr(), numbers.ptr()));
    if (!result.is_valid()) {
      PyErr_WriteUnraisable(sent.ptr());
      forget_notes(sent);
    }
  }
}

void Encoded::lay_out_in_block() {
  const char* const data = made->block->data();
  const auto within = [&](const Py_buffer& view) {
    const char* at = static_cast<const char*>(view.buf);
    return view.len != 0 && at >= data && at + view.len <= data + made->length;
  };
  std::vector<size_t> lengths;
  lengths.reserve(views.size());
  for (const Py_buffer& view : views) lengths.push_back(within(view) ? 0 : size_t(view.len));
  layout = lay_out_table(size_t(PyBytes_GET_SIZE(meta.ptr())), lengths);
  in_block = 0;
  for (size_t i = 0; i < views.size(); ++i) {
    if (!within(views[i])) continue;
    layout.entries[i] = {kInBlock | uint64_t(static_cast<const char*>(views[i].buf) - data), uint64_t(views[i].len)};
    in_block += size_t(views[i].len);
  }
  size = layout.total;
}

void Encoded::lay_out_in_body() {
  made.reset();
  std::vector<size_t> lengths;
  lengths.reserve(views.size());
  for (const Py_buffer& view : views) lengths.push_back(size_t(view.len));
  layout = lay_out_table(size_t(PyBytes_GET_SIZE(meta.ptr())), lengths);
  size = layout.total;
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
  for (size_t i = 0; i < views.size(); ++i)
    if (views[i].len != 0 && !(layout.entries[i].offset & kInBlock)) std::memcpy(to + layout.entries[i].offset, views[i].buf, size_t(views[i].len));
}

namespace {

// What the core encodes by itself. False: `value` is none of that.
bool encode_native(Encoded& out, nb::handle value, bool passes_on) {
  PyObject* v = value.ptr();
  PyTypeObject* type = Py_TYPE(v);
  if (type == &PyUnicode_Type) {
    Py_ssize_t length;
    out.data = PyUnicode_AsUTF8AndSize(v, &length);
    if (out.data != nullptr) {
      out.codec = kStr;
      out.size = size_t(length);
      out.source = nb::borrow(value);
      return true;
    }
    PyErr_Clear();
  } else if (type == &PyBytes_Type) {
    out.codec = kBytes;
    out.data = PyBytes_AS_STRING(v);
    out.size = size_t(PyBytes_GET_SIZE(v));
    out.source = nb::borrow(value);
    return true;
  } else if (v == Py_None) {
    out.codec = kNone;
    return true;
  } else if (v == Py_True || v == Py_False) {
    out.codec = v == Py_True ? kTrue : kFalse;
    return true;
  } else if (type == &PyLong_Type) {
    int overflow;
    const int64_t n = PyLong_AsLongLongAndOverflow(v, &overflow);
    if (overflow == 0) {
      std::memcpy(out.small, &n, sizeof n);
      out.codec = kInt;
      out.data = out.small;
      out.size = sizeof n;
      return true;
    }
  } else if (type == &PyFloat_Type) {
    const double d = PyFloat_AS_DOUBLE(v);
    std::memcpy(out.small, &d, sizeof d);
    out.codec = kFloat;
    out.data = out.small;
    out.size = sizeof d;
    return true;
  } else if (type == &PyTuple_Type || type == &PyList_Type || type == &PyDict_Type) {
    out.scratch.clear();
    PassedOn passed;
    if (encode_plain(out.scratch, v, passes_on ? &passed : nullptr)) {
      out.codec = kPlain;
      if (passed.any()) {
        out.codec = kArguments;
        out.raw = true;
        std::move(passed).keep(out);
      }
      out.data = out.scratch.data();
      out.size = out.scratch.size();
      return true;
    }
  }
  return false;
}

// A value that has been encoded before, and was not decoded here.
void encode_snapshot(Encoded& out, nb::handle value, nb::handle sent) {
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
  if (!keeps_surely(frame)) out.flags &= ~uint32_t(kSure);
  if (frame.flags & kKeeps) {
    out.attached = std::make_shared<const Frame>(frame);
    out.keeps = frame.keeps();
  }
  if (frame.flags & kExternal) {
    const TableView table = table_of(frame);
    out.meta = nb::bytes(table.meta, table.meta_length);
    take_buffers(out, buffers_of(frame, table, true), nullptr);
    return;
  }
  out.size = frame.size;
  out.data = frame.body;
  out.raw = true;
}

// Whether the next frame has to tell that definitions are gone.
bool has_untold(nb::handle sent) {
  if (!sent.is_valid() || sent.is_none()) return false;
  static PyObject* const name = PyUnicode_InternFromString("gone");
  const nb::object gone = nb::steal(PyObject_GetAttr(sent.ptr(), name));
  if (!gone.is_valid()) throw nb::python_error();
  return nb::cast<const Untold&>(gone).size() > 0;
}

// Anything else is the codec's in Python.
void encode_any(Encoded& out, nb::handle value, nb::handle sent, Py_ssize_t moved_refs, const Arena* arena) {
  PyObject* v = value.ptr();
  // Before the codec adds references of its own.
  const std::optional<uintptr_t> way = Py_REFCNT(v) <= moved_refs && MadeInPlace::any() ? alone(v) : std::nullopt;
  if (hooks.encode == nullptr) throw nb::type_error("conveyor: no codec is set for this type of value");
  Calling python;
  // What is made for each part would be looked through again and again while none of it is garbage.
  std::optional<Uncollected> uncollected;
  if (has_many_parts(v)) uncollected.emplace();
  Unnoted unnoted{sent};
  nb::object result = nb::steal(PyObject_CallFunctionObjArgs(hooks.encode, v, sent.ptr(), nullptr));
  if (!result.is_valid()) throw nb::python_error();
  PyObject *codec, *flags, *meta, *buffers;
  const Py_ssize_t parts = PyTuple_CheckExact(result.ptr()) ? PyTuple_GET_SIZE(result.ptr()) : 0;
  if (parts != 4 && parts != 5) throw nb::type_error("conveyor: codec result");
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
  if (parts == 5) {
    const nb::handle keeper = PyTuple_GET_ITEM(result.ptr(), 4);
    add_numbers_of(keeper, out.keeps);
    out.attached = kept(nb::borrow(keeper));
    out.flags |= kKeeps;
    // A ref may have another outcome later, so the frames themselves are kept beside it.
    std::vector<Frame> frames;
    if (keeps_surely(keeper, frames)) {
      out.flags |= kSure;
      if (!frames.empty()) out.attached = std::make_shared<const std::pair<std::shared_ptr<const void>, std::vector<Frame>>>(std::move(out.attached), std::move(frames));
    }
  }
  unnoted.reached_end = true;  // from here on `out` takes them back
  take_buffers(out, buffers, arena);
  if (!out.made && way && out.views.size() == 1) {
    out.made = moving(*way, out.views[0], arena);
    if (out.made) out.lay_out_in_block();
  }
}

}  // namespace

void Untold::add(nb::sequence tokens) {
  for (nb::handle token : tokens) {
    tokens_.push_back(nb::borrow(token));
    ++all_;
  }
}

nb::tuple Untold::take(size_t most) {
  most = std::min(most, tokens_.size());
  nb::list taken;
  for (size_t i = 0; i < most; ++i) taken.append(tokens_[i]);
  tokens_.erase(tokens_.begin(), tokens_.begin() + ptrdiff_t(most));
  all_ -= int(most);
  return nb::tuple(taken);
}

void encode(Encoded& out, nb::handle value, nb::handle sent, Py_ssize_t moved_refs, const Arena* arena, bool passes_on) {
  const bool tells = Untold::any() && has_untold(sent);
  if (!tells && encode_native(out, value, passes_on)) return;
  if (nb::isinstance<Snapshot>(value)) return encode_snapshot(out, value, sent);
  encode_any(out, value, sent, moved_refs, arena);
}

}  // namespace conveyor
