// Connections between hosts with somebody at the other end who does not speak as he should.
#include "net_stranger.h"

using namespace conveyor;
using namespace conveyor::net;

namespace {

void refused(const std::function<void(Stranger&)>& says) {
  Stranger s(600 * kSecond);  // it is not its silence that it is lost for
  s.handshake();
  says(s);
  CHECK(s.lost());
}

// A frame that keeps something at its writer, in one piece.
void lend(Stranger& s, uint64_t number) {
  struct {
    ChunkHead head;
    char block[24];
  } chunk = {{0, 0, number, 0}, {}};
  write_trailer(chunk.block, 8, Numbers{number});
  s.say(What::kFrame, FrameHead{0, 1, kBytes, number, number, kKeeps, 0, 8, sizeof chunk.block});
  s.say(What::kChunk, chunk);
}

struct Opens {
  OpenHead head;
  OpenEntry entry;
};

// Messages of the pump's, until there is one for which `last(prefix)`.
template <class Last>
void hear_until(Stranger& s, const Last& last) {
  for (;;) {
    Prefix prefix;
    REQUIRE(::recv(s.own.get(), &prefix, sizeof prefix, MSG_WAITALL) == ssize_t(sizeof prefix));
    std::vector<char> rest(prefix.size);
    REQUIRE(::recv(s.own.get(), rest.data(), rest.size(), MSG_WAITALL) == ssize_t(rest.size()));
    if (last(prefix)) return;
  }
}

constexpr size_t kLarge = kMiB;  // more than a socket takes

// Two frames have come over a first connection. What is said over the second one, when a part of frame `have` has come
// again, or nothing at all if that is not `sent`.
void refused_again(uint64_t have, const std::function<void(Stranger&)>& says, bool sent = true) {
  Stranger s(600 * kSecond);
  s.handshake();
  const auto sender = s.host.sender(kId, {{1, {0}}, {0, {1}}}, 1);
  for (uint64_t n = 0; n < 2; ++n) send(s.host, 0, *sender, n, kLarge);
  s.say(What::kOpen, Opens{{2, 1}, {1, 1, 0, 0}});
  size_t got = 0;
  hear_until(s, [&](const Prefix& p) {
    if (p.what == What::kChunk) got += p.size - sizeof(ChunkHead);
    return got == 2 * kLarge;
  });
  auto [ours, theirs] = socket_pair();
  s.own = std::move(ours);
  s.host.pump->connect(std::move(theirs), 1);
  s.handshake();
  s.say(What::kOpen, Opens{{2, 1}, {1, 1, have, 0}});
  if (sent) hear_until(s, [](const Prefix& p) { return p.what == What::kChunk; });
  says(s);
  CHECK(s.lost());  // nobody reads on: the frame stays under way
}

}  // namespace

