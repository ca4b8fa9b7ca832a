// The board: descriptors, deaths, and the slots of processes.
#include "bell_setup.h"

using namespace conveyor;

TEST(eventfds_may_come_and_go_while_others_ring) {
  auto board = board_of(2);
  std::atomic<bool> stop{false};
  std::thread ringer([&] {
    Waiter waiter(&board->slot(1)->bell);
    while (!stop.load()) {
      waiter.arm_event(waiter.count());
      board->ring(1, 3);
    }
  });
  for (int i = 0; i < 2'000; ++i) {
    const int event = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    board->set_eventfd(1, event, uint32_t(i + 1));
    if (i % 2 == 0) board->forget_eventfd(1);
    ::close(event);
  }
  stop.store(true);
  ringer.join();
}

TEST(an_eventfd_wakes_only_the_process_that_it_is_of) {
  auto board = board_of(2);
  Waiter waiter(&board->slot(1)->bell);
  const int former = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), current = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  auto readable = [](int fd) {
    pollfd p = {fd, POLLIN, 0};
    return ::poll(&p, 1, 0) == 1;
  };
  board->set_eventfd(1, former, 1);
  board->announce_death(1);
  board->prepare(1, "next");
  board->slot(1)->condition.store(Condition::kAlive);
  CHECK(waiter.arm_event(waiter.count()));
  const uint32_t alarm = board->header()->alarm.load();
  board->ring(1, 3);
  CHECK(!readable(former));
  CHECK_EQ(board->slot(1)->nudge.load(), 1u);  // the death watch is to do it
  CHECK(board->header()->alarm.load() != alarm);
  CHECK_EQ(board->slot(1)->bell.armed.load(), 1u);
  board->set_eventfd(1, current, 2);
  board->set_eventfd(1, former, 1);  // an introduction that comes late
  board->ring(1, 3);
  CHECK(readable(current));
  CHECK(!readable(former));
  ::close(former);
  ::close(current);
}

// The child has only the thread that forked: what another one held must be free there.
TEST(a_fork_while_others_ring_leaves_nothing_locked) {
  auto board = board_of(1);
  const int event = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  board->set_eventfd(0, event, 1);
  Waiter(&board->slot(0)->bell).arm_event(0);
  std::atomic<bool> stop{false};
  std::thread ringer([&] {
    while (!stop.load()) {
      board->ring(0, 3);
      board->set_eventfd(0, event, 1);
    }
  });
  for (int i = 0; i < 100; ++i) {
    check::Child child([&] {
      ::alarm(10);
      board->ring(0, 4);
      board->forget_eventfd(0);
    });
    if (!CHECK(child.passed())) break;
  }
  stop.store(true);
  ringer.join();
  ::close(event);
}

TEST(a_death_is_announced_once_and_to_the_living) {
  auto board = board_of(6);
  board->slot(1)->condition.store(Condition::kStarting);
  board->slot(2)->condition.store(Condition::kFree);
  board->slot(3)->condition.store(Condition::kDead);
  board->slot(4)->condition.store(Condition::kDying);
  CHECK(board->announce_death(4));
  CHECK(!board->announce_death(4));
  CHECK_EQ(board->header()->deaths.load(), 1u);
  for (uint32_t i = 0; i < 6; ++i) {
    const bool told = board->slot(i)->bell.ready[0].load() == uint64_t(1) << kAttentionBit;
    CHECK_EQ(told, (i == 0 || i == 1 || i == 5));
  }
  CHECK(board->slot(4)->condition.load() == Condition::kDead);
}

