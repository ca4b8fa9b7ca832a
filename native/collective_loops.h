// The loops of one element type and operation; collective_loops.inl has them. "Wide" is what is computed in.
#pragma once

#include <cstddef>

namespace conveyor {

struct Loops {
  void (*direct)(void* to, const void* first, const void* second, size_t n);  // two sources, without a tile
  void (*pair)(void* wide, const void* first, const void* second, size_t n);
  void (*add)(void* wide, const void* source, size_t n);
  void (*finish)(void* to, const void* wide, size_t n, size_t divisor);
  size_t wide;
};

}  // namespace conveyor
