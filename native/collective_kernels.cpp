#include "collective_kernels.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <type_traits>

namespace conveyor {
namespace {

// The loops of one element type and operation. "Wide" is what is computed in.
struct Loops {
  void (*direct)(void* to, const void* first, const void* second, size_t n);  // two sources, without a tile
  void (*pair)(void* wide, const void* first, const void* second, size_t n);
  void (*add)(void* wide, const void* source, size_t n);
  void (*finish)(void* to, const void* wide, size_t n, size_t divisor);
  size_t wide;
};

namespace plain {
#include "collective_loops.inl"
}

// The library is built for any x86-64; which loops run is decided once, where it runs. Wider vectors than AVX2's
// gain nothing: the memory is what these loops wait for.
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif
namespace avx2 {
#include "collective_loops.inl"
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

bool has_avx2() {
  static const bool has = __builtin_cpu_supports("avx2");
  return has;
}
#endif

const Loops& loops(ElementType type, ReduceOp op) {
  const size_t row = size_t(type), column = op == ReduceOp::kAvg ? size_t(ReduceOp::kSum) : size_t(op);
#if defined(__x86_64__)
  if (has_avx2()) return avx2::kTable[row][column];
#endif
  return plain::kTable[row][column];
}

}  // namespace

size_t size_of(ElementType type) {
  constexpr std::array<uint8_t, kElementTypes> sizes = {4, 8, 2, 2, 1, 2, 4, 8, 1, 2, 4, 8, 1};
  return sizes[size_t(type)];
}

void reduce(ElementType type, ReduceOp op, char* const* to, size_t destinations, const char* const* from, size_t sources, size_t count) {
  const size_t size = size_of(type);
  const auto put = [&](size_t i, size_t offset, const char* what, size_t bytes) {
    if (to[i] + offset != what)
      std::memcpy(to[i] + offset, what, bytes);
  };
  if (sources == 1) {
    for (size_t i = 0; i < destinations; ++i) put(i, 0, from[0], count * size);
    return;
  }
  const Loops& loop = loops(type, op);
  const bool two = sources == 2 && op != ReduceOp::kAvg;
  if (two && destinations == 1) {
    loop.direct(to[0], from[0], from[1], count);
    return;
  }
  // By tiles that stay in the first cache: one for what is computed, one for what is stored.
  constexpr size_t kTile = 8192;
  alignas(64) char wide[kTile], stored[kTile];
  const size_t step = kTile / loop.wide;
  for (size_t i = 0; i < count; i += step) {
    const size_t n = std::min(step, count - i), offset = i * size;
    char* const result = destinations == 1 ? to[0] + offset : stored;
    if (two) {
      loop.direct(result, from[0] + offset, from[1] + offset, n);
    } else {
      loop.pair(wide, from[0] + offset, from[1] + offset, n);
      for (size_t j = 2; j < sources; ++j) loop.add(wide, from[j] + offset, n);
      loop.finish(result, wide, n, op == ReduceOp::kAvg ? sources : 1);
    }
    if (result == stored)
      for (size_t j = 0; j < destinations; ++j) put(j, offset, stored, n * size);
  }
}

}  // namespace conveyor
