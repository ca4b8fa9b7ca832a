// Connections between hosts that are cut anywhere, again and again.
#include <poll.h>

#include "net_setup.h"

using namespace conveyor;
using namespace conveyor::net;

namespace {

using Shapes = std::vector<Host::Shape>;
constexpr uint64_t kId = 7;

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
  // The greeting, what opens a segment, heads and bodies, credits.
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
