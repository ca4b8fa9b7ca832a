#include "collective_group.h"


#include <cstring>

#include "collective_lines.h"
#include "populate.h"

namespace conveyor {

namespace {

constexpr uint32_t kMagic = 0x43564e43;
// How long a rank that had failed before another one's method began is waited for by that before it is given up: if
// both were at nearly the same time, so that one caller has most likely meant both; and if not, if both have failed, or
// if the call was made by who knew of the failure: whoever has called the one again most likely calls the other.
constexpr uint64_t kGraceNs = 50'000'000;
constexpr uint64_t kLongGraceNs = 1'000'000'000;
// Nobody has learned of a failure.
constexpr uint64_t kNever = ~uint64_t(0);
// Looks before the first one that gives the core away.
constexpr int kPauses = 64;
// Where ranks share cores. Four on two cores meet in 3 us with eight, and in 35 us where they sleep at once. One that has
// a core for itself waits for all those who share the other: three meet it in 11 us, and in 15 us if it sleeps after 16.
constexpr int kYields = 64;

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// FNV-1a, which is the same in every process.
uint64_t mixed(uint64_t hash, const void* data, size_t size) {
  if (hash == 0) hash = 0xcbf29ce484222325;
  for (size_t i = 0; i < size; ++i) hash = (hash ^ static_cast<const unsigned char*>(data)[i]) * 0x100000001b3;
  return hash;
}

}  // namespace

size_t CollectiveGroup::ring_at(uint32_t ranks, uint32_t rank) {
  const size_t areas = align_up(sizeof(Header) + ranks * sizeof(Line), kPage) + 2 * (size_t(ranks) + 1) * kPiece;
  return areas + rank * align_up(RingHeader::bytes(kRingSlots, kRingStride, ranks), kCacheLine);
}

size_t CollectiveGroup::bytes(uint32_t ranks) { return ring_at(ranks, ranks); }

CollectiveGroup::Header* CollectiveGroup::header_of(Segment& segment) {
  auto* header = reinterpret_cast<Header*>(segment.at(0, sizeof(Header)));
  const uint32_t ranks = read_once(header->ranks);
  if (read_once(header->magic) != kMagic || ranks == 0 || ranks > kMaxRanks || bytes(ranks) > segment.size())
    throw std::system_error(EPROTO, std::generic_category(), "no collective group here");
  return header;
}

void CollectiveGroup::prepare(Segment& segment, uint32_t ranks) {
  if (ranks == 0 || ranks > kMaxRanks) throw std::system_error(EINVAL, std::generic_category(), "collective group");
  char* base = segment.at(0, bytes(ranks));
  if (!populate(base, 0, segment.size())) throw std::system_error(ENOMEM, std::generic_category(), "collective group");
  auto* header = reinterpret_cast<Header*>(base);
  header->ranks = ranks;
  header->cores = uint32_t(usable_cores());
  for (uint32_t r = 0; r < ranks; ++r) segment.make_ring(ring_at(ranks, r), kRingSlots, kRingStride, ranks, kSilent);
  header->magic = kMagic;
}

CollectiveGroup::CollectiveGroup(std::shared_ptr<Segment> segment, std::shared_ptr<Board> board, const Inbox& inbox, uint32_t rank, std::vector<Member> members)
    : segment_(std::move(segment)), board_(std::move(board)), inbox_(inbox), rank_(rank), members_(std::move(members)), header_(header_of(*segment_)) {
  if (members_.size() != header_->ranks || rank_ >= members_.size()) throw std::system_error(EINVAL, std::generic_category(), "collective group");
  for (const Member& m : members_)
    if (m.slot >= board_->slots()) throw std::system_error(EINVAL, std::generic_category(), "collective group");
  lines_ = reinterpret_cast<Line*>(header_ + 1);
  stages_ = reinterpret_cast<char*>(header_) + align_up(sizeof(Header) + ranks() * sizeof(Line), kPage);
  results_ = stages_ + 2 * size_t(ranks()) * kPiece;
  crowded_ = ranks() > read_once(header_->cores);
  board_->become_rank(members_[rank_].slot);
}

// --- what goes wrong ---

bool CollectiveGroup::break_once(Header& header, Cause cause, uint32_t rank) {
  uint32_t none = 0;
  // Release: who finds the cause may read its words. Sequentially consistent, since those who wait announce that they
  // sleep and then look for it.
  return header.cause.compare_exchange_strong(none, uint32_t(cause) | rank << 8, std::memory_order_seq_cst);
}

void CollectiveGroup::ring_all(Board& board, const std::vector<Member>& members) {
  for (const Member& m : members)
    if (!board.gone(m.slot, m.incarnation)) board.ring(m.slot, kAttentionBit);
}

void CollectiveGroup::fail(Cause cause, uint32_t rank) {
  if (break_once(*header_, cause, rank)) ring_all(*board_, members_);
}

void CollectiveGroup::destroy(Segment& segment, Board& board, const std::vector<Member>& members, Cause cause) {
  if (break_once(*header_of(segment), cause, 0)) ring_all(board, members);
}

std::optional<CollectiveGroup::Broken> CollectiveGroup::broken(const Header& header) {
  const uint32_t word = header.cause.load(std::memory_order_seq_cst);
  if (word == 0) return {};
  const auto cause = Cause(word & 0xff);
  const uint32_t rank = std::min(word >> 8, kMaxRanks - 1);
  const auto* line = reinterpret_cast<const Line*>(&header + 1) + std::min(rank, header.ranks - 1);
  const char* text = cause == Cause::kRaised || cause == Cause::kShifted ? line->failure : cause == Cause::kInterrupted || cause == Cause::kTimedOut ? line->why : "";
  return Broken{cause, rank, {text, ::strnlen(text, sizeof line->why)}};
}

void CollectiveGroup::say(char* where, const char* why) {
  const size_t n = std::min(std::strlen(why), sizeof(Line::why) - 1);
  std::memcpy(where, why, n);
  where[n] = 0;
}

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
}

