// The doorbell under every schedule: nobody who sleeps, in the futex, in poll or in an event loop, sleeps
// through a ring. See explorer.h.
#include "modelled.h"

using namespace conveyor;

namespace {

// What a reader does with its doorbell: take the bits in `wanted`, sleeping while there are none.
void take_bits(Doorbell& doorbell, uint64_t wanted) {
  Waiter waiter(&doorbell);
  for (;;) {
    const uint32_t seen = waiter.count();
    wanted &= ~doorbell.ready[0].exchange(0);
    if (wanted == 0) return;
    waiter.park(seen, 0);
  }
}

struct OneDoorbell : Doorbells {
  model::Atomic<int> published{0};

  void publish(uint32_t bit) {
    published.fetch_add(1);
    process_table->notify(0, bit);
  }
  void wait_for(int enough) {
    Waiter waiter(&doorbell(0));
    for (;;) {
      const uint32_t seen = waiter.count();
      if (published.load() >= enough) return;
      waiter.park(seen, 0);
    }
  }
  void reset() {
    Doorbells::reset();
    published.store(0);
  }
};

// A whole process: its main thread waits in ppoll, others in the futex, event loops on its eventfd.
struct OneProcess : OneDoorbell {
  Fd event{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  Fd relay{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  std::unique_ptr<Inbox> inbox;
  bool has_loop = false;

  void reset() {
    OneDoorbell::reset();
    process_table->set_eventfd(0, event.get(), incarnation());
    uint64_t n;
    while (::read(event.get(), &n, sizeof n) > 0 || ::read(relay.get(), &n, sizeof n) > 0) {
    }
    inbox = std::make_unique<Inbox>(process_table, 0, event.get(), 1ul);  // body 0 is the main thread
    if (has_loop) inbox->add_relay(relay.get());
  }
  uint32_t incarnation() const { return process_table->slot(0)->incarnation.load(); }
  void wait(int enough) {
    for (;;) {
      const uint32_t seen = inbox->count();
      if (published.load() >= enough) return;
      conveyor::wait(*inbox, seen, 0);
    }
  }
  // An asyncio event loop (runtime/aio.py).
  void loop(int enough) {
    for (;;) {
      for (;;) {
        const uint32_t seen = inbox->count();
        if (published.load() >= enough) return inbox->disarm(relay.get());
        if (inbox->arm(seen, relay.get())) break;
      }
      pollfd p[2] = {{event.get(), POLLIN, 0}, {relay.get(), POLLIN, 0}};
      model::poll_events(p, 2, nullptr, nullptr);
      uint64_t n;
      if (p[0].revents != 0) inbox->clear_event(relay.get());
      if (p[1].revents != 0) model::read_event(relay.get(), &n, sizeof n);
    }
  }
};

}  // namespace

// The harness itself: it must find a lost wake-up where there is one, in both searches.
TEST(a_doorbell_that_looks_before_it_counts_is_caught) {
  OneDoorbell b;
  Doorbell& doorbell = b.doorbell(0);
  const Scene scene{&b, {[&] { b.wait_for(1); },
                         [&] {
                           b.published.store(1);
                           const bool wake = doorbell.sleepers.load() != 0;  // the two lines of ProcessTable::notify in
                           doorbell.count.fetch_add(1);                    // the wrong order
                           if (wake) model::system_call(SYS_futex, &doorbell.count, FUTEX_WAKE, 1);
                         }}, [&] { b.reset(); }};
  for (int preemptions : {2, model::kAll}) CHECK(scene.fails(model::Fault::kNone, "", nullptr, preemptions));
}

TEST(one_ringer_one_sleeper) {
  Doorbells b;
  const Scene scene{&b, {[&] { take_bits(b.doorbell(0), 6); }, [&] { b.process_table->notify(0, 1), b.process_table->notify(0, 2); }}, [&] { b.reset(); }};
  scene.holds(model::kAll, 100);
  Doorbell& doorbell = b.doorbell(0);
  CHECK(scene.fails(kOmitted, "fetch_add", &doorbell.sleepers));
  CHECK(scene.fails(kOmitted, "fetch_add", &doorbell.count));
  CHECK(scene.fails(kOmitted, "futex wake", &doorbell.count));
  CHECK(scene.fails(kOmitted, "fetch_or", &doorbell.ready[0]));
  // Were it not sequentially consistent. (The sleeper's own could be: the futex looks at `count` again.)
  CHECK(scene.fails(kLate, "fetch_add", &doorbell.count, 3));
}

TEST(two_ringers_one_sleeper) {
  Doorbells b;
  const Scene scene{&b, {[&] { take_bits(b.doorbell(0), 6); }, [&] { b.process_table->notify(0, 1); }, [&] { b.process_table->notify(0, 2); }}, [&] { b.reset(); }};
  scene.holds(kThorough ? model::kAll : 2, 100);
  CHECK(scene.fails(kLate, "fetch_add", &b.doorbell(0).count));
}

TEST(one_ringer_two_sleepers) {
  OneDoorbell b;
  const Scene scene{&b, {[&] { b.wait_for(1); }, [&] { b.wait_for(1); }, [&] { b.publish(1); }}, [&] { b.reset(); }};
  scene.holds(kThorough ? model::kAll : 2, 100);
  CHECK(scene.fails(kOmitted, "fetch_add", &b.doorbell(0).sleepers));
  // Twice, so that one sleeper may come back while the other still sleeps.
  const Scene twice{&b, {[&] { b.wait_for(2); }, [&] { b.wait_for(2); }, [&] { b.publish(1), b.publish(1); }}, [&] { b.reset(); }};
  twice.holds(kThorough ? 2 : 1, 100);
}

TEST(a_deadline_ends_a_sleep_in_vain) {
  Doorbells b;
  bool moved = true;
  const Scene scene{&b, {[&] { moved = Waiter(&b.doorbell(0)).park(0, now_ns() + 5'000'000); }}, [&] { b.reset(); }, [&] { return !moved; }};
  scene.holds(model::kAll, 1);
}

TEST(the_main_thread_in_poll) {
  OneProcess p;
  const Scene scene{&p, {[&] { p.wait(2); }, [&] { p.publish(1), p.publish(1); }}, [&] { p.reset(); }};
  scene.holds(model::kAll, 100);
  Doorbell& doorbell = p.doorbell(0);
  CHECK(scene.fails(kOmitted, "store", &doorbell.armed));
  CHECK(scene.fails(kLate, "store", &doorbell.armed));
  // With store buffers: the flag is out before the look at the count.
  const Scene buffered = scene.buffered();
  buffered.holds(2, 100);
  CHECK(buffered.fails(kRelaxed, "store", &doorbell.armed));
}

TEST(the_main_thread_in_poll_and_another_in_the_futex) {
  OneProcess p;
  const Scene scene{&p, {[&] { p.wait(1); }, [&] { p.wait(1); }, [&] { p.publish(1); }}, [&] { p.reset(); }};
  scene.holds(kThorough ? model::kAll : 2, 100);
  CHECK(scene.fails(kOmitted, "futex wake", &p.doorbell(0).count));
  CHECK(scene.fails(kOmitted, "store", &p.doorbell(0).armed));
}

// Both sleep on one eventfd, and whoever takes it down wakes the other.
TEST(the_main_thread_and_an_event_loop) {
  OneProcess p;
  p.has_loop = true;
  const Scene scene{&p, {[&] { p.wait(1); }, [&] { p.loop(1); }, [&] { p.publish(1); }}, [&] { p.reset(); }};
  scene.holds(kThorough ? model::kAll : 2, 100);
  model::faulty_descriptor = p.relay.get();
  CHECK(scene.fails(kOmitted, "write", &model::descriptors));
  model::faulty_descriptor = -1;
}

TEST(the_main_thread_and_an_event_loop_and_two_rings) {
  OneProcess p;
  p.has_loop = true;
  const Scene scene{&p, {[&] { p.wait(2); }, [&] { p.loop(2); }, [&] { p.publish(1), p.publish(1); }}, [&] { p.reset(); }};
  scene.holds(kThorough ? 2 : 1, 100);
}

// Notifiers that stop for ever at any of their steps, and descriptors that differ between processes. The
// sleeper, in poll, waits for what body 2 publishes; body 1 is another notifier, that may stop.

namespace {

// ProcessTable::notify as it was: whoever rings takes the flag down, and writes the descriptor that it has.
void ring_and_take_the_flag(Doorbell& doorbell, int eventfd) {
  doorbell.count.fetch_add(1);
  if (doorbell.sleepers.load() != 0) model::system_call(SYS_futex, &doorbell.count, FUTEX_WAKE, 1);
  if (doorbell.armed.load() != 0 && doorbell.armed.exchange(0) != 0) {
    const uint64_t one = 1;
    model::write_event(eventfd, &one, sizeof one);
  }
}

struct Notifiers : OneProcess {
  OtherProcess first{*this}, second{*this};
  Fd former{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};  // of the process that had the slot before
  // What they have of the sleeper.
  enum Has { kNothing, kFormer, kRight, kFormerForRight } has[2] = {kRight, kRight};
  std::unique_ptr<DeathWatch> watch;  // of this process, which is the driver as well

