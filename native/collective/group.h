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
// A failure breaks the group, whatever it is: a rank that dies, or whose method or operation raises, ranks that have called
// different things, a timeout. What was first is said once, in the header's `cause`, and every operation from then on ends
// with it. So ranks that have failed at different steps never meet in one operation, and nothing has to be known of who
// had heard of what. All mend it together, by making the group anew.
//
// Waiting: a rank looks at the others' lines for a while, then it sleeps on its own process's doorbell, as everything here
// does, so that a death, a signal handler or the group's end wakes it. The last to come to a barrier rings those who
// sleep.
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
  uint32_t graph = 0;      // whose step calls, where that is known; 0: none
  uint64_t execution = 0;  // of that
  uint64_t skipped = 0;    // above it by one: the last execution of which its process has skipped a step, as what that needs had failed; 0: none
  // Of two that call for different executions of one graph the one that is ahead may have skipped a step, in which it
  // would have met the other one. (Without that they mean to meet.)
  bool same_execution(const CollectiveCall& other) const {
    if (graph == 0 || graph != other.graph || execution == other.execution) return true;
    const auto [behind, ahead] = execution < other.execution ? std::pair(this, &other) : std::pair(&other, this);
    return ahead->skipped <= behind->execution;
  }
  bool same(const CollectiveCall& other) const {
    return same_execution(other) && operation == other.operation && op == other.op && type == other.type && dims == other.dims && root == other.root && tensors == other.tensors &&
           count == other.count && shapes == other.shapes && shape == other.shape;
  }
};

// Why a group can do nothing any more.
enum class Cause : uint32_t { kNone, kDied, kRaised, kInterrupted, kTimedOut, kDestroyed, kMismatch, kEnded };

// An execution of a graph. `graph` 0: none, it is a call.
struct Execution {
  uint32_t graph = 0;
  uint64_t number = 0;
  bool operator==(const Execution&) const = default;
};

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
  CollectiveGroup(std::shared_ptr<Segment> segment, std::shared_ptr<ProcessTable> process_table, const Inbox& inbox, uint32_t rank, std::vector<Member> members,
                  std::unique_ptr<CollectiveLinks> links = {});
  ~CollectiveGroup();

  uint32_t rank() const { return rank_; }
  uint32_t ranks() const { return uint32_t(members_.size()); }
  // Whether that rank is on this host.
  bool here(uint32_t rank) const { return hosts_.together(rank, rank_); }
  bool is_gone(uint32_t rank) const { return process_table_->gone(members_[rank].slot, members_[rank].incarnation); }
  // Nothing of it comes any more, though it has come to the operation: who needs that knows.
  void lost(uint32_t rank) { fail(Cause::kDied, rank); }
  // Take nothing more of what comes from other hosts. By who has entered it.
  void close();

  // Throws std::invalid_argument if `data` has not what `call` needs at this rank.
  void check(const CollectiveCall& call, const CollectiveData& data) const;
  // One thread at a time: false if another one, or a caller further up, is in it.
  class Entered {
   public:
    explicit Entered(CollectiveGroup& group) : group_(group), taken_(!group.busy_.exchange(true, std::memory_order_acq_rel)) {}
    ~Entered() {
      if (taken_) group_.busy_.store(false, std::memory_order_release);
    }
    Entered(const Entered&) = delete;
    Entered& operator=(const Entered&) = delete;
    explicit operator bool() const { return taken_; }

   private:
    CollectiveGroup& group_;
    const bool taken_;
  };

  // One operation, by who has entered the group. Begin it, then go on until it does not say kSleep; whenever it does, sleep on
  // the doorbell until its count differs from `seen()` or `wake_at()` (0: none) has passed. `deadline` 0: none.
  void begin(const CollectiveCall& call, CollectiveData data, uint64_t deadline);
  enum class Progress { kDone, kSleep, kMismatch, kBroken };
  Progress go_on();
  uint32_t seen() const { return seen_; }
  uint64_t wake_at() const { return wake_at_; }
  // The last barrier that this rank has come to. All ranks come to the same ones.
  uint64_t barrier() const { return barrier_; }
  // Whatever go_on() has said but kSleep is the end of the operation. Who leaves it before says why.
  void leave(Cause cause, const char* why);

  // What rank `rank` has called at the barrier that this one has come to last.
  CollectiveCall called(uint32_t rank) const;

  // This rank's process has failed in what might have come to an operation, or in one: `why` in words. `in`: what it ran.
  void raised(const char* why, Execution in);
  // What this rank runs.
  Execution execution() const;
  // Nothing goes on here any more, from any rank or from who made the group.
  // `cause`: it was destroyed, or the session ends.
  static void destroy(Segment& segment, ProcessTable& process_table, const std::vector<Member>& members, Cause cause = Cause::kDestroyed);

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
  // Whether a rank has broken it by raising in the execution that this rank runs a step of.
  std::optional<Execution> failed_in_execution() const;

 private:
  struct Header;
  struct Line;
  static Header* header_of(Segment& segment);
  static size_t areas_at(const RankHosts& hosts);
  // `teller`: whose line has the words; kMaxRanks: there are none.
  static bool break_once(Header& header, Cause cause, uint32_t rank, uint32_t teller = kMaxRanks);
  static std::optional<Broken> broken(const Header& header);
  static void ring_all(ProcessTable& process_table, const std::vector<Member>& members);
  // `at`: the barrier that this rank waits at, and goes on from no more; 0: it waits at none.
  void fail(Cause cause, uint32_t rank, const char* why = "", uint64_t at = 0, Execution in = {});
  bool break_here(Cause cause, uint32_t rank, const char* why, Execution in);

  Line& line(uint32_t rank) const;
  char* stage(uint64_t barrier, uint32_t rank) const { return stages_ + ((barrier & 1) * hosts_.most() + places_[rank]) * kPiece; }
  char* result(uint64_t barrier) const { return results_ + (barrier & 1) * kPiece; }
  // A rank that has not called the same; ranks(): there is none.
  uint32_t differs() const;
  void arrive();
  // It takes what has come from other hosts.
  bool all_arrived();
  Progress sleep_or_fail();
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
  void tell_broken(uint64_t at);
  void hear(uint32_t rank);
  void heed(uint32_t rank, Frame frame);
  const char* far(uint32_t rank, size_t at, size_t size) const;

  std::shared_ptr<Segment> segment_;
  std::shared_ptr<ProcessTable> process_table_;
  const Inbox& inbox_;
  uint32_t rank_;
  std::vector<Member> members_;
  std::unique_ptr<CollectiveLinks> links_;
  RankHosts hosts_;
  std::vector<uint32_t> places_;   // of the ranks on their hosts
  std::unique_ptr<Line[]> far_;    // of ranks on other hosts, as they have told
  std::vector<Frame> frames_;      // what they have told last
  std::vector<size_t> data_at_;    // where in these lies what they give
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
  uint64_t wake_at_ = 0, wait_began_ = 0;
  uint32_t seen_ = 0;
  std::mutex break_mutex_;     // methods fail on the main thread, and operations on any
  bool crowded_;               // more ranks than cores: spinning keeps others from running
  uint64_t budget_ = kMaxSpinNs;  // learned, as Waiter's
};

}  // namespace conveyor
