// Reductions: every type and operation against the plain way to compute it.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "check.h"
#include "collective/kernels.h"

using namespace conveyor;

namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

template <class T>
T plainly(ReduceOp op, T a, T b) {
  if (op == ReduceOp::kMin) return a != a ? a : b != b ? b : std::min(a, b);
  if (op == ReduceOp::kMax) return a != a ? a : b != b ? b : std::max(a, b);
  if constexpr (std::is_integral_v<T>) {
    const uint64_t wide = op == ReduceOp::kProduct ? uint64_t(int64_t(a)) * uint64_t(int64_t(b)) : uint64_t(int64_t(a)) + uint64_t(int64_t(b));
    return T(wide);
  } else {
    return op == ReduceOp::kProduct ? a * b : a + b;
  }
}

template <class T>
bool same(T a, T b) {
  return a == b || (a != a && b != b);
}

template <class T>
void check_type(ElementType type) {
  check::Random random(7);
  CHECK_EQ(size_of(type), sizeof(T));
  for (size_t sources = 1; sources <= 5; ++sources)
    for (size_t count : {size_t(1), size_t(31), size_t(5000)}) {
      std::vector<std::vector<T>> from(sources, std::vector<T>(count));
      for (auto& one : from)
        for (T& x : one) x = T(int64_t(random.next()) >> 40);
      std::vector<const char*> s;
      for (auto& one : from) s.push_back(reinterpret_cast<const char*>(one.data()));
      for (uint8_t o = 0; o < kReduceOps; ++o) {
        const auto op = ReduceOp(o);
        if (!can_reduce(type, op)) continue;
        for (size_t destinations : {1, 2}) {
          std::vector<T> first(count), second(count);
          char* to[2] = {reinterpret_cast<char*>(first.data()), reinterpret_cast<char*>(second.data())};
          reduce(type, op, to, destinations, s.data(), sources, count);
          bool good = true;
          for (size_t i = 0; i < count; ++i) {
            T want = from[0][i];
            for (size_t r = 1; r < sources; ++r) want = plainly(op, want, from[r][i]);
            if (op == ReduceOp::kAvg) want = T(want / T(sources));
            good &= same(first[i], want) && (destinations == 1 || same(second[i], want));
          }
          CHECK(good);
        }
      }
    }
}

float bf16(uint16_t x) { return std::bit_cast<float>(uint32_t(x) << 16); }

// By the meaning of the bits.
float f16(uint16_t x) {
  const int exponent = x >> 10 & 31, mantissa = x & 1023;
  const float sign = x & 0x8000 ? -1 : 1;
  if (exponent == 31) return mantissa ? kNaN : sign * kInf;
  return sign * (exponent == 0 ? std::ldexp(float(mantissa), -24) : std::ldexp(float(1024 + mantissa), exponent - 25));
}

// Every other number of the format is at least as far from `exact`, and a tie goes to the even one.
void check_rounding(float (*value)(uint16_t), uint16_t got, float exact) {
  if (exact != exact) return void(CHECK(value(got) != value(got)));
  const double mine = std::abs(double(value(got)) - exact);
  if (std::isinf(value(got))) return;  // checked by its neighbour
  for (int d : {-1, 1}) {
    const uint16_t other = uint16_t(got + d);
    if (((got ^ other) & 0x8000) || std::isinf(value(other)) || value(other) != value(other)) continue;
    const double theirs = std::abs(double(value(other)) - exact);
    CHECK(mine < theirs || (mine == theirs && !(got & 1)));
  }
}

}  // namespace

TEST(numbers_are_reduced_as_they_would_be_one_by_one) {
  check_type<float>(ElementType::kF32);
  check_type<double>(ElementType::kF64);
  check_type<int8_t>(ElementType::kI8);
  check_type<int16_t>(ElementType::kI16);
  check_type<int32_t>(ElementType::kI32);
  check_type<int64_t>(ElementType::kI64);
  check_type<uint8_t>(ElementType::kU8);
  check_type<uint16_t>(ElementType::kU16);
  check_type<uint32_t>(ElementType::kU32);
  check_type<uint64_t>(ElementType::kU64);
}

