// What frames claim for readers on another host, which do not get them: somebody is told, whose it is to give that up.
#include "net_claims.h"
#include "net_two.h"

using namespace conveyor;

TEST(what_a_frame_claims_for_a_reader_that_has_left_there_is_told) {
  Two t({0, 1, 1}, {{0, {1, 2}}});
  join(t.a, t.b);
  const auto sender = t.a.sender(kId, t.rings, 0);
  const auto stays = t.b.receiver(kId, t.rings, 0, 1);
  t.b.receiver(kId, t.rings, 0, 0)->close();
  uint64_t n = 0;
  Told told{*t.b.pump};
  std::vector<std::string> expected;
  for (const size_t buffer : {size_t(10), size_t(1'000'000)}) {
    ++n;
    send_claims(t.a, 0, *sender, n, "claims " + std::to_string(n), buffer);
    REQUIRE(t.b.wait(2, [&] { return !stays->ring.empty(); }));
    CHECK_EQ(stays->take().tag, n);
    expected.push_back("claims " + std::to_string(n) + "@1");
    CHECK(check::soon([&] { return told.is(expected); }));
  }
}

TEST(what_is_claimed_by_frames_that_are_not_sent_any_more_is_told) {
  Two t({0, 1}, {{0, {1}}});
  const auto sender = t.a.sender(kId, t.rings, 0);
  send_claims(t.a, 0, *sender, 1, "small", 10);
  send(t.a, 0, *sender, 2, 100'000);
  send_claims(t.a, 0, *sender, 3, "large", 1'000'000);
  t.a.pump->unmirror(kId);
  Told told{*t.a.pump};
  CHECK(told.is({"small@1", "large@1"}));
  t.a.arenas[0]->give_back(0);
  CHECK_EQ(t.a.arenas[0]->blocks_out(), 0u);
}

// In the place of a frame that cannot be sent its reader gets an error, and does not know what the frame claims for it.
TEST(what_is_claimed_by_frames_that_cannot_be_sent_is_told) {
  Two t({0, 1}, {{0, {1}}});
  join(t.a, t.b);
  const auto sender = t.a.sender(kId, t.rings, 0);
  const auto receiver = t.b.receiver(kId, t.rings, 0, 0);
  send_claims(t.a, 0, *sender, 1, "small", 10, Kind(77));
  send_claims(t.a, 0, *sender, 2, "large", 100'000, Kind(77));
  Told told{*t.a.pump};
  CHECK(check::soon([&] { return told.is({"small@1", "large@1"}); }));
  for (const uint64_t n : {1, 2}) {
    REQUIRE(t.b.wait(1, [&] { return !receiver->ring.empty(); }));
    const Frame frame = receiver->take();
    CHECK(frame.kind == Kind::kError);
    CHECK_EQ(frame.tag, n);
  }
  CHECK(check::soon([&] {
    t.a.arenas[0]->give_back(0);
    return t.a.arenas[0]->blocks_out() == 0;
  }));
}

// Nor where its host has no memory for the frame.
TEST(what_is_claimed_by_frames_that_a_host_has_no_memory_for_is_told) {
  Two t({0, 1}, {{0, {1}}}, 20 * kSecond, 8 * kMiB);
  join(t.a, t.b);
  const auto hoard = t.b.arenas[0]->allocate(6 * kMiB);
  const auto sender = t.a.sender(kId, t.rings, 0);
  const auto receiver = t.b.receiver(kId, t.rings, 0, 0);
  send_claims(t.a, 0, *sender, 1, "large", 5'000'000);
  Told told{*t.b.pump};
  CHECK(check::soon([&] { return told.is({"large@1"}); }));
  REQUIRE(t.b.wait(1, [&] { return !receiver->ring.empty(); }));
  CHECK(receiver->take().kind == Kind::kError);
  t.b.arenas[0]->release(hoard);
}

// What a broken process has written into its ring is that frame's affair. The two hosts have others to send, and
// readers there that have done nothing wrong.
TEST(frames_that_no_writer_makes_are_not_sent_and_cost_nobody_his_host) {
  Two t({0, 1}, {{0, {1}}});
  join(t.a, t.b);
  const auto sender = t.a.sender(kId, t.rings, 0);
  const auto receiver = t.b.receiver(kId, t.rings, 0, 0);
  uint64_t n = 0;
  const auto stray = [&](Kind kind, uint32_t flags) {
    Outgoing out;
    out.tag = ++n;
    out.codec = kBytes;
    out.kind = kind;
    out.flags = flags;
    sender->publish(out);
  };
  stray(Kind(0), 0);
  stray(Kind(77), 0);
  stray(Kind::kValue, kExternal);  // and there is no block
  send(t.a, 0, *sender, ++n, 100);
  for (uint64_t i = 1; i < n; ++i) {
    REQUIRE(t.b.wait(1, [&] { return !receiver->ring.empty() || t.b.process_table->gone(0, 1); }));
    REQUIRE(!t.b.process_table->gone(0, 1));
    const Frame frame = receiver->take();
    CHECK(frame.kind == Kind::kError);
    CHECK_EQ(frame.tag, i);
  }
  REQUIRE(t.b.wait(1, [&] { return !receiver->ring.empty(); }));
  CHECK(is_whole(receiver->take(), n, 100));
  CHECK(!t.a.process_table->gone(1, 1) && !t.b.process_table->gone(0, 1));
}
