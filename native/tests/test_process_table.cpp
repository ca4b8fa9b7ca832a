// The process table: descriptors, deaths, and the slots of processes.
#include "bell_setup.h"

using namespace conveyor;

TEST(eventfds_may_come_and_go_while_others_ring) {
  auto process_table = process_table_of(2);
  std::atomic<bool> stop{false};
  std::thread notifier([&] {
    Waiter waiter(&process_table->slot(1)->doorbell);
    while (!stop.load()) {
      waiter.arm_event(waiter.count());
      process_table->notify(1, 3);
    }
  });
  for (int i = 0; i < 2'000; ++i) {
    const int event = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    process_table->set_eventfd(1, event, uint32_t(i + 1));
    if (i % 2 == 0) process_table->forget_eventfd(1);
    ::close(event);
  }
  stop.store(true);
  notifier.join();
}

TEST(an_eventfd_wakes_only_the_process_that_it_is_of) {
  auto process_table = process_table_of(2);
  Waiter waiter(&process_table->slot(1)->doorbell);
  const int former = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), current = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  auto readable = [](int fd) {
    pollfd p = {fd, POLLIN, 0};
    return ::poll(&p, 1, 0) == 1;
  };
  process_table->set_eventfd(1, former, 1);
  process_table->announce_death(1);
  process_table->prepare(1, "next");
  process_table->slot(1)->condition.store(Condition::kAlive);
  CHECK(waiter.arm_event(waiter.count()));
  const uint32_t alarm = process_table->header()->alarm.load();
  process_table->notify(1, 3);
  CHECK(!readable(former));
  CHECK_EQ(process_table->slot(1)->nudge.load(), 1u);  // the death watch is to do it
  CHECK(process_table->header()->alarm.load() != alarm);
  CHECK_EQ(process_table->slot(1)->doorbell.armed.load(), 1u);
  process_table->set_eventfd(1, current, 2);
  process_table->set_eventfd(1, former, 1);  // an introduction that comes late
  process_table->notify(1, 3);
  CHECK(readable(current));
  CHECK(!readable(former));
  ::close(former);
  ::close(current);
}

// The child has only the thread that forked: what another one held must be free there.
TEST(a_fork_while_others_ring_leaves_nothing_locked) {
  auto process_table = process_table_of(1);
  const int event = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  process_table->set_eventfd(0, event, 1);
  Waiter(&process_table->slot(0)->doorbell).arm_event(0);
  std::atomic<bool> stop{false};
  std::thread notifier([&] {
    while (!stop.load()) {
      process_table->notify(0, 3);
      process_table->set_eventfd(0, event, 1);
    }
  });
  for (int i = 0; i < 100; ++i) {
    check::Child child([&] {
      ::alarm(10);
      process_table->notify(0, 4);
      process_table->forget_eventfd(0);
    });
    if (!CHECK(child.passed())) break;
  }
  stop.store(true);
  notifier.join();
  ::close(event);
}

TEST(a_death_is_announced_once_and_to_the_living) {
  auto process_table = process_table_of(6);
  process_table->slot(1)->condition.store(Condition::kStarting);
  process_table->slot(2)->condition.store(Condition::kFree);
  process_table->slot(3)->condition.store(Condition::kDead);
  process_table->slot(4)->condition.store(Condition::kDying);
  CHECK(process_table->announce_death(4));
  CHECK(!process_table->announce_death(4));
  CHECK_EQ(process_table->header()->deaths.load(), 1u);
  for (uint32_t i = 0; i < 6; ++i) {
    const bool told = process_table->slot(i)->doorbell.ready[0].load() == uint64_t(1) << kAttentionBit;
    CHECK_EQ(told, (i == 0 || i == 1 || i == 5));
  }
  CHECK(process_table->slot(4)->condition.load() == Condition::kDead);
}

