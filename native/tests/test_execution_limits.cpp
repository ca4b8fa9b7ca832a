// Deadlines and cancellations: each execution sees its own, whatever late marks and reused words say.
#include <array>
#include <deque>
#include <thread>

#include "check.h"
#include "execution_limits.h"

using namespace conveyor;

namespace {

using Verdict = Limits::Verdict;

constexpr uint32_t kSets = 4;

std::shared_ptr<Segment> segment(uint32_t tasks) { return Segment::create(Limits::bytes(kSets, tasks)); }

}  // namespace

TEST(none_at_first) {
  auto s = segment(3);
  Limits limits(s, 0, kSets, 3);
  for (uint64_t n = 0; n < 2 * kSets; ++n) {
    CHECK(limits.look(n, now_ns()) == Verdict::kGoOn);
    CHECK(limits.deadline(n) == 0);
  }
  CHECK(limits.cancellations() == 0);
}

TEST(a_late_mark_hits_nobody_else) {
  auto s = segment(1);
  Limits limits(s, 0, kSets, 1);
  limits.cancel(5);
  CHECK(limits.cancelled(5));
  CHECK(!limits.cancelled(5 + kSets));
  CHECK(!limits.cancelled(5 - kSets));
  limits.cancel(5 + kSets);
  limits.cancel(5);  // late: 5 + sets stays cancelled
  CHECK(limits.cancelled(5 + kSets));
  CHECK(!limits.cancelled(5 + 2 * kSets));
  CHECK(limits.cancellations() == 3);
}

TEST(a_failure_counts_as_a_cancellation_and_is_told_from_one) {
  auto s = segment(1);
  Limits limits(s, 0, kSets, 1);
  limits.cancel(1);
  CHECK(!limits.failed(1));
  limits.fail(1);
  CHECK(limits.failed(1));
  CHECK(limits.cancelled(1));
  CHECK(limits.look(1, 0) == Verdict::kCancelled);
  limits.cancel(1);  // it stays failed
  CHECK(limits.failed(1));
  CHECK(!limits.failed(1 + kSets));
  CHECK(!limits.cancelled(1 + kSets));
  limits.cancel(1 + kSets);
  limits.fail(1);  // late
  CHECK(limits.cancelled(1 + kSets));
  CHECK(!limits.failed(1 + kSets));
  CHECK(limits.failures() == 0);
  CHECK(limits.count_failure() == 0);
  CHECK(limits.count_failure() == 1);
  CHECK(limits.failures() == 2);
}

// Whoever skips a task since another has failed can rely on what was told of that before.
TEST(who_sees_that_it_has_failed_sees_what_was_told) {
  constexpr uint64_t executions = 20'000;
  auto s = segment(1);
  Limits limits(s, 0, kSets, 1);
  std::vector<uint64_t> told(executions, 0);
  std::atomic<uint64_t> seen{0};
  std::thread skipping([&] {
    Limits mine(s, 0, kSets, 1);
    for (uint64_t n = 0; n < executions; ++n) {
      while (mine.look(n, 0) == Verdict::kGoOn) std::this_thread::yield();
      CHECK(told[n] == n + 1);
      seen.store(n + 1, std::memory_order_release);
    }
  });
  for (uint64_t n = 0; n < executions; ++n) {
    while (n >= kSets && seen.load(std::memory_order_acquire) <= n - kSets) std::this_thread::yield();
    told[n] = n + 1;
    limits.fail(n);
  }
  skipping.join();
}

TEST(a_deadline_is_of_one_execution) {
  auto s = segment(1);
  Limits limits(s, 0, kSets, 1);
  limits.begin(1, 1000);
  CHECK(limits.look(1, 999) == Verdict::kGoOn);
  CHECK(limits.look(1, 1000) == Verdict::kOverdue);
  CHECK(limits.look(2, 1000) == Verdict::kGoOn);
  limits.cancel(1);
  CHECK(limits.look(1, 1000) == Verdict::kCancelled);
  limits.begin(1 + kSets, 0);
  CHECK(limits.look(1 + kSets, 1000) == Verdict::kGoOn);
}

