// Life and death under every schedule: a death is announced once, whoever waits wakes, and a process that
// starts while it is announced dead is dead. The death watch is the real one (DeathWatch::run); of the
// kernel, which writes the liveness futex of a thread that ends, there is a line here. See explorer.h.
#include "modelled.h"

using namespace conveyor;

namespace {

struct Deaths : Doorbells {
  std::unique_ptr<DeathWatch> watch;
  std::array<int, 2> announced{};
  Condition last{};

  // Slot 0 waits, slot 1 starts or dies, slot 2 is another that waits.
  void reset() {
    Doorbells::reset();
    announced = {};
    watch.reset();
  }
  void reset_starting() {
    reset();
    process_table->slot(1)->condition.store(Condition::kStarting);
  }
  // With a liveness futex that has an owner.
  void reset_watched() {
    reset();
    liveness_futex(process_table->slot(1))->store(1234);
    watch = std::make_unique<DeathWatch>(process_table);
    watch->add(1);
  }
  // One in its main thread until the end of the body.
  void start() {
    process_table->live(1);
    last = process_table->slot(1)->condition.load();
  }
  void end_of_thread() { pthread_mutex_unlock(&process_table->slot(1)->life); }
  void wait_for_a_death(uint32_t slot) {
    Waiter waiter(&doorbell(slot));
    for (;;) {
      const uint32_t seen = waiter.count();
      if (process_table->header()->deaths.load() != 0) return;
      waiter.park(seen, 0);
    }
  }
  // What the kernel does when the thread that holds the liveness futex ends.
  void die() {
    auto* word = liveness_futex(process_table->slot(1));
    const uint32_t before = word->exchange(FUTEX_OWNER_DIED);
    if (before & FUTEX_WAITERS) futex_wake_all(word);
  }
  bool is_dead(uint32_t slot) { return process_table->slot(slot)->condition.load() == Condition::kDead; }
  uint32_t deaths() { return process_table->header()->deaths.load(); }
};

}  // namespace

// The harness itself: a body is killed before and behind each of its steps, and does nothing any more.
TEST(what_is_killed_stops_at_any_of_its_steps) {
  Doorbells b;
  model::Atomic<int> x{0}, y{0};
  model::Mutex mutex;
  using Seen = std::set<std::pair<int, int>>;
  for (const bool buffers : {false, true})
    for (const int preemptions : {1, 5, model::kAll}) {
      Seen seen;
      const auto order = buffers ? std::memory_order_relaxed : std::memory_order_seq_cst;
      const auto look = [&] {
        const int first = x.load();
        return std::pair(first, y.load());
      };
      Scene scene{&b, {[&] { x.store(1, order), y.store(1, order), x.store(2, order); },
                       [&] {
                         model::explorer->kill(1);
                         const auto at = look();
                         if (look() != at) throw model::Wrong{"goes on behind its death"};
                         seen.insert(at);
                       }},
                  [&] { x.store(0), y.store(0); }};
      scene.buffers = buffers;
      scene.holds(preemptions, 4);
      CHECK((seen == Seen{{0, 0}, {1, 0}, {1, 1}, {2, 1}}));
    }
  // What the dead has locked stays so.
  const Scene locked{&b, {[&] { mutex.lock(), mutex.unlock(); }, [&] { model::explorer->kill(1), mutex.lock(), mutex.unlock(); }},
                     [&] { mutex.unlock(); }};
  CHECK(locked.fails(model::Fault::kNone, "", nullptr, 1));
  CHECK(locked.fails(model::Fault::kNone, "", nullptr, model::kAll));
}

TEST(two_announce_one_death) {
  Deaths d;
  const Scene scene{&d, {[&] { d.announced[0] = d.process_table->announce_death(1); }, [&] { d.announced[1] = d.process_table->announce_death(1); },
                         [&] { d.wait_for_a_death(0); }},
                    [&] { d.reset(); }, [&] { return d.announced[0] + d.announced[1] == 1 && d.deaths() == 1 && d.is_dead(1); }};
  scene.holds(kThorough ? model::kAll : 2, 20);
  CHECK(scene.fails(kOmitted, "exchange", &d.process_table->slot(1)->condition));
  CHECK(scene.fails(kOmitted, "fetch_add", &d.process_table->header()->deaths));
  CHECK(scene.fails(kOmitted, "fetch_add", &d.doorbell(0).count));
}

TEST(every_waiter_wakes_at_a_death) {
  Deaths d;
  const Scene scene{&d, {[&] { d.wait_for_a_death(0); }, [&] { d.wait_for_a_death(2); }, [&] { d.process_table->announce_death(1); }}, [&] { d.reset(); },
                    [&] { return d.deaths() == 1; }};
  scene.holds(kThorough ? model::kAll : 2, 20);
  CHECK(scene.fails(kOmitted, "fetch_add", &d.doorbell(2).sleepers));
  CHECK(scene.fails(kOmitted, "futex wake", &d.doorbell(2).count));
  CHECK(scene.fails(kOmitted, "fetch_add", &d.process_table->header()->deaths));
}

