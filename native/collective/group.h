// Collective operations of a group of processes, its ranks, over one shared segment.
//
// Every operation is a row of steps with a barrier after each but the last. A step writes to the rank's own staging
// area and reads what others have staged before the barrier. One rule makes that safe with a single barrier between
// two steps: barriers are numbered, what is written before barrier e goes to half e & 1 of the staging areas, and it
// is read between barriers e and e + 1. Who writes to that half again does so after barrier e + 1, which all readers
// have come to.
//
// What each rank has called lies beside what it has staged, and is compared at the first barrier, before any result is
// written: ranks that differ have all taken part in one barrier, and nothing else has happened.
//
// Ranks meet in the order of their calls, so one that has failed where it should have come to an operation is one
// behind: its next one would meet what the others have called before that. So each also says at the first barrier what
// has failed there since its last operation, when somebody has learned of that, and when its call was made (see
// failed_calls.h). Ranks belong together if their calls were made by who could know of all those failures, or if all
// have failed in the same calls. Others break the group. Clocks are a host's own, so a rank says of each host when all of
// its failures were known there, as far as it has heard (heard_sights.h).
//
// Waiting: a rank looks at the others' lines for a while, then it sleeps on its own process's bell, as everything here
// does, so that a death, a signal handler or the group's end wakes it. The last to come to a barrier rings those who
// sleep. What makes an operation impossible is said once, in the header's `cause`: the group is broken from then on.
//
// Ranks may be on several hosts. Each host has a segment then, with lines and staging areas of its own ranks, and what a
// rank stages goes to the others with the word that it has come to the barrier (links.h). The rest is the same:
// a frame of a rank is its line and its staging area, and lasts until this rank comes to the next barrier.
//
// Values that are exchanged do not pass through here: each rank publishes its own in a ring of its own, which all ranks
// read, and then comes to a barrier, behind which those of all are there. The rings lie in the segment as well.
#pragma once

#include <array>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels.h"
#include "links.h"
#include "../inbox.h"
#include "../ring.h"

namespace conveyor {

constexpr uint32_t kMaxRanks = 64;

enum class Collective : uint8_t { kBarrier, kAllReduce, kReduce, kReduceScatter, kAllGather, kGather, kBroadcast, kScatter, kAllToAll, kExchange };
constexpr uint8_t kCollectives = 10;

// What a rank has called. All ranks must have called the same.
struct CollectiveCall {
  static constexpr size_t kMostDims = 8;
  Collective operation = Collective::kBarrier;
  ReduceOp op = ReduceOp::kSum;
  ElementType type = ElementType::kU8;
  uint8_t dims = 0;        // how many of `shape`; more than kMostDims: only `shapes` says them
  int32_t root = -1;       // -1: the operation has none
  uint64_t tensors = 1;    // which were made one; of an exchange: its form, as its callers count forms
  uint64_t count = 0;      // elements of one tensor: a list has as many tensors of this size as there are ranks
  uint64_t shapes = 0;     // a number made of all shapes
  std::array<int64_t, kMostDims> shape{};
  uint64_t failures = 0;  // of the rank, since its last operation: its group writes them
  bool same(const CollectiveCall& other) const {
    return operation == other.operation && op == other.op && type == other.type && dims == other.dims && root == other.root && tensors == other.tensors &&
           count == other.count && shapes == other.shapes && shape == other.shape;
  }
};

// Why a group can do nothing any more.
enum class Cause : uint32_t { kNone, kDied, kRaised, kInterrupted, kTimedOut, kDestroyed, kShifted, kEnded };

// The tensors of one call, which last as long as it does. Lists have one pointer for each rank; null where the
// operation takes or gives nothing at this rank.
struct CollectiveData {
  std::vector<const char*> in;
  std::vector<char*> out;
};

class CollectiveGroup {
 public:
  static constexpr size_t kPiece = 512 << 10;   // what is staged at a time: both halves stay in a core's cache
  static constexpr size_t kOneShot = 32 << 10;  // up to here every rank reduces everything: one barrier