TEST(notes_are_kept_until_the_next_deadline) {
  constexpr uint32_t kTasks = 130;
  auto s = segment(kTasks);
  Limits limits(s, 0, kSets, kTasks);
  limits.begin(0, 1000);
  for (uint32_t task : {0u, 63u, 64u, 129u}) limits.note_ran(0, task);
  limits.note_skipped(0, 7);
  limits.note_skipped(0, 8);
  auto [skipped, ran] = limits.report(0);
  CHECK(skipped == 7);
  CHECK((ran == std::vector<uint32_t>{0, 63, 64, 129}));
  limits.begin(kSets, 0);
  limits.note_skipped(kSets, 9);  // it has no deadline: nobody will ask
  CHECK(limits.report(0).first == 7);
  limits.begin(2 * kSets, 2000);
  CHECK(limits.report(0).first == -1);
  CHECK(limits.report(0).second.empty());
}

TEST(streams_are_dropped_one_by_one) {
  constexpr uint32_t kTasks = 70;
  auto s = segment(kTasks);
  Limits limits(s, 0, kSets, kTasks);
  for (uint32_t task : {0u, 31u, 32u, 69u}) {
    CHECK(!limits.stream_dropped(0, task));
    limits.drop_stream(0, task);
    CHECK(limits.stream_dropped(0, task));
  }
  CHECK(!limits.stream_dropped(0, 1));
  CHECK(!limits.stream_dropped(1, 0));
  // Those of the next execution with these words, and a late one of the first.
  CHECK(!limits.stream_dropped(kSets, 31));
  limits.drop_stream(kSets, 30);
  limits.drop_stream(0, 29);
  CHECK(limits.stream_dropped(kSets, 30));
  CHECK(!limits.stream_dropped(kSets, 29));
  CHECK(!limits.stream_dropped(kSets, 31));
  CHECK(!limits.stream_dropped(0, 31));
  // The notes beside them are others.
  limits.begin(2 * kSets, 1000);
  CHECK(limits.stream_dropped(kSets, 30));
  CHECK(limits.report(2 * kSets).second.empty());
}

TEST(what_does_not_fit_is_refused) {
  auto s = segment(1);
  auto refused = [&](size_t offset, uint32_t sets, uint32_t tasks) {
    try {
      Limits limits(s, offset, sets, tasks);
    } catch (const std::system_error&) {
      return true;
    }
    return false;
  };
  CHECK(refused(0, 3, 1));
  CHECK(refused(0, 0, 1));
  CHECK(refused(0, 1 << 20, 1));
  CHECK(refused(1, kSets, 1));
  CHECK(refused(s->size(), kSets, 1));
  CHECK(!refused(0, kSets, 1));
}

// A submitter, a chain of two actors, and somebody who cancels whatever is or was under way. The rings
// between them are two counters, published and read as rings are.
TEST(each_sees_its_own) {
  constexpr uint64_t executions = 20'000;
  auto s = segment(2);
  Limits limits(s, 0, kSets, 2);
  std::atomic<uint64_t> submitted{0}, first{0}, second{0};
  std::atomic<bool> over{false};
  auto deadline = [](uint64_t n) { return n % 3 == 0 ? 0 : n * 1000 + 1; };
  auto actor = [&](std::atomic<uint64_t>& in, std::atomic<uint64_t>& out, uint32_t task) {
    Limits mine(s, 0, kSets, 2);
    for (uint64_t n = 0; n < executions; ++n) {
      while (in.load(std::memory_order_acquire) <= n) std::this_thread::yield();
      CHECK(mine.deadline(n) == deadline(n));
      // Only every fifth is ever cancelled.
      if (n % 5 != 0) CHECK(mine.look(n, 0) == Verdict::kGoOn);
      if (mine.deadline(n) != 0) mine.note_ran(n, task);
      out.store(n + 1, std::memory_order_release);
    }
  };
  std::thread a(actor, std::ref(submitted), std::ref(first), 0);
  std::thread b(actor, std::ref(first), std::ref(second), 1);
  std::thread canceller([&] {
    while (!over.load()) {
      const uint64_t now = submitted.load(std::memory_order_relaxed);
      for (uint64_t n = now > 12 ? now - 12 : 0; n <= now; ++n)
        if (n % 5 == 0) limits.cancel(n);
      std::this_thread::yield();
    }
  });
  for (uint64_t n = 0; n < executions; ++n) {
    while (n >= kSets && second.load(std::memory_order_acquire) <= n - kSets) std::this_thread::yield();
    if (n >= kSets && deadline(n - kSets) != 0) CHECK((limits.report(n - kSets).second == std::vector<uint32_t>{0, 1}));
    limits.begin(n, deadline(n));
    submitted.store(n + 1, std::memory_order_release);
  }
  a.join();
  b.join();
  over.store(true);
  canceller.join();
}
