// The values that cost less to encode and decode here than a call into Python does: None, bool, int, float, str,
// bytes, and small tuples of them.
#pragma once

#include <Python.h>
#include <nanobind/nanobind.h>

#include <optional>
#include <string>
#include <vector>

#include "body.h"

namespace nb = nanobind;

namespace conveyor {

// What another codec has made of an element of a tuple.
struct Nested {
  uint16_t codec;
  const char* meta;
  size_t length;
};

// Who knows such elements: what there is of `value`, if it can be one.
class Nests {
 public:
  virtual std::optional<Nested> of(PyObject* value) = 0;

 protected:
  ~Nests() = default;
};

// One element of a tuple, appended: codec, length, body. False if it needs the codec in Python. `nests` (null: nobody)
// is asked of what has no native codec.
bool encode_element(std::string& out, PyObject* value, int depth, Nests* nests = nullptr);
// `body` of `size` bytes may be anything. Throws.
nb::object decode_natively(uint16_t codec, const char* body, size_t size);
// The body of a kArguments: its nested elements, in their order; and the tuple, with their values in their places.
std::vector<Nested> nested_in(const char* body, size_t size);
nb::object decode_natively(const char* body, size_t size, const std::vector<nb::object>& nested);

// What a pickle has out of itself (codec/encoded.py): the bytes, or the text in UTF-8, that a buffer holds. Throws.
nb::object bytes_of(nb::handle buffer);
nb::object text_of(nb::handle buffer);

}  // namespace conveyor
