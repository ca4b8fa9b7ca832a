// On which host each rank of a collective group is. Hosts are counted from 0 on, within the group.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace conveyor {

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

}  // namespace conveyor
