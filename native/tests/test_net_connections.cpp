// Connections between hosts: silent, gone for good, or with somebody at the other end who does not speak as he should.
#include <poll.h>

#include "net_setup.h"

using namespace conveyor;
using namespace conveyor::net;

namespace {

using Shapes = std::vector<Host::Shape>;
constexpr uint64_t kId = 7;

// A socket that this test speaks itself, to a pump whose other host it is.
struct Stranger {
  Host host;
  Fd own;
  explicit Stranger(uint64_t window_ns = 20 * kSecond) : host(0, {0, 1}, window_ns) {
    host.mirror(kId, {{1, {0}}, {0, {1}}});
    auto [ours, theirs] = socket_pair();
    own = std::move(ours);
    host.pump->connect(std::move(theirs), 1);
  }
  void say(const void* data, size_t size) { CHECK_EQ(::send(own.get(), data, size, MSG_NOSIGNAL), ssize_t(size)); }
  template <class T>
  void say(What what, const T& value, uint16_t flags = 0, uint64_t segment = kId) {
    const Prefix prefix{what, flags, sizeof value, segment};
    say(&prefix, sizeof prefix);
    say(&value, sizeof value);
  }
  void greet(uint64_t instance = 5) { say(What::kHello, Hello{kHelloMagic, kWireVersion, 1, instance}); }
  bool lost() {
    return host.wait(0, [&] { return host.board->gone(1, 1); }, 60 * kSecond);
  }
};

void refused(const std::function<void(Stranger&)>& says) {
  Stranger s;
  s.greet();
  says(s);
  CHECK(s.lost());
}

}  // namespace

TEST(a_host_that_stays_away_is_dead) {
  const Homes homes = {0, 1, 1};
  Host a(0, homes), b(1, homes);
  join(a, b);
  CHECK(check::soon([&] { return a.pump->connected(1) && b.pump->connected(0); }));
  const uint64_t start = now_ns();
  b.pump->stop();  // it says so
  CHECK(a.wait(0, [&] { return a.board->gone(1, 1) && a.board->gone(2, 1); }));
  CHECK(now_ns() - start < 10 * kSecond);  // and not when its time is over
  bool told = false;
  CHECK(check::soon([&] {
    for (const net::Event& e : a.pump->events()) told |= e.kind == net::Event::kLost && e.host == 1;
    return told;
  }));
  auto [one, other] = socket_pair();
  CHECK_THROWS(std::system_error, a.pump->connect(std::move(one), 1));
}

TEST(a_host_whose_connection_breaks_is_dead_after_the_window) {
  const uint64_t window = 5 * kSecond;  // enough to look at it before it is over, though others have the cores
  Stranger s(window);
  s.greet();
  CHECK(check::soon([&] { return s.host.pump->connected(1); }));
  const uint64_t start = now_ns();
  s.own.reset();
  CHECK(check::soon([&] {
    for (const net::Event& e : s.host.pump->events())
      if (e.kind == net::Event::kDisconnected) return true;
    return false;
  }));
  CHECK(!s.host.board->gone(1, 1));
  CHECK(s.lost());
  CHECK(now_ns() - start > window * 9 / 10);
}