TEST(sixteen_bit_floats_are_rounded_once_and_to_even) {
  for (auto [type, value] : {std::pair{ElementType::kBf16, &bf16}, std::pair{ElementType::kF16, &f16}}) {
    // All values of one against a few of the other.
    for (uint16_t constant : {0x0000, 0x8000, 0x0001, 0x3c01, 0x3f81, 0x4470, 0x7bff, 0x7c00, 0x7e01, 0x7f80, 0x7fc1, 0xfbff}) {
      std::vector<uint16_t> a(65536), b(65536, uint16_t(constant)), got(65536);
      for (size_t i = 0; i < a.size(); ++i) a[i] = uint16_t(i);
      const char* from[] = {reinterpret_cast<char*>(a.data()), reinterpret_cast<char*>(b.data())};
      char* to = reinterpret_cast<char*>(got.data());
      reduce(type, ReduceOp::kSum, &to, 1, from, 2, a.size());
      for (size_t i = 0; i < a.size(); ++i) check_rounding(value, got[i], value(a[i]) + value(b[i]));
    }
    // Many small ones, which would vanish one by one if each sum was rounded.
    std::vector<uint16_t> one = {uint16_t(type == ElementType::kBf16 ? 0x3f80 : 0x3c00)}, small = {uint16_t(type == ElementType::kBf16 ? 0x3b00 : 0x1000)};
    std::vector<const char*> from = {reinterpret_cast<char*>(one.data())};
    for (int i = 0; i < 8; ++i) from.push_back(reinterpret_cast<char*>(small.data()));
    uint16_t got = 0;
    char* to = reinterpret_cast<char*>(&got);
    reduce(type, ReduceOp::kSum, &to, 1, from.data(), from.size(), 1);
    CHECK_EQ(value(got), 1 + 8 * value(small[0]));
  }
}

// As an operation does it, and then by all loops that this machine can run.
std::vector<std::vector<uint16_t>> all_ways(ElementType type, ReduceOp op, const std::vector<std::vector<uint16_t>>& sources) {
  const size_t n = sources[0].size();
  std::vector<const char*> from;
  for (auto& one : sources) from.push_back(reinterpret_cast<const char*>(one.data()));
  std::vector<std::vector<uint16_t>> got(1, std::vector<uint16_t>(n));
  char* to = reinterpret_cast<char*>(got[0].data());
  reduce(type, op, &to, 1, from.data(), from.size(), n);
  for (auto machine : {Machine::kPlain, Machine::kAvx2, Machine::kAvx512}) {
    const Loops* loops = loops_for(machine, type, op);
    if (!loops) continue;
    std::vector<uint16_t>& made = got.emplace_back(n);
    if (from.size() == 2 && op != ReduceOp::kAvg) {
      loops->direct(made.data(), from[0], from[1], n);
    } else {
      std::vector<float> wide(n);
      loops->pair(wide.data(), from[0], from[1], n);
      for (size_t i = 2; i < from.size(); ++i) loops->add(wide.data(), from[i], n);
      loops->finish(made.data(), wide.data(), n, op == ReduceOp::kAvg ? from.size() : 1);
    }
  }
  return got;
}

int infinity(ElementType type) { return type == ElementType::kBf16 ? 0x7f80 : 0x7c00; }
bool is_nan(ElementType type, uint16_t x) { return (x & 0x7fff) > infinity(type); }
bool is_finite(ElementType type, uint16_t x) { return (x & 0x7fff) < infinity(type); }

// What a number of `type` is `quarters` of the way to the next one, its neighbour away from zero.
bool is_rounded(ElementType type, uint16_t got, uint16_t from, size_t quarters) {
  const uint16_t next = uint16_t(from + 1);
  if (is_nan(type, next) && (quarters > 0 || is_nan(type, from))) return is_nan(type, got);
  if (!is_finite(type, next)) return got == (quarters == 0 ? from : next);
  return got == (quarters < 2 || (quarters == 2 && !(from & 1)) ? from : next);
}

