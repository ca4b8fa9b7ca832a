// What may end an execution (or a call) before it has run: its deadline, its cancellation, and the failure
// of one of its tasks. Words in the segment that all its members have mapped: one set for each of the executions that may be under
// way at once.
//
// Execution n uses set n modulo the number of sets, which is at least the depth. n + sets is submitted
// only when every output and effect of n has come out, and every task of n has looked before that (each
// leads to an output or an effect). So nobody looks at n's deadline any more when it is written for
// n + sets; and who looks at a deadline has received an input, or something made from one, that was
// published after the deadline was written: relaxed accesses are enough.
//
// A cancellation is written whenever the caller likes, perhaps when n + sets is under way already. So it
// bears the execution's number and only grows: a late one for n neither hits n + sets nor wipes out one
// of n + sets. That it is looked at again is the business of the doorbell that is rung after it.
//
// An execution that has failed is marked in the same word, by the actor whose task has raised; it counts
// as cancelled as well. That mark does publish something: the frame that tells the executor of the failure
// (failures.h). It is released after that, and acquired by who skips a task for it, so that whoever receives
// what was skipped can know why.
//
// Nor does anybody hear of a generator whose items nobody wants any more but its actor: it is marked for
// each task by itself, with the number again, since executions before it may still be wanted.
//
// Where the members are on several hosts, each host has these words, and its pump (net/) copies to the others what
// has changed. A count tells it that something has: it is moved after each change, before whatever publishes that.
#pragma once

#include <utility>

#include "ring.h"

namespace conveyor {

// The body of the error frame that stands for what was not run. Too rare and too plain to be encoded.
constexpr const char* kCancelledMeta = "conveyor:cancelled";
constexpr const char* kOverdueMeta = "conveyor:overdue";

class Limits {
 public:
  enum class Verdict { kGoOn, kCancelled, kOverdue };

  Limits(std::shared_ptr<Segment> segment, size_t offset, uint32_t sets, uint32_t tasks)
      : segment_(std::move(segment)), sets_(sets), tasks_(tasks), stride_(stride(tasks)) {
    if (sets == 0 || (sets & (sets - 1)) != 0) throw std::system_error(EINVAL, std::generic_category(), "limits");
    base_ = segment_->at(offset, bytes(sets, tasks));
  }

  // What they take, a multiple of a cache line. All zero: no limits.
  static size_t bytes(uint32_t sets, uint32_t tasks) { return kCacheLine + sets * stride(tasks); }

  // The submitter's: before the execution's first input is published. `deadline`: CLOCK_MONOTONIC in
  // nanoseconds, 0 for none.
  void begin(uint64_t number, uint64_t deadline) {
    Words& w = words(number);
    // Not written where nothing changes: the line stays in the caches of all who look at it.
    if (deadline == 0) {
      if (w.deadline.load(std::memory_order_relaxed) != 0) {
        w.deadline.store(0, std::memory_order_relaxed);
        changed();
      }
      return;  // the notes stay: the one before may still be asked about
    }
    w.skipped.store(0, std::memory_order_relaxed);
    for (uint32_t i = 0; i < ran_words(tasks_); ++i) w.ran()[i].store(0, std::memory_order_relaxed);
    w.deadline.store(deadline, std::memory_order_relaxed);
    changed();
  }

  void cancel(uint64_t number) {
    mark(number, 0);
    // Who sees the new count sees the mark.
    header()->cancellations.fetch_add(1, std::memory_order_release);
  }
  bool cancelled(uint64_t number) const { return words(number).ended.load(std::memory_order_acquire) >> 1 == number + 1; }
  // A task of it has raised, and the executor has been told.
  void fail(uint64_t number) { mark(number, kFailed); }
  bool failed(uint64_t number) const { return words(number).ended.load(std::memory_order_acquire) == ((number + 1) << 1 | kFailed); }
  // To be called before the executor is told of a failure: how many there were before.
  uint32_t count_failure() {
    const uint32_t before = header()->failures.fetch_add(1, std::memory_order_relaxed);
    changed();
    return before;
  }
  // It could not be told.
  void uncount_failure() {
    header()->failures.fetch_sub(1, std::memory_order_relaxed);
    changed();
  }
  uint32_t failures() const { return header()->failures.load(std::memory_order_relaxed); }
  // How often `cancel` was called: tells who has much running whether to look through it.
  uint32_t cancellations() const { return header()->cancellations.load(std::memory_order_acquire); }

