// The values that cost less to encode and decode here than a call into Python does: None, bool, int, float, str,
// bytes, and tuples, lists and dicts of them: plain data. Of exactly these types, so that no code of anybody's runs.
#pragma once

#include <Python.h>
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "body.h"

namespace nb = nanobind;

namespace conveyor {

// Bytes that grow.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  ~Scratch() {
    if (data_ != small_) std::free(data_);
  }
  const char* data() const { return data_; }
  size_t size() const { return size_; }
  void clear() { size_ = 0; }
  // Room for `n` more bytes, which are written at the address that is returned.
  char* add(size_t n) {
    if (n > room_ - size_) grow(n);
    return data_ + std::exchange(size_, size_ + n);
  }

 private:
  void grow(size_t n) {
    const size_t room = std::max(2 * room_, size_ + n);
    char* const made = static_cast<char*>(std::realloc(data_ == small_ ? nullptr : data_, room));
    if (made == nullptr) throw std::bad_alloc();
    if (data_ == small_) std::memcpy(made, small_, size_);
    data_ = made;
    room_ = room;
  }
  char small_[192];
  char* data_ = small_;
  size_t size_ = 0, room_ = sizeof small_;
};

// What another codec has made of a part of a value.
struct Nested {
  uint16_t codec;
  const char* meta;
  size_t length;
};

// Who knows such parts: what there is of `value`, if it can be one.
class Nests {
 public:
  virtual std::optional<Nested> of(PyObject* value) = 0;

 protected:
  ~Nests() = default;
};

// Bytes of a `bytes` from which on decoding it lets go of the GIL.
constexpr size_t kLargeObject = 4 << 20;

// A tuple, list or dict, appended to `out`. False if it needs the codec in Python; then `out` holds anything. `nests` (null:
// nobody) is asked of what is not plain.
bool encode_plain(Scratch& out, PyObject* value, Nests* nests = nullptr);
// `body` of `size` bytes may be anything. Throws.
nb::object decode_natively(uint16_t codec, const char* body, size_t size);
// The body of a kArguments: its nested parts, in their order; and the value, with theirs in their places.
std::vector<Nested> nested_in(const char* body, size_t size);
nb::object decode_natively(const char* body, size_t size, const std::vector<nb::object>& nested);

// What a pickle has out of itself (codec/encoded.py): the bytes, or the text in UTF-8, that a buffer holds. Throws.
nb::object bytes_of(nb::handle buffer);
nb::object text_of(nb::handle buffer);

}  // namespace conveyor
