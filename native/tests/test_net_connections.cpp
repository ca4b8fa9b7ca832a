// Connections between hosts: cut anywhere, silent, or gone for good.
#include <poll.h>

#include "net_stranger.h"

using namespace conveyor;
using namespace conveyor::net;

namespace {

using Shapes = std::vector<Host::Shape>;

// Carries bytes between two hosts, until it has carried so many: then it is gone, with all that it had taken.
class Cable {
 public:
  Cable(Host& a, Host& b, uint64_t cut_after, uint64_t seed) : random_(seed), left_(cut_after) {
    auto [one, to_a] = socket_pair();
    auto [two, to_b] = tcp_pair();
    a.pump->connect(std::move(one), b.self);
    b.pump->connect(std::move(two), a.self);
    thread_ = std::thread([this, to_a = std::move(to_a), to_b = std::move(to_b)] { run(to_a.get(), to_b.get()); });
  }
  ~Cable() {
    cut();
    thread_.join();
  }
  void cut() { cut_.store(true); }
  bool is_cut() const { return over_.load(); }

 private:
  void run(int a, int b) {
    std::vector<char> buffer(64 * kKiB);
    pollfd ends[] = {{a, POLLIN, 0}, {b, POLLIN, 0}};
    while (!cut_.load() && left_ != 0) {
      if (::poll(ends, 2, 20) <= 0) continue;
      for (int i = 0; i < 2 && left_ != 0; ++i) {
        if (ends[i].revents == 0) continue;
        const ssize_t n = ::recv(ends[i].fd, buffer.data(), std::min<size_t>(1 + random_.below(buffer.size()), left_), 0);
        if (n <= 0) {
          left_ = 0;
          break;
        }
        left_ -= uint64_t(n);
        for (ssize_t at = 0; at < n;) {
          const ssize_t sent = ::send(ends[1 - i].fd, buffer.data() + at, size_t(n - at), MSG_NOSIGNAL | MSG_DONTWAIT);
          if (sent < 0 && errno == EAGAIN && !cut_.load()) {
            pollfd room = {ends[1 - i].fd, POLLOUT, 0};
            ::poll(&room, 1, 20);
          } else if (sent <= 0) {
            left_ = 0;
            break;
          } else {
            at += sent;
          }
        }
      }
    }
    over_.store(true);
  }
  check::Random random_;
  uint64_t left_;
  std::atomic<bool> cut_{false}, over_{false};
  std::thread thread_;
};

// Frames both ways over connections that are each cut after as many bytes as `after` says.
void cut_again_and_again(uint64_t frames, size_t sizes, const std::function<uint64_t()>& after, uint64_t seed) {
  const Homes homes = {0, 1};
  const Shapes rings = {{0, {1}}, {1, {0}}, {0, {1}, 0}};
  Host a(0, homes), b(1, homes);
  a.mirror(kId, rings);
  b.mirror(kId, rings);
  std::atomic<int> done{0};
  std::vector<std::thread> threads;
  const auto way = [&](Host& from, uint32_t writer, Host& to, uint32_t reader, size_t ring) {
    threads.emplace_back([&, writer, ring] {
      check::guarded("sends", [&] {
        const auto sender = from.sender(kId, rings, ring);
        for (uint64_t n = 0; n < frames; ++n) REQUIRE(send(from, writer, *sender, n, size_of(n % sizes)));
      });
    });
    threads.emplace_back([&, reader, ring] {
      check::guarded("receives", [&] {
        const auto receiver = to.receiver(kId, rings, ring, 0);
        for (uint64_t n = 0; n < frames; ++n) {
          REQUIRE(to.wait(reader, [&] { return !receiver->ring.empty(); }));
          REQUIRE(is_whole(receiver->take(), n, size_of(n % sizes)));
        }
      });
      done.fetch_add(1);
    });
  };
  way(a, 0, b, 1, 0);
  way(b, 1, a, 0, 1);
  int cuts = 0;
  check::guarded("cuts", [&] {
    while (done.load() < 2 && check::failures() == 0) {
      Cable cable(a, b, after(), seed + uint64_t(++cuts));
      while (!cable.is_cut() && done.load() < 2) ::usleep(200);
    }
  });
  for (Host* host : {&a, &b})
    for (const net::Event& e : host->pump->events())
      if (e.kind == net::Event::kLost) check::note(false, __FILE__, __LINE__, e.reason);
  for (auto& thread : threads) thread.join();
  CHECK(cuts > 3);
  CHECK(check::soon([&] {
    a.arenas[0]->give_back(0);
    b.arenas[1]->give_back(0);
    return true;
  }));
}

}  // namespace

