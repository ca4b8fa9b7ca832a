// The doorbell: no ring is lost, whoever sleeps, and in whatever way.
#include "bell_setup.h"

using namespace conveyor;

TEST(no_ready_bit_is_lost_between_threads_spinning) { many_ringers(false, How::kSpin); }
TEST(no_ready_bit_is_lost_between_threads_parked) { many_ringers(false, How::kFutex); }
TEST(no_ready_bit_is_lost_between_threads_polling) { many_ringers(false, How::kPoll); }
TEST(no_ready_bit_is_lost_between_processes_spinning) { many_ringers(true, How::kSpin); }
TEST(no_ready_bit_is_lost_between_processes_parked) { many_ringers(true, How::kFutex); }
TEST(no_ready_bit_is_lost_between_processes_polling) { many_ringers(true, How::kPoll); }

namespace {

// What another process has to run for takes as long as the machine's other work lets it: after so long it is enough.
constexpr uint64_t kEnough = 10'000 * kMs;

// Two processes ring each other in turn: every ring meets a sleeper, or one about to sleep.
void ping_pong(How how, uint64_t times) {
  auto process_table = process_table_of(2);
  int events[2];
  for (uint32_t i = 0; i < 2; ++i) {
    events[i] = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    process_table->set_eventfd(i, events[i], 1);
  }
  auto play = [&](uint32_t me) {
    Doorbell& doorbell = process_table->slot(me)->doorbell;
    Waiter waiter(&doorbell);
    const uint64_t enough = now_ns() + kEnough;
    constexpr uint32_t kNext = 7, kLast = 8;
    for (uint64_t bits = 0, i = 1; (bits >> kLast) == 0; ++i) {
      if (me == 0) process_table->notify(1, i == times || now_ns() > enough ? kLast : kNext);
      for (;;) {
        const uint32_t seen = waiter.count();
        if ((bits = doorbell.ready[0].exchange(0, std::memory_order_acquire)) != 0) break;
        if (!sleep_once(*process_table, me, waiter, seen, how, events[me])) {
          CHECK(!"a ring was lost");
          return;
        }
      }
      if (me == 1) process_table->notify(0, (bits >> kLast) != 0 ? kLast : kNext);
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

// Sleepers of both kinds on one doorbell: a ring wakes every one of them. The next round begins when all
// have seen this one.
TEST(a_ring_wakes_everybody_who_sleeps_on_the_doorbell) {
  constexpr int kSleepers = 4, kRounds = 2'000;
  auto process_table = process_table_of(1);
  int event = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  process_table->set_eventfd(0, event, 1);
  std::atomic<int> round{0}, reached{0};
  Doorbell& doorbell = process_table->slot(0)->doorbell;
  std::vector<std::thread> sleepers;
  for (int s = 0; s < kSleepers; ++s)
    sleepers.emplace_back([&, s] {
      Waiter waiter(&doorbell);
      for (int known = 0; known < kRounds;) {
        const uint32_t seen = waiter.count();
        if (round.load(std::memory_order_acquire) != known) {
          ++known;
          reached.fetch_add(1, std::memory_order_acq_rel);
          continue;
        }
        if (!sleep_once(*process_table, 0, waiter, seen, s == 0 ? How::kPoll : s == 1 ? How::kSpin : How::kFutex, event)) {
          CHECK(!"a ring was lost");
          return;
        }
      }
    });
  for (int i = 1; i <= kRounds && check::failures() == 0; ++i) {
    round.store(i, std::memory_order_release);
    process_table->notify(0, 1);
    while (reached.load(std::memory_order_acquire) < i * kSleepers && check::failures() == 0) ::sched_yield();
  }
  for (auto& sleeper : sleepers) sleeper.join();
  ::close(event);
}

// Several processes, each with a doorbell of its own, all ringing all.
TEST(processes_ring_each_other_at_random) {
  constexpr uint32_t kProcesses = 4;
  constexpr int kTimes = 4'000;
  auto process_table = process_table_of(kProcesses);
  Shared<std::array<Published, kProcesses>> published;
  std::vector<check::Child> children;
  for (uint32_t me = 0; me < kProcesses; ++me)
    children.emplace_back([&, me] {
      std::thread notifier([&] {
        for (uint32_t to = 0; to < kProcesses; ++to)
          if (to != me) ring_at_random(*process_table, to, (*published.at)[to], me * kProcesses + to, kTimes);
      });
      take_all(*process_table, me, (*published.at)[me], (kProcesses - 1) * kTimes, me % 2 != 0 ? How::kSpin : How::kFutex, -1);
      notifier.join();
    });
  for (auto& child : children) CHECK(child.passed());
}

TEST(a_bit_carries_what_was_written_before_it) {
  // Plain memory: ThreadSanitizer tells if the bit's order did not carry it.
  auto process_table = process_table_of(2);
  int value = 0;
  std::thread other([&] {
    Waiter waiter(&process_table->slot(1)->doorbell);
    for (int i = 1; i <= 2'000; ++i) {
      for (;;) {
        const uint32_t seen = waiter.count();
        if (process_table->slot(1)->doorbell.ready[2].exchange(0, std::memory_order_acquire) != 0) break;
        if (!waiter.spin(seen, now_ns())) waiter.park(seen, 0);
      }
      CHECK_EQ(value, i);
      process_table->notify(0, 130);
    }
  });
  Waiter waiter(&process_table->slot(0)->doorbell);
  for (int i = 1; i <= 2'000; ++i) {
    value = i;
    process_table->notify(1, 130);
    for (;;) {
      const uint32_t seen = waiter.count();
      if (process_table->slot(0)->doorbell.ready[2].exchange(0, std::memory_order_acquire) != 0) break;
      waiter.park(seen, 0);
    }
  }
  other.join();
}

TEST(a_deadline_is_kept) {
  auto process_table = process_table_of(1);
  Waiter waiter(&process_table->slot(0)->doorbell);
  const uint32_t seen = waiter.count();
  for (uint64_t wait : {uint64_t(0), 5 * kMs, 30 * kMs}) {
    const uint64_t start = now_ns();
    CHECK(!waiter.park(seen, start + wait));
    const uint64_t took = now_ns() - start;
    CHECK(took >= wait);
    CHECK(took < wait + kLost / 2);  // the machine may have other work
  }
  CHECK(!waiter.park(seen, 1));  // long past
  process_table->notify(0, 5);
  CHECK(waiter.park(seen, 1));  // what has happened counts, however late it is
  CHECK(waiter.park(seen, 0));
  CHECK(waiter.count() != seen);
}

TEST(a_ring_before_the_deadline_ends_the_sleep) {
  auto process_table = process_table_of(1);
  Waiter waiter(&process_table->slot(0)->doorbell);
  const uint32_t seen = waiter.count();
  const uint64_t start = now_ns();
  std::thread notifier([&] {
    ::usleep(20'000);
    process_table->notify(0, 5);
  });
  CHECK(waiter.park(seen, start + kLost));
  CHECK(now_ns() - start < kLost / 2);
  notifier.join();
}

TEST(a_sleep_survives_rings_of_other_doorbells_and_signals) {
  auto process_table = process_table_of(2);
  struct sigaction action = {}, before;
  action.sa_handler = [](int) {};
  ::sigaction(SIGUSR1, &action, &before);
  const pthread_t sleeper = ::pthread_self();
  std::thread other([&] {
    for (int i = 0; i < 20; ++i) {
      ::usleep(1'000);
      process_table->notify(1, 5);
      ::pthread_kill(sleeper, SIGUSR1);
    }
  });
  Waiter waiter(&process_table->slot(0)->doorbell);
  const uint64_t start = now_ns();
  CHECK(!waiter.park(waiter.count(), start + 40 * kMs));
  CHECK(now_ns() - start >= 40 * kMs);
  other.join();
  ::sigaction(SIGUSR1, &before, nullptr);
}

// How long a spin lasts depends on the machine's load too: each turn of it gives the core away, to whoever wants it
// for as long as they want it. So its own work is counted.
TEST(spinning_ends) {
  auto process_table = process_table_of(1);
  Waiter waiter(&process_table->slot(0)->doorbell);
  const uint32_t seen = waiter.count();
  auto worked = [] {
    timespec at;
    ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &at);
    return uint64_t(at.tv_sec) * 1'000 * kMs + uint64_t(at.tv_nsec);
  };
  auto shortest = [&] {
    uint64_t least = UINT64_MAX;
    for (int i = 0; i < 20; ++i) {
      const uint64_t before = worked();
      CHECK(!waiter.spin(seen, now_ns()));
      least = std::min(least, worked() - before);
    }
    return least;
  };
  CHECK(shortest() < 100 * kMs);
  for (int i = 0; i < 10; ++i) waiter.learn_parked(now_ns() - 1'000 * kMs);  // long sleeps
  CHECK(shortest() < kMaxSpinNs / 2);
  process_table->notify(0, 1);
  CHECK(waiter.spin(seen, now_ns()));  // what has happened is seen with any budget
  CHECK(!waiter.spin(waiter.count(), now_ns()));
}

TEST(arming_tells_a_count_that_has_moved) {
  auto process_table = process_table_of(1);
  Waiter waiter(&process_table->slot(0)->doorbell);
  const int event = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  process_table->set_eventfd(0, event, 1);
  auto readable = [&] {
    pollfd p = {event, POLLIN, 0};
    return ::poll(&p, 1, 0) == 1;
  };
  const uint32_t seen = waiter.count();
  process_table->notify(0, 1);
  CHECK(!readable());  // nobody had armed
  CHECK(!waiter.arm_event(seen));
  CHECK(waiter.arm_event(waiter.count()));
  CHECK(!readable());
  process_table->notify(0, 1);
  CHECK(readable());
  uint64_t n = 0;
  CHECK_EQ(::read(event, &n, sizeof n), ssize_t(sizeof n));
  CHECK_EQ(n, 1u);
  process_table->notify(0, 1);
  process_table->notify(0, 1);
  CHECK(readable());  // every ring writes until the sleeper itself takes the flag down
  CHECK_EQ(::read(event, &n, sizeof n), ssize_t(sizeof n));
  CHECK_EQ(n, 2u);
  waiter.disarm_event();
  process_table->notify(0, 1);
  CHECK(!readable());
  CHECK(waiter.arm_event(waiter.count()));
  process_table->forget_eventfd(0);
  process_table->notify(0, 1);  // nowhere to write
  CHECK(!readable());
  ::close(event);
}

// A notifier that is stopped at a random moment, for long; what the other one says is heard meanwhile.
TEST(a_stopped_ringer_silences_no_other) {
  constexpr int kRounds = check::kThreadSanitizer ? 40 : 150;
  auto process_table = process_table_of(1);
  const int event = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  process_table->set_eventfd(0, event, 1);
  Shared<std::atomic<uint64_t>> said;
  for (const How how : {How::kPoll, How::kFutex}) {
    said.at->store(0);
    check::Child stopped([&] {
      for (;;) process_table->notify(0, 1);
    });
    check::Child other([&] {
      Waiter own(&process_table->slot(0)->doorbell);
      for (;;) {
        const uint64_t before = said.at->load();
        if (before % 2 == 1) {  // asked for
          said.at->store(before + 1);
          process_table->notify(0, 2);
        }
        if (before == 2 * kRounds) return;
        ::sched_yield();
      }
    });
    check::Random random(uint64_t(how) + 1);
    Doorbell& doorbell = process_table->slot(0)->doorbell;
    Waiter waiter(&doorbell);
    for (uint64_t i = 0; i < kRounds; ++i) {
      // Sleep and wake under its rings for a while, so that it is stopped in the midst of one.
      for (uint64_t n = random.below(20); n > 0; --n)
        if (!CHECK(sleep_once(*process_table, 0, waiter, waiter.count(), how, event))) break;
      stopped.kill(SIGSTOP);
      int status;
      CHECK(::waitpid(stopped.pid(), &status, WUNTRACED) == stopped.pid() && WIFSTOPPED(status));
      said.at->store(2 * i + 1);
      for (;;) {
        const uint32_t seen = waiter.count();
        if (said.at->load() == 2 * i + 2) break;
        if (!CHECK(sleep_once(*process_table, 0, waiter, seen, how, event))) break;
      }
      stopped.kill(SIGCONT);
    }
    CHECK(other.passed());
    stopped.kill(SIGKILL);
    stopped.wait();
  }
  ::close(event);
}