  // Of what a rank gives to an exchange before all have come to that, and of the one before, which not all may have taken.
  static constexpr uint32_t kRingSlots = 4;
  static constexpr uint32_t kRingStride = 2048;

  static size_t bytes(const RankHosts& hosts);
  static size_t bytes(uint32_t ranks) { return bytes(RankHosts(ranks)); }
  // Where the ring lies that `rank` writes; all ranks read it, itself included.
  static size_t ring_at(uint32_t ranks, uint32_t rank);
  // Where those lie by which ranks of different hosts tell each other what they do.
  static size_t links_at(uint32_t ranks) { return ring_at(ranks, ranks); }
  // Lay out a group in a fresh segment, and give it its memory. Throws std::system_error if there is none.
  static void prepare(Segment& segment, const RankHosts& hosts);
  static void prepare(Segment& segment, uint32_t ranks) { prepare(segment, RankHosts(ranks)); }

  struct Member {
    uint32_t slot, incarnation;
  };
  // Member `rank` is this process; `inbox` is its own. `links`: where ranks are on other hosts.
  CollectiveGroup(std::shared_ptr<Segment> segment, std::shared_ptr<Board> board, const Inbox& inbox, uint32_t rank, std::vector<Member> members,
                  std::unique_ptr<CollectiveLinks> links = {});
  ~CollectiveGroup();

  uint32_t rank() const { return rank_; }
  uint32_t ranks() const { return uint32_t(members_.size()); }
  // Whether that rank is on this host.
  bool here(uint32_t rank) const { return hosts_.together(rank, rank_); }
  bool is_gone(uint32_t rank) const { return board_->gone(members_[rank].slot, members_[rank].incarnation); }
  // Nothing of it comes any more, though it has come to the operation: who needs that knows.
  void lost(uint32_t rank) { fail(Cause::kDied, rank); }
  // Take nothing more of what comes from other hosts. By who has the turn.
  void close();

  // Throws std::invalid_argument if `data` has not what `call` needs at this rank.
  void check(const CollectiveCall& call, const CollectiveData& data) const;
  // One thread at a time: false if another one, or a caller further up, has its turn.
  class Turn {
   public:
    explicit Turn(CollectiveGroup& group) : group_(group), taken_(!group.busy_.exchange(true, std::memory_order_acq_rel)) {}
    ~Turn() {
      if (taken_) group_.busy_.store(false, std::memory_order_release);
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    explicit operator bool() const { return taken_; }

   private:
    CollectiveGroup& group_;
    const bool taken_;
  };

  // One operation, by who has the turn. Begin it, then go on until it does not say kSleep; whenever it does, sleep on
  // the bell until its count differs from `seen()` or `wake_at()` (0: none) has passed. `deadline` 0: none.
  // `made`: what the clock of sights said when the call was made that has led here; kNow: it is made here.
  static constexpr Stamp kNow = ~Stamp(0);
  void begin(const CollectiveCall& call, CollectiveData data, uint64_t deadline, Stamp made = kNow);
  enum class Progress { kDone, kSleep, kMismatch, kBroken };
  Progress go_on();
  uint32_t seen() const { return seen_; }
  uint64_t wake_at() const { return wake_at_; }
  // The last barrier that this rank has come to. All ranks come to the same ones.
  uint64_t barrier() const { return barrier_; }
  // Whatever go_on() has said but kSleep is the end of the operation. Who leaves it before says why.
  void leave(Cause cause, const char* why);

  // What rank `rank` has called; of the ranks that did not call the same, which go_on() has told of.
  CollectiveCall called(uint32_t rank) const;

  // This rank's process has failed in what might have come to an operation: those who wait for it are told, if they
  // can know that it is not coming. `why` in words. `first`: of the process's groups this is the first to be told.
  void note_failure(const char* why, bool first = true);
  // The same of a call. `number`: the failure's, on the board; 0: whoever has made the call knew of it when the clock of
  // sights said `seen_at` there. `name` and `caller` say which call it was, `ran` whether it had begun.
  void note_failed_call(const char* why, const char* name, Member caller, bool ran, uint64_t number, Stamp seen_at = 0, bool first = true);
  // Nothing goes on here any more, from any rank or from who made the group.
  // `cause`: it was destroyed, or the session ends.
  static void destroy(Segment& segment, Board& board, const std::vector<Member>& members, Cause cause = Cause::kDestroyed);

