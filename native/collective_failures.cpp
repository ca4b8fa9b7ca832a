// What ranks of a group know of each other's failures: who is not coming, and who may have missed an operation.
#include <cstring>

#include "collective_lines.h"

namespace conveyor {

namespace {

// How long a rank that had failed before another one's method began is waited for by that before it is given up: if
// both were at nearly the same time, so that one caller has most likely meant both; and if not, if both have failed, or
// if the call was made by who knew of the failure: whoever has called the one again most likely calls the other.
constexpr uint64_t kGraceNs = 50'000'000;
constexpr uint64_t kLongGraceNs = 1'000'000'000;
// Nobody has learned of a failure.
constexpr uint64_t kNever = ~uint64_t(0);

// FNV-1a, which is the same in every process.
uint64_t mixed(uint64_t hash, const void* data, size_t size) {
  if (hash == 0) hash = 0xcbf29ce484222325;
  for (size_t i = 0; i < size; ++i) hash = (hash ^ static_cast<const unsigned char*>(data)[i]) * 0x100000001b3;
  return hash;
}

}  // namespace

void CollectiveGroup::note_failure(const char* why) {
  if (inbox_.inherited() || header_->cause.load(std::memory_order_acquire) != 0) return;  // what has broken the group may be this rank's last one
  std::lock_guard lock(failed_mutex_);
  step_failed_ns_ = now_ns();
  history_ = mixed(history_, "step", 4);
  tell_of_failure(why, 0);
}

void CollectiveGroup::note_failed_call(const char* why, const char* name, Member caller, bool ran, uint64_t number, uint64_t seen_at) {
  if (inbox_.inherited() || header_->cause.load(std::memory_order_acquire) != 0) return;
  std::lock_guard lock(failed_mutex_);
  seen_at_ = std::max(seen_at_, seen_at);
  note_sights();
  if (unseen_.size() == FailedCalls::kKept) lost_ = true;  // of the first nobody will be able to say that it was seen
  else if (number != 0) unseen_.push_back({number, why});
  // In the call of the last operation it has failed behind that; in another one it may have missed one.
  const bool behind = ran && running_since() == operation_since_;
  const uint32_t which[] = {caller.slot, caller.incarnation, behind};
  history_ = mixed(mixed(history_, name, std::strlen(name)), which, sizeof which);
  tell_of_failure(why, number);
}

void CollectiveGroup::note_sights() {
  std::erase_if(unseen_, [&](const Failed& failed) {
    const auto seen = board_->seen_at(members_[rank_].slot, failed.number);
    if (seen) seen_at_ = std::max(seen_at_, *seen);
    return seen.has_value();
  });
}

void CollectiveGroup::tell_of_failure(const char* why, uint64_t number) {
  Line& mine = lines_[rank_];
  mine.failures.fetch_add(1, std::memory_order_relaxed);
  if (busy_.load(std::memory_order_acquire)) return;  // another thread has come to an operation
  say(mine.failure, why);
  mine.failed_call.store(number, std::memory_order_relaxed);  // told by the next
  // Sequentially consistent: those who wait announce that they sleep, and then look here.
  mine.failed_ns.store(now_ns(), std::memory_order_seq_cst);
  for (uint32_t r = 0; r < ranks(); ++r)
    if (r != rank_ && lines_[r].asleep.load(std::memory_order_seq_cst) != 0) board_->ring(members_[r].slot, kAttentionBit);
  tell_failure();
}

uint64_t CollectiveGroup::running_since() const {
  return board_->slot(members_[rank_].slot)->status.since_ns.load(std::memory_order_acquire);
}

// A driver runs no methods: there it is the operation itself.
uint64_t CollectiveGroup::method_began() const {
  const uint64_t since = running_since();
  return since == 0 ? began_ : std::min(began_, since);
}

// Its process is gone, or what it ran has raised and it has begun nothing since. If it has raised since this rank's own
// method began, what it has begun does not matter, as that belongs to a later operation; unless this rank has failed as
// often, so that both are at the same. Where it has raised before, that may have had nothing to do with the operation:
// so whoever calls the methods gets some time to begin another one there, and more if he knew of the failure.
Cause CollectiveGroup::will_not_come(uint32_t rank, uint64_t now) {
  const Member& m = members_[rank];
  if (board_->gone(m.slot, m.incarnation)) return Cause::kDied;
  const Line& its = line(rank);
  const uint64_t failed = its.failed_ns.load(std::memory_order_seq_cst);
  if (failed == 0) return Cause::kNone;
  const bool as_often = call_.failures != 0 && its.failures.load(std::memory_order_relaxed) <= call_.failures;
  // When it has begun what is not known of another host, nor who has learned of the failure: see belong_together.
  if (!here(rank)) return as_often ? Cause::kNone : Cause::kRaised;
  const auto since = [&](uint32_t slot) { return board_->slot(slot)->status.since_ns.load(std::memory_order_acquire); };
  const uint64_t begun = method_began();
  if (failed >= begun && !as_often) return Cause::kRaised;
  if (since(m.slot) > failed) return Cause::kNone;  // it runs something else by now, which may come to it
  const auto seen = board_->seen_at(m.slot, its.failed_call.load(std::memory_order_relaxed));
  const bool known = seen && made_ >= *seen;  // to who has called this rank
  const bool patient = as_often || known || failed + kGraceNs < begun;
  const uint64_t until = std::max(began_, failed) + (patient ? kLongGraceNs : kGraceNs);
  if (now >= until) return Cause::kRaised;
  wake_at_ = wake_at_ == 0 ? until : std::min(wake_at_, until);
  return Cause::kNone;
}

void CollectiveGroup::write_call() {
  Line& mine = lines_[rank_];
  const Status& status = board_->slot(members_[rank_].slot)->status;
  const size_t half = (barrier_ + 1) & 1;
  std::lock_guard lock(failed_mutex_);
  note_sights();
  call_.failures = mine.failures.exchange(0, std::memory_order_relaxed);
  mine.calls[half] = call_;
  Way& way = mine.ways[half];
  way.failed_ns = mine.failed_ns.exchange(0, std::memory_order_relaxed);
  way.step_failed_ns = step_failed_ns_;
  way.begun_ns = method_began();
  way.execution = status.execution.load(std::memory_order_relaxed);
  way.graph = status.graph.load(std::memory_order_relaxed);
  way.made = made_ == kNow || way.graph != 0 ? board_->sights() : made_;
  way.seen_at = unseen_.empty() && !lost_ ? seen_at_ : kNever;
  way.history = history_;
  if (!unseen_.empty()) say(mine.failure, unseen_.front().why.c_str());
  unseen_.clear();
  seen_at_ = step_failed_ns_ = history_ = 0;
  lost_ = false;
  operation_since_ = running_since();
}

// All ranks look at the same, and so find the same.
uint32_t CollectiveGroup::shifted() const {
  const size_t half = barrier_ & 1;
  const auto failures = [&](uint32_t r) { return line(r).calls[half].failures; };
  uint32_t without = 0;
  while (without < ranks() && failures(without) == 0) ++without;
  for (uint32_t a = without; a < ranks(); ++a)
    for (uint32_t b = 0; b < ranks(); ++b)
      if (a != b && failures(a) != 0 && !belong_together(a, b)) return a;
  return ranks();
}

// Whether rank `a`, which has failed since the last operation, has come to the same one as `b`.
bool CollectiveGroup::belong_together(uint32_t a, uint32_t b) const {
  const size_t half = barrier_ & 1;
  const Way &one = line(a).ways[half], &other = line(b).ways[half];
  if (one.graph != 0 && one.graph == other.graph) return one.execution == other.execution;
  // What they had last was the same operation. If the same calls have failed at both since then, so that both have
  // missed the same or nothing, the next one is the same again.
  if (one.history == other.history) return true;
  if (!hosts_.together(a, b)) return false;  // their clocks are different ones
  if (one.graph != 0 || other.graph != 0) return one.failed_ns <= other.begun_ns;  // an execution bears no clock
  // Calls that were made before somebody had learned of the failure may belong to the operation that was missed, if it
  // was, and those that were made after that do not.
  return one.made >= one.seen_at && other.made >= one.seen_at && one.step_failed_ns <= other.begun_ns;
}

}  // namespace conveyor
