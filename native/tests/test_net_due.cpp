// Which frames are due on another host, and whether they are there, or when: for who reads both hosts at different
// moments.
#include <poll.h>

#include "net_setup.h"

using namespace conveyor;

namespace {

const std::vector<Host::Shape> kBothWays = {{0, {1}}, {1, {0}}};
constexpr uint64_t kBoth = 7;

// What the pump tells next, as who sleeps on its descriptor hears it.
std::list<uint64_t> next_come(net::HostPump& pump) {
  for (;;) {
    pollfd there = {pump.notice_fd(), POLLIN, 0};
    if (::poll(&there, 1, 30'000) != 1) return CHECK(!"nothing is told"), std::list<uint64_t>();
    pump.events();
    if (auto come = pump.come(); !come.empty()) return come;
  }
}

}  // namespace

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

TEST(what_is_awaited_is_told_once_when_it_has_come) {
  Host a(0, {0, 1}), b(1, {0, 1});
  a.mirror(kBoth, kBothWays);
  b.mirror(kBoth, kBothWays);
  const auto sender = a.sender(kBoth, kBothWays, 0);
  const auto receiver = b.receiver(kBoth, kBothWays, 0, 0);
  for (uint64_t n = 0; n < 3; ++n) REQUIRE(send(a, 0, *sender, n, size_of(n)));
  const auto due = a.pump->due();
  b.pump->tell_when_come(0, due, 41);
  b.pump->tell_when_come(0, {{1, kBoth, 0, 4}}, 42);  // the next one, too
  CHECK(b.pump->come().empty());
  join(a, b);
  CHECK(next_come(*b.pump) == std::list<uint64_t>{41});
  // Who is told so finds them in the ring.
  CHECK_EQ(receiver->ring.head(), 3u);
  REQUIRE(send(a, 0, *sender, 3, size_of(3)));
  CHECK(next_come(*b.pump) == std::list<uint64_t>{42});
  for (uint64_t n = 0; n < 4; ++n) CHECK(is_whole(receiver->take(), n, size_of(n)));
  // What is here already, and nothing at all, without a frame that comes.
  b.pump->tell_when_come(0, due, 43);
  CHECK(next_come(*b.pump) == std::list<uint64_t>{43});
  b.pump->tell_when_come(0, {}, 44);
  CHECK(next_come(*b.pump) == std::list<uint64_t>{44});
  CHECK(b.pump->come().empty());
}

TEST(what_was_not_fetched_by_who_had_no_memory_for_it_is_told_again) {
  Host b(1, {0, 1});
  b.pump->tell_when_come(0, {}, 1);
  auto come = next_come(*b.pump);
  b.pump->untold(std::move(come));
  CHECK(next_come(*b.pump) == std::list<uint64_t>{1});
}

TEST(of_what_does_not_come_any_more_the_wait_ends) {
  Host b(1, {0, 1});
  b.mirror(kBoth, kBothWays);
  b.pump->tell_when_come(0, {{1, kBoth, 0, 1}}, 1);
  b.pump->unmirror(kBoth);
  CHECK(next_come(*b.pump) == std::list<uint64_t>{1});
  b.mirror(kBoth + 1, kBothWays);
  b.pump->tell_when_come(0, {{1, kBoth + 1, 0, 1}}, 2);
  b.pump->give_up(0, "by the test");
  CHECK(next_come(*b.pump) == std::list<uint64_t>{2});
  b.pump->tell_when_come(0, {{1, kBoth + 1, 0, 1}}, 3);
  CHECK(next_come(*b.pump) == std::list<uint64_t>{3});
}

TEST(a_pump_that_is_stopped_leaves_what_is_awaited) {
  Host b(1, {0, 1});
  b.mirror(kBoth, kBothWays);
  b.pump->tell_when_come(0, {{1, kBoth, 0, 1}}, 1);
  b.pump->stop();
  CHECK(b.pump->come().empty());
  bool refused = false;
  try {
    b.pump->tell_when_come(0, {}, 2);
  } catch (const std::system_error& error) {
    refused = error.code().value() == ESHUTDOWN;
  }
  CHECK(refused);
}
