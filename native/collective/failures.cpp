// What ranks of a group know of each other's failures: who is not coming, and who may have missed an operation.
#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

#include "lines.h"

namespace conveyor {

namespace {

// How long a rank that had failed before another one's method began is waited for by that before it is given up: if
// both were at nearly the same time, so that one caller has most likely meant both; and if not, if both have failed, or
// if the call was made by who knew of the failure: whoever has called the one again most likely calls the other.
constexpr uint64_t kGraceNs = 50'000'000;
constexpr uint64_t kLongGraceNs = 1'000'000'000;
// The same of one of another host, of which it takes longer to hear: a connection that breaks is made again meanwhile.
constexpr uint64_t kFarGraceNs = 5'000'000'000;

// FNV-1a, which is the same in every process.
uint64_t mixed(uint64_t hash, const void* data, size_t size) {
  if (hash == 0) hash = 0xcbf29ce484222325;
  for (size_t i = 0; i < size; ++i) hash = (hash ^ static_cast<const unsigned char*>(data)[i]) * 0x100000001b3;
  return hash;
}

}  // namespace

void CollectiveGroup::note_failure(const char* why, bool first) {
  if (inbox_.inherited()) return;
  if (first) note_on_board(why, 0, kNow);
  if (header_->cause.load(std::memory_order_acquire) != 0) return;  // what has broken the group may be this rank's last one
  std::lock_guard lock(failed_mutex_);
  step_failed_ns_ = now_ns();
  step_failed_ = board_->slot(members_[rank_].slot)->rank_failures.count();
  const Execution failed = execution();
  const auto same = std::ranges::find(failed_in_, failed.graph, &Execution::graph);
  (same != failed_in_.end() ? *same : failed_in_[failed_steps_++ % failed_in_.size()]) = failed;
  history_ = mixed(history_, "step", 4);
  tell_of_failure(why, 0, kNow);
}

void CollectiveGroup::note_failed_call(const char* why, const char* name, Member caller, bool ran, uint64_t number, Stamp seen_at, bool first) {
  if (inbox_.inherited()) return;
  Stamp known_at = kNow;
  if (number == 0) {
    known_at = seen_at;
    if (!board_->alone()) {  // others hear of it from here
      number = board_->fail(members_[rank_].slot);
      board_->see(members_[rank_].slot, number);
    }
  }
  if (first) note_on_board(why, number, known_at);
  if (header_->cause.load(std::memory_order_acquire) != 0) return;
  std::lock_guard lock(failed_mutex_);
  forget_known();
  if (number == 0) {
    meet(known_, {seen_at});
  } else {
    if (failed_calls_.size() == FailedCalls::kKept)
      known_ = Sights();  // of the first nobody will be able to say that it was seen
    else
      failed_calls_.push_back({number, known_at, why});
  }
  // In the call of the last operation it has failed behind that; in another one it may have missed one.
  const bool behind = ran && running_since() == operation_since_;
  const uint32_t which[] = {caller.slot, caller.incarnation, behind};
  history_ = mixed(mixed(history_, name, std::strlen(name)), which, sizeof which);
  tell_of_failure(why, number, known_at);
}

CollectiveGroup::Sights CollectiveGroup::sights_of(const Failed& failed) const {
  Sights sights;
  // Who has cancelled a call has known of it before this rank has.
  if (failed.known_at != kNow) sights.push_back(failed.known_at);
  const auto add = [&](Stamp at) {
    const auto same = std::ranges::find(sights, host_of(at), host_of);
    if (same == sights.end())
      sights.push_back(at);
    else
      *same = std::min(*same, at);
  };
  const uint32_t slot = members_[rank_].slot;
  if (const auto here = board_->seen_at(slot, failed.number)) add(*here);
  if (!board_->alone()) board_->header()->heard.each(slot, failed.number, add);
  return sights;
}

void CollectiveGroup::meet(std::optional<Sights>& known, const Sights& others) {
  if (!known) {
    known = others;
    return;
  }
  Sights both;
  for (const Stamp at : *known)
    if (const auto same = std::ranges::find(others, host_of(at), host_of); same != others.end()) both.push_back(std::max(at, *same));
  known = std::move(both);
}

// Where others may still hear of a failure it is kept as long as there is room.
void CollectiveGroup::forget_known() {
  if (!board_->alone() && failed_calls_.size() < FailedCalls::kKept) return;
  std::erase_if(failed_calls_, [&](const Failed& failed) {
    const Sights sights = sights_of(failed);
    if (!sights.empty()) meet(known_, sights);
    return !sights.empty();
  });
}

void CollectiveGroup::note_on_board(const char* why, uint64_t number, Stamp known_at) {
  if (board_->alone()) return;
  RankFailure failure;
  failure.number = number;
  failure.cancelled_at = known_at == kNow ? 0 : known_at;
  if (number == 0) {
    const Execution failed = execution();
    failure.execution = failed.number;
    failure.graph = failed.graph;
  }
  failure.noted_ns = now_ns();
  static_assert(sizeof failure.why >= sizeof Line::why);
  say(failure.why, why);
  board_->note_rank_failure(members_[rank_].slot, failure);
}

void CollectiveGroup::tell_of_failure(const char* why, uint64_t number, Stamp known_at) {
  Line& mine = lines_[rank_];
  failed_ = board_->slot(members_[rank_].slot)->rank_failures.count();
  mine.failures.fetch_add(1, std::memory_order_relaxed);
  if (busy_.load(std::memory_order_acquire)) return;  // another thread has come to an operation
  say(mine.failure, why);
  const Execution failed = number == 0 && known_at == kNow ? execution() : Execution();
  mine.failed_call.store(number, std::memory_order_relaxed);  // told by the last, as the others
  mine.cancelled_at.store(known_at == kNow ? 0 : known_at, std::memory_order_relaxed);
  mine.failed_execution.store(failed.number, std::memory_order_relaxed);
  mine.failed_graph.store(failed.graph, std::memory_order_relaxed);
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

// Whether who has called this rank knew of what has failed last there.
bool CollectiveGroup::was_known(uint32_t rank) const {
  const Stamp by = made(), cancelled = line(rank).cancelled_at.load(std::memory_order_relaxed);
  if (cancelled != 0 && host_of(cancelled) == host_of(by) && by >= cancelled) return true;
  const auto seen = board_->seen_at(members_[rank].slot, line(rank).failed_call.load(std::memory_order_relaxed), by);
  return seen && by >= *seen;
}

// Whether that was a step of an earlier execution of the graph that this rank runs a step of: it comes to its own one.
bool CollectiveGroup::was_earlier(uint32_t rank) const {
  const Execution own = execution();
  return own.graph != 0 && line(rank).failed_graph.load(std::memory_order_relaxed) == own.graph && line(rank).failed_execution.load(std::memory_order_relaxed) < own.number;
}

Execution CollectiveGroup::execution(uint32_t rank) const {
  const Status& status = board_->slot(members_[rank].slot)->status;
  return {status.graph.load(std::memory_order_relaxed), status.execution.load(std::memory_order_relaxed)};
}

// Its process is gone, or what it ran has raised and it has begun nothing since. If it has raised since this rank's own
// method began, what it has begun does not matter, as that belongs to a later operation; unless this rank has failed as
// often, so that both are at the same, or that was in an earlier execution, or who has called this rank knew of it: a
// rank may hear late of a call that was not sent. Where it has raised before, that may have had nothing to do with the
// operation: so whoever calls the methods gets some time to begin another one there, and more if he knew of the failure.
Cause CollectiveGroup::will_not_come(uint32_t rank, uint64_t now) {
  const Member& m = members_[rank];
  if (board_->gone(m.slot, m.incarnation)) return Cause::kDied;
  if (!here(rank)) look_up(rank);
  const Line& its = line(rank);
  const uint64_t failed = its.failed_ns.load(std::memory_order_seq_cst);
  if (failed == 0) return Cause::kNone;
  const bool as_often = call_.failures != 0 && its.failures.load(std::memory_order_relaxed) <= call_.failures;
  const bool known = was_known(rank), comes = as_often || known || was_earlier(rank);
  const uint64_t begun = method_began();
  if (failed >= begun && !comes) return Cause::kRaised;
  if (goes_on(rank, failed)) return Cause::kNone;  // it runs something else by now, which may come to it
  // Where a step is one of both, to have heard of the failure says nothing of who has called this rank.
  const bool a_step = execution().graph != 0 || its.failed_call.load(std::memory_order_relaxed) == 0;
  const bool patient = comes || failed + kGraceNs < begun || (!here(rank) && a_step);
  const uint64_t until = std::max(began_, failed) + (!patient ? kGraceNs : comes && !here(rank) ? kFarGraceNs : kLongGraceNs);
  if (now >= until) return Cause::kRaised;
  wake_at_ = wake_at_ == 0 ? until : std::min(wake_at_, until);
  return Cause::kNone;
}

// Whether that rank has begun something since that. Where it has failed in the execution that this rank runs a step of,
// only a further step of that may come to the same operation.
bool CollectiveGroup::goes_on(uint32_t rank, uint64_t failed_ns) const {
  const BoardSlot* const its = board_->slot(members_[rank].slot);
  const Line& told = line(rank);
  Execution now;
  if (here(rank)) {
    if (its->status.since_ns.load(std::memory_order_acquire) <= failed_ns) return false;
    now = execution(rank);
  } else {
    if (its->rank_failures.went_on() < failed_before_[rank] + told.failures.load(std::memory_order_relaxed)) return false;
    now = its->rank_failures.went_on_in();
  }
  const Execution own = execution();
  const Execution failed{told.failed_graph.load(std::memory_order_relaxed), told.failed_execution.load(std::memory_order_relaxed)};
  return own.graph == 0 || failed != own || now == own;
}

// What it has failed in since it came to an operation is not known: then none is named.
std::optional<Execution> CollectiveGroup::failed_in_execution(uint32_t rank) const {
  const auto why = broken();
  const Execution own = execution();
  if (!why || own.graph == 0) return {};
  const Line& its = line(rank);
  Execution last{its.failed_graph.load(std::memory_order_relaxed), its.failed_execution.load(std::memory_order_relaxed)};
  // Who has found that the group is broken may have been another rank of this host, and has looked there.
  if (!here(rank))
    if (const auto told = board_->slot(members_[rank].slot)->rank_failures.last()) last = {told->graph, told->execution};
  // Of those that have come to this barrier the rest is there.
  if (last == own || (why->cause == Cause::kShifted && std::ranges::count(its.ways[barrier_ & 1].failed_in, own) != 0)) return own;
  return {};
}

void CollectiveGroup::write_call() {
  Line& mine = lines_[rank_];
  const size_t half = (barrier_ + 1) & 1;
  std::lock_guard lock(failed_mutex_);
  call_.failures = mine.failures.exchange(0, std::memory_order_relaxed);
  mine.calls[half] = call_;
  Way& way = mine.ways[half];
  way.failed_ns = mine.failed_ns.exchange(0, std::memory_order_relaxed);
  way.step_failed_ns = step_failed_ns_;
  way.begun_ns = method_began();
  const Execution runs = execution();
  way.execution = runs.number;
  way.graph = runs.graph;
  way.made = way.graph != 0 ? board_->sights() : made();
  way.history = history_;
  way.failed_in = std::exchange(failed_in_, {});
  way.failed = std::exchange(failed_, 0);
  way.step_failed = std::exchange(step_failed_, 0);
  way.hears = links_ && write_heard(mine.heard[half], way.begun_ns);
  told_of_failure_ = false;
  way.sights = Way::kEverywhere;
  if (known_ || !failed_calls_.empty()) write_sights(way);
  failed_calls_.clear();
  known_.reset();
  step_failed_ns_ = history_ = 0;
  operation_since_ = running_since();
}

// Whether there is any. What was heard before the last operation began was before that of all ranks was over.
bool CollectiveGroup::write_heard(std::array<uint64_t, kMaxRanks>& heard, uint64_t begun_ns) {
  bool any = false;
  heard = {};
  for (uint32_t r = 0; r < ranks(); ++r) {
    if (here(r)) continue;
    const auto last = board_->slot(members_[r].slot)->rank_failures.last();
    if (!last || last->noted_ns > begun_ns || last->noted_ns < last_began_) continue;
    heard[r] = last->count;
    any = true;
  }
  last_began_ = began_;
  return any;
}

void CollectiveGroup::write_sights(Way& way) {
  const auto in_vain = [&](const Sights& sights) { return std::ranges::find(sights, host_of(way.made), host_of) == sights.end(); };
  const Failed* unknown = nullptr;
  for (const Failed& failed : failed_calls_) {
    const Sights sights = sights_of(failed);
    if (unknown == nullptr && in_vain(sights)) unknown = &failed;
    meet(known_, sights);
  }
  // Where there are more hosts than places, that of who has made the call is the last to be left out.
  std::ranges::partition(*known_, [&](Stamp at) { return host_of(at) == host_of(way.made); });
  way.sights = uint32_t(std::min<size_t>(known_->size(), Way::kMostSights));
  std::copy_n(known_->begin(), way.sights, way.seen.begin());
  if (unknown != nullptr) say(lines_[rank_].failure, unknown->why.c_str());
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
  // What it has missed the other one is still in, or in an earlier one. Executions of one graph come in their order.
  if (other.graph != 0 && std::ranges::any_of(one.failed_in, [&](const Execution& in) { return in.graph == other.graph && in.number >= other.execution; })) return false;
  // What they had last was the same operation. If the same calls have failed at both since then, so that both have
  // missed the same or nothing, the next one is the same again.
  if (one.history == other.history) return true;
  // Whether that was before the other's method began. What clocks of different hosts say cannot be compared: there it is
  // what was heard by then.
  const auto before = [&](uint64_t failed_ns, uint64_t failed) {
    if (failed_ns == 0 || hosts_.together(a, b)) return failed_ns <= other.begun_ns;
    return other.hears != 0 && line(b).heard[half][a] >= failed;
  };
  // An execution bears no stamp.
  if (one.graph != 0 || other.graph != 0) return before(one.failed_ns, one.failed);
  if (!before(one.step_failed_ns, one.step_failed)) return false;
  // Calls that were made before somebody had learned of the failure may belong to the operation that was missed, if it
  // was, and those that were made after that do not.
  const auto knew = [&](Stamp made) {
    if (one.sights == Way::kEverywhere) return true;
    const std::span seen(one.seen.data(), std::min(one.sights, Way::kMostSights));
    return std::ranges::any_of(seen, [&](Stamp at) { return host_of(at) == host_of(made) && made >= at; });
  };
  return knew(one.made) && knew(other.made);
}

}  // namespace conveyor