TEST(a_death_wakes_all_processes) {
  constexpr uint32_t kProcesses = 4;
  auto process_table = process_table_of(kProcesses + 1);
  std::vector<check::Child> children;
  for (uint32_t i = 0; i < kProcesses; ++i)
    children.emplace_back([&, i] {
      Waiter waiter(&process_table->slot(i)->doorbell);
      for (;;) {
        const uint32_t seen = waiter.count();
        if (process_table->header()->deaths.load() != 0) break;
        if (!waiter.park(seen, now_ns() + kLost)) CHECK(!"nobody woke this process");
      }
      CHECK((process_table->slot(i)->doorbell.ready[0].load() & 1) != 0);
    });
  ::usleep(20'000);
  process_table->announce_death(kProcesses);
  for (auto& child : children) CHECK(child.passed());
}

TEST(the_last_bit_and_the_first_are_their_own) {
  auto process_table = process_table_of(2);
  process_table->notify(0, kDoorbellBits - 1);
  process_table->notify(0, 0);
  process_table->notify(0, 63);
  process_table->notify(0, 64);
  Doorbell& doorbell = process_table->slot(0)->doorbell;
  CHECK_EQ(doorbell.ready[0].load(), uint64_t(1) << 63 | 1);
  CHECK_EQ(doorbell.ready[1].load(), 1u);
  CHECK_EQ(doorbell.ready[kDoorbellWords - 1].load(), uint64_t(1) << 63);
  CHECK_EQ(process_table->slot(1)->doorbell.count.load(), 0u);
}

TEST(a_slot_is_prepared_for_each_process_anew) {
  auto process_table = ProcessTable::create(3);
  CHECK_EQ(process_table->slots(), 3u);
  CHECK(process_table->gone(1, 0));  // free
  process_table->prepare(1, std::string(100, 'x'));
  ProcessTableSlot* slot = process_table->slot(1);
  CHECK_EQ(slot->incarnation.load(), 1u);
  CHECK_EQ(process_table->header()->used.load(), 2u);
  CHECK_EQ(std::strlen(slot->name), sizeof slot->name - 1);
  CHECK(slot->condition.load() == Condition::kStarting);
  CHECK(!process_table->gone(1, 1));
  process_table->notify(1, 9);
  slot->status.execution.store(5);
  process_table->announce_death(1);
  CHECK(process_table->gone(1, 1));
  process_table->prepare(1, "next");
  CHECK_EQ(slot->incarnation.load(), 2u);
  CHECK(process_table->gone(1, 1));  // the slot lives, the one that had it does not
  CHECK(!process_table->gone(1, 2));
  CHECK_EQ(slot->doorbell.count.load(), 0u);
  CHECK_EQ(slot->doorbell.ready[0].load(), 0u);
  CHECK_EQ(slot->status.execution.load(), 0u);
  CHECK_EQ(std::string(slot->name), "next");
}

TEST(a_process_table_is_attached_by_its_descriptor_alone) {
  auto process_table = process_table_of(2);
  auto same = ProcessTable::attach(process_table->fd());
  CHECK_EQ(same->slots(), 2u);
  CHECK_EQ(std::string(same->slot(1)->name), "slot 1");
  same->notify(1, 70);
  CHECK_EQ(process_table->slot(1)->doorbell.ready[1].load(), uint64_t(1) << 6);
  Fd other = make_memfd("no process table", sizeof(ProcessTableHeader));
  CHECK_THROWS(std::system_error, ProcessTable::attach(other.get()));
  Fd small = make_memfd("too small", 8);
  CHECK_THROWS(std::system_error, ProcessTable::attach(small.get()));
  CHECK_THROWS(std::system_error, ProcessTable::attach(-1));
}

TEST(a_process_table_that_says_it_is_larger_is_refused_or_not_believed) {
  auto process_table = ProcessTable::create(4);
  for (uint32_t i = 0; i < 4; ++i) process_table->prepare(i, "");
  auto peer = ProcessTable::attach(process_table->fd());
  peer->header()->slots = 1u << 30;
  peer->header()->used.store(1u << 30);
  CHECK_EQ(process_table->slots(), 4u);
  CHECK(process_table->announce_death(1));
  CHECK_THROWS(std::system_error, ProcessTable::attach(process_table->fd()));
  process_table->close_fds();
}

TEST(shared_memory_cannot_be_resized) {
  auto process_table = process_table_of(1);
  CHECK(::ftruncate(process_table->fd(), 0) != 0);
  CHECK(::ftruncate(process_table->fd(), 1 << 24) != 0);
  CHECK((::fcntl(process_table->fd(), F_GETFD) & FD_CLOEXEC) != 0);
}
