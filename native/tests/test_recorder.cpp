// The recorder: buckets of the histogram, counters that another thread reads, and events that come out
// whole and in order, or are counted as dropped, while another thread takes them.
#include <sys/stat.h>

#include <thread>

#include "check.h"
#include "recorder.h"

using namespace conveyor;

namespace {

const RecorderPlace kPlace{0, kCacheLine, 4 * kGranule, 64, 1, 1, 1, 1, 8};

struct Both {
  std::shared_ptr<Segment> segment = Segment::create(kPlace.events + kPlace.capacity * sizeof(Event));
  Recorder writer{segment, kPlace, false};
  Recorder reader{segment, kPlace, false};
};

}  // namespace

TEST(every_value_has_a_bucket_that_holds_it) {
  CHECK(kPlace.offset + kPlace.bytes() <= kPlace.events);
  uint64_t value = 0;
  for (size_t i = 0; i + 1 < Histogram::kBuckets; ++i) {
    CHECK(Histogram::lowest(i) == value);
    const uint64_t next = Histogram::lowest(i + 1);
    CHECK(next > value);
    CHECK(Histogram::bucket(value) == i);
    CHECK(Histogram::bucket(next - 1) == i);
    value = next;
  }
  CHECK(Histogram::bucket(value) == Histogram::kBuckets - 1);
  CHECK(Histogram::bucket(UINT64_MAX) == Histogram::kBuckets - 1);
}

TEST(a_place_beyond_the_segment_is_refused) {
  auto segment = Segment::create(kGranule);
  bool refused = false;
  try {
    Recorder recorder(segment, kPlace, false);
  } catch (const std::system_error&) {
    refused = true;
  }
  CHECK(refused);
}

TEST(counters_are_read_while_they_are_written) {
  Both both;
  constexpr uint64_t kRuns = 20'000;
  std::thread writer([&] {
    for (uint64_t i = 0; i < kRuns; ++i) {
      both.writer.note_task(0, i, 1000, 1000 + i, i % 4 == 0);
      both.writer.note_send(0, i, 1000, 1001, 3, false);
    }
  });
  uint64_t seen = 0;
  while (seen < kRuns) {
    const uint64_t now = value_of(both.reader.sent(0).frames);
    CHECK(now >= seen);
    seen = now;
  }
  writer.join();
  CHECK(value_of(both.reader.task(0).errors) == kRuns / 4);
  CHECK(value_of(both.reader.task(0).running.total) == kRuns * (kRuns - 1) / 2);
  CHECK(value_of(both.reader.task(0).running.largest) == kRuns - 1);
  CHECK(value_of(both.reader.sent(0).bytes) == 3 * kRuns);
  CHECK(both.reader.take_events().empty());  // nobody traces
}

TEST(events_come_out_whole_and_in_order_or_are_counted) {
  Both both;
  constexpr uint64_t kRuns = 50'000;
  constexpr size_t kKept = 30'000;
  both.reader.collect(kKept);
  both.reader.set_tracing(true);
  std::atomic<bool> done{false};
  std::thread writer([&] {
    for (uint64_t i = 0; i < kRuns; ++i) both.writer.note_task(0, i, i, 2 * i, i % 2 != 0);
    done.store(true);
  });
  while (!done.load()) both.reader.drain();
  writer.join();
  both.reader.set_tracing(false);
  both.reader.drain();
  const std::vector<Event> events = both.reader.take_events();
  CHECK(events.size() <= kKept);
  CHECK(events.size() + both.reader.dropped() == kRuns);
  uint64_t least = 0;
  for (const Event& e : events) {
    CHECK(e.execution >= least);
    least = e.execution + 1;
    CHECK(e.begin == e.execution && e.end == 2 * e.execution);
    CHECK(e.kind == EventKind::kTask && e.flags == e.execution % 2);
  }
  both.writer.note_task(0, 0, 1, 2, false);
  both.reader.drain();
  CHECK(both.reader.take_events().empty());
}

TEST(a_later_trace_starts_afresh) {
  Both both;
  both.reader.collect(10);
  both.reader.set_tracing(true);
  for (uint64_t i = 0; i < 2 * kPlace.capacity; ++i) both.writer.note_task(0, i, i, i, false);
  CHECK(both.reader.dropped() == kPlace.capacity);
  both.reader.set_tracing(false);
  both.reader.free_events();
  both.reader.collect(10);
  CHECK(both.reader.dropped() == 0);
  both.reader.set_tracing(true);
  for (uint64_t i = 0; i < 3; ++i) both.writer.note_task(0, i, i, i, false);
  both.reader.drain();
  CHECK(both.reader.take_events().size() == 3);
}

