#include "collective_group.h"

#include <sched.h>

#include <cstring>

#include "populate.h"

namespace conveyor {

namespace {

constexpr uint32_t kMagic = 0x43564e43;
// Two lines: x86 fetches them in pairs.
constexpr size_t kApart = 2 * kCacheLine;
// How long a rank that had failed before another one's method began is waited for by that before it is given up: if
// both were at nearly the same time, so that one caller has most likely meant both, and if not.
constexpr uint64_t kGraceNs = 50'000'000;
constexpr uint64_t kLongGraceNs = 1'000'000'000;
// Looks before the first one that gives the core away.
constexpr int kPauses = 64;

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

uint32_t cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return ::sched_getaffinity(0, sizeof set, &set) == 0 ? uint32_t(CPU_COUNT(&set)) : kMaxRanks;
}

}  // namespace

struct alignas(kApart) CollectiveGroup::Header {
  uint32_t magic;
  uint32_t ranks;
  uint32_t cores;  // that the session may use: one rank may be bound to a single one
  std::atomic<uint32_t> cause;  // 0, or a Cause with the rank above it; set once
};

// What has led a rank to an operation.
struct CollectiveGroup::Way {
  uint64_t failed_ns;  // when the last of the call's failures was
  uint64_t begun_ns;   // when the method began
  uint64_t execution;  // of `graph`
  uint32_t graph;      // that has called it; 0: an ordinary call has
  bool unaware;        // the call was made before anybody can have known of them
};

// Of one rank, which alone writes there.
struct alignas(kApart) CollectiveGroup::Line {
  std::atomic<uint64_t> arrived;  // the last barrier it has come to
  std::atomic<uint32_t> asleep;   // 1: it sleeps on its bell, or is about to
  alignas(kCacheLine) CollectiveCall calls[2];  // by the half of the barrier
  std::atomic<uint64_t> failed_ns;  // when something has failed there since its last operation; 0: nothing has
  std::atomic<uint64_t> failures;   // since its last operation
  alignas(kCacheLine) Way ways[2];  // likewise; nobody looks there while nothing fails
  char failure[256];                // what, in words; written before
  char why[256];                    // it has left an operation; written before `cause`
};

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
  header->cores = cores();
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

void CollectiveGroup::destroy(Segment& segment, Board& board, const std::vector<Member>& members) {
  if (break_once(*header_of(segment), Cause::kDestroyed, 0)) ring_all(board, members);
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
  if (inbox_.inherited() || busy_.load(std::memory_order_acquire)) return;  // another thread is in an operation
  if (header_->cause.load(std::memory_order_acquire) != 0) return;  // what has broken the group may be this rank's last one
  Line& mine = lines_[rank_];
  say(mine.failure, why);
  mine.failures.fetch_add(1, std::memory_order_relaxed);
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

// A driver runs no methods: there it is the operation itself.
uint64_t CollectiveGroup::method_began() const {
  const uint64_t since = board_->slot(members_[rank_].slot)->status.since_ns.load(std::memory_order_acquire);
  return since == 0 ? began_ : std::min(began_, since);
}

// Its process is gone, or what it ran has raised and it has begun nothing since. If it has raised since this rank's own
// method began, what it has begun does not matter, as that belongs to a later operation; unless this rank has failed as
// often, so that both are at the same. Where it has raised before, that may have had nothing to do with the operation:
// so whoever calls the methods gets some time to begin another one there.
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
  const uint64_t until = std::max(began_, failed) + (failed + kGraceNs < begun ? kLongGraceNs : kGraceNs);
  if (now >= until) return Cause::kRaised;
  wake_at_ = wake_at_ == 0 ? until : std::min(wake_at_, until);
  return Cause::kNone;
}

// --- barriers ---

void CollectiveGroup::write_call() {
  Line& mine = lines_[rank_];
  const Status& status = board_->slot(members_[rank_].slot)->status;
  const size_t half = (barrier_ + 1) & 1;
  mine.calls[half] = call_;
  mine.ways[half] = {failed_ns_, method_began(), status.execution.load(std::memory_order_relaxed), status.graph.load(std::memory_order_relaxed), status.graph.load(std::memory_order_relaxed) == 0 && unaware_.load(std::memory_order_relaxed)};
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
  uint32_t like_first = 1;
  while (like_first < ranks() && failures(like_first) == failures(0)) ++like_first;
  if (like_first >= ranks()) return ranks();
  for (uint32_t a = 0; a < ranks(); ++a)
    for (uint32_t b = 0; b < ranks(); ++b) {
      if (failures(a) <= failures(b)) continue;
      const Way &one = lines_[a].ways[half], &other = lines_[b].ways[half];
      const bool together = one.graph != 0 && one.graph == other.graph;
      if (together ? one.execution != other.execution : one.unaware || one.failed_ns > other.begun_ns) return a;
    }
  return ranks();
}

bool CollectiveGroup::all_arrived() const {
  // Acquire, at least: what they have staged is visible. Sequentially consistent for arrive() and sleep_or_fail().
  for (uint32_t r = 0; r < ranks(); ++r)
    if (lines_[r].arrived.load(std::memory_order_seq_cst) < barrier_) return false;
  return true;
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

void CollectiveGroup::begin(const CollectiveCall& call, CollectiveData data, uint64_t deadline) {
  call_ = call;
  data_ = std::move(data);
  deadline_ = deadline;
  began_ = now_ns();
  step_ = 0;
  waiting_ = false;
  Line& mine = lines_[rank_];
  failed_ns_ = mine.failed_ns.load(std::memory_order_relaxed);
  call_.failures = mine.failures.load(std::memory_order_relaxed);
  mine.failed_ns.store(0, std::memory_order_relaxed);
  mine.failures.store(0, std::memory_order_relaxed);
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
        const uint64_t budget = crowded_ ? 0 : std::min(budget_, inbox_.spin_limit());
        while (!there && now - wait_began_ < budget) {
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
