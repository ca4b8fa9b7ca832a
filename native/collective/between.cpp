// What ranks of a group that are on different hosts tell each other. See links.h.
#include <array>
#include <cstring>
#include <utility>

#include "lines.h"

namespace conveyor {

// At the beginning of a frame. What belongs to it follows, each part at a multiple of a cache line.
struct CollectiveGroup::Said {
  enum What : uint32_t { kCame = 1, kBroken };
  uint32_t what;
  uint32_t calls;     // kCame: 1: what it has called follows
  uint32_t cause;     // kBroken
  uint32_t rank;      // likewise
  uint64_t left;      // kBroken: the barrier that who tells it waits at no more; 0: none
  uint64_t data_at;   // kCame: where in the frame what it gives begins
  Execution in;       // kBroken: that has failed
};

namespace {

[[noreturn]] void senseless() { throw std::system_error(EPROTO, std::generic_category(), "conveyor: a rank of another host has said what makes no sense"); }

}  // namespace

std::vector<CollectiveLinks::Part> CollectiveGroup::parts_for(uint32_t host) const {
  if (by_hosts_) {
    if (step_ == 0 || step_ > pieces_ || !root_is_on(host)) return {};
    const Part own = part(elements(step_ - 1));
    return {{result(barrier_ + 1) + own.from * size_, own.count * size_}};
  }
  if (step_ >= pieces_) return {};
  const size_t offset = at(step_), size = elements(step_) * size_;
  const bool gives = call_.root == int32_t(rank_);
  std::vector<CollectiveLinks::Part> parts;
  const auto chunks = [&] {
    for (const uint32_t r : hosts_.on(host)) parts.push_back({data_.in[r] + offset, size});
  };
  switch (call_.operation) {
    case Collective::kBarrier:
    case Collective::kExchange:
      break;
    case Collective::kAllReduce:
    case Collective::kAllGather:
    case Collective::kReduce:
    case Collective::kGather:
      if (root_is_on(host)) parts.push_back({data_.in[0] + offset, size});
      break;
    case Collective::kBroadcast:
      if (gives) parts.push_back({data_.in[0] + offset, size});
      break;
    case Collective::kScatter:
      if (gives) chunks();
      break;
    case Collective::kReduceScatter:
    case Collective::kAllToAll:
      chunks();
      break;
  }
  return parts;
}

void CollectiveGroup::tell_arrival() {
  if (!links_) return;
  Said said = {Said::kCame, step_ == 0, 0, 0, 0, 0, {}};
  const Line& mine = lines_[rank_];
  const size_t half = (barrier_ + 1) & 1;
  std::vector<CollectiveLinks::Part> head = {{&said, sizeof said}};
  if (said.calls != 0) head.push_back({&mine.calls[half], sizeof(CollectiveCall)});
  for (const CollectiveLinks::Part& part : head) said.data_at += CollectiveLinks::place_of(part.size);
  for (const uint32_t host : links_->others()) {
    std::vector<CollectiveLinks::Part> parts = head;
    for (const CollectiveLinks::Part& part : parts_for(host)) parts.push_back(part);
    links_->send(host, barrier_ + 1, parts);
  }
}

void CollectiveGroup::tell_broken(uint64_t at) {
  if (!links_) return;
  const std::optional<Broken> why = broken();
  const Line& mine = lines_[rank_];  // this rank has broken it
  const Said said = {Said::kBroken, 0, uint32_t(why->cause), why->rank, at, 0, mine.in};
  for (const uint32_t host : links_->others()) links_->send(host, 0, std::array<CollectiveLinks::Part, 2>{{{&said, sizeof said}, {mine.why, sizeof mine.why}}});
}

// Frames of later barriers stay in the ring: what this rank reads at its barrier lies in the frame of that.
void CollectiveGroup::hear(uint32_t rank) {
  Receiver& from = links_->from(rank);
  while (!from.ring.empty()) {
    const SlotHeader slot = read_once(*from.ring.front());
    if (slot.kind != Kind::kValue) {  // the pump has had no memory for it
      from.pass();
      return fail(Cause::kInterrupted, rank_, "a lack of memory for what comes from another host");
    }
    if (slot.tag > barrier_) return;
    heed(rank, from.take());
  }
}

void CollectiveGroup::heed(uint32_t rank, Frame frame) {
  Said said;
  Line& its = far_[rank];
  const auto read = [&](size_t at, void* to, size_t size) {
    if (at > frame.size || size > frame.size - at) senseless();
    std::memcpy(to, frame.body + at, size);
  };
  const size_t behind = CollectiveLinks::place_of(sizeof said);
  read(0, &said, sizeof said);
  switch (said.what) {
    case Said::kCame: {
      const size_t half = frame.tag & 1;
      if (said.calls != 0) read(behind, &its.calls[half], sizeof(CollectiveCall));
      its.arrived.store(frame.tag, std::memory_order_relaxed);
      data_at_[rank] = said.data_at;
      frames_[rank] = std::move(frame);
      return;
    }
    case Said::kBroken: {
      if (said.cause == 0 || said.cause > uint32_t(Cause::kEnded) || said.rank >= ranks()) senseless();
      left_at_ = std::max(left_at_, said.left);
      char words[sizeof its.why];
      read(behind, words, sizeof words);
      words[sizeof words - 1] = 0;
      if (break_here(Cause(said.cause), said.rank, words, said.in)) ring_all(*board_, members_);
      return;
    }
    default:
      senseless();
  }
}

const char* CollectiveGroup::far(uint32_t rank, size_t at, size_t size) const {
  const Frame& frame = frames_[rank];
  const size_t begin = data_at_[rank];
  if (begin > frame.size || at > frame.size - begin || size > frame.size - begin - at) senseless();
  return frame.body + begin + at;
}

const char* CollectiveGroup::given(uint32_t rank, size_t size) const { return here(rank) ? stage(barrier_, rank) : far(rank, 0, size); }

const char* CollectiveGroup::chunk(uint32_t rank, size_t size) const {
  if (!here(rank)) return far(rank, places_[rank_] * CollectiveLinks::place_of(size), size);
  return stage(barrier_, rank) + rank_ * piece_ * size_;
}

void CollectiveGroup::close() {
  if (!links_) return;
  for (Frame& frame : frames_) frame = {};
  links_->close();
}

}  // namespace conveyor
