// The inner loops of kernels.cpp, which includes this once for each kind of machine, in a namespace of its
// own and with what that machine can do: `kVector` is the bytes of its vectors, and `Halves` has its conversions of
// a vector of 16-bit floats, if it has any.

typedef float Floats __attribute__((vector_size(kVector)));
typedef uint32_t Words __attribute__((vector_size(kVector)));

// What is computed with at once, of types of which the compiler makes no good loops by itself. In which order its parts
// have the elements is for `load` and `store` of the type to say: nobody else looks at what is kept wide.
template <size_t N>
struct Block {
  static constexpr size_t kElements = N * kVector / sizeof(float);
  Floats parts[N];
  // By whole vectors: copied as one object it would be written by smaller pieces than it is read by.
  static Block get(const float* wide) {
    Block made;
    for (size_t k = 0; k < N; ++k) std::memcpy(&made.parts[k], wide + k * kVector / sizeof(float), kVector);
    return made;
  }
  void put(float* wide) const {
    for (size_t k = 0; k < N; ++k) std::memcpy(wide + k * kVector / sizeof(float), &parts[k], kVector);
  }
};

template <class T>
struct Plain {  // what is kept is what is computed with
  using Stored = T;
  using Wide = T;
  static T up(T x) { return x; }
  static T down(T x) { return x; }
};

struct Bool {
  using Stored = uint8_t;
  using Wide = uint8_t;
  static uint8_t up(uint8_t x) { return x != 0; }
  static uint8_t down(uint8_t x) { return x; }
};

struct Bf16 {
  using Stored = uint16_t;
  using Wide = float;
  static float up(uint16_t x) { return std::bit_cast<float>(uint32_t(x) << 16); }
  static uint16_t down(float x) {  // to the nearest, ties to even
    const uint32_t u = std::bit_cast<uint32_t>(x);
    const uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    return uint16_t(x != x ? 0x7fc0 : rounded);
  }

  // Two neighbours lie in one word, the first of them in its lower half: none has to be moved to another lane.
  using Several = Block<2>;
  static Several load(const uint16_t* from) {
    Words words;
    std::memcpy(&words, from, sizeof words);
    return {Floats(words << 16), Floats(words & 0xffff0000u)};
  }
  static void store(uint16_t* to, const Several& block) {
    const Words words = rounded(block.parts[0]) >> 16 | (rounded(block.parts[1]) & 0xffff0000u);
    std::memcpy(to, &words, sizeof words);
  }

 private:
  static Words rounded(Floats x) {
    const Words u = Words(x);
    return x != x ? Words{} + 0x7fc00000u : u + 0x7fffu + (u >> 16 & 1u);
  }
};

template <class H>
struct HalfBlocks {};

template <class H>
  requires requires { typename H::Vector; }
struct HalfBlocks<H> {
  using Several = Block<1>;
  static Several load(const uint16_t* from) { return {Floats(H::up(from))}; }
  static void store(uint16_t* to, const Several& block) { H::down(to, block.parts[0]); }
};

struct F16 : HalfBlocks<Halves> {  // by hand, since not every compiler has the type: written so that it is vectorized
  using Stored = uint16_t;
  using Wide = float;
  static float up(uint16_t x) {
    const uint32_t magnitude = uint32_t(x & 0x7fff) << 13;
    // 2^112 moves the exponent from one bias to the other, and makes subnormal numbers normal ones.
    const float value = std::bit_cast<float>(magnitude) * std::bit_cast<float>(0x77800000u);
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t special = magnitude >= 0x0f800000u ? 0x7f800000u : 0u;
    return std::bit_cast<float>(bits | special | uint32_t(x & 0x8000) << 16);
  }
  static uint16_t down(float x) {  // to the nearest, ties to even
    const uint32_t u = std::bit_cast<uint32_t>(x), sign = u & 0x80000000u, magnitude = u ^ sign;
    // Where the result is subnormal, adding a half has the machine round at the right bit.
    const uint32_t small = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
    const uint32_t normal = (magnitude + 0xc8000fffu + ((magnitude >> 13) & 1)) >> 13;
    const uint32_t huge = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    const uint32_t finite = magnitude < 0x38800000u ? small : normal;
    return uint16_t((magnitude >= 0x47800000u ? huge : finite) | sign >> 16);
  }
};

// Unsigned integers wrap around; small ones would be promoted to signed ones.
template <class T>
using Wrapping = std::conditional_t<std::is_integral_v<T>, std::conditional_t<(sizeof(T) < 4), uint32_t, std::make_unsigned_t<std::conditional_t<std::is_integral_v<T>, T, int>>>, T>;

