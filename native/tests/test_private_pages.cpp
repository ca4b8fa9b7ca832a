// Values that their reader may write to.
#include <fcntl.h>
#include <sys/mman.h>

#include "arena_setup.h"
#include "arena/private_pages.h"

using namespace conveyor;

namespace {

constexpr size_t kSize = 300'000;

struct Value {
  std::shared_ptr<Lease> lease;
  std::unique_ptr<PrivatePages> pages;
  Value(Setup& s, const Block* block, size_t size = kSize) : lease(s.lease(block)), pages(std::make_unique<PrivatePages>(lease, lease->shared_mapping(), lease->data(), size)) {
    REQUIRE(pages->data() != nullptr);
  }
  char* data() const { return pages->data(); }
  bool is_full_of(int byte) const { return std::all_of(data(), data() + kSize, [byte](char c) { return c == char(byte); }); }
};

Block* published(Setup& s, int byte) {
  Block* block = s.arena.allocate(kSize);
  std::memset(block->data(), byte, kSize);
  s.arena.publish(block, s.readers(), 0, 0);
  return block;
}

}  // namespace

TEST(what_a_reader_writes_is_its_own_and_goes_with_the_value) {
  Setup s;
  char* at = nullptr;
  for (int i = 1; i < 6; ++i) {
    Block* block = published(s, i);
    {
      Value value(s, block);
      CHECK(at == nullptr || at == value.data());  // in the pages of the value before
      at = value.data();
      CHECK(value.is_full_of(i));
      if (i % 2 == 0) {
        at[kSize / 2] = 99;
        CHECK_EQ(block->data()[kSize / 2], char(i));
      }
      CHECK(s.is_out(block));
    }
    CHECK(!s.is_out(block));
  }
}

TEST(the_first_and_the_last_page_count) {
  Setup s;
  for (size_t place : {size_t(0), kSize - 1}) {
    Block* block = published(s, 1);
    { Value(s, block).data()[place] = 99; }
    CHECK(!s.is_out(block));
    Block* again = published(s, 2);
    CHECK(again == block);
    CHECK(Value(s, again).is_full_of(2));
    CHECK(!s.is_out(again));
  }
}

TEST(values_in_one_place_at_the_same_time_have_pages_of_their_own) {
  Setup s;
  Block* block = s.arena.allocate(kSize);
  std::memset(block->data(), 1, kSize);
  s.arena.publish(block, s.readers(2), 0, 0);
  auto lease = std::shared_ptr<Lease>(s.lease(block, 0)), other = std::shared_ptr<Lease>(s.lease(block, 1));
  PrivatePages one(lease, lease->shared_mapping(), lease->data(), kSize), two(other, other->shared_mapping(), other->data(), kSize);
  one.data()[5] = 9;
  CHECK_EQ(two.data()[5], 1);
  CHECK(one.data() != two.data());
}

TEST(few_views_are_kept_and_none_of_what_is_closed) {
  const size_t before = mappings();
  {
    Setup s;
    const size_t own = mappings();
    std::vector<Block*> blocks;
    std::vector<std::unique_ptr<Value>> values;
    for (int i = 0; i < 30; ++i) {
      blocks.push_back(published(s, i));
      values.push_back(std::make_unique<Value>(s, blocks.back()));
    }
    CHECK(mappings() >= own + 30);
    auto last = std::move(values.back());
    values.clear();
    CHECK(mappings() <= own + 11);  // the window, twice: the arena's and the reader's; eight that are kept, and the one in use
    last->data()[0] = 5;
    last.reset();
    for (int i = 30; i < 60; ++i) {
      Block* block = published(s, i);
      CHECK(Value(s, block).is_full_of(i));
    }
    auto lease = std::shared_ptr<Lease>(s.lease(published(s, 1)));
    lease->mapping().close_file();
    CHECK(mappings() <= own + 2);
    PrivatePages late(lease, lease->shared_mapping(), lease->data(), kSize);
    CHECK(late.data() != nullptr);  // who has the lease may still read
  }
  CHECK_EQ(mappings(), before);
}