// As with a host that has given this one up: it still lets in who connects, and hangs up at once.
TEST(a_host_is_dead_after_the_window_though_it_can_be_connected_to) {
  Stranger s(kSecond);
  s.greet();
  CHECK(check::soon([&] { return s.host.pump->connected(1); }));
  s.own.reset();
  CHECK(check::soon([&] {
    if (s.host.board->gone(1, 1)) return true;
    auto [ours, theirs] = socket_pair();
    ours.reset();
    try {
      s.host.pump->connect(std::move(theirs), 1);
    } catch (const std::system_error&) {  // it is given up
    }
    ::usleep(20'000);
    return false;
  }));
}

TEST(a_silent_host_is_dead_after_the_window) {
  Stranger s(kSecond);
  s.greet();
  CHECK(s.lost());
}

TEST(hosts_without_work_keep_their_connection) {
  const Homes homes = {0, 1};
  // Three quarters of it in silence end the connection; a machine that has other work takes no such time to send a word.
  const uint64_t window = 4 * kSecond;
  Host a(0, homes, window), b(1, homes, window);
  join(a, b);
  const auto connected = [&] { return a.pump->connected(1) && b.pump->connected(0); };
  CHECK(check::soon(connected));
  for (const uint64_t end = now_ns() + window; now_ns() < end && connected();) ::usleep(5'000);
  CHECK(connected());
}

// A copy of a socket that a forked child has keeps it open, whoever closes it.
TEST(a_connection_ends_though_a_forked_child_has_a_copy_of_it) {
  install_fork_handlers();
  auto [one, other] = socket_pair();
  auto connection = std::make_unique<Connection>(std::move(one));
  char c;
  check::Child ends([&] { connection.reset(); });
  CHECK(ends.passed());
  CHECK(::recv(other.get(), &c, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN);  // it was not the child's to end
  check::Child holds([] {
    for (;;) ::pause();
  });
  connection.reset();
  CHECK_EQ(::recv(other.get(), &c, 1, MSG_DONTWAIT), ssize_t(0));
}
TEST(a_pump_sleeps_though_a_forked_child_has_a_copy_of_its_broken_connection) {
  const uint64_t window = 2 * kSecond;
  Stranger s(window);
  s.greet();
  CHECK(check::soon([&] { return s.host.pump->connected(1); }));
  check::Child holds([] {
    for (;;) ::pause();
  });
  s.host.pump->disconnect(1, "for a test");
  const auto spent = [] {
    timespec at;
    ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &at);
    return uint64_t(at.tv_sec) * kSecond + uint64_t(at.tv_nsec);
  };
  const uint64_t before = spent();
  CHECK(s.lost());  // till then it has nothing to do
  CHECK(spent() - before < window / 4);
  char bytes[4096];
  ssize_t n;
  pollfd heard = {s.own.get(), POLLIN, 0};
  while (::poll(&heard, 1, 60'000) == 1 && (n = ::recv(s.own.get(), bytes, sizeof bytes, MSG_DONTWAIT)) > 0) {
  }
  CHECK_EQ(n, ssize_t(0));
}

TEST(another_pump_in_the_place_of_one_is_not_taken_for_it) {
  Stranger s;
  s.greet(5);
  CHECK(check::soon([&] { return s.host.pump->connected(1); }));
  auto [ours, theirs] = socket_pair();
  s.own = std::move(ours);
  s.host.pump->connect(std::move(theirs), 1);
  s.greet(6);
  CHECK(s.lost());
}

TEST(a_hosts_clock_says_the_time_between_question_and_answer) {
  const Homes homes = {0, 1};
  Host a(0, homes), b(1, homes);
  // Nobody answers, and it is said so when the time is over.
  CHECK(a.pump->ask_clock(1, 3, 1'000'000).empty());
  join(a, b);
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i)
    threads.emplace_back([&] {
      check::guarded("asks", [&] {
        const auto samples = a.pump->ask_clock(1, 8, 60 * kSecond);
        CHECK(samples.size() >= 8);
        uint64_t last = 0;
        for (const ClockSample& s : samples) {
          CHECK(last <= s.asked && s.asked <= s.says && s.says <= s.answered);  // both have the same clock
          last = s.answered;
        }
      });
    });
  for (std::thread& t : threads) t.join();
  // Also over the next connection, where a question may have been lost with the former one.
  a.pump->disconnect(1, "by the test");
  CHECK(check::soon([&] { return !b.pump->connected(0); }));
  join(a, b);
  CHECK(b.pump->ask_clock(0, 4, 60 * kSecond).size() >= 4);
}

TEST(who_does_not_greet_is_lost) {
  Stranger s;
  s.say(What::kPing, 0, 0);
  CHECK(s.lost());
}
TEST(who_speaks_another_protocol_is_lost) {
  Stranger s;
  s.say(What::kHello, Hello{kHelloMagic, kWireVersion + 1, 1, 5});
  CHECK(s.lost());
}
TEST(who_says_what_makes_no_sense_is_lost) {
  const auto frame = [](uint32_t ring, uint64_t number, uint32_t in_slot, uint64_t size, uint64_t block, uint32_t flags = 0, uint16_t kind = 1) {
    return FrameHead{ring, kind, kBytes, number, 0, flags, in_slot, size, block};
  };
  refused([](Stranger& s) { s.say(What(99), uint64_t(0)); });
  refused([](Stranger& s) { s.say(What::kHello, Hello{kHelloMagic, kWireVersion, 1, 5}); });
  refused([](Stranger& s) { s.say(What::kHave, uint64_t(0)); });
  refused([](Stranger& s) { s.say(What::kHave, Have{0, 0, 0}); });
  refused([](Stranger& s) { s.say(What::kHave, Have{1, 0, 7}); });
  refused([](Stranger& s) { s.say(What::kCredit, Credit{1, 0, {5, 0, 0, 0}}); });
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
}

TEST(random_bytes_end_a_host_and_nothing_else) {
  check::Random random(7);
  for (int round = 0; round < 40; ++round) {
    Stranger s;
    s.greet();
    // Whole prefixes of known kinds, now and then, so that it gets further than the first word.
    for (int i = 0; i < 200; ++i) {
      char bytes[256];
      for (char& c : bytes) c = char(random.next());
      Prefix prefix{What(1 + random.below(15)), uint16_t(random.below(2)), uint32_t(random.below(200)), random.below(4) != 0 ? kId : random.next()};
      if (random.below(20) == 0) prefix.size = uint32_t(random.next());
      if (::send(s.own.get(), &prefix, sizeof prefix, MSG_NOSIGNAL) < 0 || ::send(s.own.get(), bytes, std::min<size_t>(prefix.size, sizeof bytes), MSG_NOSIGNAL) < 0) break;
    }
    s.own.reset();
    s.host.pump->give_up(1, "it is over");
    CHECK(s.lost());
  }
}

TEST(a_segment_that_one_host_has_left_is_nothing_to_the_other) {
  const Homes homes = {0, 1};
  const Shapes rings = {{0, {1}, 0}};
  Host a(0, homes), b(1, homes);
  for (uint64_t id = 1; id < 30; ++id) {
    a.mirror(id, rings);
    b.mirror(id, rings);
    if (id == 1) join(a, b);
    const auto sender = a.sender(id, rings, 0);
    for (uint64_t n = 0; n < kSlots; ++n) send(a, 0, *sender, n, size_of(n));
    if (id % 3 == 0) CHECK(check::soon([&, receiver = b.receiver(id, rings, 0, 0)] { return !receiver->ring.empty(); }));
    (id % 2 ? a : b).pump->unmirror(id);
    (id % 2 ? b : a).pump->unmirror(id);
  }
  a.mirror(99, rings);
  b.mirror(99, rings);
  const auto sender = a.sender(99, rings, 0);
  const auto receiver = b.receiver(99, rings, 0, 0);
  send(a, 0, *sender, 4, size_of(4));
  CHECK(b.wait(1, [&] { return !receiver->ring.empty(); }));
  CHECK(!a.board->gone(1, 1) && !b.board->gone(0, 1));
}