TEST(all_sixteen_bit_floats_and_what_lies_between_them_are_rounded_to_the_bit) {
  for (auto type : {ElementType::kF16, ElementType::kBf16})
    for (size_t n : {size_t(65536), size_t(65536 - 13)}) {  // what is left behind the last whole vector goes other ways
      std::vector<uint16_t> one(n), next(n);
      for (size_t i = 0; i < n; ++i) one[i] = uint16_t(i + 65536 - n), next[i] = uint16_t(one[i] + 1);
      for (auto op : {ReduceOp::kMin, ReduceOp::kMax})  // there and back
        for (size_t sources : {2, 3})
          for (auto& got : all_ways(type, op, std::vector(sources, one))) {
            size_t wrong = 0;
            for (size_t i = 0; i < n; ++i) wrong += is_nan(type, one[i]) ? !is_nan(type, got[i]) : got[i] != one[i];
            CHECK_EQ(wrong, 0u);
          }
      for (size_t quarters = 0; quarters <= 4; ++quarters) {
        std::vector<std::vector<uint16_t>> sources;
        for (size_t i = 0; i < 4; ++i) sources.push_back(i < quarters ? next : one);
        for (auto& got : all_ways(type, ReduceOp::kAvg, sources)) {
          size_t wrong = 0;
          for (size_t i = 0; i < n; ++i) {
            const int magnitude = one[i] & 0x7fff;
            // Four of the greatest bf16 are too much for 32 bits, and quarters of the least ones too little.
            const bool beyond = type == ElementType::kBf16 && (magnitude < 0x0100 || (magnitude >= 0x7e7f && magnitude <= 0x7f80));
            wrong += magnitude != 0x7fff && !beyond && !is_rounded(type, got[i], one[i], quarters);
          }
          CHECK_EQ(wrong, 0u);
        }
      }
    }
  // Where the greatest ends, and in the middle between nothing and the least.
  const std::vector<std::vector<uint16_t>> edge = {std::vector<uint16_t>(40, 0x7bff), std::vector<uint16_t>(40, 0x4c00)};
  const std::vector<std::vector<uint16_t>> below = {std::vector<uint16_t>(40, 0x7bff), std::vector<uint16_t>(40, 0x4bff)};
  const std::vector<std::vector<uint16_t>> least = {std::vector<uint16_t>(40, 0x0001), std::vector<uint16_t>(40, 0x3800)};
  for (auto& way : all_ways(ElementType::kF16, ReduceOp::kSum, edge)) CHECK(way == std::vector<uint16_t>(40, 0x7c00));
  for (auto& way : all_ways(ElementType::kF16, ReduceOp::kSum, below)) CHECK(way == std::vector<uint16_t>(40, 0x7bff));
  for (auto& way : all_ways(ElementType::kF16, ReduceOp::kProduct, least)) CHECK(way == std::vector<uint16_t>(40, 0));
}

TEST(loops_of_all_machines_give_the_bits_of_the_plain_ones) {
  check::Random random(11);
  for (auto type : {ElementType::kF16, ElementType::kBf16})
    for (size_t sources = 2; sources <= 4; ++sources)
      for (size_t n : {1, 7, 8, 9, 15, 16, 17, 31, 33, 2048}) {
        std::vector<std::vector<uint16_t>> from(sources, std::vector<uint16_t>(n));
        for (auto& one : from)
          for (uint16_t& x : one) x = uint16_t(random.next() >> 20);
        for (uint8_t o = 0; o < kReduceOps; ++o) {
          const auto ways = all_ways(type, ReduceOp(o), from);
          // Which sign has a sum of two that are no numbers is for the compiler to choose.
          for (auto& way : ways)
            for (size_t i = 0; i < n; ++i) CHECK(way[i] == ways[1][i] || (is_nan(type, way[i]) && is_nan(type, ways[1][i])));
        }
      }
}

TEST(least_and_greatest_of_what_is_no_number_is_no_number) {
  for (float other : {0.0f, -kInf, kInf, kNaN})
    for (auto op : {ReduceOp::kMin, ReduceOp::kMax})
      for (bool first : {true, false})
        for (size_t sources : {2, 3}) {
          std::vector<float> a(9, first ? kNaN : other), b(9, first ? other : kNaN), c(9, 1), got(9);
          const char* from[] = {reinterpret_cast<char*>(a.data()), reinterpret_cast<char*>(b.data()), reinterpret_cast<char*>(c.data())};
          char* to = reinterpret_cast<char*>(got.data());
          reduce(ElementType::kF32, op, &to, 1, from, sources, got.size());
          for (float x : got) CHECK(x != x);
        }
}

TEST(truths_are_joined) {
  const uint8_t a[] = {0, 0, 1, 1}, b[] = {0, 1, 0, 1};
  const char* from[] = {reinterpret_cast<const char*>(a), reinterpret_cast<const char*>(b)};
  for (auto op : {ReduceOp::kSum, ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kMax}) {
    uint8_t got[4];
    char* to = reinterpret_cast<char*>(got);
    reduce(ElementType::kBool, op, &to, 1, from, 2, 4);
    const bool any = op == ReduceOp::kSum || op == ReduceOp::kMax;
    for (int i = 0; i < 4; ++i) CHECK_EQ(int(got[i]), any ? a[i] | b[i] : a[i] & b[i]);
  }
  CHECK(!can_reduce(ElementType::kBool, ReduceOp::kAvg));
  CHECK(!can_reduce(ElementType::kI32, ReduceOp::kAvg));
  CHECK(can_reduce(ElementType::kBf16, ReduceOp::kAvg));
}

TEST(a_source_can_be_the_destination) {
  for (size_t sources : {2, 3}) {
    std::vector<std::vector<float>> s(sources, std::vector<float>(3000, 2));
    std::vector<const char*> from;
    for (auto& one : s) from.push_back(reinterpret_cast<char*>(one.data()));
    char* to = reinterpret_cast<char*>(s.back().data());
    reduce(ElementType::kF32, ReduceOp::kSum, &to, 1, from.data(), sources, 3000);
    for (float x : s.back()) CHECK_EQ(x, 2.0f * sources);
  }
}
