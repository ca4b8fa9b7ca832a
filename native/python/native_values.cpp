#include "native_values.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "../platform.h"
#include "hooks.h"

namespace conveyor {

namespace {

// One value after the other, each before its parts: a tag, then what it says. Of a tag that counts there are two: a count of
// one byte follows, or, where 1 is added, one of four.
enum Tag : uint8_t {
  kTagNone,
  kTagTrue,
  kTagFalse,
  kTagInt1,
  kTagInt4,
  kTagInt8,
  kTagFloat,
  kTagStr,  // counts bytes of UTF-8
  kTagBytes = kTagStr + 2,
  kTagTuple = kTagBytes + 2,  // counts elements
  kTagList = kTagTuple + 2,
  kTagDict = kTagList + 2,    // counts pairs
  kTagAgain = kTagDict + 2,   // the object that was remembered with this number
  kTagNested = kTagAgain + 2,  // uint16_t codec, uint32_t length, what the codec has made
  kTags,
};
// Beside a tag: the object may come again, which is kTagAgain then. A tuple is remembered behind its elements: what it is in
// would have to be there before it.
constexpr uint8_t kRemembered = 0x80;

constexpr int kMaxDepth = 100;         // what is deeper is a pickle's to do, or to refuse
constexpr size_t kLargest = 1 << 18;   // bytes of a text or a bytes; larger ones lie beside a pickle (codec/encoded.py)

// The numbers of objects that may come again, by their addresses.
class Met {
 public:
  static constexpr uint32_t kNew = UINT32_MAX, kOpen = UINT32_MAX - 1;  // not met before; a tuple whose elements are being written

  // What is known of it, to be changed before the next call; kNew at first.
  uint32_t& operator[](PyObject* object) {
    if (table_.empty()) {
      for (size_t i = 0; i < count_; ++i)
        if (few_[i].object == object) return few_[i].number;
      if (count_ < kFew) return add(few_[count_], object);
      rehash(8 * kFew);
    } else if (2 * count_ >= table_.size()) {
      rehash(4 * table_.size());
    }
    Entry& entry = place(object);
    return entry.object == object ? entry.number : add(entry, object);
  }

 private:
  struct Entry {
    PyObject* object = nullptr;
    uint32_t number = kNew;
  };
  static constexpr size_t kFew = 12;

  uint32_t& add(Entry& entry, PyObject* object) {
    entry = {object, kNew};
    ++count_;
    return entry.number;
  }
  Entry& place(PyObject* object) {
    size_t i = (uintptr_t(object) >> 4) * 0x9e3779b97f4a7c15u >> shift_;
    while (table_[i].object != nullptr && table_[i].object != object) i = (i + 1) & (table_.size() - 1);
    return table_[i];
  }
  void rehash(size_t size) {
    size = std::bit_ceil(size);
    const std::vector<Entry> old = table_.empty() ? std::vector<Entry>(few_, few_ + count_) : std::move(table_);
    table_.assign(size, {});
    shift_ = 64 - std::bit_width(size - 1);
    for (const Entry& entry : old)
      if (entry.object != nullptr) place(entry.object) = entry;
  }

  Entry few_[kFew];
  std::vector<Entry> table_;
  size_t count_ = 0;
  int shift_ = 0;
};

class PlainEncoder {
 public:
  PlainEncoder(Scratch& out, Nests* nests) : out_(out), nests_(nests) {}

