// The doorbell: no ring is lost, whoever rings and however the other side sleeps; deadlines; the
// board's slots. (test_interleavings.cpp searches the schedules that a run like this meets by chance.)
#include <poll.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <functional>
#include <thread>
#include <vector>

#include "board.h"
#include "check.h"
#include "waiter.h"

using namespace conveyor;

namespace {

constexpr uint64_t kMs = 1'000'000;
// A sleep that is not ended by a ring ends here, and is noted as a lost wake-up.
constexpr uint64_t kLost = 20'000 * kMs;

std::shared_ptr<Board> board_of(uint32_t slots) {
  auto board = Board::create(slots);
  for (uint32_t i = 0; i < slots; ++i) {
    board->prepare(i, "slot " + std::to_string(i));
    board->slot(i)->condition.store(Condition::kAlive);
  }
  return board;
}

// Memory that forked processes share.
template <class T>
struct Shared {
  Shared() : at(static_cast<T*>(::mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {}
  ~Shared() { ::munmap(static_cast<void*>(at), sizeof(T)); }
  T* operator->() const { return at; }
  T* at;
};

enum class How { kSpin, kFutex, kPoll };

// Sleeps until the count differs from `seen`.
bool sleep_once(Board& board, uint32_t slot, Waiter& waiter, uint32_t seen, How how, int event) {
  const uint64_t deadline = now_ns() + kLost;
  Bell& bell = board.slot(slot)->bell;
  switch (how) {
    case How::kSpin: {
      const uint64_t start = now_ns();
      if (waiter.spin(seen, start)) return true;
      const bool moved = waiter.park(seen, deadline);
      waiter.learn_parked(start);
      return moved;
    }
    case How::kFutex:
      return waiter.park(seen, deadline);
    case How::kPoll:
      while (waiter.arm_event(seen)) {
        if (now_ns() > deadline) return false;
        pollfd p = {event, POLLIN, 0};
        const timespec left = to_timespec(kLost);
        if (::ppoll(&p, 1, &left, nullptr) == 1) {
          uint64_t n;
          waiter.disarm_event();
          CHECK(::read(event, &n, sizeof n) == sizeof n || errno == EAGAIN);
        }
      }
      return bell.count.load() != seen;
  }
  return false;
}

// What ringers publish: for each bit a number that only grows, counted before the ring.
struct Published {
  std::array<std::atomic<uint64_t>, kBellBits> number;
};

void ring_at_random(Board& board, uint32_t slot, Published& published, uint64_t seed, int times) {
  check::Random random(seed);
  for (int i = 0; i < times; ++i) {
    // Few bits most of the time, so that ringers meet.
    const auto bit = uint32_t(random.below(4) != 0 ? random.below(3) * 64 : random.below(kBellBits));
    published.number[bit].fetch_add(1, std::memory_order_relaxed);
    board.ring(slot, bit);
    if (random.below(16) == 0) ::sched_yield();
    if (random.below(256) == 0) ::usleep(50);  // let the waiter fall asleep
  }
}

// Takes ready bits until all of `total` publications were seen through them.
void take_all(Board& board, uint32_t slot, Published& published, uint64_t total, How how, int event) {
  Bell& bell = board.slot(slot)->bell;
  Waiter waiter(&bell);
  std::vector<uint64_t> seen_number(kBellBits);
  uint64_t sum = 0;
  for (;;) {
    const uint32_t seen = waiter.count();
    for (uint32_t word = 0; word < kBellWords; ++word) {
      uint64_t bits = bell.ready[word].exchange(0, std::memory_order_acquire);
      for (; bits != 0; bits &= bits - 1) {
        const uint32_t bit = word * 64 + uint32_t(__builtin_ctzll(bits));
        const uint64_t number = published.number[bit].load(std::memory_order_relaxed);
        CHECK(number >= seen_number[bit]);
        sum += number - seen_number[bit];
        seen_number[bit] = number;
      }
    }
    if (sum >= total) break;
    if (!sleep_once(board, slot, waiter, seen, how, event)) {
      CHECK(!"a ring was lost");
      return;
    }
  }
  CHECK_EQ(sum, total);
}

void many_ringers(bool processes, How how) {
  constexpr int kRingers = 4;
  const int times = check::kThreadSanitizer ? 5'000 : 20'000;
  auto board = board_of(1);
  Shared<Published> published;
  const int event = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  board->set_eventfd(0, event, 1);
  auto ringer = [&](uint64_t seed) { ring_at_random(*board, 0, *published.at, seed, times); };
  const uint64_t total = uint64_t(kRingers) * uint64_t(times);
  if (processes) {
    std::vector<check::Child> children;
    for (int i = 0; i < kRingers; ++i) children.emplace_back([&] { ringer(uint64_t(i)); });
    take_all(*board, 0, *published.at, total, how, event);
    for (auto& child : children) CHECK(child.passed());
  } else {
    std::vector<std::thread> threads;
    for (int i = 0; i < kRingers; ++i) threads.emplace_back([&, i] { ringer(uint64_t(i)); });
    take_all(*board, 0, *published.at, total, how, event);
    for (auto& thread : threads) thread.join();
  }
  ::close(event);
}

}  // namespace

TEST(no_ready_bit_is_lost_between_threads_spinning) { many_ringers(false, How::kSpin); }
TEST(no_ready_bit_is_lost_between_threads_parked) { many_ringers(false, How::kFutex); }
TEST(no_ready_bit_is_lost_between_threads_polling) { many_ringers(false, How::kPoll); }
TEST(no_ready_bit_is_lost_between_processes_spinning) { many_ringers(true, How::kSpin); }
TEST(no_ready_bit_is_lost_between_processes_parked) { many_ringers(true, How::kFutex); }
TEST(no_ready_bit_is_lost_between_processes_polling) { many_ringers(true, How::kPoll); }

namespace {

// Two processes ring each other in turn: every ring meets a sleeper, or one about to sleep.
void ping_pong(How how, int times) {
  auto board = board_of(2);
  int events[2];
  for (uint32_t i = 0; i < 2; ++i) {
    events[i] = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    board->set_eventfd(i, events[i], 1);
  }
  auto play = [&](uint32_t me) {
    Bell& bell = board->slot(me)->bell;
    Waiter waiter(&bell);
    for (int i = 0; i < times; ++i) {
      if (me == 0) board->ring(1, 7);
      for (;;) {
        const uint32_t seen = waiter.count();
        if (bell.ready[0].exchange(0, std::memory_order_acquire) != 0) break;
        if (!sleep_once(*board, me, waiter, seen, how, events[me])) {
          CHECK(!"a ring was lost");
          return;
        }
      }
      if (me == 1) board->ring(0, 7);
    }
  };
  check::Child other([&] { play(1); });
  play(0);
  CHECK(other.passed());
  for (int event : events) ::close(event);
}

}  // namespace

TEST(processes_ring_each_other_in_turn_parked) { ping_pong(How::kFutex, 20'000); }
TEST(processes_ring_each_other_in_turn_polling) { ping_pong(How::kPoll, 10'000); }
TEST(processes_ring_each_other_in_turn_spinning) { ping_pong(How::kSpin, 20'000); }

// Sleepers of both kinds on one bell: a ring wakes every one of them. The next round begins when all
// have seen this one.
TEST(a_ring_wakes_everybody_who_sleeps_on_the_bell) {
  constexpr int kSleepers = 4, kRounds = 2'000;
  auto board = board_of(1);
  int event = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  board->set_eventfd(0, event, 1);
  std::atomic<int> round{0}, reached{0};
  Bell& bell = board->slot(0)->bell;
  std::vector<std::thread> sleepers;
  for (int s = 0; s < kSleepers; ++s)
    sleepers.emplace_back([&, s] {
      Waiter waiter(&bell);
      for (int known = 0; known < kRounds;) {
        const uint32_t seen = waiter.count();
        if (round.load(std::memory_order_acquire) != known) {
          ++known;
          reached.fetch_add(1, std::memory_order_acq_rel);
          continue;
        }
        if (!sleep_once(*board, 0, waiter, seen, s == 0 ? How::kPoll : s == 1 ? How::kSpin : How::kFutex, event)) {
          CHECK(!"a ring was lost");
          return;
        }
      }
    });
  for (int i = 1; i <= kRounds && check::failures() == 0; ++i) {
    round.store(i, std::memory_order_release);
    board->ring(0, 1);
    while (reached.load(std::memory_order_acquire) < i * kSleepers && check::failures() == 0) ::sched_yield();
  }
  for (auto& sleeper : sleepers) sleeper.join();
  ::close(event);
}

// Several processes, each with a bell of its own, all ringing all.
TEST(processes_ring_each_other_at_random) {
  constexpr uint32_t kProcesses = 4;
  constexpr int kTimes = 4'000;
  auto board = board_of(kProcesses);
  Shared<std::array<Published, kProcesses>> published;
  std::vector<check::Child> children;
  for (uint32_t me = 0; me < kProcesses; ++me)
    children.emplace_back([&, me] {
      std::thread ringer([&] {
        for (uint32_t to = 0; to < kProcesses; ++to)
          if (to != me) ring_at_random(*board, to, (*published.at)[to], me * kProcesses + to, kTimes);
      });
      take_all(*board, me, (*published.at)[me], (kProcesses - 1) * kTimes, me % 2 != 0 ? How::kSpin : How::kFutex, -1);
      ringer.join();
    });
  for (auto& child : children) CHECK(child.passed());
}

TEST(a_bit_carries_what_was_written_before_it) {
  // Plain memory: ThreadSanitizer tells if the bit's order did not carry it.
  auto board = board_of(2);
  int value = 0;
  std::thread other([&] {
    Waiter waiter(&board->slot(1)->bell);
    for (int i = 1; i <= 2'000; ++i) {
      for (;;) {
        const uint32_t seen = waiter.count();
        if (board->slot(1)->bell.ready[2].exchange(0, std::memory_order_acquire) != 0) break;
        if (!waiter.spin(seen, now_ns())) waiter.park(seen, 0);
      }
      CHECK_EQ(value, i);
      board->ring(0, 130);
    }
  });
  Waiter waiter(&board->slot(0)->bell);
  for (int i = 1; i <= 2'000; ++i) {
    value = i;
    board->ring(1, 130);
    for (;;) {
      const uint32_t seen = waiter.count();
      if (board->slot(0)->bell.ready[2].exchange(0, std::memory_order_acquire) != 0) break;
      waiter.park(seen, 0);
    }
  }
  other.join();
}

TEST(a_deadline_is_kept) {
  auto board = board_of(1);
  Waiter waiter(&board->slot(0)->bell);
  const uint32_t seen = waiter.count();
  for (uint64_t wait : {uint64_t(0), 5 * kMs, 30 * kMs}) {
    const uint64_t start = now_ns();
    CHECK(!waiter.park(seen, start + wait));
    const uint64_t took = now_ns() - start;
    CHECK(took >= wait);
    CHECK(took < wait + 2'000 * kMs);  // a busy machine
  }
  CHECK(!waiter.park(seen, 1));  // long past
  board->ring(0, 5);
  CHECK(waiter.park(seen, 1));  // what has happened counts, however late it is
  CHECK(waiter.park(seen, 0));
  CHECK(waiter.count() != seen);
}

TEST(a_ring_before_the_deadline_ends_the_sleep) {
  auto board = board_of(1);
  Waiter waiter(&board->slot(0)->bell);
  const uint32_t seen = waiter.count();
  const uint64_t start = now_ns();
  std::thread ringer([&] {
    ::usleep(20'000);
    board->ring(0, 5);
  });
  CHECK(waiter.park(seen, start + kLost));
  CHECK(now_ns() - start < kLost / 2);
  ringer.join();
}

TEST(a_sleep_survives_rings_of_other_bells_and_signals) {
  auto board = board_of(2);
  struct sigaction action = {}, before;
  action.sa_handler = [](int) {};
  ::sigaction(SIGUSR1, &action, &before);
  const pthread_t sleeper = ::pthread_self();
  std::thread other([&] {
    for (int i = 0; i < 20; ++i) {
      ::usleep(1'000);
      board->ring(1, 5);
      ::pthread_kill(sleeper, SIGUSR1);
    }
  });
  Waiter waiter(&board->slot(0)->bell);
  const uint64_t start = now_ns();
  CHECK(!waiter.park(waiter.count(), start + 40 * kMs));
  CHECK(now_ns() - start >= 40 * kMs);
  other.join();
  ::sigaction(SIGUSR1, &before, nullptr);
}

// How long a spin lasts depends on the machine's load too, so only its bounds can be told.
TEST(spinning_ends) {
  auto board = board_of(1);
  Waiter waiter(&board->slot(0)->bell);
  const uint32_t seen = waiter.count();
  auto shortest = [&] {
    uint64_t least = UINT64_MAX;
    for (int i = 0; i < 20; ++i) {
      const uint64_t start = now_ns();
      CHECK(!waiter.spin(seen, start));
      least = std::min(least, now_ns() - start);
    }
    return least;
  };
  CHECK(shortest() < 100 * kMs);
  for (int i = 0; i < 10; ++i) waiter.learn_parked(now_ns() - 1'000 * kMs);  // long sleeps
  CHECK(shortest() < kMaxSpinNs);
  board->ring(0, 1);
  CHECK(waiter.spin(seen, now_ns()));  // what has happened is seen with any budget
  CHECK(!waiter.spin(waiter.count(), now_ns()));
}

TEST(arming_tells_a_count_that_has_moved) {
  auto board = board_of(1);
  Waiter waiter(&board->slot(0)->bell);
  const int event = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  board->set_eventfd(0, event, 1);
  auto readable = [&] {
    pollfd p = {event, POLLIN, 0};
    return ::poll(&p, 1, 0) == 1;
  };
  const uint32_t seen = waiter.count();
  board->ring(0, 1);
  CHECK(!readable());  // nobody had armed
  CHECK(!waiter.arm_event(seen));
  CHECK(waiter.arm_event(waiter.count()));
  CHECK(!readable());
  board->ring(0, 1);
  CHECK(readable());
  uint64_t n = 0;
  CHECK_EQ(::read(event, &n, sizeof n), ssize_t(sizeof n));
  CHECK_EQ(n, 1u);
  board->ring(0, 1);
  board->ring(0, 1);
  CHECK(readable());  // every ring writes until the sleeper itself takes the flag down
  CHECK_EQ(::read(event, &n, sizeof n), ssize_t(sizeof n));
  CHECK_EQ(n, 2u);
  waiter.disarm_event();
  board->ring(0, 1);
  CHECK(!readable());
  CHECK(waiter.arm_event(waiter.count()));
  board->forget_eventfd(0);
  board->ring(0, 1);  // nowhere to write
  CHECK(!readable());
  ::close(event);
}

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
  CHECK_EQ(board->slot(1)->nudge.load(), 1u);  // the service thread is to do it
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

// A ringer that is stopped at a random moment, for long; what the other one says is heard meanwhile.
TEST(a_stopped_ringer_silences_no_other) {
  constexpr int kRounds = check::kThreadSanitizer ? 40 : 150;
  auto board = board_of(1);
  const int event = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  board->set_eventfd(0, event, 1);
  Shared<std::atomic<uint64_t>> said;
  for (const How how : {How::kPoll, How::kFutex}) {
    said.at->store(0);
    check::Child stopped([&] {
      for (;;) board->ring(0, 1);
    });
    check::Child other([&] {
      Waiter own(&board->slot(0)->bell);
      for (;;) {
        const uint64_t before = said.at->load();
        if (before % 2 == 1) {  // asked for
          said.at->store(before + 1);
          board->ring(0, 2);
        }
        if (before == 2 * kRounds) return;
        ::sched_yield();
      }
    });
    check::Random random(uint64_t(how) + 1);
    Bell& bell = board->slot(0)->bell;
    Waiter waiter(&bell);
    for (uint64_t i = 0; i < kRounds; ++i) {
      // Sleep and wake under its rings for a while, so that it is stopped in the midst of one.
      for (uint64_t n = random.below(20); n > 0; --n)
        if (!CHECK(sleep_once(*board, 0, waiter, waiter.count(), how, event))) break;
      stopped.kill(SIGSTOP);
      int status;
      CHECK(::waitpid(stopped.pid(), &status, WUNTRACED) == stopped.pid() && WIFSTOPPED(status));
      said.at->store(2 * i + 1);
      for (;;) {
        const uint32_t seen = waiter.count();
        if (said.at->load() == 2 * i + 2) break;
        if (!CHECK(sleep_once(*board, 0, waiter, seen, how, event))) break;
      }
      stopped.kill(SIGCONT);
    }
    CHECK(other.passed());
    stopped.kill(SIGKILL);
    stopped.wait();
  }
  ::close(event);
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