  void reset() {
    OneProcess::reset();
    uint64_t n;
    while (::read(former.get(), &n, sizeof n) > 0) {
    }
    for (int i = 0; i < 2; ++i) {
      OtherProcess& p = i == 0 ? first : second;
      switch (has[i]) {
        case kNothing: p.process_table->forget_eventfd(0); break;
        case kFormer: p.knows(0, former.get(), incarnation() - 1); break;
        case kRight: p.knows(0, event.get(), incarnation()); break;
        case kFormerForRight: p.knows(0, former.get(), incarnation()); break;  // a mistake
      }
    }
    // Alive, with a liveness futex that has an owner.
    liveness_futex(process_table->slot(0))->store(1234);
    watch = std::make_unique<DeathWatch>(process_table);
    watch->add(0);
  }
  void publish_by(OtherProcess& process, uint32_t bit) {
    published.fetch_add(1);
    process.process_table->notify(0, bit);
  }
  std::vector<model::Explorer::Alias> aliases() const { return {first.alias(*this), second.alias(*this)}; }

  Scene scene(std::vector<std::function<void()>> bodies, uint64_t may_stop, size_t daemons = 0) {
    return {this, std::move(bodies), [this] { reset(); }, [] { return true; }, daemons, [this] { return aliases(); }, may_stop};
  }
};

}  // namespace

TEST(a_ringer_that_stops_silences_no_other) {
  Notifiers p;
  const auto sleeper = [&] { p.wait(1); };
  const Scene scene = p.scene({sleeper, [&] { p.first.process_table->notify(0, 1); }, [&] { p.publish_by(p.second, 2); }}, 1 << 1);
  scene.holds(kThorough ? model::kAll : 2, 100);
  CHECK(scene.fails(kOmitted, "store", &p.doorbell(0).armed));
  // The explorer sees it where notifiers take the flag down, and only because one of them may stop.
  const auto old_first = [&] { ring_and_take_the_flag(p.doorbell(0), p.event.get()); };
  const auto old_second = [&] { p.published.fetch_add(1), ring_and_take_the_flag(p.doorbell(0), p.event.get()); };
  for (int preemptions : {2, model::kAll}) {
    CHECK(p.scene({sleeper, old_first, old_second}, 1 << 1).fails(model::Fault::kNone, "", nullptr, preemptions));
    CHECK(!p.scene({sleeper, old_first, old_second}, 0).fails(model::Fault::kNone, "", nullptr, preemptions));
  }
}

TEST(a_ringer_that_stops_silences_no_other_for_a_sleeper_in_the_futex) {
  Notifiers p;
  const Scene scene = p.scene({[&] { p.wait_for(1); }, [&] { p.first.process_table->notify(0, 1); }, [&] { p.publish_by(p.second, 2); }}, 1 << 1);
  scene.holds(kThorough ? model::kAll : 2, 100);
  CHECK(scene.fails(kOmitted, "futex wake", &p.doorbell(0).count));
}

TEST(a_ringer_that_stops_silences_no_other_for_an_event_loop) {
  Notifiers p;
  p.has_loop = true;
  const Scene scene = p.scene({[&] { p.wait(1); }, [&] { p.first.process_table->notify(0, 1); }, [&] { p.publish_by(p.second, 2); }, [&] { p.loop(1); }}, 1 << 1);
  scene.holds(1, 100);
}

// It knew the process that had the slot before, and rings for what it has to say to that one.
TEST(a_ringer_with_a_former_process_s_descriptor_silences_no_other) {
  Notifiers p;
  p.has[0] = Notifiers::kFormer;
  const auto sleeper = [&] { p.wait(1); };
  for (uint64_t may_stop : {0, 1 << 1}) {
    const Scene scene = p.scene({sleeper, [&] { p.first.process_table->notify(0, 1); }, [&] { p.publish_by(p.second, 2); }}, may_stop);
    scene.holds(kThorough ? model::kAll : 2, 100);
  }
  const auto old_first = [&] { ring_and_take_the_flag(p.doorbell(0), p.former.get()); };
  const auto old_second = [&] { p.published.fetch_add(1), ring_and_take_the_flag(p.doorbell(0), p.event.get()); };
  for (int preemptions : {2, model::kAll}) CHECK(p.scene({sleeper, old_first, old_second}, 0).fails(model::Fault::kNone, "", nullptr, preemptions));
}

// What it says is for the slot's process of now, and the death watch has the descriptor that it lacks.
TEST(a_ringer_with_a_former_process_s_descriptor_wakes_through_the_death_watch) {
  Notifiers p;
  const auto sleeper = [&] { p.wait(1); };
  const auto service = [] { model::started(); };
  for (const Notifiers::Has has : {Notifiers::kFormer, Notifiers::kNothing}) {
    p.has[0] = p.has[1] = has;
    const Scene scene = p.scene({sleeper, [&] { p.publish_by(p.first, 1); }, service}, 0, 1);
    scene.holds(kThorough ? 2 : 1, 100);
    CHECK(scene.fails(kOmitted, "store", &p.process_table->slot(0)->nudge));
    CHECK(scene.fails(kOmitted, "fetch_add", &p.process_table->header()->alarm));
    // Also if another has stopped in the middle of asking it.
    const Scene two = p.scene({sleeper, [&] { p.first.process_table->notify(0, 1); }, [&] { p.publish_by(p.second, 2); }, service}, 1 << 1, 1);
    two.holds(1, 100);
  }
  // Did it believe that its descriptor were the right one, it would wake nobody.
  p.has[0] = Notifiers::kFormerForRight;
  CHECK(p.scene({sleeper, [&] { p.publish_by(p.first, 1); }, service}, 0, 1).fails(model::Fault::kNone, "", nullptr));
}

// The slot's next process starts, sleeps and is rung, while somebody who knew the former one still rings.
TEST(a_slot_changes_hands_while_it_is_rung) {
  Notifiers p;
  p.has[0] = Notifiers::kRight;  // until the slot is prepared anew
  const auto next_process = [&] {
    p.process_table->prepare(0, "");
    p.process_table->slot(0)->condition.store(Condition::kAlive);
    p.wait(1);
  };
  const auto reset = [&] {
    p.reset();
    p.first.knows(0, p.former.get(), p.incarnation());
    p.second.knows(0, p.event.get(), p.incarnation() + 1);
  };
  for (uint64_t may_stop : {0, 1 << 1}) {
    Scene scene = p.scene({next_process, [&] { p.first.process_table->notify(0, 1); }, [&] { p.publish_by(p.second, 2); }, [] { model::started(); }}, may_stop, 1);
    scene.reset = reset;
    scene.holds(1, 100);
  }
}
