// The thread that sends calls later (pump_wait.h) under every schedule: what can be sent is sent, whoever else waits for
// the result and then ceases to. Without a timer, which only delays what is told here. See explorer.h.
#include "modelled.h"

using namespace conveyor;

namespace {

constexpr uint64_t kLink = 7;

// Slot 0 has one call to send, once its argument has come.
struct Pumped : Doorbells {
  Fd event{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  std::unique_ptr<Inbox> inbox;
  std::unique_ptr<PumpWait> wait;
  model::Mutex gil;
  model::Atomic<int> come{0}, sent{0};

  void reset() {
    Doorbells::reset();
    process_table->set_eventfd(0, event.get(), process_table->slot(0)->incarnation.load());
    inbox = std::make_unique<Inbox>(process_table, 0, event.get(), 1ul);
    wait = std::make_unique<PumpWait>(*inbox);
    come.store(0), sent.store(0);
  }
  void with_gil(const std::function<void()>& does) {
    gil.lock();
    does();
    gil.unlock();
  }
  // With the GIL.
  void flush() {
    if (come.load() == 0 || sent.load() != 0) return;
    sent.store(1);
    wait->end(kLink);
  }
  void pump() {
    while (wait->wait()) with_gil([this] { flush(); });
  }
  // The argument comes.
  void bring() {
    come.store(1);
    process_table->notify(0, 2);
  }
  // Calls, and sends once more itself, since it may have come before the pump was told.
  void call() {
    with_gil([this] { wait->begin(kLink); });
    with_gil([this] { flush(); });
  }
  Scene scene(std::vector<std::function<void()>> bodies, bool ends = false) {
    bodies.push_back([this] { pump(); });
    return {this, std::move(bodies), [this] { reset(); }, [this, ends] { return ends || sent.load() == 1; }, size_t(!ends)};
  }
};

}  // namespace

TEST(a_call_that_nobody_waits_for_is_sent_by_the_thread) {
  Pumped p;
  const auto bring = [&] { p.bring(); };
  const Scene scene = p.scene({[&] { p.call(); }, bring});
  scene.holds(kThorough ? 2 : 1, 10);
  // Only the doorbell tells of the argument.
  CHECK(scene.fails(kOmitted, "futex wake", &p.doorbell(0).count));
  // Who does not send once more himself counts on a doorbell that has rung before.
  CHECK(p.scene({[&] { p.with_gil([&] { p.wait->begin(kLink); }); }, bring}).fails(model::Fault::kNone, "", nullptr));
}

TEST(who_waits_for_a_result_and_ceases_to_leaves_it_to_the_thread) {
  Pumped p;
  const auto waits = [&](bool tells) {
    return [&p, tells] {
      p.with_gil([&] { p.wait->attend(kLink); });
      p.call();
      // One look, and then its time is over.
      p.with_gil([&] { p.flush(); });
      if (tells) p.with_gil([&] { p.wait->unattend(kLink); });
    };
  };
  const auto bring = [&] { p.bring(); };
  p.scene({waits(true), bring}).holds(kThorough ? 2 : 1, 10);
  CHECK(p.scene({waits(false), bring}).fails(model::Fault::kNone, "", nullptr));
}

TEST(two_who_wait_for_the_same_are_counted) {
  Pumped p;
  const auto waits = [&] {
    p.with_gil([&] { p.wait->attend(kLink); });
    p.with_gil([&] { p.flush(); });
    p.with_gil([&] { p.wait->unattend(kLink); });
  };
  p.scene({[&] { p.call(); }, waits, waits, [&] { p.bring(); }}).holds(1, 10);
}

TEST(the_thread_ends_when_it_is_told) {
  Pumped p;
  const Scene scene = p.scene({[&] { p.call(); }, [&] { p.with_gil([&] { p.wait->close(); }); }}, true);
  scene.holds(kThorough ? model::kAll : 1, 10);
}