TEST(the_memory_of_a_trace_is_given_back) {
  RecorderPlace place = kPlace;
  place.capacity = 4096;
  auto segment = Segment::create(place.events + place.capacity * sizeof(Event));
  Recorder recorder(segment, place, false);
  const auto bytes = [&] {
    struct stat status;
    CHECK(::fstat(segment->fd(), &status) == 0);
    return uint64_t(status.st_blocks) * 512;
  };
  recorder.note_task(0, 0, 1, 2, false);
  const uint64_t before = bytes();
  recorder.collect(1);
  recorder.set_tracing(true);
  for (uint64_t i = 0; i < place.capacity; ++i) recorder.note_task(0, i, i, i, false);
  recorder.set_tracing(false);
  CHECK(bytes() >= before + place.capacity * sizeof(Event));
  recorder.free_events();
  CHECK(bytes() <= before + kGranule);
  CHECK(value_of(recorder.task(0).running.buckets[0]) == place.capacity);
}

TEST(a_wait_is_measured_from_when_there_was_nothing) {
  Both both;
  const uint64_t before = now_ns();
  both.writer.wait_begins();
  const uint64_t waiting = now_ns();
  while (now_ns() < waiting + 2'000'000) {
  }
  both.writer.wait_begins();
  both.writer.receive_begins(0, 0, true);
  const uint64_t longest = now_ns() - before;
  both.writer.receive_begins(0, 1, true);
  const uint64_t total = value_of(both.reader.received(0).waiting.total);
  CHECK(total >= 2'000'000 && total <= longest);
  CHECK(value_of(both.reader.received(0).waiting.buckets[0]) == 1);
  // The clock that was read then is the task's beginning.
  const uint64_t began = both.writer.task_begins(0, 1);
  CHECK(began >= before && began <= before + longest);
  CHECK(value_of(both.reader.header().running) == 1);
  both.writer.task_returns();
  both.writer.task_ends(0, 1, false);
  CHECK(value_of(both.reader.header().running) == 0);
}

TEST(the_time_of_an_output_is_kept_for_the_last_executions) {
  Both both;
  for (uint64_t i = 0; i < 20; ++i) {
    both.writer.set_clock(1000 + i);
    both.writer.sending(0, 0, i, 8, false, true);
  }
  for (uint64_t i = 12; i < 20; ++i) CHECK(value_of(both.reader.sent_at(0, i)) == 1000 + i);
}

TEST(a_head_that_somebody_has_written_over_is_an_error_and_not_a_long_way) {
  Both both;
  Recorder driver{both.segment, kPlace, false, "the actor A"};
  driver.collect(100);
  driver.set_tracing(true);
  for (uint64_t wrong : {kPlace.capacity + uint64_t(1), uint64_t(1) << 60, UINT64_MAX}) {
    driver.header().head.store(value_of(driver.header().tail) + wrong);
    try {
      driver.drain();
      CHECK(!"nothing was thrown");
    } catch (const std::system_error& error) {
      CHECK_EQ(error.code().value(), EPROTO);
      CHECK(std::string(error.what()).find("the actor A") != std::string::npos);
    }
    CHECK(driver.take_events().empty());
    // What follows is traced.
    both.writer.note_task(0, 7, 1, 2, false);
    driver.drain();
    CHECK_EQ(driver.take_events().size(), 1u);
  }
}

TEST(an_event_that_cannot_be_counts_as_lost) {
  Both both;
  both.reader.collect(100);
  both.reader.set_tracing(true);
  both.writer.trace({1, 2, 3, 0, kPlace.tasks, 0, EventKind::kTask, 0, 0});
  both.writer.trace({1, 2, 3, 0, UINT32_MAX, 0, EventKind::kSend, 0, 0});
  both.writer.trace({1, 2, 3, 0, 0, 0, EventKind(77), 0, 0});
  both.writer.note_task(0, 4, 1, 2, false);
  both.reader.drain();
  const auto events = both.reader.take_events();
  REQUIRE(events.size() == 1);
  CHECK_EQ(events[0].execution, 4u);
  CHECK_EQ(both.reader.dropped(), 3u);
}
