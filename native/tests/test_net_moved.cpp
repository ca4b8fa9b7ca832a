// Processes that come back on another host than they were on, as one whose host was lost may.
#include "net_setup.h"

using namespace conveyor;

namespace {

constexpr uint64_t kId = 7;

}  // namespace

TEST(a_process_that_comes_back_elsewhere_has_nothing_of_the_segments_of_before) {
  Host a(0, {0, 1}), c(2, {0, 2});
  a.mirror(kId, {{0, {1}}});  // laid when process 1 was on host 1
  a.pump->remove_proxy(1);
  a.pump->add_proxy(1, 2, 2, "again", a.arenas[1]);
  c.process_table->prepare(1, "again", 2);
  c.process_table->slot(1)->condition.store(Condition::kAlive);
  join(a, c);
  CHECK(check::soon([&] { return a.pump->connected(2); }));
  // As whoever still publishes in that segment rings.
  a.process_table->notify(1, 3);
  CHECK_EQ(a.pump->ask_clock(2, 1, 20 * kSecond).size(), size_t(1));
  CHECK(a.pump->connected(2));
  CHECK_EQ(a.pump->counts(2).connections, uint64_t(1));
  // Somebody of it may wait for that doorbell all the same.
  CHECK(check::soon([&] { return (c.process_table->slot(1)->doorbell.ready[0].load() & 8) != 0; }));
}
