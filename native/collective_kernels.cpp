#include "collective_kernels.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <iterator>
#include <type_traits>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#include "collective_loops.h"

namespace conveyor {
namespace {

namespace plain {
constexpr size_t kVector = 16;
struct Halves {};
#include "collective_loops.inl"
}

// The library is built for any x86-64; which loops run is decided once, where it runs. Wider vectors than AVX2's
// gain nothing: the memory is what these loops wait for.
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif
namespace avx2 {
constexpr size_t kVector = 32;
struct Halves {
  using Vector = __m256;
  static Vector up(const uint16_t* from) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))); }
  static void down(uint16_t* to, Vector x) {
    // Of what is no number only the sign is kept, as F16::down does.
    const __m256i no_number = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256 kept = _mm256_andnot_ps(_mm256_castsi256_ps(_mm256_srli_epi32(no_number, 10)), x);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(kept, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
};
#include "collective_loops.inl"
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

bool has_avx2() {
  static const bool has = [] {
    uint32_t a, b, c, d;  // not every compiler's __builtin_cpu_supports knows F16C
    return __builtin_cpu_supports("avx2") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
  }();
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
