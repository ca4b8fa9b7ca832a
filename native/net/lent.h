// Frames that keep something where they were made (kKeeps), between two hosts. Their maker's host lends them: it holds its
// leases on their blocks until the other host says that nobody there has the frame any more. So a lease on one host stands
// for all leases on the other one, and ends behind the last of these; with a host that is lost all of them end.
#pragma once

#include <sys/eventfd.h>

#include <atomic>
#include <compare>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "../arena/view.h"
#include "../platform.h"

namespace conveyor::net {

struct FrameKey {
  uint64_t segment;
  uint32_t ring;
  uint64_t number;
  auto operator<=>(const FrameKey&) const = default;
};

// What one host has of this one's. The pump's thread alone uses it.
class Lent {
 public:
  using Leases = std::vector<std::shared_ptr<Lease>>;
  // The other host has that frame. Strong.
  void add(const FrameKey& frame, Leases& leases) {
    if (over_ || returned_.erase(frame) != 0) return leases.clear();
    leases_.try_emplace(frame, std::move(leases));
  }
  // It has it no more; true: it had it.
  bool returned(const FrameKey& frame) { return leases_.erase(frame) != 0; }
  // The same of one of which the news that it has arrived is still to come.
  void returned_early(const FrameKey& frame) {
    if (!over_) returned_.insert(frame);
  }
  // Neither host has that segment any more, and of a ring the frames below `have(ring)` had come: the others are lent to
  // nobody.
  template <class Have>
  void reconcile(uint64_t segment, const Have& have) {
    for (auto at = leases_.lower_bound({segment, 0, 0}); at != leases_.end() && at->first.segment == segment;)
      at = at->first.number < have(at->first.ring) ? std::next(at) : leases_.erase(at);
  }
  // The other host is lost.
  void end() {
    over_ = true;
    leases_.clear();
    returned_.clear();
  }
  size_t size() const { return leases_.size(); }

 private:
  std::map<FrameKey, Leases> leases_;
  std::set<FrameKey> returned_;
  bool over_ = false;
};

// A frame of another host that this one has.
struct Borrowed {
  FrameKey frame;
  bool whole = false;  // it has come: its end is told
  Borrowed* next = nullptr;
};

// Of those of one other host the ones that nobody here has any more. Blocks outlive the pump, and end on any thread.
class Returning {
 public:
  // `doorbell`: an eventfd, which is written to when there are some.
  explicit Returning(std::shared_ptr<const Fd> doorbell) : doorbell_(std::move(doorbell)) {}
  ~Returning() { drop(take()); }
  Returning(const Returning&) = delete;
  Returning& operator=(const Returning&) = delete;

  // What keeps a frame here is to keep this.
  static std::shared_ptr<Borrowed> borrow(std::shared_ptr<Returning> from, const FrameKey& frame) {
    return {new Borrowed{frame}, [from = std::move(from)](Borrowed* one) { from->put(one); }};
  }
  // All that there are, for the caller to drop; null: none.
  Borrowed* take() { return first_.exchange(nullptr, std::memory_order_acquire); }
  static void drop(Borrowed* one) {
    while (one != nullptr) delete std::exchange(one, one->next);
  }

 private:
  void put(Borrowed* one) noexcept {
    // In a forked child nothing ends that its parent has.
    if (!one->whole || fork_ != fork_generation.load(std::memory_order_relaxed)) {
      delete one;
      return;
    }
    // From the exchange on it is the pump's.
    Borrowed* before = first_.load(std::memory_order_relaxed);
    do one->next = before;
    while (!first_.compare_exchange_weak(before, one, std::memory_order_release, std::memory_order_relaxed));
    if (before != nullptr) return;  // who takes that one takes this one, too
    write_event(doorbell_->get());
  }

  const std::shared_ptr<const Fd> doorbell_;
  const uint64_t fork_ = fork_generation.load(std::memory_order_relaxed);
  std::atomic<Borrowed*> first_{nullptr};
};

}  // namespace conveyor::net
