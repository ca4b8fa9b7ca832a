// What ranks of a group that are on different hosts tell each other. See links.h.
#include <array>
#include <cstring>
#include <utility>

#include "lines.h"

namespace conveyor {

// At the beginning of a frame. What belongs to it follows, each part at a multiple of a cache line.
struct CollectiveGroup::Said {
  enum What : uint32_t { kCame = 1, kFailed, kBroken };
  uint32_t what;
  uint32_t calls;     // kCame: 1: what it has called follows, and how it has come there
  uint32_t cause;     // kBroken
  uint32_t rank;      // likewise
  uint64_t number;    // kFailed: how many had failed in its process before (RankFailures). kBroken: the barrier that who tells it waits at no more; 0: none
  uint64_t data_at;   // kCame: where in the frame what it gives begins
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
  Said said = {Said::kCame, step_ == 0, 0, 0, 0, 0};
  const Line& mine = lines_[rank_];
  const size_t half = (barrier_ + 1) & 1;
  std::vector<CollectiveLinks::Part> head = {{&said, sizeof said}};
  if (said.calls != 0) {
    head.push_back({&mine.calls[half], sizeof(CollectiveCall)});
    head.push_back({&mine.ways[half], sizeof(Way)});
    if (call_.failures != 0) head.push_back({mine.failure, sizeof mine.failure});
    if (mine.ways[half].hears != 0) head.push_back({&mine.heard[half], sizeof mine.heard[half]});
  }
  for (const CollectiveLinks::Part& part : head) said.data_at += CollectiveLinks::place_of(part.size);
  for (const uint32_t host : links_->others()) {
    std::vector<CollectiveLinks::Part> parts = head;
    for (const CollectiveLinks::Part& part : parts_for(host)) parts.push_back(part);
    links_->send(host, barrier_ + 1, parts);
  }
}

// Of the first failure since the last operation that there are some; which one was the last is on the boards of all hosts.
void CollectiveGroup::tell_failure() {
  if (!links_) return;
  if (std::exchange(told_of_failure_, true)) {
    for (uint32_t r = 0; r < ranks(); ++r)
      if (!here(r)) board_->ring(members_[r].slot, kAttentionBit);
    return;
  }
  Said said = {Said::kFailed, 0, 0, 0, failed_ - 1, 0};
  for (const uint32_t host : links_->others()) links_->send(host, 0, std::array<CollectiveLinks::Part, 1>{{{&said, sizeof said}}});
}

// What is known of the last failure of a rank of another host, if it has told that there are some.
void CollectiveGroup::look_up(uint32_t rank) {
  Line& its = far_[rank];
  if (its.failed_ns.load(std::memory_order_relaxed) == 0) return;
  const auto last = board_->slot(members_[rank].slot)->rank_failures.last();
  if (!last || last->count <= failed_before_[rank]) return;
  its.failures.store(last->count - failed_before_[rank], std::memory_order_relaxed);
  its.failed_call.store(last->number, std::memory_order_relaxed);
  its.cancelled_at.store(last->cancelled_at, std::memory_order_relaxed);
  its.failed_execution.store(last->execution, std::memory_order_relaxed);
  its.failed_graph.store(last->graph, std::memory_order_relaxed);
  its.failed_ns.store(last->noted_ns, std::memory_order_relaxed);
  say(its.failure, last->why);
}

void CollectiveGroup::tell_broken(uint64_t at) {
  if (!links_) return;
  const std::optional<Broken> why = broken();
  Said said = {Said::kBroken, 0, uint32_t(why->cause), why->rank, at, 0};
  char words[sizeof Line::told] = {};
  say(words, why->why.c_str());
  for (const uint32_t host : links_->others()) links_->send(host, 0, std::array<CollectiveLinks::Part, 2>{{{&said, sizeof said}, {words, sizeof words}}});
}

// Frames of later barriers stay in the ring: what this rank reads at its barrier lies in the frame of that.
void CollectiveGroup::hear(uint32_t rank) {
  Receiver& from = links_->from(rank);
  while (!from.ring.empty()) {
    const SlotHeader slot = read_once(*from.ring.front());
    if (slot.kind != Kind::kValue) {  // the pump has had no memory for it
      from.pass();
      if (header_->cause.load(std::memory_order_acquire) != 0) return;
      say(lines_[rank_].why, "a lack of memory for what comes from another host");
      return fail(Cause::kInterrupted, rank_);
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
      if (said.calls != 0) {
        size_t at = behind;
        const auto next = [&](void* to, size_t size) {
          read(at, to, size);
          at += CollectiveLinks::place_of(size);
        };
        next(&its.calls[half], sizeof(CollectiveCall));
        next(&its.ways[half], sizeof(Way));
        if (its.calls[half].failures != 0) next(its.failure, sizeof its.failure);
        its.failure[sizeof its.failure - 1] = 0;
        if (its.ways[half].hears != 0) next(&its.heard[half], sizeof its.heard[half]);
        its.failures.store(0, std::memory_order_relaxed);
        its.failed_ns.store(0, std::memory_order_relaxed);
      }
      its.arrived.store(frame.tag, std::memory_order_relaxed);
      data_at_[rank] = said.data_at;
      frames_[rank] = std::move(frame);
      return;
    }
    case Said::kFailed:
      failed_before_[rank] = said.number;
      its.failed_ns.store(now_ns(), std::memory_order_relaxed);
      return;
    case Said::kBroken: {
      if (said.cause == 0 || said.cause > uint32_t(Cause::kEnded) || said.rank >= ranks()) senseless();
      left_at_ = std::max(left_at_, said.number);
      if (header_->cause.load(std::memory_order_acquire) != 0) return;
      char words[sizeof its.told];
      read(behind, words, sizeof words);
      words[sizeof words - 1] = 0;
      say(lines_[rank_].told, words);
      if (break_once(*header_, Cause(said.cause), said.rank, rank_)) ring_all(*board_, members_);
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