  // Of the outermost value nobody can tell who else refers to it: a caller may have lent it.
  bool encode(PyObject* value, int depth, bool outermost = false) {
    if (value == Py_None) return tag(kTagNone);
    if (value == Py_True) return tag(kTagTrue);
    if (value == Py_False) return tag(kTagFalse);
    PyTypeObject* const type = Py_TYPE(value);
    if (type == &PyLong_Type) return integer(value);
    if (type == &PyFloat_Type) return tag(kTagFloat, PyFloat_AS_DOUBLE(value));
    const bool is_tuple = type == &PyTuple_Type;
    const bool is_container = is_tuple || type == &PyList_Type || type == &PyDict_Type;
    if (!is_container && type != &PyUnicode_Type && type != &PyBytes_Type) return nested(value);
    // What has one reference is one part's alone.
    const bool remembered = (Py_REFCNT(value) > 1 || outermost) && !(is_tuple && PyTuple_GET_SIZE(value) == 0);
    if (remembered) {
      uint32_t& number = met_[value];
      if (number == Met::kOpen) return false;  // it is in itself
      if (number != Met::kNew) return head(kTagAgain, number, false);
      number = is_tuple ? Met::kOpen : next_++;
    }
    if (!is_container) return type == &PyUnicode_Type ? text(value, remembered) : string(kTagBytes, PyBytes_AS_STRING(value), PyBytes_GET_SIZE(value), remembered);
    if (depth == kMaxDepth) return false;
    if (type == &PyList_Type) {
      const Py_ssize_t n = PyList_GET_SIZE(value);
      if (!head(kTagList, n, remembered)) return false;
      for (Py_ssize_t i = 0; i < n; ++i)
        if (!encode(PyList_GET_ITEM(value, i), depth + 1)) return false;
      return true;
    }
    if (type == &PyDict_Type) {
      if (!head(kTagDict, PyDict_GET_SIZE(value), remembered)) return false;
      PyObject *key, *item;
      for (Py_ssize_t at = 0; PyDict_Next(value, &at, &key, &item);)
        if (!encode(key, depth + 1) || !encode(item, depth + 1)) return false;
      return true;
    }
    const Py_ssize_t n = PyTuple_GET_SIZE(value);
    if (!head(kTagTuple, n, remembered)) return false;
    for (Py_ssize_t i = 0; i < n; ++i)
      if (!encode(PyTuple_GET_ITEM(value, i), depth + 1)) return false;
    if (remembered) met_[value] = next_++;
    return true;
  }

 private:
  bool tag(Tag tag) {
    *out_.add(1) = char(tag);
    return true;
  }
  template <typename T>
  bool tag(Tag tag, T what) {
    char* const at = out_.add(1 + sizeof what);
    *at = char(tag);
    std::memcpy(at + 1, &what, sizeof what);
    return true;
  }
  bool head(Tag small, size_t count, bool remembered) {
    if (count > UINT32_MAX) return false;
    const uint8_t flag = remembered ? kRemembered : 0;
    return count < 256 ? tag(Tag(small | flag), uint8_t(count)) : tag(Tag((small + 1) | flag), uint32_t(count));
  }
  bool integer(PyObject* value) {
    int overflow;
    const int64_t n = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow != 0) return false;
    if (n == int8_t(n)) return tag(kTagInt1, int8_t(n));
    return n == int32_t(n) ? tag(kTagInt4, int32_t(n)) : tag(kTagInt8, n);
  }
  bool text(PyObject* value, bool remembered) {
    Py_ssize_t length;
    const char* const data = PyUnicode_AsUTF8AndSize(value, &length);
    if (data != nullptr) return string(kTagStr, data, length, remembered);
    PyErr_Clear();  // lone surrogates: pickle can
    return false;
  }
  bool string(Tag tag, const char* data, Py_ssize_t length, bool remembered) {
    if (size_t(length) >= kLargest) return false;
    head(tag, size_t(length), remembered);
    std::memcpy(out_.add(size_t(length)), data, size_t(length));
    return true;
  }
  bool nested(PyObject* value) {
    const std::optional<Nested> made = nests_ == nullptr ? std::nullopt : nests_->of(value);
    if (!made || made->length > UINT32_MAX) return false;
    tag(kTagNested, made->codec);
    const uint32_t length = uint32_t(made->length);
    std::memcpy(out_.add(sizeof length), &length, sizeof length);
    std::memcpy(out_.add(length), made->meta, length);
    return true;
  }

  Scratch& out_;
  Nests* const nests_;
  Met met_;
  uint32_t next_ = 0;
};

// Reads what may be anything, and may change while it is read: each part is read once.
class Body {
 public:
  Body(const char* body, size_t size) : at_(body), end_(body + size) {}
  bool empty() const { return at_ == end_; }
  size_t left() const { return size_t(end_ - at_); }
  const char* take(size_t n) {
    if (n > left()) bad_frame();
    return std::exchange(at_, at_ + n);
  }
  template <typename T>
  T read() {
    T what;
    std::memcpy(&what, take(sizeof what), sizeof what);
    return what;
  }
  // Behind a tag that counts.
  uint32_t count(uint8_t tag, Tag small) { return tag == small ? read<uint8_t>() : read<uint32_t>(); }
  Nested nested() {
    const uint16_t codec = read<uint16_t>();
    const uint32_t length = read<uint32_t>();
    return {codec, take(length), length};
  }

