#include "group.h"

#include <cstring>

#include "lines.h"
#include "../arena/populate.h"

namespace conveyor {

namespace {

constexpr uint32_t kMagic = 0x43564e43;
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

}  // namespace

size_t CollectiveGroup::ring_at(uint32_t ranks, uint32_t rank) {
  return align_up(sizeof(Header) + ranks * sizeof(Line), kPage) + rank * align_up(RingHeader::bytes(kRingSlots, kRingStride, ranks), kCacheLine);
}

size_t CollectiveGroup::areas_at(const RankHosts& hosts) { return align_up(links_at(hosts.ranks()) + CollectiveLinks::bytes(hosts), kPage); }

// As many areas as the host needs that has most ranks: segments are laid out alike.
size_t CollectiveGroup::bytes(const RankHosts& hosts) { return areas_at(hosts) + 2 * (size_t(hosts.most()) + 1) * kPiece; }

CollectiveGroup::Header* CollectiveGroup::header_of(Segment& segment) {
  auto* header = reinterpret_cast<Header*>(segment.at(0, sizeof(Header)));
  const uint32_t ranks = read_once(header->ranks);
  if (read_once(header->magic) != kMagic || ranks == 0 || ranks > kMaxRanks || links_at(ranks) > segment.size())
    throw std::system_error(EPROTO, std::generic_category(), "no collective group here");
  return header;
}

void CollectiveGroup::prepare(Segment& segment, const RankHosts& hosts) {
  const uint32_t ranks = hosts.ranks();
  if (ranks == 0 || ranks > kMaxRanks) throw std::system_error(EINVAL, std::generic_category(), "collective group");
  char* base = segment.at(0, bytes(hosts));
  if (!populate(base, 0, segment.size())) throw std::system_error(ENOMEM, std::generic_category(), "collective group");
  auto* header = reinterpret_cast<Header*>(base);
  header->ranks = ranks;
  header->cores = uint32_t(usable_cores());
  header->most = hosts.most();
  // A value that comes from another host may come behind the word that its rank has come.
  const uint32_t flags = hosts.hosts() > 1 ? 0u : uint32_t(kSilent);
  for (uint32_t r = 0; r < ranks; ++r) segment.make_ring(ring_at(ranks, r), kRingSlots, kRingStride, ranks, flags);
  CollectiveLinks::prepare(segment, links_at(ranks), hosts);
  header->magic = kMagic;
}

CollectiveGroup::CollectiveGroup(std::shared_ptr<Segment> segment, std::shared_ptr<Board> board, const Inbox& inbox, uint32_t rank, std::vector<Member> members,
                                 std::unique_ptr<CollectiveLinks> links)
    : segment_(std::move(segment)), board_(std::move(board)), inbox_(inbox), rank_(rank), members_(std::move(members)), links_(std::move(links)),
      hosts_(links_ ? links_->hosts() : RankHosts(uint32_t(members_.size()))), header_(header_of(*segment_)) {
  if (members_.size() != header_->ranks || rank_ >= members_.size() || hosts_.ranks() != ranks() || hosts_.most() != header_->most || bytes(hosts_) > segment_->size())
    throw std::system_error(EINVAL, std::generic_category(), "collective group");
  for (const Member& m : members_)
    if (m.slot >= board_->slots()) throw std::system_error(EINVAL, std::generic_category(), "collective group");
  for (uint32_t r = 0; r < ranks(); ++r) places_.push_back(hosts_.place(r));
  lines_ = reinterpret_cast<Line*>(header_ + 1);
  stages_ = reinterpret_cast<char*>(header_) + areas_at(hosts_);
  results_ = stages_ + 2 * size_t(hosts_.most()) * kPiece;
  if (links_) {
    far_ = std::make_unique<Line[]>(ranks());
    frames_.resize(ranks());
    data_at_.resize(ranks());
  }
  crowded_ = hosts_.count(hosts_[rank_]) > read_once(header_->cores);
  board_->become_rank(members_[rank_].slot);
}

CollectiveGroup::~CollectiveGroup() = default;

CollectiveGroup::Line& CollectiveGroup::line(uint32_t rank) const { return here(rank) ? lines_[rank] : far_[rank]; }

// --- what goes wrong ---

bool CollectiveGroup::break_once(Header& header, Cause cause, uint32_t rank, uint32_t teller) {
  uint32_t none = 0;
  // Release: who finds the cause may read its words. Sequentially consistent, since those who wait announce that they
  // sleep and then look for it.
  return header.cause.compare_exchange_strong(none, uint32_t(cause) | rank << 8 | teller << 16, std::memory_order_seq_cst);
}

void CollectiveGroup::ring_all(Board& board, const std::vector<Member>& members) {
  for (const Member& m : members)
    if (!board.gone(m.slot, m.incarnation)) board.ring(m.slot, kAttentionBit);
}

bool CollectiveGroup::break_here(Cause cause, uint32_t rank, const char* why, Execution in) {
  std::lock_guard lock(break_mutex_);
  // What has broken it before may be in this rank's words, which stay.
  if (header_->cause.load(std::memory_order_acquire) != 0) return false;
  Line& mine = lines_[rank_];
  const size_t n = std::min(std::strlen(why), sizeof mine.why - 1);
  std::memcpy(mine.why, why, n);
  mine.why[n] = 0;
  mine.in = in;
  return break_once(*header_, cause, rank, rank_);
}

void CollectiveGroup::fail(Cause cause, uint32_t rank, const char* why, uint64_t at, Execution in) {
  if (!break_here(cause, rank, why, in)) return;
  ring_all(*board_, members_);  // first: to tell other hosts may fail
  // Whoever has called something else finds it by itself, behind the same barrier.
  if (cause != Cause::kMismatch) tell_broken(at);
}

void CollectiveGroup::raised(const char* why, Execution in) {
  if (!inbox_.inherited()) fail(Cause::kRaised, rank_, why, 0, in);
}

Execution CollectiveGroup::execution() const {
  const Status& status = board_->slot(members_[rank_].slot)->status;
  return {status.graph.load(std::memory_order_relaxed), status.execution.load(std::memory_order_relaxed)};
}

std::optional<Execution> CollectiveGroup::failed_in_execution() const {
  const uint32_t word = header_->cause.load(std::memory_order_seq_cst), teller = word >> 16;
  const Execution own = execution();
  if (Cause(word & 0xff) != Cause::kRaised || own.graph == 0 || teller >= ranks() || lines_[teller].in != own) return {};
  return own;
}

void CollectiveGroup::destroy(Segment& segment, Board& board, const std::vector<Member>& members, Cause cause) {
  if (break_once(*header_of(segment), cause, 0)) ring_all(board, members);
}

std::optional<CollectiveGroup::Broken> CollectiveGroup::broken(const Header& header) {
  const uint32_t word = header.cause.load(std::memory_order_seq_cst);
  if (word == 0) return {};
  const auto cause = Cause(word & 0xff);
  const auto* lines = reinterpret_cast<const Line*>(&header + 1);
  const uint32_t rank = std::min(word >> 8 & 0xff, kMaxRanks - 1), teller = word >> 16;
  const char* text = teller < std::min(header.ranks, kMaxRanks) ? lines[teller].why : "";
  return Broken{cause, rank, {text, ::strnlen(text, sizeof Line::why)}};
}

void CollectiveGroup::leave(Cause cause, const char* why) {
  lines_[rank_].asleep.store(0, std::memory_order_relaxed);
  fail(cause, rank_, why, waiting_ ? barrier_ : 0);
  data_ = {};
}

// --- barriers ---

CollectiveCall CollectiveGroup::called(uint32_t rank) const { return line(rank).calls[barrier_ & 1]; }

uint32_t CollectiveGroup::differs() const {
  uint32_t r = 0;
  while (r < ranks() && (r == rank_ || line(r).calls[barrier_ & 1].same(call_))) ++r;
  return r;
}

bool CollectiveGroup::all_arrived() {
  // Acquire, at least: what they have staged is visible. Sequentially consistent for arrive() and sleep_or_fail().
  const auto lacks = [&](uint32_t r) { return line(r).arrived.load(std::memory_order_seq_cst) < barrier_; };
  for (uint32_t r = 0; r < ranks(); ++r) {
    if (!lacks(r)) continue;
    if (!here(r)) hear(r);
    if (lacks(r)) return false;
  }
  return true;
}

std::vector<uint32_t> CollectiveGroup::absent() const {
  std::vector<uint32_t> absent;
  for (uint32_t r = 0; r < ranks(); ++r)
    if (line(r).arrived.load(std::memory_order_seq_cst) < barrier_) absent.push_back(r);
  return absent;
}

std::vector<std::pair<uint64_t, std::vector<uint32_t>>> CollectiveGroup::waits(Segment& segment) {
  const Header* header = header_of(segment);
  const auto* lines = reinterpret_cast<const Line*>(header + 1);
  std::vector<std::pair<uint64_t, std::vector<uint32_t>>> waits(header->ranks);
  for (uint32_t r = 0; r < header->ranks; ++r) {
    const uint64_t barrier = waits[r].first = lines[r].arrived.load(std::memory_order_seq_cst);
    if (lines[r].asleep.load(std::memory_order_seq_cst) == 0) continue;
    for (uint32_t other = 0; other < header->ranks; ++other)
      if (lines[other].arrived.load(std::memory_order_seq_cst) < barrier) waits[r].second.push_back(other);
  }
  return waits;
}

void CollectiveGroup::tell_of_waits(Segment& segment, uint32_t slot) { header_of(segment)->told_of_waits.store(slot + 1, std::memory_order_seq_cst); }

// The last of all stores finds that all have come, and so at least one rank does; it rings those who sleep. Each of
// those has announced that before it looked for the last time (seq_cst on both sides, as in Board::ring), so it has
// seen the last store then, or is seen here. Should the last one die in between, its death rings.
void CollectiveGroup::arrive() {
  tell_arrival();
  lines_[rank_].arrived.store(++barrier_, std::memory_order_seq_cst);
  waiting_ = true;
  wait_began_ = 0;
  if (!all_arrived()) return;
  for (uint32_t r = 0; r < ranks(); ++r)
    if (r != rank_ && lines_[r].asleep.load(std::memory_order_seq_cst) != 0) board_->ring(members_[r].slot, kAttentionBit);
}

CollectiveGroup::Progress CollectiveGroup::sleep_or_fail() {
  seen_ = inbox_.count();  // before the looks: what is said after them moves it
  lines_[rank_].asleep.store(1, std::memory_order_seq_cst);
  if (all_arrived()) return Progress::kDone;
  for (uint32_t r = 0; r < ranks(); ++r)
    if (!here(r)) hear(r);  // one that has come may have left since
  // Once more, as whoever was told of all may have broken it since: what all have come to ends at all ranks alike.
  if (header_->cause.load(std::memory_order_seq_cst) != 0) return all_arrived() ? Progress::kDone : Progress::kBroken;
  for (uint32_t r = 0; r < ranks(); ++r) {
    const auto lacks = [&] { return line(r).arrived.load(std::memory_order_seq_cst) < barrier_; };
    if (r == rank_ || !lacks()) continue;
    // Once more: it may have come to the barrier before it died.
    if (!is_gone(r) || !lacks()) continue;
    fail(Cause::kDied, r, "", barrier_);
    return Progress::kBroken;
  }
  if (all_arrived()) return Progress::kDone;
  // Sequentially consistent, here and where it is set: whoever sets it and looks then sees that this rank sleeps, or is
  // rung.
  const uint32_t told = header_->told_of_waits.load(std::memory_order_seq_cst);
  if (told != 0 && told <= board_->slots()) board_->ring(told - 1, kAttentionBit);
  return Progress::kSleep;
}

void CollectiveGroup::begin(const CollectiveCall& call, CollectiveData data, uint64_t deadline) {
  call_ = call;
  data_ = std::move(data);
  wake_at_ = deadline;
  step_ = 0;
  waiting_ = false;
  plan();
  lines_[rank_].calls[(barrier_ + 1) & 1] = call_;
}

CollectiveGroup::Progress CollectiveGroup::go_on() {
  const auto end = [&](Progress progress) {
    lines_[rank_].asleep.store(0, std::memory_order_relaxed);
    data_ = {};
    for (Frame& frame : frames_) frame = {};
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
        const Progress progress = sleep_or_fail();
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
      // That a rank of another host has come is heard only here, and so is that it waits no more.
      if (left_at_ == barrier_) return end(Progress::kBroken);
      if (const uint32_t other = differs(); other < ranks()) {
        const CollectiveCall its = called(other);
        if (!call_.same_execution(its)) {
          fail(Cause::kInterrupted, its.execution < call_.execution ? other : rank_, "the failure of its execution");
          return end(Progress::kBroken);
        }
        fail(Cause::kMismatch, other);
        return end(Progress::kMismatch);
      }
    }
    ++step_;
  }
}

}  // namespace conveyor