TEST(a_death_wakes_all_processes) {
  constexpr uint32_t kProcesses = 4;
  auto board = board_of(kProcesses + 1);
  std::vector<check::Child> children;
  for (uint32_t i = 0; i < kProcesses; ++i)
    children.emplace_back([&, i] {
      Waiter waiter(&board->slot(i)->bell);
      for (;;) {
        const uint32_t seen = waiter.count();
        if (board->header()->deaths.load() != 0) break;
        if (!waiter.park(seen, now_ns() + kLost)) CHECK(!"nobody woke this process");
      }
      CHECK((board->slot(i)->bell.ready[0].load() & 1) != 0);
    });
  ::usleep(20'000);
  board->announce_death(kProcesses);
  for (auto& child : children) CHECK(child.passed());
}

TEST(the_last_bit_and_the_first_are_their_own) {
  auto board = board_of(2);
  board->ring(0, kBellBits - 1);
  board->ring(0, 0);
  board->ring(0, 63);
  board->ring(0, 64);
  Bell& bell = board->slot(0)->bell;
  CHECK_EQ(bell.ready[0].load(), uint64_t(1) << 63 | 1);
  CHECK_EQ(bell.ready[1].load(), 1u);
  CHECK_EQ(bell.ready[kBellWords - 1].load(), uint64_t(1) << 63);
  CHECK_EQ(board->slot(1)->bell.count.load(), 0u);
}

TEST(a_slot_is_prepared_for_each_process_anew) {
  auto board = Board::create(3);
  CHECK_EQ(board->slots(), 3u);
  CHECK(board->gone(1, 0));  // free
  board->prepare(1, std::string(100, 'x'));
  BoardSlot* slot = board->slot(1);
  CHECK_EQ(slot->incarnation.load(), 1u);
  CHECK_EQ(board->header()->used.load(), 2u);
  CHECK_EQ(std::strlen(slot->name), sizeof slot->name - 1);
  CHECK(slot->condition.load() == Condition::kStarting);
  CHECK(!board->gone(1, 1));
  board->ring(1, 9);
  slot->status.execution.store(5);
  board->announce_death(1);
  CHECK(board->gone(1, 1));
  board->prepare(1, "next");
  CHECK_EQ(slot->incarnation.load(), 2u);
  CHECK(board->gone(1, 1));  // the slot lives, the one that had it does not
  CHECK(!board->gone(1, 2));
  CHECK_EQ(slot->bell.count.load(), 0u);
  CHECK_EQ(slot->bell.ready[0].load(), 0u);
  CHECK_EQ(slot->status.execution.load(), 0u);
  CHECK_EQ(std::string(slot->name), "next");
}

TEST(a_board_is_attached_by_its_descriptor_alone) {
  auto board = board_of(2);
  auto same = Board::attach(board->fd());
  CHECK_EQ(same->slots(), 2u);
  CHECK_EQ(std::string(same->slot(1)->name), "slot 1");
  same->ring(1, 70);
  CHECK_EQ(board->slot(1)->bell.ready[1].load(), uint64_t(1) << 6);
  Fd other = make_memfd("no board", sizeof(BoardHeader));
  CHECK_THROWS(std::system_error, Board::attach(other.get()));
  Fd small = make_memfd("too small", 8);
  CHECK_THROWS(std::system_error, Board::attach(small.get()));
  CHECK_THROWS(std::system_error, Board::attach(-1));
}

TEST(a_board_that_says_it_is_larger_is_refused_or_not_believed) {
  auto board = Board::create(4);
  for (uint32_t i = 0; i < 4; ++i) board->prepare(i, "");
  auto peer = Board::attach(board->fd());
  peer->header()->slots = 1u << 30;
  peer->header()->used.store(1u << 30);
  CHECK_EQ(board->slots(), 4u);
  CHECK(board->announce_death(1));
  CHECK_THROWS(std::system_error, Board::attach(board->fd()));
  board->close_fds();
}

TEST(shared_memory_cannot_be_resized) {
  auto board = board_of(1);
  CHECK(::ftruncate(board->fd(), 0) != 0);
  CHECK(::ftruncate(board->fd(), 1 << 24) != 0);
  CHECK((::fcntl(board->fd(), F_GETFD) & FD_CLOEXEC) != 0);
}