  uint64_t deadline(uint64_t number) const { return words(number).deadline.load(std::memory_order_relaxed); }
  Verdict look(uint64_t number, uint64_t now) const {
    if (cancelled(number)) return Verdict::kCancelled;
    const uint64_t end = deadline(number);
    return end != 0 && now >= end ? Verdict::kOverdue : Verdict::kGoOn;
  }

  // Nobody wants more items of `task`, a generator. Its actor is to be rung then.
  void drop_stream(uint64_t number, uint32_t task) {
    CONVEYOR_ASSERT(task < tasks_);
    std::atomic<uint64_t>& dropped = words(number).dropped(tasks_)[task / 32];
    const uint64_t bit = uint64_t(1) << (task % 32);
    uint64_t before = dropped.load(std::memory_order_relaxed), after;
    do {
      const int32_t ahead = int32_t(stamp(number) - uint32_t(before >> 32));
      if (ahead < 0) return;  // it is over, and its words are another's
      after = ahead == 0 ? before | bit : uint64_t(stamp(number)) << 32 | bit;
    } while (!dropped.compare_exchange_weak(before, after, std::memory_order_release, std::memory_order_relaxed));
    changed();
  }
  bool stream_dropped(uint64_t number, uint32_t task) const {
    CONVEYOR_ASSERT(task < tasks_);
    const uint64_t dropped = words(number).dropped(tasks_)[task / 32].load(std::memory_order_acquire);
    return uint32_t(dropped >> 32) == stamp(number) && (dropped >> (task % 32) & 1) != 0;
  }

  // Notes for the error that a missed deadline gives; kept for executions that have one.
  void note_ran(uint64_t number, uint32_t task) {
    CONVEYOR_ASSERT(task < tasks_);
    words(number).ran()[task / 64].fetch_or(uint64_t(1) << (task % 64), std::memory_order_relaxed);
    changed();
  }
  // The first to be skipped counts.
  void note_skipped(uint64_t number, uint32_t task) {
    if (deadline(number) == 0) return;
    uint64_t none = 0;
    words(number).skipped.compare_exchange_strong(none, uint64_t(task) + 1, std::memory_order_relaxed);
    changed();
  }
  // The task that was skipped first (-1: none yet), and those that have run.
  std::pair<int64_t, std::vector<uint32_t>> report(uint64_t number) const {
    Words& w = words(number);
    std::vector<uint32_t> ran;
    for (uint32_t task = 0; task < tasks_; ++task)
      if (w.ran()[task / 64].load(std::memory_order_relaxed) >> (task % 64) & 1) ran.push_back(task);
    const uint64_t skipped = w.skipped.load(std::memory_order_relaxed);
    return {skipped <= tasks_ ? int64_t(skipped) - 1 : -1, std::move(ran)};  // a number of a task, whoever wrote it
  }

