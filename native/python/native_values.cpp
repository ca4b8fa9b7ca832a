#include "native_values.h"

#include <cstring>

#include <sys/mman.h>

#include "../platform.h"
#include "hooks.h"

namespace conveyor {

namespace {

constexpr int kMaxDepth = 8;
constexpr size_t kMaxTuple = 64 * 1024;

template <typename T>
void put(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

// From here on a copy goes without the GIL, and to huge pages where the system has them: new memory of an object costs more
// than the copy otherwise, a fault for each page.
constexpr size_t kLargeObject = 4 << 20;

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

bool encode_element(std::string& out, PyObject* value, int depth, Nests* nests) {
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
      if (!encode_element(out, PyTuple_GET_ITEM(value, i), depth + 1, nests)) return false;
    const size_t body = out.size() - at - sizeof(uint32_t);
    if (body > kMaxTuple) return false;
    const uint32_t word = uint32_t(kTuple) << 28 | uint32_t(body);
    std::memcpy(out.data() + at, &word, sizeof word);
    return true;
  } else {
    const std::optional<Nested> nested = nests == nullptr ? std::nullopt : nests->of(value);
    if (!nested || nested->length + out.size() > kMaxTuple) return false;
    head(kNested, uint32_t(sizeof nested->codec + nested->length));
    put(out, nested->codec);
    out.append(nested->meta, nested->length);
    return true;
  }
  if (size_t(length) + out.size() > kMaxTuple) return false;
  head(codec, uint32_t(length));
  out.append(data, size_t(length));
  return true;
}

namespace {

// The values that stand in a tuple in the places of its nested elements, in their order.
struct Places {
  const std::vector<nb::object>& values;
  size_t next = 0;
};

PyObject* decode_tuple(const char* body, size_t size, int depth, Places* places);

PyObject* decode_one(uint16_t codec, const char* body, size_t size, int depth, Places* places) {
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
      return decode_tuple(body, size, depth, places);
    case kNested:
      if (places == nullptr || places->next == places->values.size()) bad_frame();
      return Py_NewRef(places->values[places->next++].ptr());
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

PyObject* decode_tuple(const char* body, size_t size, int depth, Places* places) {
  size_t count = 0;
  for (size_t at = 0; at < size; ++count) next_element(body, size, at);
  nb::object tuple = nb::steal(PyTuple_New(Py_ssize_t(count)));
  if (!tuple.is_valid()) throw nb::python_error();
  size_t at = 0;
  for (size_t i = 0; i < count; ++i) {
    const Element element = next_element(body, size, at);
    PyObject* item = decode_one(element.codec, element.body, element.size, depth + 1, places);
    if (item == nullptr) throw nb::python_error();
    PyTuple_SET_ITEM(tuple.ptr(), Py_ssize_t(i), item);
  }
  return tuple.release().ptr();
}

void find_nested(std::vector<Nested>& found, const char* body, size_t size, int depth) {
  if (depth > kMaxDepth) bad_frame();
  for (size_t at = 0; at < size;) {
    const Element element = next_element(body, size, at);
    if (element.codec == kTuple) find_nested(found, element.body, element.size, depth + 1);
    if (element.codec != kNested) continue;
    Nested nested{0, element.body + sizeof nested.codec, element.size - sizeof nested.codec};
    if (element.size < sizeof nested.codec) bad_frame();
    std::memcpy(&nested.codec, element.body, sizeof nested.codec);
    found.push_back(nested);
  }
}

nb::object decode_without_collection(uint16_t codec, const char* body, size_t size, Places* places) {
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
  PyObject* value = decode_one(codec, body, size, 0, places);
  if (value == nullptr) throw nb::python_error();
  return nb::steal(value);
}

}  // namespace

nb::object decode_natively(uint16_t codec, const char* body, size_t size) {
  if (codec != kBytes) return decode_without_collection(codec, body, size, nullptr);
  nb::object value = nb::steal(copied(body, size));  // which may give up the GIL, and bytes start no collection
  if (!value.is_valid()) throw nb::python_error();
  return value;
}

std::vector<Nested> nested_in(const char* body, size_t size) {
  std::vector<Nested> found;
  find_nested(found, body, size, 0);
  return found;
}

nb::object decode_natively(const char* body, size_t size, const std::vector<nb::object>& nested) {
  Places places{nested};
  return decode_without_collection(kTuple, body, size, &places);
}

}  // namespace conveyor
