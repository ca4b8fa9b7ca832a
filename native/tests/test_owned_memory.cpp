// Memory of a process's own: what has been let go of is used again, and never by two at once.
#include <atomic>
#include <cstring>
#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "body.h"
#include "owned_memory.h"

using conveyor::OwnedMemory;

namespace {

constexpr size_t kMiB = 1 << 20;

std::unique_ptr<OwnedMemory> filled(size_t size, int with) {
  auto memory = std::make_unique<OwnedMemory>(size);
  std::memset(memory->data, with, size);
  return memory;
}

bool is_filled(const OwnedMemory& memory, size_t size, int with) {
  for (size_t i = 0; i < size; i += 997)
    if (memory.data[i] != char(with)) return false;
  return memory.data[size - 1] == char(with);
}

}  // namespace

TEST(what_was_let_go_of_is_used_again) {
  const char* const first = filled(8 * kMiB, 1)->data;
  const auto again = filled(8 * kMiB - 100, 2);
  CHECK(again->data == first);
  const auto other = filled(8 * kMiB, 3);
  CHECK(other->data != first);
  CHECK(is_filled(*again, 8 * kMiB - 100, 2));
}

TEST(a_small_value_takes_no_large_memory) {
  const char* const large = filled(64 * kMiB, 1)->data;
  const auto small = filled(2 * kMiB, 2);
  CHECK(small->data < large || small->data >= large + 64 * kMiB);
}

TEST(threads_share_none) {
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 1; t <= 4; ++t)
    threads.emplace_back([t, &wrong] {
      check::Random random{uint64_t(t)};
      std::deque<std::pair<std::unique_ptr<OwnedMemory>, size_t>> held;
      for (int i = 0; i < 40; ++i) {
        const size_t size = 1000 + random.below(10 * kMiB);
        held.emplace_back(filled(size, t), size);
        if (held.size() <= random.below(6)) continue;
        if (!is_filled(*held.front().first, held.front().second, t)) ++wrong;
        held.pop_front();
      }
    });
  for (auto& thread : threads) thread.join();
  CHECK_EQ(wrong.load(), 0);
}

TEST(what_is_aligned_stays_so) {
  for (size_t size : {size_t(1), size_t(100), kMiB / 2 - 1, kMiB / 2, 3 * kMiB + 7}) CHECK_EQ(reinterpret_cast<uintptr_t>(filled(size, 1)->data) % conveyor::kBufferAlign, uintptr_t(0));
}
