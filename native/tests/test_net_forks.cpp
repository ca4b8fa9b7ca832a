// Children that are forked while the pump is at work, and end what they have of it.
#include "net_two.h"

using namespace conveyor;

TEST(a_forked_child_ends_what_it_has_of_a_pump_at_work) {
  install_fork_handlers();
  Two t({0, 1}, {{0, {1}}, {1, {0}}});
  join(t.a, t.b);
  std::atomic<bool> over{false};
  // The pumps change what they have all the time: looks at segments, doorbells that are rung.
  std::thread rings([&] {
    for (uint32_t i = 0; !over.load(); ++i) {
      t.a.process_table->notify(1, i % 2 ? kAttentionBit : 40 + i % 100);
      t.b.process_table->notify(0, i % 2 ? kAttentionBit : 40 + i % 100);
    }
  });
  for (int i = 0; i < (check::kThreadSanitizer ? 20 : 300) && check::failures() == 0; ++i) {
    check::Child child([&] {
      t.a.pump.reset();
      t.b.pump.reset();
    });
    CHECK(child.passed());
  }
  over.store(true);
  rings.join();
}
