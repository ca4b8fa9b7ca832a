// Values that are read in blocks which their process keeps, under the lease of a frame.
#include <sys/wait.h>

#include <functional>
#include <thread>

#include "arena_setup.h"
#include "arena/view.h"
#include "arena/private_pages.h"

using namespace conveyor;

namespace {

constexpr size_t kLarge = 20 * kMiB, kSmall = 100'000;

// A value that is kept for the readers of a frame, as made_in_place does: its block is released with what is attached.
struct Kept {
  Setup& s;
  Block* value;
  Block* frame;
  std::shared_ptr<std::atomic<bool>> gone = std::make_shared<std::atomic<bool>>(false);

  Kept(Setup& s, size_t size, uint32_t readers = 1) : s(s), value(s.arena.allocate(size)), frame(s.arena.allocate(100)) {
    std::memset(value->data(), 7, size);
    auto attached = std::shared_ptr<const void>(value, [&s, value = value, gone = gone](const void*) {
      s.arena.release(value);
      *gone = true;
    });
    s.arena.publish(frame, s.readers(readers), 0, 0, std::move(attached));
  }
  std::unique_ptr<Borrowed> borrow(uint32_t reader = 0) const { return std::make_unique<Borrowed>(s.lease(frame, reader), *s.view, value->offset, value->size); }
  bool is_there() const {
    s.arena.give_back(0);
    return !*gone;
  }
};

char* data_of(const Borrowed& one) { return one.block() + kBlockHeader; }

}  // namespace

TEST(the_block_stays_as_long_as_it_is_read_there) {
  for (const size_t size : {kSmall, kLarge}) {
    Setup s;
    Kept kept(s, size);
    auto borrowed = kept.borrow();
    CHECK_EQ(data_of(*borrowed)[size - 1], char(7));
    CHECK(kept.is_there());
    Block* other = s.arena.allocate(size);
    CHECK(other != kept.value);
    std::memset(other->data(), 9, size);
    CHECK_EQ(data_of(*borrowed)[size / 2], char(7));
    s.arena.release(other);
    borrowed.reset();
    CHECK(!kept.is_there());
  }
}

TEST(each_reader_keeps_it_until_it_lets_go_or_dies) {
  Setup s;
  Kept kept(s, kLarge, 2);
  auto one = kept.borrow(0), two = kept.borrow(1);
  one.reset();
  CHECK(kept.is_there());
  s.process_table->announce_death(2);
  CHECK(!kept.is_there());
}

TEST(what_its_process_gives_back_meanwhile_is_something_else) {
  Setup s;
  Kept kept(s, kLarge);
  auto borrowed = kept.borrow();
  s.arena.close();
  CHECK(std::all_of(data_of(*borrowed), data_of(*borrowed) + kLarge, [](char c) { return c == 7; }));
  borrowed.reset();
  CHECK(!kept.is_there());
}

TEST(no_block_is_none) {
  Setup s;
  Kept kept(s, kLarge);
  const auto borrow = [&](uint64_t offset, uint64_t size) {
    try {
      Borrowed(s.lease(kept.frame), *s.view, offset, size);
    } catch (const std::system_error&) {
      return false;
    }
    return true;
  };
  CHECK(!borrow(kFile, kLarge));
  CHECK(!borrow(kept.value->offset + kGranule, kGranule));
  CHECK(!borrow(kept.value->offset, 8));
  CHECK(!kept.is_there());  // each of these has had the frame's lease
}

TEST(private_pages_lie_over_it) {
  Setup s;
  Kept kept(s, kLarge);
  {
    std::shared_ptr<Borrowed> borrowed = kept.borrow();
    PrivatePages pages(borrowed, borrowed->mapping(), data_of(*borrowed) + 3, kLarge - 3);
    REQUIRE(pages.data() != nullptr);
    borrowed.reset();
    pages.data()[5] = 1;
    CHECK_EQ(kept.value->data()[8], char(7));
    CHECK_EQ(pages.data()[kLarge - 4], char(7));
    CHECK(kept.is_there());
  }
  CHECK(!kept.is_there());
}

TEST(a_forked_child_keeps_it_for_itself) {
  install_fork_handlers();
  Setup s;
  Kept kept(s, kLarge);
  auto borrowed = kept.borrow();
  int ends[2];
  REQUIRE(::pipe2(ends, O_CLOEXEC) == 0);
  check::Child child([&] {
    ::close(ends[1]);
    char c;
    while (::read(ends[0], &c, 1) < 0 && errno == EINTR) {
    }
    CHECK_EQ(live_leases(), 0u);
    CHECK(std::all_of(data_of(*borrowed), data_of(*borrowed) + kLarge, [](char c) { return c == 7; }));
    borrowed.reset();
  });
  borrowed.reset();
  CHECK(kept.is_there());
  ::close(ends[1]);
  ::close(ends[0]);
  CHECK(child.passed());
  CHECK(check::soon([&] { return !kept.is_there(); }));  // the thread that hears of the child ends it, and nobody else may
}

// The reader lets go while its process looks, sends and frees.
TEST(threads_borrow_while_the_arena_is_used) {
  Setup s;
  for (int round = 0; round < 200; ++round) {
    Kept kept(s, kSmall);
    std::atomic<bool> right{true};
    std::thread reader([&, borrowed = std::shared_ptr<Borrowed>(kept.borrow())]() mutable {
      right = data_of(*borrowed)[kSmall - 1] == 7;
      borrowed.reset();
    });
    while (kept.is_there()) {
      Block* other = s.arena.allocate(kSmall);
      std::memset(other->data(), 9, kSmall);
      s.arena.release(other);
    }
    reader.join();
    CHECK(right);
  }
}