  // What the pump copies: one set, and how many words of bits it ends with.
  struct Copy {
    uint64_t deadline = 0;
    uint64_t ended = 0;
    uint64_t skipped = 0;
    std::vector<uint64_t> bits{};  // which tasks have run, then which streams nobody wants
    bool operator==(const Copy&) const = default;
  };
  static constexpr uint64_t kFailed = 1;
  uint32_t sets() const { return sets_; }
  uint32_t bit_words() const { return ran_words(tasks_) + dropped_words(tasks_); }
  uint32_t changes() const { return header()->changes.load(std::memory_order_acquire); }
  void copy(uint32_t set, Copy& to) const {
    Words& w = words(set);
    to.deadline = w.deadline.load(std::memory_order_relaxed);
    to.ended = w.ended.load(std::memory_order_acquire);
    to.skipped = w.skipped.load(std::memory_order_relaxed);
    to.bits.resize(bit_words());
    for (uint32_t i = 0; i < bit_words(); ++i) to.bits[i] = w.ran()[i].load(std::memory_order_acquire);
  }
  // What has happened on another host. `begins`: its deadline is a new one; `notes`: of what has run and been skipped,
  // those of this same execution.
  void merge(uint32_t set, const Copy& from, bool begins, bool notes) {
    Words& w = words(set);
    if (begins) {
      if (from.deadline != 0) {
        w.skipped.store(0, std::memory_order_relaxed);
        for (uint32_t i = 0; i < ran_words(tasks_); ++i) w.ran()[i].store(0, std::memory_order_relaxed);
      }
      w.deadline.store(from.deadline, std::memory_order_relaxed);
    }
    if (from.ended > w.ended.load(std::memory_order_relaxed) && from.ended >= 2) {
      mark((from.ended >> 1) - 1, from.ended & kFailed, set);
      if (!(from.ended & kFailed)) header()->cancellations.fetch_add(1, std::memory_order_release);
    }
    uint64_t none = 0;
    if (notes && from.skipped != 0) w.skipped.compare_exchange_strong(none, from.skipped, std::memory_order_relaxed);
    const uint32_t ran = ran_words(tasks_);
    for (uint32_t i = 0; i < ran && notes; ++i) w.ran()[i].fetch_or(from.bits[i], std::memory_order_relaxed);
    for (uint32_t i = ran; i < bit_words(); ++i) {
      uint64_t before = w.ran()[i].load(std::memory_order_relaxed), after;
      do {
        const int32_t ahead = int32_t(uint32_t(from.bits[i] >> 32) - uint32_t(before >> 32));
        if (ahead < 0) break;
        after = ahead == 0 ? before | from.bits[i] : from.bits[i];
      } while (!w.ran()[i].compare_exchange_weak(before, after, std::memory_order_release, std::memory_order_relaxed));
    }
  }
  // So many more failures than were known have been counted elsewhere.
  void add_failures(uint32_t more) { header()->failures.fetch_add(more, std::memory_order_release); }

 private:
  struct Header {
    std::atomic<uint32_t> cancellations;
    std::atomic<uint32_t> failures;
    std::atomic<uint32_t> changes;
  };
  struct Words {
    std::atomic<uint64_t> deadline;
    std::atomic<uint64_t> ended;    // (number + 1) * 2, and kFailed or 0
    std::atomic<uint64_t> skipped;  // task + 1
    std::atomic<uint64_t>* ran() { return reinterpret_cast<std::atomic<uint64_t>*>(this + 1); }
    // 32 tasks in each, below the stamp of the execution.
    std::atomic<uint64_t>* dropped(uint32_t tasks) { return ran() + ran_words(tasks); }
  };
  static uint32_t ran_words(uint32_t tasks) { return (tasks + 63) / 64; }
  static uint32_t dropped_words(uint32_t tasks) { return (tasks + 31) / 32; }
  static uint32_t stamp(uint64_t number) { return uint32_t(number + 1); }
  static size_t stride(uint32_t tasks) {
    return align_up(sizeof(Words) + (ran_words(tasks) + dropped_words(tasks)) * sizeof(uint64_t), kCacheLine);
  }
  void mark(uint64_t number, uint64_t how) { mark(number, how, number); }
  void mark(uint64_t number, uint64_t how, uint64_t set) {
    std::atomic<uint64_t>& ended = words(set).ended;
    const uint64_t mine = (number + 1) << 1 | how;
    uint64_t before = ended.load(std::memory_order_relaxed);
    while (before < mine && !ended.compare_exchange_weak(before, mine, std::memory_order_release, std::memory_order_relaxed)) {
    }
    changed();
  }
  // Release: who sees the count sees the change.
  void changed() { header()->changes.fetch_add(1, std::memory_order_release); }
  Header* header() const { return reinterpret_cast<Header*>(base_); }
  Words& words(uint64_t number) const {
    return *reinterpret_cast<Words*>(base_ + kCacheLine + (number & (sets_ - 1)) * stride_);
  }

  std::shared_ptr<Segment> segment_;
  uint32_t sets_;
  uint32_t tasks_;
  size_t stride_;
  char* base_;
};

}  // namespace conveyor