struct Sum {
  template <class T>
  static T of(T a, T b) { return T(Wrapping<T>(a) + Wrapping<T>(b)); }
};
struct Product {
  template <class T>
  static T of(T a, T b) { return T(Wrapping<T>(a) * Wrapping<T>(b)); }
};
struct Min {
  template <class T>
  static T of(T a, T b) { return ((a < b) | (a != a)) ? a : b; }  // if b is NaN, neither holds
};
struct Max {
  template <class T>
  static T of(T a, T b) { return ((a > b) | (a != a)) ? a : b; }
};
struct Or {
  template <class T>
  static T of(T a, T b) { return T(a | b); }
};
struct And {
  template <class T>
  static T of(T a, T b) { return T(a & b); }
};

// Blocks are done first, then what is left, one by one.
template <class E>
constexpr size_t at_once() {
  if constexpr (requires { typename E::Several; }) return E::Several::kElements;
  return 0;
}

template <class O, class B>
B each(const B& a, const B& b) {
  B made;
  for (size_t k = 0; k < std::size(made.parts); ++k) made.parts[k] = O::of(a.parts[k], b.parts[k]);
  return made;
}

// What a destination shares with a source begins at the same place: each element is read before it is written.
template <class E, class O>
void direct(void* to, const void* first, const void* second, size_t n) {
  auto* d = static_cast<typename E::Stored*>(to);
  auto *a = static_cast<const typename E::Stored*>(first), *b = static_cast<const typename E::Stored*>(second);
  size_t i = 0;
  if constexpr (constexpr size_t k = at_once<E>(); k != 0)
    for (; i + k <= n; i += k) E::store(d + i, each<O>(E::load(a + i), E::load(b + i)));
#pragma GCC ivdep
  for (; i < n; ++i) d[i] = E::down(O::of(E::up(a[i]), E::up(b[i])));
}

template <class E, class O>
void pair(void* wide, const void* first, const void* second, size_t n) {
  auto* d = static_cast<typename E::Wide*>(wide);
  auto *a = static_cast<const typename E::Stored*>(first), *b = static_cast<const typename E::Stored*>(second);
  size_t i = 0;
  if constexpr (constexpr size_t k = at_once<E>(); k != 0)
    for (; i + k <= n; i += k) each<O>(E::load(a + i), E::load(b + i)).put(d + i);
#pragma GCC ivdep
  for (; i < n; ++i) d[i] = O::of(E::up(a[i]), E::up(b[i]));
}

template <class E, class O>
void add(void* wide, const void* source, size_t n) {
  auto* d = static_cast<typename E::Wide*>(wide);
  auto* a = static_cast<const typename E::Stored*>(source);
  size_t i = 0;
  if constexpr (constexpr size_t k = at_once<E>(); k != 0)
    for (; i + k <= n; i += k) each<O>(E::Several::get(d + i), E::load(a + i)).put(d + i);
#pragma GCC ivdep
  for (; i < n; ++i) d[i] = O::of(d[i], E::up(a[i]));
}

template <class E, bool kDivides>
void finish_by(typename E::Stored* d, const typename E::Wide* a, size_t n, typename E::Wide by) {
  const auto quotient = [by](auto x) { return kDivides ? x / by : x; };
  size_t i = 0;
  if constexpr (constexpr size_t k = at_once<E>(); k != 0)
    for (; i + k <= n; i += k) {
      auto made = E::Several::get(a + i);
      for (size_t j = 0; j < std::size(made.parts); ++j) made.parts[j] = quotient(made.parts[j]);
      E::store(d + i, made);
    }
#pragma GCC ivdep
  for (; i < n; ++i) d[i] = E::down(quotient(a[i]));
}

template <class E>
void finish(void* to, const void* wide, size_t n, size_t divisor) {
  auto* d = static_cast<typename E::Stored*>(to);
  auto* a = static_cast<const typename E::Wide*>(wide);
  if constexpr (std::is_floating_point_v<typename E::Wide>)
    if (divisor != 1) return finish_by<E, true>(d, a, n, static_cast<typename E::Wide>(divisor));
  finish_by<E, false>(d, a, n, 1);
}

template <class E, class O>
constexpr Loops loops_of() {
  return {&direct<E, O>, &pair<E, O>, &add<E, O>, &finish<E>, sizeof(typename E::Wide)};
}

template <class E>
constexpr std::array<Loops, 4> all_of() {
  return {loops_of<E, Sum>(), loops_of<E, Product>(), loops_of<E, Min>(), loops_of<E, Max>()};
}

// By element type and operation; an average is a sum that is divided in the end.
constexpr std::array<std::array<Loops, 4>, kElementTypes> kTable = {
    all_of<Plain<float>>(),    all_of<Plain<double>>(),  all_of<F16>(),            all_of<Bf16>(),           all_of<Plain<int8_t>>(),
    all_of<Plain<int16_t>>(),  all_of<Plain<int32_t>>(), all_of<Plain<int64_t>>(), all_of<Plain<uint8_t>>(), all_of<Plain<uint16_t>>(),
    all_of<Plain<uint32_t>>(), all_of<Plain<uint64_t>>(),
    std::array<Loops, 4>{loops_of<Bool, Or>(), loops_of<Bool, And>(), loops_of<Bool, And>(), loops_of<Bool, Or>()},
};
