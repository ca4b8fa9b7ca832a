#include "kernels.h"

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

namespace conveyor {
namespace {

namespace plain {
constexpr size_t kVector = 16;
struct Halves {};
#include "loops.inl"
}

// The library is built for any x86-64; which loops run is decided once, where it runs. Wider vectors than AVX2's gain
// nothing where the memory is what loops wait for, which is so for all but 16-bit floats.
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
#include "loops.inl"
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#endif
namespace avx512 {
constexpr size_t kVector = 64;
struct Halves {
  using Vector = __m512;
  // With a mask of all: what GCC writes those without one by looks like an uninitialized variable to it.
  static constexpr __mmask16 kAll = 0xffff;
  static Vector up(const uint16_t* from) { return _mm512_maskz_cvtph_ps(kAll, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))); }
  static void down(uint16_t* to, Vector x) {
    const __m512i sign = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(int(0xffc00000)));
    const __m512 kept = _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_castsi512_ps(sign));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_maskz_cvtps_ph(kAll, kept, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
};
#include "loops.inl"
constexpr std::array<Loops, 4> kF16 = all_of<F16>(), kBf16 = all_of<Bf16>();  // the others' are left out of the library
}  // namespace avx512
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

// Those with VBMI: earlier ones slow their clocks down for wide vectors.
bool has_avx512() {
  static const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi");
  return has;
}
#endif

}  // namespace

const Loops* loops_for(Machine machine, ElementType type, ReduceOp op) {
  const size_t row = size_t(type), column = op == ReduceOp::kAvg ? size_t(ReduceOp::kSum) : size_t(op);
  switch (machine) {
    case Machine::kPlain:
      return &plain::kTable[row][column];
#if defined(__x86_64__)
    case Machine::kAvx2:
      return has_avx2() ? &avx2::kTable[row][column] : nullptr;
    case Machine::kAvx512:
      if (!has_avx512() || (type != ElementType::kF16 && type != ElementType::kBf16)) return nullptr;
      return type == ElementType::kF16 ? &avx512::kF16[column] : &avx512::kBf16[column];
#endif
    default:
      return nullptr;
  }
}

size_t size_of(ElementType type) {
  constexpr std::array<uint8_t, kElementTypes> sizes = {4, 8, 2, 2, 1, 2, 4, 8, 1, 2, 4, 8, 1};
  return sizes[size_t(type)];
}

void reduce(ElementType type, ReduceOp op, char* const* to, size_t destinations, const char* const* from, size_t sources, size_t count,
            size_t of) {
  const size_t size = size_of(type);
  const auto put = [&](size_t i, size_t offset, const char* what, size_t bytes) {
    if (to[i] + offset != what)
      std::memcpy(to[i] + offset, what, bytes);
  };
  if (sources == 1) {
    for (size_t i = 0; i < destinations; ++i) put(i, 0, from[0], count * size);
    return;
  }
  const Loops* fastest = nullptr;
  for (auto machine : {Machine::kAvx512, Machine::kAvx2, Machine::kPlain})
    if ((fastest = loops_for(machine, type, op))) break;
  const Loops& loop = *fastest;
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
      loop.finish(result, wide, n, op == ReduceOp::kAvg ? (of != 0 ? of : sources) : 1);
    }
    if (result == stored)
      for (size_t j = 0; j < destinations; ++j) put(j, offset, stored, n * size);
  }
}

}  // namespace conveyor
