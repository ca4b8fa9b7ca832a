// The loops of one element type and operation; loops.inl has them. "Wide" is what is computed in.
#pragma once

#include "kernels.h"

namespace conveyor {

struct Loops {
  void (*direct)(void* to, const void* first, const void* second, size_t n);  // two sources, without a tile
  void (*pair)(void* wide, const void* first, const void* second, size_t n);
  void (*add)(void* wide, const void* source, size_t n);
  void (*finish)(void* to, const void* wide, size_t n, size_t divisor);
  size_t wide;
};

enum class Machine : uint8_t { kPlain, kAvx2, kAvx512 };

// Null where this machine is none of that kind, or nothing is made for it. Of several it takes the last.
const Loops* loops_for(Machine machine, ElementType type, ReduceOp op);

}  // namespace conveyor
