#include "mirrored_limits.h"

namespace conveyor::net {

MirroredLimits::MirroredLimits(const std::shared_ptr<Segment>& segment, uint64_t id, uint32_t which, const LimitsSpec& spec, uint32_t self)
    : id_(id), which_(which), self_(self), home_(spec.home), limits_(segment, spec.offset, spec.sets, spec.tasks), sets_(spec.sets) {
  if (limits_.bit_words() > kMostBitWords) throw std::system_error(EINVAL, std::generic_category(), "limits");
  for (Set& set : sets_) set.words.bits.resize(limits_.bit_words());
  seen_ = limits_.changes() - 1;  // whatever is there has not been looked at
}

void MirroredLimits::look() {
  seen_ = limits_.changes();  // first: what changes meanwhile is looked at once more
  read();
}

void MirroredLimits::read() {
  for (uint32_t i = 0; i < sets_.size(); ++i) {
    Set& set = sets_[i];
    const uint64_t deadline = set.words.deadline;
    limits_.copy(i, set.words);
    if (set.words.deadline != deadline) ++set.version;
  }
  uint32_t own = limits_.failures();
  for (const auto& [host, count] : failures_)
    if (host != self_) own -= count;
  failures_[self_] = own;
}

MirroredLimits::Told& MirroredLimits::told(uint32_t host) {
  const auto [found, fresh] = told_.try_emplace(host);
  if (fresh) {
    found->second.sets.resize(sets_.size());
    for (Set& set : found->second.sets) set.words.bits.resize(limits_.bit_words());
  }
  return found->second;
}

void MirroredLimits::tell(uint32_t host, Connection& to) {
  Told& known = told(host);
  const uint32_t own = failures_[self_];
  if (own != known.failures) {
    to.put(Prefix{What::kFailures, 0, sizeof(Failures), id_});
    to.put(Failures{which_, own});
    known.failures = own;
  }
  for (uint32_t i = 0; i < sets_.size(); ++i) {
    Set& has = known.sets[i];
    Set next = sets_[i];
    if ((next.words.ended & Limits::kFailed) && self_ != home_ && host != home_) next.words.ended = has.words.ended;
    if (next.version == has.version && next.words == has.words) continue;
    const uint64_t now = now_ns(), deadline = next.words.deadline;
    LimitsHead head = {which_, i, next.version, limits_.bit_words(), 0, next.words.ended, next.words.skipped};
    if (deadline != 0) head.left = deadline > now ? deadline - now : 1;
    to.put(Prefix{What::kLimits, 0, uint32_t(sizeof head + head.words * sizeof(uint64_t)), id_});
    to.put(head);
    if (head.words != 0) to.put(next.words.bits.data(), head.words * sizeof(uint64_t));
    has = std::move(next);
  }
}

bool MirroredLimits::hear(uint32_t host, const LimitsHead& head, const char* bits) {
  if (head.set >= sets_.size() || head.words != limits_.bit_words()) throw Violation("limits of another shape");
  read();
  Set& set = sets_[head.set];
  const Set before = set;
  Limits::Copy said{0, head.ended, head.skipped, std::vector<uint64_t>(head.words)};
  if (head.words != 0) std::memcpy(said.bits.data(), bits, head.words * sizeof(uint64_t));
  const int32_t ahead = int32_t(head.version - set.version);
  if (ahead > 0 && head.left != 0) said.deadline = now_ns() + std::min<uint64_t>(head.left, uint64_t(1) << 62);
  limits_.merge(head.set, said, ahead > 0, ahead >= 0);
  limits_.copy(head.set, set.words);
  if (ahead > 0) set.version = head.version;
  // What it has just said need not be told to it.
  Set& known = told(host).sets[head.set];
  known.version = std::max(known.version, head.version);
  if (known.version == set.version) known.words.deadline = set.words.deadline;
  known.words.ended = std::max(known.words.ended, head.ended);
  known.words.skipped = head.skipped;
  known.words.bits = said.bits;
  return before.version != set.version || before.words != set.words;
}

bool MirroredLimits::hear(uint32_t host, const Failures& said) {
  read();
  const uint32_t more = said.count - failures_[host];
  if (more == 0) return false;
  failures_[host] = said.count;
  limits_.add_failures(more);
  return true;
}

}  // namespace conveyor::net
