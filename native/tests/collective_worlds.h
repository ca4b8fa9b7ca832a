// Groups whose ranks are on several hosts, each with a process table, a pump and a segment of its own.
#pragma once

#include <latch>

#include "collective_setup.h"
#include "net_setup.h"

namespace conveyor {

constexpr uint64_t kNumber = 7;

// Rank r has slot r + 1 everywhere. Each host has a process table, a pump and a segment of its own.
struct Worlds {
  explicit Worlds(std::vector<uint32_t> of, uint64_t window_ns = 20 * kSecond) : hosts(of) {
    Homes homes = {0};
    homes.insert(homes.end(), of.begin(), of.end());
    for (uint32_t r = 0; r < of.size(); ++r) members.push_back({r + 1, 1});
    for (uint32_t h = 0; h < hosts.hosts(); ++h) all.push_back(std::make_unique<Host>(h, homes, window_ns));
    for (const auto& host : all) mirror(*host);
    for (uint32_t a = 0; a < all.size(); ++a)
      for (uint32_t b = a + 1; b < all.size(); ++b) join(*all[a], *all[b]);
  }
  void mirror(Host& host) {
    const auto segment = host.segments[kNumber] = Segment::create(CollectiveGroup::bytes(hosts));
    CollectiveGroup::prepare(*segment, hosts);
    std::vector<net::RingSpec> specs;
    for (uint32_t r = 0; r < hosts.ranks(); ++r)
      for (uint32_t h = 0; h < hosts.hosts(); ++h) {
        if (h == hosts[r]) continue;
        net::RingSpec spec{CollectiveGroup::links_at(hosts.ranks()) + CollectiveLinks::ring_at(hosts, r, h), {r + 1, 3}, {}, hosts[r] == host.self ? host.view(r + 1) : nullptr};
        for (const uint32_t reader : hosts.on(h)) spec.readers.push_back({reader + 1, 3});
        specs.push_back(spec);
      }
    host.pump->mirror(kNumber, segment, specs, {});
  }
  Host& of(uint32_t rank) { return *all[hosts[rank]]; }
  std::unique_ptr<Rank> rank(uint32_t r) {
    Host& host = of(r);
    std::vector<Target> doorbells;
    std::vector<std::shared_ptr<ArenaView>> views;
    for (uint32_t other = 0; other < hosts.ranks(); ++other) {
      doorbells.push_back({other + 1, 3});
      views.push_back(host.view(other + 1));
    }
    const auto segment = host.segments[kNumber];
    auto links = std::make_unique<CollectiveLinks>(segment, CollectiveGroup::links_at(hosts.ranks()), host.process_table, hosts, r, doorbells, host.arenas[r + 1], views);
    return std::make_unique<Rank>(host.process_table, segment, r, members, std::move(links));
  }
  template <class Body>
  void in_threads(Body body) {
    std::vector<std::thread> threads;
    // All of them have their ends before one begins, as where a group is made.
    std::latch ready(hosts.ranks());
    for (uint32_t r = 0; r < hosts.ranks(); ++r)
      threads.emplace_back([&, r] {
        check::guarded("rank", [&] {
          const auto made = rank(r);
          ready.arrive_and_wait();
          body(*made);
        });
      });
    for (std::thread& thread : threads) thread.join();
  }

  RankHosts hosts;
  std::vector<CollectiveGroup::Member> members;
  std::vector<std::unique_ptr<Host>> all;
};

inline bool broken_by(const Rank& rank, Cause cause, uint32_t at, const char* why) {
  const auto broken = rank.group.broken();
  return CHECK(broken.has_value()) && CHECK(broken->cause == cause) && CHECK_EQ(broken->rank, at) && CHECK(broken->why == why);
}

}  // namespace conveyor