 private:
  const char* at_;
  const char* const end_;
};

nb::object made(PyObject* object) {
  if (object == nullptr) throw nb::python_error();
  return nb::steal(object);
}

class PlainDecoder {
 public:
  // `nested`: the values of the nested parts, in their order (null: there are none).
  PlainDecoder(const char* body, size_t size, const std::vector<nb::object>* nested) : body_(body, size), nested_(nested) {}

  nb::object decode() {
    nb::object value = decode(0);
    if (!body_.empty()) bad_frame();
    return value;
  }

 private:
  nb::object decode(int depth) {
    const uint8_t first = body_.read<uint8_t>(), tag = first & ~kRemembered;
    const bool remembered = first & kRemembered;
    switch (tag) {
      case kTagNone:
        return nb::none();
      case kTagTrue:
        return nb::borrow(Py_True);
      case kTagFalse:
        return nb::borrow(Py_False);
      case kTagInt1:
        return made(PyLong_FromLong(body_.read<int8_t>()));
      case kTagInt4:
        return made(PyLong_FromLong(body_.read<int32_t>()));
      case kTagInt8:
        return made(PyLong_FromLongLong(body_.read<int64_t>()));
      case kTagFloat:
        return made(PyFloat_FromDouble(body_.read<double>()));
      case kTagStr:
      case kTagStr + 1: {
        const uint32_t n = body_.count(tag, kTagStr);
        return met(made(PyUnicode_DecodeUTF8(body_.take(n), Py_ssize_t(n), nullptr)), remembered);
      }
      case kTagBytes:
      case kTagBytes + 1: {
        const uint32_t n = body_.count(tag, kTagBytes);
        return met(made(PyBytes_FromStringAndSize(body_.take(n), Py_ssize_t(n))), remembered);
      }
      case kTagTuple:
      case kTagTuple + 1:
        return tuple(elements(tag, kTagTuple, 1, depth), remembered, depth);
      case kTagList:
      case kTagList + 1:
        return list(elements(tag, kTagList, 1, depth), remembered, depth);
      case kTagDict:
      case kTagDict + 1:
        return dict(elements(tag, kTagDict, 2, depth), remembered, depth);
      case kTagAgain:
      case kTagAgain + 1: {
        const uint32_t number = body_.count(tag, kTagAgain);
        if (number >= met_.size()) bad_frame();
        return met_[number];
      }
      case kTagNested:
        body_.nested();
        if (nested_ == nullptr || next_ == nested_->size()) bad_frame();
        return (*nested_)[next_++];
      default:
        bad_frame();
    }
  }
  nb::object met(nb::object value, bool remembered) {
    if (remembered) met_.push_back(value);
    return value;
  }
  // Of which each has `parts`, of a byte at least: nothing is allocated for what cannot be there.
  Py_ssize_t elements(uint8_t tag, Tag small, size_t parts, int depth) {
    const uint32_t n = body_.count(tag, small);
    if (n > body_.left() / parts || depth == kMaxDepth) bad_frame();
    return Py_ssize_t(n);
  }
  nb::object tuple(Py_ssize_t n, bool remembered, int depth) {
    nb::object value = made(PyTuple_New(n));
    for (Py_ssize_t i = 0; i < n; ++i) PyTuple_SET_ITEM(value.ptr(), i, decode(depth + 1).release().ptr());
    return met(std::move(value), remembered);
  }
  nb::object list(Py_ssize_t n, bool remembered, int depth) {
    nb::object value = met(made(PyList_New(n)), remembered);
    for (Py_ssize_t i = 0; i < n; ++i) PyList_SET_ITEM(value.ptr(), i, decode(depth + 1).release().ptr());
    return value;
  }
  nb::object dict(Py_ssize_t n, bool remembered, int depth) {
    nb::object value = met(made(PyDict_New()), remembered);
    for (Py_ssize_t i = 0; i < n; ++i) {
      const nb::object key = decode(depth + 1), item = decode(depth + 1);
      if (PyDict_SetItem(value.ptr(), key.ptr(), item.ptr()) != 0) throw nb::python_error();
    }
    return value;
  }