  // The ranks that have not come to the barrier that this one has come to.
  std::vector<uint32_t> absent() const;
  // Of each rank the last barrier that it has come to, and if it sleeps there, for whom. For who made the group, whose
  // ranks are all on one host.
  static std::vector<std::pair<uint64_t, std::vector<uint32_t>>> waits(Segment& segment);
  // From now on a rank that goes to sleep rings the process in `slot`, so that this one looks at `waits` again.
  static void tell_of_waits(Segment& segment, uint32_t slot);

  struct Broken {
    Cause cause;
    uint32_t rank;  // whose doing it is
    std::string why;
  };
  std::optional<Broken> broken() const { return broken(*header_); }
  // After it was broken by that rank, which has raised: the execution that this rank runs a step of, if that was in it.
  std::optional<Execution> failed_in_execution(uint32_t rank) const;

 private:
  struct Header;
  struct Way;
  struct Line;
  static Header* header_of(Segment& segment);
  static size_t areas_at(const RankHosts& hosts);
  // `teller`: whose line has the words that it was told; kMaxRanks: they are those of `rank`.
  static bool break_once(Header& header, Cause cause, uint32_t rank, uint32_t teller = kMaxRanks);
  static std::optional<Broken> broken(const Header& header);
  static void ring_all(Board& board, const std::vector<Member>& members);
  void say(char* where, const char* why);
  // `at`: the barrier that this rank waits at, and goes on from no more; 0: it waits at none.
  void fail(Cause cause, uint32_t rank, uint64_t at = 0);

  Line& line(uint32_t rank) const;
  char* stage(uint64_t barrier, uint32_t rank) const { return stages_ + ((barrier & 1) * hosts_.most() + places_[rank]) * kPiece; }
  char* result(uint64_t barrier) const { return results_ + (barrier & 1) * kPiece; }
  // Both with the mutex of what has failed.
  // `known_at`: to who has cancelled it; else kNow.
  void tell_of_failure(const char* why, uint64_t number, Stamp known_at);
  struct Failed;
  using Sights = std::vector<Stamp>;  // of hosts, each once
  Sights sights_of(const Failed& failed) const;
  // Leave of `known` the hosts of `others`, with the later of both.
  static void meet(std::optional<Sights>& known, const Sights& others);
  void forget_known();
  Stamp made() const { return made_ == kNow ? board_->sights() : made_; }
  void note_on_board(const char* why, uint64_t number, Stamp known_at);
  void write_call();
  void write_sights(Way& way);
  bool write_heard(std::array<uint64_t, kMaxRanks>& heard, uint64_t begun_ns);
  bool all_called_the_same() const;
  // The rank that may have missed an operation which another one has come to; ranks() if there is none.
  uint32_t shifted() const;
  bool belong_together(uint32_t a, uint32_t b) const;
  void arrive();
  // It takes what has come from other hosts.
  bool all_arrived();
  Progress sleep_or_fail(uint64_t now);
  uint64_t running_since() const;
  uint64_t method_began() const;
  // Why `rank`, which has not come, is known not to: kNone if it is not.
  Cause will_not_come(uint32_t rank, uint64_t now);
  bool was_known(uint32_t rank) const;
  bool was_earlier(uint32_t rank) const;
  bool goes_on(uint32_t rank, uint64_t failed_ns) const;

