// The thread that looks at dropped results, and who asks it for their memory, under every schedule: whoever
// asks is answered, and what is dropped is looked at. See explorer.h.
#include "modelled.h"

using namespace conveyor;

namespace {

// The process in slot 0 has one window, and the thread; that in slot 1 asks.
struct Dropped : Doorbells {
  model::Mutex gil;
  Leftover window;
  std::unique_ptr<Leftovers> leftovers;
  bool here = true;  // what was dropped is in its ring
  int looked = 0;

  // `before`: it is dropped before anything else happens.
  void reset(bool before, bool arrived) {
    Doorbells::reset();
    Returns& words = process_table->slot(0)->leftovers;
    for (auto* word : {&words.count, &words.wanted, &words.requested, &words.answered}) word->store(0);
    process_table->header()->memory.given.store(0);
    window.leave();
    leftovers = std::make_unique<Leftovers>(process_table, 0);
    here = arrived;
    looked = 0;
    if (before) leftovers->enter(window, [&] { return here; });
  }
  void drop() {
    std::lock_guard lock(gil);
    leftovers->enter(window, [&] { return here; });
  }
  void arrive() {
    model::writes(&here);
    here = true;
    process_table->notify(0, 3);
  }
  void sweeper() {
    while (leftovers->wait(0)) {
      std::lock_guard lock(gil);
      bool looks = false;
      leftovers->begin([&](Leftover&) { looks = true; });
      if (looks) {
        model::reads(&here);
        ++looked;
        if (here) window.leave();
      }
      leftovers->end();
    }
  }
  // As Arena::take_memory, with patience that never ends.
  void ask() {
    std::vector<ProcessTable::Requested> requested;
    requested.reserve(1);
    process_table->ask_for_leftovers(0, requested);
    for (;;) {
      const uint32_t seen = process_table->header()->memory.given.load();
      process_table->still_requested_for_leftovers(requested);
      if (requested.empty()) return;
      model::system_call(SYS_futex, &process_table->header()->memory.given, FUTEX_WAIT, seen, nullptr);
    }
  }
  bool done() { return !window.entered() && looked != 0; }
  Scene scene(std::vector<std::function<void()>> others, bool before, bool arrived) {
    others.push_back([this] { sweeper(); });
    return {this, std::move(others), [this, before, arrived] { reset(before, arrived); }, [this] { return done(); }, 1};
  }
};

}  // namespace

TEST(who_asks_while_the_last_of_it_is_looked_at_is_answered) {
  Dropped b;
  const Scene scene = b.scene({[&] { b.ask(); }}, true, true);
  scene.holds(kThorough ? model::kAll : 2, 10);
  CHECK(scene.fails(kOmitted, "futex wake", &b.process_table->header()->memory.given, model::kAll));
  scene.buffered().holds(2, 10);
}

TEST(who_asks_for_what_has_not_come_yet_is_answered) {
  Dropped b;
  Scene scene = b.scene({[&] { b.ask(); }}, true, false);
  scene.judge = [&] { return b.window.entered(); };
  scene.holds(kThorough ? model::kAll : 2, 10);
  CHECK(scene.fails(kOmitted, "futex wake", &b.doorbell(0).count));
}

TEST(two_who_ask_are_both_answered) {
  Dropped b;
  const Scene scene = b.scene({[&] { b.ask(); }, [&] { b.ask(); }}, true, true);
  scene.holds(kThorough ? 2 : 1, 10);
}

TEST(what_is_dropped_while_nothing_is_left_is_looked_at) {
  Dropped b;
  const Scene scene = b.scene({[&] { b.drop(); }, [&] { b.ask(); }}, false, true);
  scene.holds(kThorough ? 2 : 1, 10);
  CHECK(scene.fails(kOmitted, "futex wake", &b.process_table->slot(0)->leftovers.count));
  scene.buffered().holds(1, 10);
}

TEST(what_comes_while_it_is_looked_for_is_looked_at_again) {
  Dropped b;
  const Scene scene = b.scene({[&] { b.arrive(); }}, true, false);
  scene.holds(kThorough ? 3 : 2, 10);
  CHECK(scene.fails(kOmitted, "futex wake", &b.doorbell(0).count));
  scene.buffered().holds(2, 10);
}

TEST(what_is_dropped_while_the_doorbell_is_watched_is_looked_at) {
  Dropped b;
  const Scene scene = b.scene({[&] {
                                 b.arrive();
                                 b.drop();
                               },
                               [&] { b.ask(); }},
                              true, false);
  scene.holds(kThorough ? 2 : 1, 10);
}
