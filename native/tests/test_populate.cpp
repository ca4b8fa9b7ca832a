// Cold memory: huge pages where the kernel has them, small ones elsewhere, and what the file costs.
#include "arena/populate.h"

#include <sys/resource.h>

#include <thread>

#include "arena_setup.h"

using namespace conveyor;

namespace {

// Whether this kernel makes huge pages of shared memory at all; asked of a mapping of its own.
bool has_huge_pages() {
  const Fd fd = make_memfd("probe", kHugePage);
  char* base = map_shared(fd.get(), 0, kHugePage);
  base[0] = 1;
  const bool has = ::madvise(base, kHugePage, 25 /* MADV_COLLAPSE */) == 0;
  ::munmap(base, kHugePage);
  return has;
}

// Bytes of the mapping that `within` lies in which one entry of a page table covers at a time.
size_t huge_bytes(const void* within) {
  std::ifstream smaps("/proc/self/smaps");
  bool found = false;
  unsigned long from, to, kilobytes;
  for (std::string line; std::getline(smaps, line);) {
    if (std::sscanf(line.c_str(), "%lx-%lx ", &from, &to) == 2) found = reinterpret_cast<uintptr_t>(within) - from < to - from;
    if (found && std::sscanf(line.c_str(), "ShmemPmdMapped: %lu kB", &kilobytes) == 1) return size_t(kilobytes) << 10;
  }
  return 0;
}

bool all_zero(const char* from, size_t size) {
  for (size_t i = 0; i < size; i += 509)
    if (from[i] != 0) return false;
  return true;
}

}  // namespace

TEST(what_is_refused_is_tried_less_and_less_often) {
  Attempts attempts;
  const uint64_t second = Attempts::kFirstPauseNs;
  CHECK(attempts.due(0));
  uint64_t now = 5 * second, pause = second;
  for (int i = 0; i < 12; ++i) {
    attempts.refused(now);
    CHECK(!attempts.due(now + pause - 1));
    CHECK(attempts.due(now + pause));
    now += pause;
    pause = std::min(2 * pause, Attempts::kLongestPauseNs);
  }
  attempts.worked();
  attempts.refused(now);
  CHECK(attempts.due(now + second));
}

TEST(a_large_block_has_huge_pages_and_so_have_its_readers) {
  if (!has_huge_pages()) return;
  for (size_t size : {kHugePage, 5 * kMiB, 17 * kMiB, 40 * kMiB + 12'345}) {
    Setup s;
    s.arena.allocate(1'000);  // so that it does not lie at the beginning
    Block* block = s.publish(size);
    const size_t whole = block->touched / kHugePage * kHugePage;
    CHECK(whole != 0);
    CHECK_EQ(huge_bytes(block->base), whole);
    CHECK_EQ(s.memory(), s.arena.bytes_touched());
    const auto lease = s.lease(block);
    for (size_t i = 0; i < size; i += kPage) REQUIRE(lease->data()[i] == char(size % 251));
    CHECK_EQ(huge_bytes(lease->data()), whole);
  }
}

TEST(where_the_first_huge_page_is_dear_the_others_are_small) {
  if (!has_huge_pages()) return;
  for (size_t size : {6 * kMiB, 18 * kMiB, 42 * kMiB}) {
    const auto file = std::make_shared<const Fd>(make_memfd("conveyor-arena", size));
    const Mapping mapping(file, 0, size);
    CHECK(populate(mapping.base, 0, size, 0));
    const size_t there = huge_bytes(mapping.base), most = 4 * kHugePage;  // one for each thread
    CHECK(there != 0);
    CHECK(there <= most);
    CHECK(there < size);
    CHECK(all_zero(mapping.base, size));
    struct stat s;
    REQUIRE(::fstat(file->get(), &s) == 0);
    CHECK_EQ(size_t(s.st_blocks) * 512, size);
  }
}

TEST(no_page_costs_more_than_the_block_has_requested_for) {
  Setup s(size_t(2) << 30);
  std::vector<Block*> blocks;
  for (size_t size : {kHugePage - 1'000, kHugePage, kHugePage + 5'000, 3 * kMiB, 9 * kMiB, 30 * kMiB + 1, 64 * kMiB}) {
    for (int i = 0; i < 3; ++i) blocks.push_back(s.arena.allocate(size));
    CHECK_EQ(s.memory(), s.arena.bytes_touched());
  }
  for (Block* block : blocks) {
    CHECK(all_zero(block->data(), block->used - kBlockHeader));
    s.arena.release(block);
  }
  s.arena.give_back(0);
  CHECK_EQ(s.memory(), 0u);
  CHECK_EQ(s.arena.bytes_touched(), 0u);
}

// A value that is larger than the one before it in the same block.
TEST(memory_that_is_there_keeps_what_it_holds) {
  Setup s;
  Block* block = s.arena.allocate(5 * kMiB - 2 * kBlockHeader);
  std::memset(block->data(), 7, 4 * kMiB + 100);
  const size_t before = block->touched;
  CHECK(populate(block->base, block->offset, block->touched));
  for (size_t i = 0; i < 4 * kMiB + 100; ++i) REQUIRE(block->data()[i] == 7);
  CHECK(all_zero(block->data() + 4 * kMiB + 100, before - kBlockHeader - 4 * kMiB - 100));
  CHECK_EQ(s.memory(), before);
  s.arena.release(block);
  Block* larger = s.arena.allocate(block->capacity());
  CHECK(larger == block);
  CHECK_EQ(s.memory(), s.arena.bytes_touched());
}

TEST(where_huge_pages_are_refused_there_are_small_ones) {
  const bool has = has_huge_pages();
  check::Child refused([has] {
    REQUIRE(::prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0);
    Setup s;
    Block* block = s.publish(20 * kMiB);
    CHECK_EQ(s.memory(), s.arena.bytes_touched());
    CHECK_EQ(huge_bytes(block->base), 0u);
    // Which is remembered: for a second nothing is tried.
    REQUIRE(::prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0) == 0);
    block = s.publish(20 * kMiB);
    if (!check::kThreadSanitizer) CHECK_EQ(huge_bytes(block->base), 0u);
      if (has) CHECK(check::soon([&] {
      Setup again;
      return huge_bytes(again.publish(20 * kMiB)->base) == 20 * kMiB;
    }));
  });
  CHECK(refused.passed());
}

TEST(a_mapping_needs_no_more_addresses_than_its_own) {
  check::Child limited([] {
    const Fd fd = Arena::create_file(kFile);
    std::ifstream status("/proc/self/statm");
    size_t pages = 0;
    status >> pages;
    const rlim_t enough = pages * kernel_page() + kWindow + kHugePage / 2;
    const rlimit limit{enough, enough};
    REQUIRE(::setrlimit(RLIMIT_AS, &limit) == 0);
    char* base = map_shared(fd.get(), 0, kWindow);
    base[kWindow - 1] = 1;
    ::munmap(base, kWindow);
  });
  CHECK(limited.passed());
}