TEST(a_forked_child_keeps_what_it_has_inherited) {
  install_fork_handlers();
  Setup s;
  Block* block = published(s, 1);
  auto value = std::make_unique<Value>(s, block);
  value->data()[7] = 3;
  int ends[2];
  REQUIRE(::pipe2(ends, O_CLOEXEC) == 0);
  check::Child child([&] {
    ::close(ends[1]);
    char c;
    (void)!::read(ends[0], &c, 1);  // until the parent has let go of its own
    CHECK_EQ(value->data()[7], 3);
    CHECK_EQ(value->data()[8], 1);
    value->data()[8] = 4;
    value.reset();
  });
  value.reset();
  Block* next = published(s, 2);
  CHECK(next != block);
  CHECK(Value(s, next).is_full_of(2));
  ::close(ends[0]);
  ::close(ends[1]);
  CHECK(child.passed());
  CHECK(check::soon([&] { return !s.is_out(block); }));
  Block* again = published(s, 5);
  CHECK(Value(s, again).is_full_of(5));
}

// As mlockall does, which would lock all that a sanitizer has mapped as well.
TEST(pages_that_were_locked_while_they_lay_idle_show_the_next_value) {
  Setup s;
  int byte = 0;
  char* at = nullptr;
  const auto look = [&](bool used_before) {
    Block* block = published(s, ++byte);
    Value value(s, block);
    CHECK(!used_before || at == value.data());
    at = value.data();
    CHECK(value.is_full_of(byte));
  };
  const auto mapped = [&] { return reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(at) / kernel_page() * kernel_page()); };
  look(false);
  look(true);
  if (::mlock(mapped(), kSize) != 0) return;  // RLIMIT_MEMLOCK
  look(false);  // a new view: what is locked keeps its pages
  for (int i = 0; i < 3; ++i) {
    look(true);
    REQUIRE(::mlock(mapped(), kSize) == 0 && ::munlock(mapped(), kSize) == 0);
    look(true);  // its pages have gone, and are the file's again
    look(true);
  }
  // While a value is there, to the end of it and after.
  for (const bool unlocked : {false, true}) {
    {
      Value value(s, published(s, ++byte));
      at = value.data();
      REQUIRE(::mlock(mapped(), kSize) == 0);
      if (unlocked) ::munlock(mapped(), kSize);
      CHECK(value.is_full_of(byte));
    }
    look(unlocked);
    look(true);
  }
  REQUIRE(::mlock2(mapped(), kSize, MLOCK_ONFAULT) == 0);
  look(false);
  look(true);
}

TEST(both_ways_of_asking_say_the_same) {
  Setup s;
  const Fd pagemap(::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
  REQUIRE(pagemap.get() >= 0);
  for (const size_t size : {kSize, 20 * kMiB}) {
    Block* block = s.publish(size);
    const size_t mapped = align_up(size, kernel_page());
    for (const size_t written : {size_t(0), size / 2, size - 1}) {
      char* base = static_cast<char*>(map_file(s.file.get(), block->offset, mapped, MAP_PRIVATE));
      REQUIRE(base != MAP_FAILED);
      const auto ask = [&](bool expected) {
        CHECK_EQ(read_as_written(pagemap.get(), base, size), expected);
        const auto scanned = scanned_as_written(pagemap.get(), base, size);
        if (scanned) CHECK_EQ(*scanned, expected);  // else the kernel is older
      };
      ask(false);
      char sum = 0;
      for (size_t at = 0; at < size; at += 4096) sum = char(sum + const_cast<volatile char*>(base)[at]);
      ask(false);  // looked at
      const_cast<volatile char*>(base)[written] = sum;
      ask(true);
      CHECK_EQ(::madvise(base, mapped, MADV_DONTNEED), 0);
      ask(false);
      ::munmap(base, mapped);
    }
  }
}