void CollectiveGroup::leave(Cause cause, const char* why) {
  Line& mine = lines_[rank_];
  mine.asleep.store(0, std::memory_order_relaxed);
  say(mine.why, why);
  fail(cause, rank_);
  data_ = {};
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
  const uint64_t failed = lines_[rank].failed_ns.load(std::memory_order_seq_cst);
  if (failed == 0) return Cause::kNone;
  const auto since = [&](uint32_t slot) { return board_->slot(slot)->status.since_ns.load(std::memory_order_acquire); };
  const uint64_t begun = method_began();
  const bool as_often = call_.failures != 0 && lines_[rank].failures.load(std::memory_order_relaxed) <= call_.failures;
  if (failed >= begun && !as_often) return Cause::kRaised;
  if (since(m.slot) > failed) return Cause::kNone;  // it runs something else by now, which may come to it
  const auto seen = board_->seen_at(m.slot, lines_[rank].failed_call.load(std::memory_order_relaxed));
  const bool known = seen && made_ >= *seen;  // to who has called this rank
  const bool patient = as_often || known || failed + kGraceNs < begun;
  const uint64_t until = std::max(began_, failed) + (patient ? kLongGraceNs : kGraceNs);
  if (now >= until) return Cause::kRaised;
  wake_at_ = wake_at_ == 0 ? until : std::min(wake_at_, until);
  return Cause::kNone;
}

// --- barriers ---

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

CollectiveCall CollectiveGroup::called(uint32_t rank) const { return lines_[rank].calls[barrier_ & 1]; }

bool CollectiveGroup::all_called_the_same() const {
  for (uint32_t r = 0; r < ranks(); ++r)
    if (r != rank_ && !(lines_[r].calls[barrier_ & 1].same(call_))) return false;
  return true;
}

// All ranks look at the same, and so find the same.
uint32_t CollectiveGroup::shifted() const {
  const size_t half = barrier_ & 1;
  const auto failures = [&](uint32_t r) { return lines_[r].calls[half].failures; };
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
  const Way &one = lines_[a].ways[half], &other = lines_[b].ways[half];
  if (one.graph != 0 && one.graph == other.graph) return one.execution == other.execution;
  // What they had last was the same operation. If the same calls have failed at both since then, so that both have
  // missed the same or nothing, the next one is the same again.
  if (one.history == other.history) return true;
  if (one.graph != 0 || other.graph != 0) return one.failed_ns <= other.begun_ns;  // an execution bears no clock
  // Calls that were made before somebody had learned of the failure may belong to the operation that was missed, if it
  // was, and those that were made after that do not.
  return one.made >= one.seen_at && other.made >= one.seen_at && one.step_failed_ns <= other.begun_ns;
}

bool CollectiveGroup::all_arrived() const {
  // Acquire, at least: what they have staged is visible. Sequentially consistent for arrive() and sleep_or_fail().
  for (uint32_t r = 0; r < ranks(); ++r)
    if (lines_[r].arrived.load(std::memory_order_seq_cst) < barrier_) return false;
  return true;
}

std::vector<uint32_t> CollectiveGroup::absent(const Line* lines, uint32_t ranks, uint64_t barrier) {
  std::vector<uint32_t> absent;
  for (uint32_t r = 0; r < ranks; ++r)
    if (lines[r].arrived.load(std::memory_order_seq_cst) < barrier) absent.push_back(r);
  return absent;
}

