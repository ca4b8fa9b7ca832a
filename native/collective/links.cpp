#include "links.h"

namespace conveyor {

void CollectiveLinks::prepare(Segment& segment, size_t offset, const RankHosts& hosts) {
  if (hosts.hosts() < 2) return;
  for (uint32_t r = 0; r < hosts.ranks(); ++r)
    for (uint32_t h = 0; h < hosts.hosts(); ++h)
      if (h != hosts[r]) segment.make_ring(offset + ring_at(hosts, r, h), kSlots, kStride, hosts.count(h), kWriterMayWait);
}

CollectiveLinks::CollectiveLinks(const std::shared_ptr<Segment>& segment, size_t offset, const std::shared_ptr<ProcessTable>& process_table, RankHosts hosts, uint32_t rank,
                                 const std::vector<Target>& doorbells, const std::shared_ptr<Arena>& arena, const std::vector<std::shared_ptr<ArenaView>>& views)
    : hosts_(std::move(hosts)), to_(hosts_.hosts()), from_(hosts_.ranks()) {
  if (rank >= hosts_.ranks() || doorbells.size() != hosts_.ranks() || views.size() != hosts_.ranks())
    throw std::system_error(EINVAL, std::generic_category(), "collective group");
  for (uint32_t h = 0; h < hosts_.hosts(); ++h) {
    if (h == hosts_[rank] || hosts_.count(h) == 0) continue;
    others_.push_back(h);
    std::vector<Target> readers;
    for (const uint32_t r : hosts_.on(h)) readers.push_back(doorbells[r]);
    to_[h] = std::make_unique<Sender>(segment, offset + ring_at(hosts_, rank, h), process_table, readers, arena);
  }
  for (uint32_t r = 0; r < hosts_.ranks(); ++r) {
    if (hosts_.together(r, rank)) continue;
    from_[r] = std::make_unique<Receiver>(segment, offset + ring_at(hosts_, r, hosts_[rank]), hosts_.place(rank), process_table, doorbells[r], views[r], true);
    from_[r]->ring.carries = "a collective group";
  }
}

void CollectiveLinks::send(uint32_t host, uint64_t tag, std::span<const Part> parts) {
  Sender& to = *to_[host];
  Outgoing out;
  out.tag = tag;
  out.codec = kBytes;
  for (const Part& part : parts) out.size += place_of(part.size);
  to.reserve(out);
  std::lock_guard lock(mutex_);
  if (!to.ring.has_room()) throw std::system_error(EPROTO, std::generic_category(), "conveyor: ranks of another host have not taken what they were given before");
  char* at = to.body_of(out);
  for (const Part& part : parts) {
    if (part.size != 0) std::memcpy(at, part.from, part.size);
    at += place_of(part.size);
  }
  to.publish(out);
}

void CollectiveLinks::close() {
  for (const auto& from : from_)
    if (from) from->close();
}

}  // namespace conveyor