// A notifier that dies before it has woken anybody: whoever sleeps, in the futex or in poll, wakes at its
// death at the latest, and finds what it had published.
TEST(a_ringer_that_dies_half_way_leaves_nobody_asleep) {
  Deaths d;
  OtherProcess notifier(d);
  Fd event(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  std::unique_ptr<Inbox> inbox;
  const Scene scene{&d, {[&] {
                           for (;;) {
                             const uint32_t seen = inbox->count();
                             if (d.process_table->header()->deaths.load() != 0) return;
                             wait(*inbox, seen, 0);
                           }
                         },
                         [&] { notifier.process_table->notify(0, 3); }, [&] { d.process_table->announce_death(1); }, [&] { d.wait_for_a_death(0); }},
                    [&] {
                      d.reset();
                      uint64_t n;
                      while (::read(event.get(), &n, sizeof n) > 0) {
                      }
                      const uint32_t incarnation = d.process_table->slot(0)->incarnation.load();
                      d.process_table->set_eventfd(0, event.get(), incarnation);
                      notifier.knows(0, event.get(), incarnation);
                      inbox = std::make_unique<Inbox>(d.process_table, 0, event.get(), 1ul);
                    },
                    [] { return true; }, 0, [&]() -> std::vector<model::Explorer::Alias> { return {notifier.alias(d)}; }, 1u << 1};
  scene.holds(1, 20);
  CHECK(scene.fails(kOmitted, "futex wake", &d.doorbell(0).count, 1));
  CHECK(scene.fails(kOmitted, "store", &d.doorbell(0).armed, 1));
}

TEST(a_process_that_starts_while_it_is_announced_dead_is_dead) {
  Deaths d;
  const Scene scene{&d, {[&] { d.start(), d.end_of_thread(); }, [&] { d.announced[0] = d.process_table->announce_death(1); }, [&] { d.wait_for_a_death(0); }},
                    [&] { d.reset_starting(); }, [&] { return d.announced[0] == 1 && d.is_dead(1) && d.deaths() == 1; }};
  scene.holds(kThorough ? model::kAll : 2, 20);
  // Were the condition stored and not exchanged, the dead would live again.
  CHECK(scene.fails(kOmitted, "compare_exchange", &d.process_table->slot(1)->condition));
}

TEST(the_watch_sees_an_actor_die_and_wakes_who_waits) {
  Deaths d;
  const Scene scene{&d, {[&] { d.wait_for_a_death(0); }, [&] { d.die(); }, [&] { model::started(); }}, [&] { d.reset_watched(); },
                    [&] { return d.is_dead(1) && d.deaths() == 1; }, 1};
  scene.holds(kThorough ? model::kAll : 2, 20);
  CHECK(scene.fails(kOmitted, "futex wake", liveness_futex(d.process_table->slot(1))));
}

TEST(the_watch_and_another_see_the_same_death) {
  Deaths d;
  const Scene scene{&d, {[&] { d.wait_for_a_death(0); }, [&] { d.die(), d.process_table->announce_death(1); }, [&] { model::started(); }},
                    [&] { d.reset_watched(); }, [&] { return d.is_dead(1) && d.deaths() == 1; }, 1};
  scene.holds(kThorough ? model::kAll : 1, 20);
}

// An actor is watched from the moment it has taken its liveness futex, also before it says that it lives.
TEST(an_actor_that_dies_right_after_its_start_is_seen) {
  Deaths d;
  auto reset = [&] {
    d.reset();
    liveness_futex(d.process_table->slot(1))->store(0);
    d.process_table->slot(1)->condition.store(Condition::kStarting);
    d.watch = std::make_unique<DeathWatch>(d.process_table);
    d.watch->add(1);
  };
  const Scene scene{&d, {[&] { d.wait_for_a_death(0); },
                           [&] {
                             ProcessTableSlot* slot = d.process_table->slot(1);
                             auto* word = liveness_futex(slot);
                             word->store(1234);  // ProcessTable::live, but that the lock is of this thread, which lives on
                             d.process_table->header()->alarm.fetch_add(1);
                             futex_wake_all(&d.process_table->header()->alarm);
                             Condition starting = Condition::kStarting;
                             slot->condition.compare_exchange_strong(starting, Condition::kAlive);
                             d.die();
                           },
                           [&] { model::started(); }},
                      reset, [&] { return d.is_dead(1) && d.deaths() == 1; }, 1};
  scene.holds(kThorough ? model::kAll : 2, 20);
  CHECK(scene.fails(kOmitted, "fetch_add", &d.process_table->header()->alarm));
  CHECK(scene.fails(kOmitted, "futex wake", &d.process_table->header()->alarm));
}

// A notifier that has no descriptor of a sleeper in poll asks the watch to wake it.
TEST(a_nudge_reaches_who_sleeps_in_poll) {
  Deaths d;
  Fd event(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  model::Atomic<int> published{0};
  // The notifier's own view of the process table, without the descriptor; the watch's has it.
  OtherProcess stranger(d);
  auto& other = stranger.process_table;
  const Scene scene{&d, {[&] {
                           Waiter waiter(&d.doorbell(1));
                           for (;;) {
                             const uint32_t seen = waiter.count();
                             if (published.load() != 0) return;
                             if (!waiter.arm_event(seen)) continue;
                             pollfd p = {event.get(), POLLIN, 0};
                             model::poll_events(&p, 1, nullptr, nullptr);
                             uint64_t n;
                             (void)!model::read_event(event.get(), &n, sizeof n);
                           }
                         },
                         [&] { published.store(1), other->notify(1, 3); }, [&] { model::started(); }},
                    [&] {
                      d.reset_watched();
                      d.process_table->set_eventfd(1, event.get(), d.process_table->slot(1)->incarnation.load());
                      published.store(0);
                      uint64_t n;
                      while (::read(event.get(), &n, sizeof n) > 0) {
                      }
                    },
                    [&] { return !d.is_dead(1); }, 1,
                    [&]() -> std::vector<model::Explorer::Alias> { return {stranger.alias(d)}; }};
  scene.holds(kThorough ? model::kAll : 2, 20);
  CHECK(scene.fails(kOmitted, "fetch_add", &other->header()->alarm));
  CHECK(scene.fails(kOmitted, "store", &other->slot(1)->nudge));
  CHECK(scene.fails(kLate, "store", &d.doorbell(1).armed));
}