std::vector<std::pair<uint64_t, std::vector<uint32_t>>> CollectiveGroup::waits(Segment& segment) {
  const Header* header = header_of(segment);
  const auto* lines = reinterpret_cast<const Line*>(header + 1);
  std::vector<std::pair<uint64_t, std::vector<uint32_t>>> waits(header->ranks);
  for (uint32_t r = 0; r < header->ranks; ++r) {
    const uint64_t barrier = waits[r].first = lines[r].arrived.load(std::memory_order_seq_cst);
    if (lines[r].asleep.load(std::memory_order_seq_cst) != 0) waits[r].second = absent(lines, header->ranks, barrier);
  }
  return waits;
}

// The last of all stores finds that all have come, and so at least one rank does; it rings those who sleep. Each of
// those has announced that before it looked for the last time (seq_cst on both sides, as in Board::ring), so it has
// seen the last store then, or is seen here. Should the last one die in between, its death rings.
void CollectiveGroup::arrive() {
  lines_[rank_].arrived.store(++barrier_, std::memory_order_seq_cst);
  waiting_ = true;
  wait_began_ = 0;
  if (!all_arrived()) return;
  for (uint32_t r = 0; r < ranks(); ++r)
    if (r != rank_ && lines_[r].asleep.load(std::memory_order_seq_cst) != 0) board_->ring(members_[r].slot, kAttentionBit);
}

CollectiveGroup::Progress CollectiveGroup::sleep_or_fail(uint64_t now) {
  seen_ = inbox_.count();  // before the looks: what is said after them moves it
  lines_[rank_].asleep.store(1, std::memory_order_seq_cst);
  if (all_arrived()) return Progress::kDone;
  if (header_->cause.load(std::memory_order_seq_cst) != 0) return Progress::kBroken;
  wake_at_ = deadline_;
  for (uint32_t r = 0; r < ranks(); ++r) {
    const auto lacks = [&] { return lines_[r].arrived.load(std::memory_order_seq_cst) < barrier_; };
    if (r == rank_ || !lacks()) continue;
    const Cause cause = will_not_come(r, now);
    // Once more: it may have come to the barrier before it died.
    if (cause == Cause::kNone || !lacks()) continue;
    fail(cause, r);
    return Progress::kBroken;
  }
  return all_arrived() ? Progress::kDone : Progress::kSleep;
}

void CollectiveGroup::begin(const CollectiveCall& call, CollectiveData data, uint64_t deadline, uint64_t made) {
  call_ = call;
  made_ = made;
  data_ = std::move(data);
  deadline_ = deadline;
  began_ = now_ns();
  step_ = 0;
  waiting_ = false;
  plan();
  write_call();
}

CollectiveGroup::Progress CollectiveGroup::go_on() {
  const auto end = [&](Progress progress) {
    lines_[rank_].asleep.store(0, std::memory_order_relaxed);
    data_ = {};
    return progress;
  };
  for (;;) {
    if (!waiting_) {
      // A broken group takes part in nothing; who has come to a barrier by now is told of it there.
      if (step_ == 0 && header_->cause.load(std::memory_order_acquire) != 0) return end(Progress::kBroken);
      work(step_);
      if (step_ == last_) return end(Progress::kDone);
      arrive();
    }
    bool there = all_arrived();
    for (int i = 0; !there && i < kPauses && !crowded_; ++i) {
      relax();
      there = all_arrived();
    }
    if (!there) {
      uint64_t now = now_ns();
      if (wait_began_ == 0) {
        wait_began_ = now;
        const uint64_t budget = std::min(budget_, inbox_.spin_limit());
        // With more ranks than cores those that are still to come run on this one meanwhile: how long they take says
        // nothing, only how often they were let.
        for (int n = 0; !there && (crowded_ ? budget != 0 && n < kYields : now - wait_began_ < budget); ++n) {
          ::sched_yield();
          there = all_arrived();
          now = now_ns();
        }
      }
      if (!there) {
        const Progress progress = sleep_or_fail(now);
        if (progress != Progress::kDone) return progress == Progress::kSleep ? progress : end(progress);
      }
    }
    if (lines_[rank_].asleep.load(std::memory_order_relaxed) != 0) {
      lines_[rank_].asleep.store(0, std::memory_order_relaxed);
      const uint64_t waited = now_ns() - wait_began_;
      budget_ = waited < kWorthSpinningNs ? kMaxSpinNs : std::max(budget_ / 2, kMinSpinNs);
    }
    waiting_ = false;
    if (step_ == 0) {
      if (const uint32_t rank = shifted(); rank < ranks()) {
        fail(Cause::kShifted, rank);
        return end(Progress::kBroken);
      }
    }
    if (step_ == 0 && !all_called_the_same()) return end(Progress::kMismatch);
    ++step_;
  }
}

}  // namespace conveyor
