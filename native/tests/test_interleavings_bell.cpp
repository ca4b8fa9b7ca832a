// The doorbell under every schedule: nobody who sleeps, in the futex, in poll or in an event loop, sleeps
// through a ring. See explorer.h.
#include "modelled.h"

using namespace conveyor;

namespace {

// What a reader does with its bell: take the bits in `wanted`, sleeping while there are none.
void take_bits(Bell& bell, uint64_t wanted) {
  Waiter waiter(&bell);
  for (;;) {
    const uint32_t seen = waiter.count();
    wanted &= ~bell.ready[0].exchange(0);
    if (wanted == 0) return;
    waiter.park(seen, 0);
  }
}

struct OneBell : Bells {
  model::Atomic<int> published{0};

  void publish(uint32_t bit) {
    published.fetch_add(1);
    board->ring(0, bit);
  }
  void wait_for(int enough) {
    Waiter waiter(&bell(0));
    for (;;) {
      const uint32_t seen = waiter.count();
      if (published.load() >= enough) return;
      waiter.park(seen, 0);
    }
  }
  void reset() {
    Bells::reset();
    published.store(0);
  }
};

// A whole process: its main thread waits in ppoll, others in the futex, event loops on its eventfd.
struct OneProcess : OneBell {
  Fd event{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  Fd relay{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  std::unique_ptr<Inbox> inbox;
  bool has_loop = false;

  OneProcess() { board->set_eventfd(0, event.get()); }
  void reset() {
    OneBell::reset();
    uint64_t n;
    while (::read(event.get(), &n, sizeof n) > 0 || ::read(relay.get(), &n, sizeof n) > 0) {
    }
    inbox = std::make_unique<Inbox>(board, 0, event.get(), 1ul);  // body 0 is the main thread
    if (has_loop) inbox->add_relay(relay.get());
  }
  void wait(int enough) {
    for (;;) {
      const uint32_t seen = inbox->count();
      if (published.load() >= enough) return;
      inbox->wait(seen, 0);
    }
  }
  // An asyncio event loop (runtime/waiting/aio.py).
  void loop(int enough) {
    for (;;) {
      for (;;) {
        const uint32_t seen = inbox->count();
        if (published.load() >= enough) return;
        if (inbox->arm(seen)) break;
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
TEST(a_bell_that_looks_before_it_counts_is_caught) {
  OneBell b;
  Bell& bell = b.bell(0);
  const Scene scene{&b, {[&] { b.wait_for(1); },
                         [&] {
                           b.published.store(1);
                           const bool wake = bell.sleepers.load() != 0;  // the two lines of Board::ring in
                           bell.count.fetch_add(1);                    // the wrong order
                           if (wake) model::system_call(SYS_futex, &bell.count, FUTEX_WAKE, 1);
                         }}, [&] { b.reset(); }};
  for (int preemptions : {2, model::kAll}) CHECK(scene.fails(model::Fault::kNone, "", nullptr, preemptions));
}

TEST(one_ringer_one_sleeper) {
  Bells b;
  const Scene scene{&b, {[&] { take_bits(b.bell(0), 6); }, [&] { b.board->ring(0, 1), b.board->ring(0, 2); }}, [&] { b.reset(); }};
  scene.holds(model::kAll, 100);
  Bell& bell = b.bell(0);
  CHECK(scene.fails(kOmitted, "fetch_add", &bell.sleepers));
  CHECK(scene.fails(kOmitted, "fetch_add", &bell.count));
  CHECK(scene.fails(kOmitted, "futex wake", &bell.count));
  CHECK(scene.fails(kOmitted, "fetch_or", &bell.ready[0]));
  // Were it not sequentially consistent. (The sleeper's own could be: the futex looks at `count` again.)
  CHECK(scene.fails(kLate, "fetch_add", &bell.count, 3));
}

TEST(two_ringers_one_sleeper) {
  Bells b;
  const Scene scene{&b, {[&] { take_bits(b.bell(0), 6); }, [&] { b.board->ring(0, 1); }, [&] { b.board->ring(0, 2); }}, [&] { b.reset(); }};
  scene.holds(kThorough ? model::kAll : 2, 100);
  CHECK(scene.fails(kLate, "fetch_add", &b.bell(0).count));
}

TEST(one_ringer_two_sleepers) {
  OneBell b;
  const Scene scene{&b, {[&] { b.wait_for(1); }, [&] { b.wait_for(1); }, [&] { b.publish(1); }}, [&] { b.reset(); }};
  scene.holds(kThorough ? model::kAll : 2, 100);
  CHECK(scene.fails(kOmitted, "fetch_add", &b.bell(0).sleepers));
  // Twice, so that one sleeper may come back while the other still sleeps.
  const Scene twice{&b, {[&] { b.wait_for(2); }, [&] { b.wait_for(2); }, [&] { b.publish(1), b.publish(1); }}, [&] { b.reset(); }};
  twice.holds(kThorough ? 2 : 1, 100);
}

TEST(a_deadline_ends_a_sleep_in_vain) {
  Bells b;
  bool moved = true;
  const Scene scene{&b, {[&] { moved = Waiter(&b.bell(0)).park(0, now_ns() + 5'000'000); }}, [&] { b.reset(); }, [&] { return !moved; }};
  scene.holds(model::kAll, 1);
}

TEST(the_main_thread_in_poll) {
  OneProcess p;
  const Scene scene{&p, {[&] { p.wait(2); }, [&] { p.publish(1), p.publish(1); }}, [&] { p.reset(); }};
  scene.holds(model::kAll, 100);
  Bell& bell = p.bell(0);
  CHECK(scene.fails(kOmitted, "store", &bell.armed));
  CHECK(scene.fails(kLate, "store", &bell.armed));
}

TEST(the_main_thread_in_poll_and_another_in_the_futex) {
  OneProcess p;
  const Scene scene{&p, {[&] { p.wait(1); }, [&] { p.wait(1); }, [&] { p.publish(1); }}, [&] { p.reset(); }};
  scene.holds(kThorough ? model::kAll : 2, 100);
  CHECK(scene.fails(kOmitted, "futex wake", &p.bell(0).count));
  CHECK(scene.fails(kOmitted, "store", &p.bell(0).armed));
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
