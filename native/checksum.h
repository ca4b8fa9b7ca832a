// A checksum of memory, to see whether somebody has written to it. Not against who means harm.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <span>
#include <sys/uio.h>

namespace conveyor {

namespace checksum_parts {

constexpr uint64_t kPrimes[] = {0x9e3779b185ebca87, 0xc2b2ae3d27d4eb4f, 0x165667b19e3779f9, 0x85ebca77c2b2ae63, 0x27d4eb2f165667c5};

inline uint64_t word_at(const char* at) {
  uint64_t word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

inline uint64_t round(uint64_t lane, uint64_t word) { return std::rotl(lane + word * kPrimes[1], 31) * kPrimes[0]; }

// In the manner of xxHash: lanes that do not wait for each other, so that memory is what takes the time.
inline uint64_t of(const char* at, size_t size, uint64_t seed) {
  constexpr size_t kLanes = 4, kStripe = kLanes * sizeof(uint64_t);
  uint64_t lanes[kLanes] = {seed + kPrimes[0] + kPrimes[1], seed + kPrimes[1], seed, seed - kPrimes[0]};
  size_t left = size;
  for (; left >= kStripe; left -= kStripe, at += kStripe)
    for (size_t i = 0; i < kLanes; ++i) lanes[i] = round(lanes[i], word_at(at + i * sizeof(uint64_t)));
  uint64_t sum = size + kPrimes[4];
  for (const uint64_t lane : lanes) sum = (sum ^ round(0, lane)) * kPrimes[0] + kPrimes[3];
  for (; left >= sizeof(uint64_t); left -= sizeof(uint64_t), at += sizeof(uint64_t)) sum = std::rotl(sum ^ round(0, word_at(at)), 27) * kPrimes[0] + kPrimes[3];
  for (; left != 0; --left, ++at) sum = std::rotl(sum ^ (uint8_t(*at) * kPrimes[4]), 11) * kPrimes[0];
  sum = (sum ^ sum >> 33) * kPrimes[1];
  sum = (sum ^ sum >> 29) * kPrimes[2];
  return sum ^ sum >> 32;
}

}  // namespace checksum_parts

// Of all parts, in their order; never 0. Others may be writing to them: then it is that of anything.
#if defined(__SANITIZE_THREAD__)
__attribute__((no_sanitize("thread")))
#endif
inline uint64_t checksum_of(std::span<const iovec> parts) {
  uint64_t sum = 1;
  for (const iovec& part : parts) sum = checksum_parts::of(static_cast<const char*>(part.iov_base), part.iov_len, sum);
  return sum == 0 ? 1 : sum;
}

}  // namespace conveyor
