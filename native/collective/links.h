// How a rank tells those of other hosts what it does. To each other host it has a ring, which all ranks there read, and
// which goes over the connection between the hosts as every ring does (net/): it is authenticated, and made again when it
// breaks, and nothing is lost or comes twice.
//
// At each barrier a rank sends a frame to each host, with what the ranks there need of its tensor, so that a frame that is
// there is what an arrival is on one host. Ranks that have nothing to give send one as well: it tells that they have read
// what came before, and so nobody is more than two frames ahead of anybody.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "../receiver.h"
#include "../sender.h"

namespace conveyor {

// On which host each rank of a collective group is. Hosts are counted from 0 on, within the group.
class RankHosts {
 public:
  // All of them on one.
  explicit RankHosts(uint32_t ranks) : RankHosts(std::vector<uint32_t>(ranks, 0)) {}
  explicit RankHosts(std::vector<uint32_t> of) : of_(std::move(of)) {
    for (const uint32_t host : of_) hosts_ = std::max(hosts_, host + 1);
    for (uint32_t h = 0; h < hosts_; ++h) most_ = std::max(most_, count(h));
  }

  uint32_t ranks() const { return uint32_t(of_.size()); }
  uint32_t hosts() const { return hosts_; }
  // How many are on the host that has most of them.
  uint32_t most() const { return most_; }
  uint32_t operator[](uint32_t rank) const { return of_[rank]; }
  bool together(uint32_t a, uint32_t b) const { return of_[a] == of_[b]; }
  uint32_t count(uint32_t host) const { return uint32_t(std::ranges::count(of_, host)); }
  // Its number among those of its host.
  uint32_t place(uint32_t rank) const { return uint32_t(std::count(of_.begin(), of_.begin() + rank, of_[rank])); }
  std::vector<uint32_t> on(uint32_t host) const {
    std::vector<uint32_t> ranks;
    for (uint32_t r = 0; r < of_.size(); ++r)
      if (of_[r] == host) ranks.push_back(r);
    return ranks;
  }

 private:
  std::vector<uint32_t> of_;
  uint32_t hosts_ = 0;
  uint32_t most_ = 0;
};

class CollectiveLinks {
 public:
  // The frames of two barriers, and that the group is broken.
  static constexpr uint32_t kSlots = 4;
  static constexpr uint32_t kStride = 1024;

  // Where in the rings of a group the one lies that `rank` writes for `host`.
  static size_t ring_at(const RankHosts& hosts, uint32_t rank, uint32_t host) {
    const uint32_t nth = host - (host > hosts[rank]);  // of the other ones
    return (size_t(rank) * (hosts.hosts() - 1) + nth) * align_up(RingHeader::bytes(kSlots, kStride, hosts.most()), kCacheLine);
  }
  static size_t bytes(const RankHosts& hosts) { return hosts.hosts() < 2 ? 0 : hosts.ranks() * (hosts.hosts() - 1) * align_up(RingHeader::bytes(kSlots, kStride, hosts.most()), kCacheLine); }
  static void prepare(Segment& segment, size_t offset, const RankHosts& hosts);

  // `offset`: of the rings in the segment; `doorbells`: of all ranks; `arena`: this process's; `views`: of each rank's.
  CollectiveLinks(const std::shared_ptr<Segment>& segment, size_t offset, const std::shared_ptr<ProcessTable>& process_table, RankHosts hosts, uint32_t rank,
                  const std::vector<Target>& doorbells, const std::shared_ptr<Arena>& arena, const std::vector<std::shared_ptr<ArenaView>>& views);

  const RankHosts& hosts() const { return hosts_; }
  // The other hosts.
  const std::vector<uint32_t>& others() const { return others_; }
  // What comes from that rank, which is on another host.
  Receiver& from(uint32_t rank) { return *from_[rank]; }

  struct Part {
    const void* from;
    size_t size;
  };
  // Send one after the other, each at a multiple of a cache line. Throws where there is no memory, or no room.
  void send(uint32_t host, uint64_t tag, std::span<const Part> parts);
  static size_t place_of(size_t size) { return align_up(size, kCacheLine); }
  void close();

 private:
  const RankHosts hosts_;
  std::vector<uint32_t> others_;
  std::vector<std::unique_ptr<Sender>> to_;      // by host
  std::vector<std::unique_ptr<Receiver>> from_;  // by rank
  std::mutex mutex_;                             // failures are told by another thread than that of operations
};

}  // namespace conveyor