TEST(who_does_not_greet_is_lost) {
  Stranger s;
  s.say(What::kPing, 0, 0);
  CHECK(s.lost());
}
TEST(who_speaks_another_protocol_is_lost) {
  Stranger s;
  s.say(What::kHandshake, Handshake{kHandshakeMagic, kWireVersion + 1, 1, 5});
  CHECK(s.lost());
}
TEST(who_says_what_makes_no_sense_is_lost) {
  const auto frame = [](uint32_t ring, uint64_t number, uint32_t in_slot, uint64_t size, uint64_t block, uint32_t flags = 0, uint16_t kind = 1) {
    return FrameHead{ring, kind, kBytes, number, 0, flags, in_slot, size, block};
  };
  refused([](Stranger& s) { s.say(What(99), uint64_t(0)); });
  refused([](Stranger& s) { s.say(What::kHandshake, Handshake{kHandshakeMagic, kWireVersion, 1, 5}); });
  refused([](Stranger& s) { s.say(What::kHave, uint64_t(0)); });
  refused([](Stranger& s) { s.say(What::kHave, Have{0, 0, 0}); });
  refused([](Stranger& s) { s.say(What::kHave, Have{1, 0, 7}); });
  refused([](Stranger& s) { s.say(What::kCredit, Credit{1, 0, {5, 0, 0, 0}}); });
  refused([](Stranger& s) { s.say(What::kReturned, Returned{1, 0, 0, 1}); });  // which it was never sent
  refused([](Stranger& s) { s.say(What::kReturned, Returned{9, 0, 0, 1}); });
  refused([](Stranger& s) { s.say(What::kCredit, Credit{1, 1, {}}); });
  refused([](Stranger& s) { s.say(What::kCredit, Credit{0, 0, {}}); });
  refused([](Stranger& s) { s.say(What::kLimits, LimitsHead{1, 0, 0, 0, 0, 0, 0}); });
  refused([](Stranger& s) { s.say(What::kLimits, LimitsHead{0, 0, 0, 3, 0, 0, 0}); });
  refused([](Stranger& s) { s.say(What::kLimits, LimitsHead{0, 9, 0, 0, 0, 0, 0}); });
  refused([](Stranger& s) { s.say(What::kFailures, Failures{3, 1}); });
  refused([](Stranger& s) { s.say(What::kRing, Rung{77, 1, 1, 0}); });
  refused([](Stranger& s) { s.say(What::kClock, uint64_t(0)); });
  refused([](Stranger& s) { s.say(What::kClockIs, Clock{1, 2}); });
  refused([](Stranger& s) { s.say(What::kRing, Rung{0, 1, 1 << 20, 0}); });
  refused([&](Stranger& s) { s.say(What::kFrame, frame(1, 0, 0, 0, 0)); });
  refused([&](Stranger& s) { s.say(What::kFrame, frame(5, 0, 0, 0, 0)); });
  refused([&](Stranger& s) { s.say(What::kFrame, frame(0, 1, 0, 0, 0)); });
  refused([&](Stranger& s) { s.say(What::kFrame, frame(0, 0, 0, 0, 0, 0, 9)); });
  refused([&](Stranger& s) { s.say(What::kFrame, frame(0, 0, 0, 100, 0)); });
  refused([&](Stranger& s) { s.say(What::kFrame, frame(0, 0, 0, 100, 99)); });
  refused([&](Stranger& s) { s.say(What::kFrame, frame(0, 0, 0, 100, uint64_t(1) << 60)); });
  refused([&](Stranger& s) { s.say(What::kFrame, frame(0, 0, 0, 0, 0, kKeeps)); });
  refused([&](Stranger& s) { s.say(What::kFrame, frame(0, 0, 0, 0, 0, kExternal)); });
  refused([&](Stranger& s) {
    s.say(What::kFrame, frame(0, 0, 0, 1000, 1000));
    s.say(What::kFrame, frame(0, 1, 0, 0, 0));
  });
  refused([&](Stranger& s) {
    s.say(What::kFrame, frame(0, 0, 0, 1000, 1000));
    const struct {
      ChunkHead head;
      char bytes[8];
    } chunk = {{0, 0, 0, 996}, {}};
    s.say(What::kChunk, chunk);
  });
  refused([&](Stranger& s) {
    for (uint64_t n = 0; n <= kSlots; ++n) s.say(What::kFrame, frame(0, n, 0, 0, 0));
  });
  refused([](Stranger& s) { s.say(What::kClose, CloseHead{1, 0}); });
  refused([](Stranger& s) { s.say(What::kClosed, CloseHead{0, 0}); });
  refused([](Stranger& s) { s.say(What::kHeard, Heard{1}); });
  refused([](Stranger& s) { s.say(What::kReturned, Returned{1, 0, 0, 1}); });
  refused([](Stranger& s) { s.say(What::kClockIs, Clock{1, 1}); });
}

// What it had over a connection before it has not said when this one began.
TEST(who_has_what_is_only_being_sent_again_is_lost) {
  for (const uint64_t first : {0, 1}) {
    for (const uint64_t have : {first + 1, uint64_t(3)}) refused_again(first, [&](Stranger& s) { s.say(What::kHave, Have{1, 0, have}); });
    refused_again(first, [&](Stranger& s) { s.say(What::kCredit, Credit{1, 0, {first + 1, 0, 0, 0}}); });
    refused_again(first, [&](Stranger& s) { s.say(What::kReturned, Returned{1, 0, first, 1}); });
    if (first == 1) refused_again(first, [](Stranger& s) { s.say(What::kHave, Have{1, 0, 0}); });
  }
  refused_again(3, [](Stranger&) {}, false);
  refused_again(~uint64_t(0), [](Stranger&) {}, false);
}

