// Reductions of tensors' elements: sources into destinations, in the order of the sources, so that whoever
// reduces the same gets the same bits.
#pragma once

#include <cstddef>
#include <cstdint>

namespace conveyor {

enum class ElementType : uint8_t { kF32, kF64, kF16, kBf16, kI8, kI16, kI32, kI64, kU8, kU16, kU32, kU64, kBool };
constexpr uint8_t kElementTypes = 13;
enum class ReduceOp : uint8_t { kSum, kProduct, kMin, kMax, kAvg };
constexpr uint8_t kReduceOps = 5;

size_t size_of(ElementType type);

// Integers have no average: who wants one says first how to round.
inline bool can_reduce(ElementType type, ReduceOp op) { return op != ReduceOp::kAvg || type <= ElementType::kBf16; }

// `count` elements of each of `sources`, reduced, into each of `destinations`. Sums of 16-bit floats are made
// in 32 bits and rounded once. MIN and MAX give NaN where any source is NaN. Integers wrap around. Of bools, SUM
// and MAX are "or", PRODUCT and MIN are "and". A destination may be one of the sources, but overlap none otherwise.
// `of`: of how many an average is, where sources are sums of several; 0: of the sources.
void reduce(ElementType type, ReduceOp op, char* const* to, size_t destinations, const char* const* from, size_t sources, size_t count,
            size_t of = 0);

// The loops of one element type and operation; loops.inl has them. "Wide" is what is computed in.
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
