// Memory of a process's own: what has been let go of is used again, and never by two at once, nor while somebody may read it.
#include <signal.h>
#include <sys/resource.h>

#include <atomic>
#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include "arena/private_pages.h"
#include "arena_setup.h"
#include "body.h"
#include "owned_memory.h"

using namespace conveyor;

namespace {

std::unique_ptr<OwnedMemory> filled(size_t size, int with) {
  auto memory = std::make_unique<OwnedMemory>(size);
  std::memset(memory->data, with, size);
  return memory;
}

bool is_filled(const char* data, size_t size, int with) {
  for (size_t i = 0; i < size; i += 997)
    if (data[i] != char(with)) return false;
  return data[size - 1] == char(with);
}
bool is_filled(const OwnedMemory& memory, size_t size, int with) { return is_filled(memory.data, size, with); }

std::unique_ptr<PrivatePages> pages_of(const std::shared_ptr<OwnedMemory>& memory, size_t size) {
  auto pages = std::make_unique<PrivatePages>(memory, memory->mapping, memory->data, size);
  REQUIRE(pages->data() != nullptr);
  return pages;
}

// Of the files that it lies in.
size_t resident() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("RssShmem:")) return std::stoull(line.substr(9)) << 10;
  return 0;
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
  for (size_t size : {size_t(1), size_t(100), kMiB / 2 - 1, kMiB / 2, 3 * kMiB + 7}) CHECK_EQ(reinterpret_cast<uintptr_t>(filled(size, 1)->data) % kBufferAlign, uintptr_t(0));
}

TEST(small_memory_is_of_the_heap_and_large_memory_can_be_shown_in_private_pages) {
  CHECK(filled(kMiB / 4 - 1, 1)->mapping == nullptr);
  for (const size_t size : {kMiB / 4, 20 * kMiB}) {
    std::shared_ptr<OwnedMemory> memory = filled(size, 1);
    const char* const at = memory->data;
    auto one = pages_of(memory, size), other = pages_of(memory, size);
    std::memset(one->data(), 2, size);
    CHECK(is_filled(*memory, size, 1));
    CHECK(is_filled(other->data(), size, 1));
    memory.reset();
    CHECK(filled(size, 3)->data != at);  // it is shown
    CHECK(is_filled(one->data(), size, 2));
    one.reset();
    CHECK(filled(size, 3)->data != at);
    CHECK(is_filled(other->data(), size, 1));
    other.reset();
    CHECK(filled(size, 3)->data == at);
  }
}

TEST(what_a_child_has_inherited_stays_as_it_is) {
  std::shared_ptr<OwnedMemory> memory = filled(kMiB, 1);
  const char* const at = memory->data;
  auto pages = pages_of(memory, kMiB);
  int ends[2];
  REQUIRE(::pipe2(ends, O_CLOEXEC) == 0);
  check::Child child([&] {
    ::close(ends[1]);
    // Its own lies elsewhere, and its parent sees nothing of it.
    for (int i = 10; i < 20; ++i) CHECK(is_filled(*filled(kMiB, i), kMiB, i));
    char c;
    (void)!::read(ends[0], &c, 1);  // until the parent has let go of its own
    CHECK(is_filled(*memory, kMiB, 1));
    CHECK(is_filled(pages->data(), kMiB, 1));
    std::memset(memory->data, 5, kMiB);
    std::memset(pages->data(), 6, kMiB);
    pages.reset();
    memory.reset();
  });
  pages.reset();
  CHECK(is_filled(*memory, kMiB, 1));
  memory.reset();
  for (int i = 30; i < 40; ++i) {
    const auto other = filled(kMiB, i);
    CHECK(other->data != at);
    CHECK(is_filled(*other, kMiB, i));
  }
  ::close(ends[0]);
  ::close(ends[1]);
  CHECK(child.passed());
  // Several at once: what was let go of last is used first, and that may be another block for good.
  CHECK(check::soon([&] {
    std::vector<std::shared_ptr<OwnedMemory>> held;
    while (held.size() < 8 && (held.empty() || held.back()->data != at)) held.push_back(filled(kMiB, 1));
    return held.back()->data == at;
  }));
}

TEST(of_what_was_let_go_of_little_stays_warm_and_of_that_nothing_stays_idle) {
  CHECK(check::soon([] { return mappings() == 0; }));
  const int before = open_descriptors();
  constexpr size_t kSize = 128 * kMiB;
  {
    std::vector<std::unique_ptr<OwnedMemory>> held;
    for (int i = 0; i < 6; ++i) held.push_back(filled(kSize, i));
    CHECK(resident() >= 6 * kSize);
    CHECK_EQ(open_descriptors(), before + 1);
  }
  CHECK(resident() <= 4 * kSize + kMiB);
  CHECK(check::soon([&] { return mappings() == 0 && open_descriptors() <= before; }));
  CHECK(resident() < kMiB);
}

TEST(where_no_file_is_to_be_had_it_is_of_the_heap) {
  CHECK(check::soon([] { return mappings() == 0; }));
  check::Child limited([] {
    ::signal(SIGXFSZ, SIG_IGN);  // as Python does
    const rlimit small{kMiB, kMiB};
    REQUIRE(::setrlimit(RLIMIT_FSIZE, &small) == 0);
    const auto memory = filled(kMiB, 1);
    CHECK(memory->mapping == nullptr);
    CHECK(is_filled(*memory, kMiB, 1));
  });
  CHECK(limited.passed());
  CHECK(filled(kMiB, 1)->mapping != nullptr);
}
