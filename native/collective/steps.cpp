// What a group's operations do between its barriers.
#include <cstring>
#include <stdexcept>

#include "group.h"

namespace conveyor {

void CollectiveGroup::check(const CollectiveCall& call, const CollectiveData& data) const {
  const bool is_root = call.root < 0 || uint32_t(call.root) == rank_;
  size_t in = 1, out = 1;
  bool rooted = false, reduces = false;
  switch (call.operation) {
    case Collective::kBarrier: in = out = 0; break;
    case Collective::kAllReduce: reduces = true; break;
    case Collective::kReduce: rooted = reduces = true; out = is_root; break;
    case Collective::kReduceScatter: reduces = true; in = ranks(); break;
    case Collective::kAllGather: out = ranks(); break;
    case Collective::kGather: rooted = true; out = is_root ? ranks() : 0; break;
    case Collective::kBroadcast: rooted = true; in = is_root; out = !is_root; break;
    case Collective::kScatter: rooted = true; in = is_root ? ranks() : 0; break;
    case Collective::kAllToAll: in = out = ranks(); break;
    case Collective::kExchange: in = out = 0; rooted = call.root >= 0; break;
  }
  const auto null = [&](const auto& tensors) { return call.count != 0 && std::ranges::find(tensors, nullptr) != tensors.end(); };
  if (data.in.size() != in || data.out.size() != out || rooted != (call.root >= 0) || call.root >= int32_t(ranks()) || null(data.in) || null(data.out))
    throw std::invalid_argument("conveyor: these tensors do not fit the operation");
  if (reduces && !can_reduce(call.type, call.op)) throw std::invalid_argument("conveyor: integers have no average");
  if (call.count > (size_t(1) << 48)) throw std::invalid_argument("conveyor: too many elements");
}

CollectiveGroup::Part CollectiveGroup::part(size_t count, uint32_t rank) const {
  const size_t line = kCacheLine / size_, here = hosts_.count(hosts_[rank]);
  const size_t each = align_up((count + here - 1) / here, line);
  const size_t from = std::min(count, each * places_[rank]);
  return {from, std::min(count - from, each)};
}

size_t CollectiveGroup::elements(size_t piece) const { return std::min(piece_, call_.count - piece * piece_); }

void CollectiveGroup::plan() {
  size_ = size_of(call_.type);
  piece_ = kPiece / size_;
  switch (call_.operation) {
    case Collective::kBarrier:
    case Collective::kExchange:
      call_.count = 0;
      break;
    case Collective::kReduceScatter:
    case Collective::kAllToAll:  // a piece has a chunk for each rank
      piece_ = kPiece / ranks() / kCacheLine * kCacheLine / size_;
      break;
    default:
      break;
  }
  pieces_ = (call_.count + piece_ - 1) / piece_;
  const bool reduces = call_.operation == Collective::kAllReduce || call_.operation == Collective::kReduce;
  // Between hosts all that is staged crosses, so as much of it as one rank may have is all that a host's have.
  one_shot_ = reduces && call_.count * size_ <= (links_ ? kOneShot / hosts_.most() : kOneShot);
  // Sums of 16-bit floats are rounded once, so what of them crosses are the tensors.
  by_hosts_ = reduces && !one_shot_ && links_ && hosts_.most() > 1 && call_.type != ElementType::kF16 && call_.type != ElementType::kBf16;
  last_ = std::max<size_t>(pieces_, 1);
  if (reduces && !one_shot_) last_ = pieces_ + 1;
}

void CollectiveGroup::work(size_t step) {
  if (call_.count == 0) return;
  if ((call_.operation == Collective::kAllReduce || call_.operation == Collective::kReduce) && !one_shot_)
    return by_hosts_ ? reduce_by_hosts(step) : reduce_in_pieces(step);
  if (step > 0) give_out(step - 1);
  if (step < pieces_) take_in(step);
}

void CollectiveGroup::reduce_one_shot() {
  if (!takes()) return;
  const char* from[kMaxRanks];
  for (uint32_t r = 0; r < ranks(); ++r) from[r] = r == rank_ ? data_.in[0] : given(r, call_.count * size_);
  reduce(call_.type, call_.op, data_.out.data(), 1, from, ranks(), call_.count);
}

// Three pieces are under way at a time: one is staged, one is reduced, each rank a part of it, and of one the results
// are fetched.
void CollectiveGroup::reduce_in_pieces(size_t step) {
  if (!root_is_on(hosts_[rank_])) return;  // what it has goes there
  const bool alone = hosts_.count(hosts_[rank_]) == 1;
  if (step >= 2 && takes()) {
    const size_t k = step - 2, n = elements(k);
    const Part own = part(n);
    char *to = data_.out[0] + at(k), *from = result(barrier_);
    const size_t behind = (own.from + own.count) * size_;
    std::memcpy(to, from, own.from * size_);
    std::memcpy(to + behind, from + behind, n * size_ - behind);
  }
  if (step >= 1 && step - 1 < pieces_) {
    const size_t k = step - 1, n = elements(k);
    const Part own = part(n);
    const size_t offset = own.from * size_;
    const char* from[kMaxRanks];
    for (uint32_t r = 0; r < ranks(); ++r) from[r] = (r == rank_ ? data_.in[0] + at(k) : given(r, n * size_)) + offset;
    char* to[2];
    size_t places = 0;
    if (!alone) to[places++] = result(barrier_ + 1) + offset;
    if (takes()) to[places++] = data_.out[0] + at(k) + offset;
    if (own.count != 0) reduce(call_.type, call_.op, to, places, from, ranks(), own.count);
  }
  if (step < pieces_) stage_for_others(step);
}

// All but what this rank reduces, which nobody else here needs.
void CollectiveGroup::stage_for_others(size_t piece) {
  const size_t n = elements(piece);
  const Part own = part(n);
  char* to = stage(barrier_ + 1, rank_);
  const char* from = data_.in[0] + at(piece);
  const size_t behind = (own.from + own.count) * size_;
  std::memcpy(to, from, own.from * size_);
  std::memcpy(to + behind, from + behind, n * size_ - behind);
}

// Each host reduces what its ranks have, each of them a part; the parts go to the other hosts, so each host sends so much
// as one tensor has. Every rank reduces what all hosts have come to, in their order.
void CollectiveGroup::reduce_by_hosts(size_t step) {
  if (step >= 2 && takes()) reduce_hosts(step - 2);
  if (step >= 1 && step - 1 < pieces_) {
    const size_t k = step - 1;
    const Part own = part(elements(k));
    const size_t offset = own.from * size_;
    const char* from[kMaxRanks];
    size_t sources = 0;
    for (uint32_t r = 0; r < ranks(); ++r)
      if (here(r)) from[sources++] = (r == rank_ ? data_.in[0] + at(k) : stage(barrier_, r)) + offset;
    char* to = result(barrier_ + 1) + offset;
    const ReduceOp op = call_.op == ReduceOp::kAvg ? ReduceOp::kSum : call_.op;
    if (own.count != 0) reduce(call_.type, op, &to, 1, from, sources, own.count);
  }
  if (step < pieces_) stage_for_others(step);
}

// Hosts have different numbers of ranks, and so their parts begin elsewhere.
void CollectiveGroup::reduce_hosts(size_t piece) {
  const size_t n = elements(piece);
  std::vector<std::vector<uint32_t>> on;
  for (uint32_t h = 0; h < hosts_.hosts(); ++h) on.push_back(hosts_.on(h));
  std::vector<size_t> which(on.size(), 0);
  for (size_t begin = 0; begin < n;) {
    size_t end = n;
    const char* from[kMaxRanks];
    for (size_t h = 0; h < on.size(); ++h) {
      Part theirs = part(n, on[h][which[h]]);
      while (theirs.from + theirs.count <= begin) theirs = part(n, on[h][++which[h]]);
      const uint32_t rank = on[h][which[h]];
      end = std::min(end, theirs.from + theirs.count);
      from[h] = here(rank) ? result(barrier_) + begin * size_ : far(rank, 0, theirs.count * size_) + (begin - theirs.from) * size_;
    }
    char* to = data_.out[0] + at(piece) + begin * size_;
    reduce(call_.type, call_.op, &to, 1, from, on.size(), end - begin, ranks());
    begin = end;
  }
}

void CollectiveGroup::take_in(size_t piece) {
  if (hosts_.count(hosts_[rank_]) == 1) return;  // nobody reads it here
  const size_t n = elements(piece) * size_, offset = at(piece);
  char* to = stage(barrier_ + 1, rank_);
  switch (call_.operation) {
    case Collective::kBarrier:
    case Collective::kExchange:
      break;
    case Collective::kAllReduce:
    case Collective::kReduce:
      std::memcpy(to, data_.in[0], n);
      break;
    case Collective::kAllGather:
      std::memcpy(to, data_.in[0] + offset, n);
      break;
    case Collective::kGather:
      if (!takes()) std::memcpy(to, data_.in[0] + offset, n);
      break;
    case Collective::kBroadcast:
      if (takes()) std::memcpy(to, data_.in[0] + offset, n);
      break;
    case Collective::kScatter:  // the areas of those who get it have nothing else in them
      if (takes())
        for (uint32_t r = 0; r < ranks(); ++r)
          if (r != rank_ && here(r)) std::memcpy(stage(barrier_ + 1, r), data_.in[r] + offset, n);
      break;
    case Collective::kReduceScatter:
    case Collective::kAllToAll:
      for (uint32_t r = 0; r < ranks(); ++r)
        if (r != rank_ && here(r)) std::memcpy(to + r * piece_ * size_, data_.in[r] + offset, n);
      break;
  }
}

void CollectiveGroup::give_out(size_t piece) {
  if (piece >= pieces_) return;
  const size_t n = elements(piece) * size_, offset = at(piece);
  const auto copy = [&](char* to, const char* from) {
    if (to != from) std::memcpy(to, from, n);
  };
  switch (call_.operation) {
    case Collective::kBarrier:
    case Collective::kExchange:
      break;
    case Collective::kAllReduce:
    case Collective::kReduce:
      reduce_one_shot();
      break;
    case Collective::kAllGather:
    case Collective::kGather:
      if (takes())
        for (uint32_t i = 0; i < ranks(); ++i) {  // not all from the same one at the same time
          const uint32_t r = (rank_ + i) % ranks();
          copy(data_.out[r] + offset, r == rank_ ? data_.in[0] + offset : given(r, n));
        }
      break;
    case Collective::kBroadcast:
      if (!takes()) copy(data_.out[0] + offset, given(uint32_t(call_.root), n));
      break;
    case Collective::kScatter: {
      const auto root = uint32_t(call_.root);
      copy(data_.out[0] + offset, takes() ? data_.in[rank_] + offset : here(root) ? stage(barrier_, rank_) : chunk(root, n));
      break;
    }
    case Collective::kReduceScatter: {
      const char* from[kMaxRanks];
      for (uint32_t r = 0; r < ranks(); ++r) from[r] = r == rank_ ? data_.in[r] + offset : chunk(r, n);
      char* to = data_.out[0] + offset;
      reduce(call_.type, call_.op, &to, 1, from, ranks(), elements(piece));
      break;
    }
    case Collective::kAllToAll:
      for (uint32_t i = 0; i < ranks(); ++i) {
        const uint32_t r = (rank_ + i) % ranks();
        copy(data_.out[r] + offset, r == rank_ ? data_.in[r] + offset : chunk(r, n));
      }
      break;
  }
}

}  // namespace conveyor