  // The steps of operations; `step` is 0 for what comes before the first barrier.
  void plan();
  void work(size_t step);
  void reduce_in_pieces(size_t step);
  void reduce_by_hosts(size_t step);
  void stage_for_others(size_t piece);
  void reduce_hosts(size_t piece);
  void take_in(size_t piece);
  void give_out(size_t piece);
  void reduce_one_shot();
  struct Part {
    size_t from, count;
  };
  // Of the elements that the ranks of a host reduce, those of one of them.
  Part part(size_t count, uint32_t rank) const;
  Part part(size_t count) const { return part(count, rank_); }
  size_t elements(size_t piece) const;
  size_t at(size_t piece) const { return piece * piece_ * size_; }  // in bytes
  bool takes() const { return call_.root < 0 || uint32_t(call_.root) == rank_; }
  bool root_is_on(uint32_t host) const { return call_.root < 0 || hosts_[uint32_t(call_.root)] == host; }
  // What `rank` has staged, all of `size` bytes, or the chunk of it that is this rank's.
  const char* given(uint32_t rank, size_t size) const;
  const char* chunk(uint32_t rank, size_t size) const;

  // Between hosts.
  struct Said;
  void tell_arrival();
  std::vector<CollectiveLinks::Part> parts_for(uint32_t host) const;
  void tell_failure();
  void tell_broken(uint64_t at);
  void hear(uint32_t rank);
  void look_up(uint32_t rank);
  void heed(uint32_t rank, Frame frame);
  const char* far(uint32_t rank, size_t at, size_t size) const;

  std::shared_ptr<Segment> segment_;
  std::shared_ptr<Board> board_;
  const Inbox& inbox_;
  uint32_t rank_;
  std::vector<Member> members_;
  std::unique_ptr<CollectiveLinks> links_;
  RankHosts hosts_;
  std::vector<uint32_t> places_;   // of the ranks on their hosts
  std::unique_ptr<Line[]> far_;    // of ranks on other hosts, as they have told
  std::vector<Frame> frames_;      // what they have told last
  std::vector<size_t> data_at_;    // where in these lies what they give
  std::vector<uint64_t> failed_before_;  // how many had failed in their processes at their last operations, of those that have told of one since
  Execution execution() const { return execution(rank_); }  // that this rank runs
  Execution execution(uint32_t rank) const;                  // of this host
  Header* header_;
  Line* lines_;
  char* stages_;
  char* results_;

  std::atomic<bool> busy_{false};
  CollectiveCall call_;
  CollectiveData data_;
  uint64_t barrier_ = 0;  // the last that this rank has come to
  bool waiting_ = false;  // for the others at it
  uint64_t left_at_ = 0;  // the barrier that a rank of another host has left the last operation at
  size_t step_ = 0, last_ = 0, pieces_ = 0, piece_ = 0, size_ = 1;
  bool one_shot_ = false, by_hosts_ = false;
  uint64_t deadline_ = 0, wake_at_ = 0, began_ = 0, wait_began_ = 0;
  uint32_t seen_ = 0;
  Stamp made_ = kNow;

  // Of this rank, since its last operation. Failures are noted on the main thread, which need not be the one that
  // begins an operation.
  struct Failed {
    uint64_t number;
    Stamp known_at;  // to who has made the call, if it was cancelled; else kNow
    std::string why;
  };
  std::mutex failed_mutex_;
  std::vector<Failed> failed_calls_;
  std::optional<Sights> known_;   // when somebody had learned of those that are not among them any more
  uint64_t history_ = 0;        // a number made of all that has failed, in that order
  uint64_t step_failed_ns_ = 0;   // when a step of a graph has
  uint64_t failed_ = 0, step_failed_ = 0;  // which ones of its process the last failure was, and that of a step (RankFailures)
  std::array<Execution, 4> failed_in_{};  // see Way
  size_t failed_steps_ = 0;
  bool told_of_failure_ = false;  // other hosts know that there are some
  uint64_t operation_since_ = 0;  // when what had begun that was in the last operation
  uint64_t last_began_ = 0;       // when the last operation did
  bool lost_ = false;             // more than the board keeps were not learned of
  bool crowded_;               // more ranks than cores: spinning keeps others from running
  uint64_t budget_ = kMaxSpinNs;  // learned, as Waiter's
};

}  // namespace conveyor
