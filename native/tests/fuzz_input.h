// What the fuzz targets share: taking an input apart, and touching memory so that AddressSanitizer has
// its say about every byte of it.
#pragma once

#include <sanitizer/asan_interface.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

// Unlike assert, always there.
#define FUZZ_CHECK(condition)                                                                \
  do {                                                                                       \
    if (!(condition)) {                                                                      \
      std::fprintf(stderr, "fuzz: not so: %s (%s:%d)\n", #condition, __FILE__, __LINE__);     \
      std::abort();                                                                          \
    }                                                                                        \
  } while (0)

namespace fuzz {

// Takes numbers and bytes off the front; zeros when there are no more.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : data_(data), left_(size) {}
  template <class T>
  T take() {
    T value{};
    take_into(&value, sizeof value);
    return value;
  }
  size_t take_into(void* to, size_t size) {
    const size_t n = size < left_ ? size : left_;
    if (n != 0) std::memcpy(to, data_, n);
    data_ += n;
    left_ -= n;
    return n;
  }
  const uint8_t* data() const { return data_; }
  size_t left() const { return left_; }

 private:
  const uint8_t* data_;
  size_t left_;
};

// Memory of exactly `size` bytes: one too many is seen.
inline std::unique_ptr<char[]> exactly(const void* data, size_t size) {
  std::unique_ptr<char[]> copy(new char[size]);
  if (size != 0) std::memcpy(copy.get(), data, size);
  return copy;
}

// As reading all of it would be, but in time for tables that name the same bytes thousands of times.
inline void touch(const char* at, size_t size) {
  if (size == 0) return;
  const char* bad = static_cast<const char*>(__asan_region_is_poisoned(const_cast<char*>(at), size));
  if (bad != nullptr) (void)*static_cast<const volatile char*>(bad);  // AddressSanitizer reports this read
  // Memory without shadow, or without a mapping, faults.
  (void)*static_cast<const volatile char*>(at);
  (void)*static_cast<const volatile char*>(at + size - 1);
}

}  // namespace fuzz