// What it says of that would be kept for news that never comes.
TEST(who_returns_a_frame_that_keeps_nothing_is_lost) {
  refused([](Stranger& s) {
    const auto sender = s.host.sender(kId, {{1, {0}}, {0, {1}}}, 1);
    send(s.host, 0, *sender, 0, 100'000);
    struct {
      OpenHead head;
      OpenEntry entry;
    } const open = {{2, 1}, {1, 1, 0, 0}};
    s.say(What::kOpen, open);
    hear_until(s, [](const Prefix& p) { return p.what == What::kChunk; });
    s.say(What::kReturned, Returned{1, 0, 0, 1});
  });
}

TEST(random_bytes_end_a_host_and_nothing_else) {
  check::Random random(7);
  for (int round = 0; round < 40; ++round) {
    Stranger s;
    s.handshake();
    // Whole prefixes of known kinds, now and then, so that it gets further than the first word.
    for (int i = 0; i < 200; ++i) {
      char bytes[256];
      for (char& c : bytes) c = char(random.next());
      Prefix prefix{What(1 + random.below(uint32_t(What::kLast))), uint16_t(random.below(2)), uint32_t(random.below(200)), random.below(4) != 0 ? kId : random.next()};
      if (random.below(20) == 0) prefix.size = uint32_t(random.next());
      if (::send(s.own.get(), &prefix, sizeof prefix, MSG_NOSIGNAL) < 0 || ::send(s.own.get(), bytes, std::min<size_t>(prefix.size, sizeof bytes), MSG_NOSIGNAL) < 0) break;
    }
    s.own.reset();
    s.host.pump->give_up(1, "it is over");
    CHECK(s.lost());
  }
}

// It has said farewell: the connection is over, though more lies there to be read, as much as is read at once.
TEST(what_comes_behind_a_farewell_is_not_read) {
  Stranger s;
  auto [ours, theirs] = socket_pair();
  s.own = std::move(ours);
  s.handshake();
  const Prefix bye{What::kBye, 0, 0, 0};
  s.say(&bye, sizeof bye);
  const std::vector<char> more(100 * kKiB);
  s.say(more.data(), more.size());
  s.host.pump->connect(std::move(theirs), 1);  // in the place of the first connection
  CHECK(s.lost());
}

// It has heard of more over a connection that broke than it was told again over the next one so far.
TEST(what_was_heard_over_a_connection_before_is_no_lie) {
  Stranger s;
  s.handshake();
  constexpr uint64_t kFrames = 40;
  const auto receiver = s.host.receiver(kId, {{1, {0}}, {0, {1}}}, 0, 0);
  for (uint64_t n = 0; n < kFrames; ++n) {
    lend(s, n);
    REQUIRE(s.host.wait(0, [&] { return !receiver->ring.empty(); }));
    receiver->take();
    s.host.arenas[1]->give_back_soon();
    hear_until(s, [](const Prefix& p) { return p.what == What::kReturned; });
  }
  auto [ours, theirs] = socket_pair();
  s.own = std::move(ours);
  const struct {
    Prefix handshake{What::kHandshake, 0, sizeof(Handshake), 0};
    Handshake says{kHandshakeMagic, kWireVersion, 1, 5};
    Prefix heard{What::kHeard, 0, sizeof(Heard), 0};
    Heard frames{kFrames};
    Prefix clock{What::kClock, 0, sizeof(Clock), 0};
    Clock requested{7, 0};
  } all;
  s.say(&all, sizeof all);  // at once, as what is there when the connection comes about
  s.host.pump->connect(std::move(theirs), 1);
  uint64_t again = 0;
  hear_until(s, [&](const Prefix& p) {
    again += p.what == What::kReturned;
    return p.what == What::kClockIs;
  });
  CHECK_EQ(again, uint64_t(0));
  CHECK(!s.host.process_table->gone(1, 1));
  // And it goes on where that was.
  lend(s, kFrames);
  REQUIRE(s.host.wait(0, [&] { return !receiver->ring.empty(); }));
  receiver->take();
  s.host.arenas[1]->give_back_soon();
  hear_until(s, [](const Prefix& p) { return p.what == What::kReturned; });
}

// The block is not held for it any more, so what lies there by then may be of another one.
TEST(a_frame_that_an_error_has_stood_for_is_not_sent_over_the_next_connection_either) {
  Stranger s;
  const auto sender = s.host.sender(kId, {{1, {0}}, {0, {1}}}, 1);
  send(s.host, 0, *sender, 0, 100'000);
  auto* const slot = reinterpret_cast<SlotHeader*>(s.host.segments[kId]->ring(Host::offset({{1, {0}}, {0, {1}}}, 1)).slot(0));
  const auto size = std::exchange(slot->block_size, kBlockHeader);  // no such block can be mapped
  struct {
    OpenHead head;
    OpenEntry entry;
  } const open = {{2, 1}, {1, 1, 0, 0}};
  for (int i = 0; i < 2; ++i) {
    s.handshake();
    s.say(What::kOpen, open);
    bool stands_in = false;
    hear_until(s, [&](const Prefix& p) {
      stands_in = p.flags & kStandIn;
      return p.what == What::kFrame;
    });
    CHECK(stands_in);
    slot->block_size = size;
    auto [ours, theirs] = socket_pair();
    s.own = std::move(ours);
    s.host.pump->connect(std::move(theirs), 1);
  }
}
