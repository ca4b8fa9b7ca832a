// Frames that are on their way when both hosts let go of their segment: what they claim is given up, and what they keep
// let go of, if and only if they have not come.
#include "net_claims.h"
#include "net_stranger.h"

using namespace conveyor;
using namespace conveyor::net;

namespace {

const std::vector<Host::Shape> kRings = {{1, {0}}, {0, {1}}};

// The stranger's own words, and what it hears.
struct Closer : Stranger {
  std::unique_ptr<Sender> sender = host.sender(kId, kRings, 1);
  std::string heard;

  Closer() { begin(0); }
  // A connection is there, over which it wants frames from there on.
  void begin(uint64_t have) {
    handshake();
    struct {
      OpenHead head;
      OpenEntry entry;
    } open = {{2, 1}, {1, 1, have, 0}};
    say(What::kOpen, open);
  }
  void reconnect() {
    auto [ours, theirs] = socket_pair();
    own = std::move(ours);
    heard.clear();
    host.pump->connect(std::move(theirs), 1);
    handshake();
  }
  // Of the ring that leads to it it has had so many, and has the segment no more.
  void close(uint64_t have) {
    struct {
      CloseHead head;
      CloseEntry entry;
    } said = {{1, 0}, {1, 0, have}};
    say(What::kClose, said);
  }
  void wait_until_sent(uint64_t frames) {
    CHECK(check::soon([&] {
      drain();
      return host.pump->counts(1).frames_sent == frames;
    }));
  }
  void drain() {
    char some[4096];
    for (ssize_t n; (n = ::recv(own.get(), some, sizeof some, MSG_DONTWAIT)) > 0;) heard.append(some, size_t(n));
  }
  // How many messages of that kind have come, and how many frames that of kClose says for the other ring.
  uint64_t said_have = ~uint64_t(0);
  size_t count(What what) {
    drain();
    size_t found = 0;
    for (size_t at = 0; at + sizeof(Prefix) <= heard.size();) {
      Prefix prefix;
      std::memcpy(&prefix, heard.data() + at, sizeof prefix);
      if (at + sizeof prefix + prefix.size > heard.size()) break;
      if (prefix.what == what) ++found;
      if (prefix.what == What::kClose) {
        CloseEntry entry;
        CHECK_EQ(prefix.size, sizeof(CloseHead) + sizeof entry);
        std::memcpy(&entry, heard.data() + at + sizeof prefix + sizeof(CloseHead), sizeof entry);
        CHECK_EQ(entry.ring, 0u);
        said_have = entry.have;
      }
      at += sizeof prefix + prefix.size;
    }
    return found;
  }
};

void send_three(Closer& c) {
  send_claims(c.host, 0, *c.sender, 1, "first", 10);
  send_claims(c.host, 0, *c.sender, 2, "second", 10);
  send_claims(c.host, 0, *c.sender, 3, "third", 100'000);
  c.wait_until_sent(3);
}

}  // namespace

TEST(what_frames_claim_that_have_come_to_no_segment_is_told) {
  Closer c;
  send_three(c);
  c.host.pump->unmirror(kId);
  Told told{*c.host.pump};
  CHECK(check::soon([&] { return c.count(What::kClose) == 1; }));
  CHECK_EQ(c.said_have, 0u);
  CHECK(told.is({}));  // they may come
  c.close(1);
  CHECK(check::soon([&] { return told.is({"second@1", "third@1"}); }));
  CHECK(check::soon([&] { return c.count(What::kClosed) == 1; }));
  c.host.arenas[0]->give_back(0);
  CHECK_EQ(c.host.arenas[0]->blocks_out(), 0u);
}

TEST(it_is_told_as_well_if_the_readers_host_has_closed_first) {
  Closer c;
  send_three(c);
  c.close(2);
  Told told{*c.host.pump};
  // Behind that, and nothing has come of it yet: the segment is here.
  c.say(What::kClock, Clock{1, 0});
  CHECK(check::soon([&] { return c.count(What::kClockIs) == 1; }));
  CHECK(told.is({}));
  CHECK_EQ(c.count(What::kClosed), 0u);
  c.host.pump->unmirror(kId);
  CHECK(told.is({"third@1"}));
  CHECK(check::soon([&] { return c.count(What::kClosed) == 1; }));
}

TEST(a_frame_of_which_a_part_has_come_has_not_come) {
  Closer c;
  send_claims(c.host, 0, *c.sender, 1, "larger than what a socket takes", 20'000'000);
  c.wait_until_sent(1);  // begun
  c.own = Fd();
  c.host.pump->unmirror(kId);
  c.reconnect();
  Told told{*c.host.pump};
  c.close(0);
  CHECK(check::soon([&] { return told.is({"larger than what a socket takes@1"}); }));
}

TEST(what_was_sent_over_a_connection_that_has_broken_is_told_when_there_is_another) {
  Closer c;
  send_three(c);
  c.own = Fd();
  c.host.pump->unmirror(kId);
  for (int i = 0; i < 2; ++i) {  // as often as it is not answered
    c.reconnect();
    CHECK(check::soon([&] { return c.count(What::kClose) == 1; }));
  }
  Told told{*c.host.pump};
  c.close(0);
  CHECK(check::soon([&] { return told.is({"first@1", "second@1", "third@1"}); }));
  const Prefix closed{What::kClosed, 0, 0, kId};
  c.say(&closed, sizeof closed);
  for (int i = 0; i < 2; ++i) {  // it has heard that; and it has said all behind a reconnect
    if (i == 1) c.reconnect();
    c.say(What::kClock, Clock{1, 0});
    CHECK(check::soon([&] { return c.count(What::kClockIs) == 1; }));
  }
  CHECK_EQ(c.count(What::kClose), 0u);
}

// A reader that leaves while its frames are on their way: whether they have come its host says when it closes.
TEST(what_was_sent_to_a_reader_that_has_left_since_is_told) {
  Closer c;
  send_three(c);
  c.say(What::kCredit, Credit{1, 0, {1, 0, 0, 1}});
  Told told{*c.host.pump};
  c.say(What::kClock, Clock{1, 0});
  CHECK(check::soon([&] { return c.count(What::kClockIs) == 1; }));
  CHECK(told.is({}));
  c.host.pump->unmirror(kId);
  c.close(2);
  CHECK(check::soon([&] { return told.is({"third@1"}); }));
}

TEST(what_frames_keep_that_have_come_to_no_segment_is_let_go_of) {
  Closer c;
  std::atomic<int> gone{0};
  for (uint64_t n = 0; n < 3; ++n) {
    REQUIRE(c.host.wait_for_room(0, *c.sender));
    Outgoing out;
    out.tag = n;
    out.codec = kBytes;
    out.flags = kKeeps;
    out.size = 5'000;
    out.keeps = {5};
    out.attached = {&gone, [](const std::atomic<int>* one) { const_cast<std::atomic<int>*>(one)->fetch_add(1); }};
    c.sender->reserve(out);
    std::memset(c.sender->body_of(out), 0, out.size);
    c.sender->publish(out);
  }
  c.wait_until_sent(3);
  c.host.pump->unmirror(kId);
  const auto is_gone = [&](int count) {
    c.host.arenas[0]->give_back_soon();
    return gone.load() == count;
  };
  c.close(1);
  CHECK(check::soon([&] { return is_gone(2); }));
  c.say(What::kReturned, Returned{1, 0, 0, 1});
  CHECK(check::soon([&] { return is_gone(3); }));
}

TEST(a_segment_that_is_there_again_is_not_said_to_be_closed) {
  Closer c;
  c.host.pump->unmirror(kId);
  CHECK(check::soon([&] { return c.count(What::kClose) == 1; }));
  c.host.mirror(kId, kRings);
  c.reconnect();
  c.say(What::kClock, Clock{1, 0});
  CHECK(check::soon([&] { return c.count(What::kClockIs) == 1; }));
  CHECK_EQ(c.count(What::kClose), 0u);
  CHECK(check::soon([&] { return c.count(What::kOpen) == 1; }));
}
