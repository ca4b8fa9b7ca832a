// The values that cost less to encode and decode here than a call into Python does: None, bool, int, float, str,
// bytes, and small tuples of them.
#pragma once

#include <Python.h>
#include <nanobind/nanobind.h>

#include <string>

#include "body.h"

namespace nb = nanobind;

namespace conveyor {

// One element of a tuple, appended: codec, length, body. False if it needs the codec in Python.
bool encode_element(std::string& out, PyObject* value, int depth);
// `body` of `size` bytes may be anything. Throws.
nb::object decode_natively(uint16_t codec, const char* body, size_t size);

}  // namespace conveyor
