#include "group.h"

#include <array>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "../arena/populate.h"
#include "links.h"

namespace conveyor {

// What lies at the beginning of a collective group's segment: of the group, and of each rank.

// Two lines: x86 fetches them in pairs.
constexpr size_t kApart = 2 * kCacheLine;

struct alignas(kApart) CollectiveGroup::Header {
  uint32_t magic;
  uint32_t ranks;
  uint32_t cores;  // that the session may use: one rank may be bound to a single one
  uint32_t most;   // ranks on one host
  std::atomic<uint32_t> cause;  // 0, or a Cause with the rank above it, and above that whose line has the words; set once
  std::atomic<uint32_t> told_of_waits;  // 0, or above its slot by one: the process that ranks ring when they sleep
};

// Of one rank, which alone writes there.
struct alignas(kApart) CollectiveGroup::Line {
  std::atomic<uint64_t> arrived;  // the last barrier it has come to
  std::atomic<uint32_t> asleep;   // 1: it sleeps on its doorbell, or is about to
  alignas(kCacheLine) CollectiveCall calls[2];  // by the half of the barrier
  // Why this rank has broken the group, or what it has heard of another host; written before `cause`.
  Execution in;    // that has failed
  char why[256];
};

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

CollectiveGroup::CollectiveGroup(std::shared_ptr<Segment> segment, std::shared_ptr<ProcessTable> process_table, const Inbox& inbox, uint32_t rank, std::vector<Member> members,
                                 std::unique_ptr<CollectiveLinks> links)
    : segment_(std::move(segment)), process_table_(std::move(process_table)), inbox_(inbox), rank_(rank), members_(std::move(members)), links_(std::move(links)),
      hosts_(links_ ? links_->hosts() : RankHosts(uint32_t(members_.size()))), header_(header_of(*segment_)) {
  if (members_.size() != header_->ranks || rank_ >= members_.size() || hosts_.ranks() != ranks() || hosts_.most() != header_->most || bytes(hosts_) > segment_->size())
    throw std::system_error(EINVAL, std::generic_category(), "collective group");
  for (const Member& m : members_)
    if (m.slot >= process_table_->slots()) throw std::system_error(EINVAL, std::generic_category(), "collective group");
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
  process_table_->become_rank(members_[rank_].slot);
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

void CollectiveGroup::ring_all(ProcessTable& process_table, const std::vector<Member>& members) {
  for (const Member& m : members)
    if (!process_table.gone(m.slot, m.incarnation)) process_table.notify(m.slot, kAttentionBit);
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
  ring_all(*process_table_, members_);  // first: to tell other hosts may fail
  // Whoever has called something else finds it by itself, behind the same barrier.
  if (cause != Cause::kMismatch) tell_broken(at);
}

void CollectiveGroup::raised(const char* why, Execution in) {
  if (!inbox_.inherited()) fail(Cause::kRaised, rank_, why, 0, in);
}

Execution CollectiveGroup::execution() const {
  const Status& status = process_table_->slot(members_[rank_].slot)->status;
  return {status.graph.load(std::memory_order_relaxed), status.execution.load(std::memory_order_relaxed)};
}

std::optional<Execution> CollectiveGroup::failed_in_execution() const {
  const uint32_t word = header_->cause.load(std::memory_order_seq_cst), teller = word >> 16;
  const Execution own = execution();
  if (Cause(word & 0xff) != Cause::kRaised || own.graph == 0 || teller >= ranks() || lines_[teller].in != own) return {};
  return own;
}

void CollectiveGroup::destroy(Segment& segment, ProcessTable& process_table, const std::vector<Member>& members, Cause cause) {
  if (break_once(*header_of(segment), cause, 0)) ring_all(process_table, members);
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
// those has announced that before it looked for the last time (seq_cst on both sides, as in ProcessTable::notify), so it has
// seen the last store then, or is seen here. Should the last one die in between, its death rings.
void CollectiveGroup::arrive() {
  tell_arrival();
  lines_[rank_].arrived.store(++barrier_, std::memory_order_seq_cst);
  waiting_ = true;
  wait_began_ = 0;
  if (!all_arrived()) return;
  for (uint32_t r = 0; r < ranks(); ++r)
    if (r != rank_ && lines_[r].asleep.load(std::memory_order_seq_cst) != 0) process_table_->notify(members_[r].slot, kAttentionBit);
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
  if (told != 0 && told <= process_table_->slots()) process_table_->notify(told - 1, kAttentionBit);
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
      if (break_here(Cause(said.cause), said.rank, words, said.in)) ring_all(*process_table_, members_);
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
