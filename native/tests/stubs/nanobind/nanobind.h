// See stubs/Python.h.
#pragma once

namespace nanobind {
struct gil_scoped_release {
  ~gil_scoped_release() {}
};
struct python_error {};
}  // namespace nanobind