  Body body_;
  const std::vector<nb::object>* const nested_;
  size_t next_ = 0;
  std::vector<nb::object> met_;
};

nb::object decode_plain(const char* body, size_t size, const std::vector<nb::object>* nested) {
#if PY_VERSION_HEX < 0x030c0000
  // Before 3.12 a new container may start a collection, and that runs finalizers; since then they wait until
  // we are back in Python.
  struct NoCollection {
    const bool was = PyGC_Disable();
    ~NoCollection() {
      if (was) PyGC_Enable();
    }
  } none;
#endif
  return PlainDecoder(body, size, nested).decode();
}

// A large one goes without the GIL, and to huge pages where the system has them: new memory of an object costs more than the
// copy otherwise, a fault for each page.
PyObject* copied(const char* body, size_t size) {
  if (size < kLargeObject) return PyBytes_FromStringAndSize(body, Py_ssize_t(size));
  PyObject* const made = PyBytes_FromStringAndSize(nullptr, Py_ssize_t(size));
  if (made == nullptr) return nullptr;
  char* const to = PyBytes_AS_STRING(made);
  const uintptr_t from = align_up(uintptr_t(to), kHugePage), end = (uintptr_t(to) + size) / kHugePage * kHugePage;
  if (from < end) ::madvise(reinterpret_cast<void*>(from), end - from, MADV_HUGEPAGE);  // a wish
  Py_BEGIN_ALLOW_THREADS;
  std::memcpy(to, body, size);
  Py_END_ALLOW_THREADS;
  return made;
}

}  // namespace

nb::object bytes_of(nb::handle buffer) {
  Py_buffer view;
  if (PyObject_GetBuffer(buffer.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
  nb::object made = nb::steal(copied(static_cast<const char*>(view.buf), size_t(view.len)));
  PyBuffer_Release(&view);
  if (!made.is_valid()) throw nb::python_error();
  return made;
}

nb::object text_of(nb::handle buffer) {
  Py_buffer view;
  if (PyObject_GetBuffer(buffer.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
  nb::object made = nb::steal(PyUnicode_DecodeUTF8(static_cast<const char*>(view.buf), view.len, "surrogatepass"));
  PyBuffer_Release(&view);
  if (!made.is_valid()) throw nb::python_error();
  return made;
}

bool encode_plain(Scratch& out, PyObject* value, Nests* nests) { return PlainEncoder(out, nests).encode(value, 0, true); }

nb::object decode_natively(uint16_t codec, const char* body, size_t size) {
  const auto read = [&]<typename T>(T what) {
    if (size != sizeof what) bad_frame();
    std::memcpy(&what, body, sizeof what);
    return what;
  };
  switch (codec) {
    case kNone:
      return nb::none();
    case kTrue:
      return nb::borrow(Py_True);
    case kFalse:
      return nb::borrow(Py_False);
    case kInt:
      return made(PyLong_FromLongLong(read(int64_t())));
    case kFloat:
      return made(PyFloat_FromDouble(read(double())));
    case kStr:
      return made(PyUnicode_DecodeUTF8(body, Py_ssize_t(size), nullptr));
    case kBytes:
      return made(copied(body, size));
    case kPlain:
      return decode_plain(body, size, nullptr);
    default:
      bad_frame();
  }
}

std::vector<Nested> nested_in(const char* body, size_t size) {
  std::vector<Nested> found;
  for (Body left(body, size); !left.empty();) {
    const uint8_t tag = left.read<uint8_t>() & ~kRemembered;
    if (tag >= kTags) bad_frame();
    if (tag == kTagNested)
      found.push_back(left.nested());
    else if (tag >= kTagTuple)  // they count what follows by itself
      left.take((tag - kTagTuple) % 2 == 0 ? 1 : 4);
    else if (tag >= kTagStr)
      left.take(left.count(tag, tag >= kTagBytes ? kTagBytes : kTagStr));
    else
      left.take(tag == kTagInt1 ? 1 : tag == kTagInt4 ? 4 : tag >= kTagInt8 ? 8 : 0);
  }
  return found;
}

nb::object decode_natively(const char* body, size_t size, const std::vector<nb::object>& nested) { return decode_plain(body, size, &nested); }

}  // namespace conveyor