TEST(a_connection_may_be_cut_at_every_byte) {
  uint64_t at = 0;
  // The handshake, what opens a segment, heads and bodies, credits.
  cut_again_and_again(60, 6, [&] { return at++ * 7 % 2'000 + 1; }, 1);
}
TEST(connections_are_cut_at_random_while_large_frames_come) {
  check::Random random(2);
  const uint64_t most = 8 * kMiB;
  cut_again_and_again(check::kThreadSanitizer ? 40 : 120, 10, [&] { return 1 + random.below(random.below(2) ? most : 300 * kKiB); }, 3);
}

TEST(a_frame_larger_than_what_any_connection_carries_comes_in_the_end) {
  const Homes homes = {0, 1};
  const Shapes rings = {{0, {1}}};
  Host a(0, homes), b(1, homes);
  a.mirror(kId, rings);
  b.mirror(kId, rings);
  const auto sender = a.sender(kId, rings, 0);
  const auto receiver = b.receiver(kId, rings, 0, 0);
  send(a, 0, *sender, 3, 17 * kMiB);
  int cuts = 0;
  while (receiver->ring.empty() && ++cuts < 100) {
    Cable cable(a, b, 2 * kMiB, uint64_t(cuts));
    while (!cable.is_cut() && receiver->ring.empty()) ::usleep(200);
  }
  CHECK(cuts > 5);
  REQUIRE(!receiver->ring.empty());
  CHECK(is_whole(receiver->take(), 3, 17 * kMiB));
}

TEST(a_death_while_there_is_no_connection_is_told_over_the_next_one) {
  const Shapes rings = {{0, {2}}, {2, {0}}};
  Host a(0, {0, 0, 1}), b(1, {0, 0, 1});
  a.mirror(kId, rings);
  b.mirror(kId, rings);
  {
    const Cable cable(a, b, ~uint64_t(0), 1);
    CHECK(check::soon([&] { return a.pump->connected(1) && b.pump->connected(0); }));
  }
  CHECK(check::soon([&] { return !a.pump->connected(1) && !b.pump->connected(0); }));
  a.process_table->slot(1)->status.signal.store(11);
  a.process_table->announce_death(1);
  a.mirror(kId + 1, rings);  // when the pump has done that, and is to connect, it has seen the death
  join(a, b);
  CHECK(b.wait(2, [&] { return b.process_table->gone(1, 1); }));
  CHECK_EQ(b.process_table->slot(1)->status.signal.load(), 11u);
  CHECK(!b.process_table->gone(0, 1));
}

// Also where the connection breaks in the middle of it.
TEST(a_death_comes_behind_what_the_process_has_written_over_a_connection_before) {
  const Shapes rings = {{0, {1}, 0}};
  Host a(0, {0, 1}), b(1, {0, 1});
  a.mirror(kId, rings);
  b.mirror(kId, rings);
  const auto sender = a.sender(kId, rings, 0);
  const auto receiver = b.receiver(kId, rings, 0, 0);
  {
    Cable cable(a, b, 2 * kMiB, 1);
    CHECK(check::soon([&] { return a.pump->connected(1) && b.pump->connected(0); }));
    send(a, 0, *sender, 5, 17 * kMiB);
    a.process_table->announce_death(0);
    CHECK(check::soon([&] { return cable.is_cut(); }));
  }
  CHECK(check::soon([&] { return !a.pump->connected(1) && !b.pump->connected(0); }));
  CHECK(!b.process_table->gone(0, 1));
  join(a, b);
  REQUIRE(b.wait(1, [&] { return b.process_table->gone(0, 1); }));
  REQUIRE(!receiver->ring.empty());
  CHECK(is_whole(receiver->take(), 5, 17 * kMiB));
}

TEST(a_host_that_stays_away_is_dead) {
  const Homes homes = {0, 1, 1};
  Host a(0, homes), b(1, homes);
  join(a, b);
  CHECK(check::soon([&] { return a.pump->connected(1) && b.pump->connected(0); }));
  const uint64_t start = now_ns();
  b.pump->stop();  // it says so
  CHECK(a.wait(0, [&] { return a.process_table->gone(1, 1) && a.process_table->gone(2, 1); }));
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
  s.handshake();
  CHECK(check::soon([&] { return s.host.pump->connected(1); }));
  const uint64_t start = now_ns();
  s.own.reset();
  CHECK(check::soon([&] {
    for (const net::Event& e : s.host.pump->events())
      if (e.kind == net::Event::kDisconnected) return true;
    return false;
  }));
  CHECK(!s.host.process_table->gone(1, 1));
  CHECK(s.lost());
  CHECK(now_ns() - start > window * 9 / 10);
}

// As with a host that has given this one up: it still lets in who connects, and hangs up at once.
TEST(a_host_is_dead_after_the_window_though_it_can_be_connected_to) {
  Stranger s(kSecond);
  s.handshake();
  CHECK(check::soon([&] { return s.host.pump->connected(1); }));
  s.own.reset();
  CHECK(check::soon([&] {
    if (s.host.process_table->gone(1, 1)) return true;
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

// Who connects again is told of each connection that breaks, also of one that was never seen to be whole.
TEST(a_connection_that_breaks_at_once_is_told_of) {
  Stranger s;
  s.handshake();
  CHECK(check::soon([&] { return s.host.pump->connected(1); }));
  s.own.reset();
  for (int i = 0; i < 20; ++i) {
    CHECK(check::soon([&] {
      for (const net::Event& e : s.host.pump->events())
        if (e.kind == net::Event::kDisconnected) return true;
      return false;
    }));
    auto [ours, theirs] = socket_pair();
    ours.reset();
    s.host.pump->connect(std::move(theirs), 1);
  }
}

TEST(the_processes_of_a_host_that_is_given_up_are_dead_at_once) {
  Stranger s;
  s.host.pump->give_up(1, "for a test");
  CHECK(s.host.process_table->gone(1, 1));
}

TEST(a_silent_host_is_dead_after_the_window) {
  Stranger s(kSecond);
  s.handshake();
  CHECK(s.lost());
}

// A machine that has other work may take longer, but not each time. The silence is the part that a host may take less of.
TEST(a_silent_connection_is_broken_after_three_words_that_did_not_come) {
  const uint64_t window = 3 * kSecond;
  uint64_t took = window;
  for (int i = 0; i < 5 && took > window * 7 / 10; ++i) {
    Stranger s(window);
    s.handshake();
    CHECK(check::soon([&] { return s.host.pump->connected(1); }));
    const uint64_t start = now_ns();
    CHECK(check::soon([&] {
      for (const net::Event& e : s.host.pump->events())
        if (e.kind == net::Event::kDisconnected) return true;
      return false;
    }));
    took = now_ns() - start;
    CHECK(took > window / 2);
  }
  CHECK(took <= window * 7 / 10);
}

// As where the network ends in the middle of a large frame: what is to be sent waits in the kernel, and nothing comes.
TEST(a_host_that_is_silent_while_a_large_frame_goes_to_it_is_dead_after_the_window) {
  Stranger s(kSecond);
  s.handshake();
  struct {
    OpenHead head;
    OpenEntry entry;
  } const open = {{2, 1}, {1, 1, 0, 0}};
  s.say(What::kOpen, open);
  const auto sender = s.host.sender(kId, {{1, {0}}, {0, {1}}}, 1);
  send(s.host, 0, *sender, 0, 17 * kMiB);
  CHECK(s.host.wait(0, [&] { return s.host.process_table->gone(1, 1); }, 20 * kSecond));
  CHECK(s.host.pump->counts(1).bytes_sent > 0);
}

TEST(hosts_without_work_keep_their_connection) {
  const Homes homes = {0, 1};
  // Three fifths of it in silence end the connection; a machine that has other work takes no such time to send a word.
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
  s.handshake();
  CHECK(check::soon([&] { return s.host.pump->connected(1); }));
  check::Child holds([] {
    for (;;) ::pause();
  });
  s.host.pump->disconnect(1, "for a test");
  const auto spent = [] {  // by the other threads: this one looks a thousand times a second
    const auto of = [](clockid_t clock) {
      timespec at;
      ::clock_gettime(clock, &at);
      return uint64_t(at.tv_sec) * kSecond + uint64_t(at.tv_nsec);
    };
    return of(CLOCK_PROCESS_CPUTIME_ID) - of(CLOCK_THREAD_CPUTIME_ID);
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
  s.handshake(5);
  CHECK(check::soon([&] { return s.host.pump->connected(1); }));
  auto [ours, theirs] = socket_pair();
  s.own = std::move(ours);
  s.host.pump->connect(std::move(theirs), 1);
  s.handshake(6);
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
          CHECK(last <= s.requested && s.requested <= s.says && s.says <= s.answered);  // both have the same clock
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
  CHECK(!a.process_table->gone(1, 1) && !b.process_table->gone(0, 1));
}
