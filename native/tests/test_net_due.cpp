// Which frames are due on another host, and whether they are there: for who reads both hosts at different moments.
#include "net_setup.h"

using namespace conveyor;

TEST(what_is_due_is_not_there_before_it_has_come) {
  constexpr uint64_t kId = 7;
  const std::vector<Host::Shape> rings = {{0, {1}}, {1, {0}}};
  Host a(0, {0, 1}, 20 * kSecond, 512 * kMiB), b(1, {0, 1}, 20 * kSecond, 512 * kMiB);
  a.mirror(kId, rings);
  b.mirror(kId, rings);
  const auto sender = a.sender(kId, rings, 0);
  const auto receiver = b.receiver(kId, rings, 0, 0);
  CHECK(a.pump->due().empty());
  for (uint64_t n = 0; n < 3; ++n) REQUIRE(send(a, 0, *sender, n, size_of(n)));
  const auto due = a.pump->due();
  REQUIRE(due.size() == 1);
  CHECK_EQ(due[0].host, 1u);
  CHECK_EQ(due[0].segment, kId);
  CHECK_EQ(due[0].ring, 0u);
  CHECK_EQ(due[0].frames, 3u);
  CHECK(!b.pump->has(0, due));
  // Of what this host has not, or what does not lead here, nothing is waited for.
  CHECK(b.pump->has(0, {{1, kId + 1, 0, 3}, {1, kId, 1, 3}, {1, kId, 9, 3}}));
  join(a, b);
  CHECK(check::soon([&] { return b.pump->has(0, due); }));
  CHECK(!receiver->ring.empty());
  // Frames that were taken are still such as have come.
  for (uint64_t n = 0; n < 3; ++n) CHECK(is_whole(receiver->take(), n, size_of(n)));
  CHECK(b.pump->has(0, a.pump->due()));
  CHECK(b.pump->due().empty());
}
