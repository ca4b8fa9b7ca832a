// Ends of a ring that leave, close, die and come again.
#include "ring_setup.h"

using namespace conveyor;

TEST(a_closed_reader_holds_nobody_up) {
  Channel c(2, 2, 64, kWriterMayWait);
  RingWriter writer = c.writer();
  RingReader a = c.reader(0), b = c.reader(1);
  for (int i = 0; i < 2; ++i) write_frame((writer.has_room(), writer));
  CHECK(!writer.has_room());
  CHECK(!all_gone(writer));
  b.close();
  CHECK(c.rung(0));
  CHECK(!writer.has_room());
  CHECK(!all_gone(writer));
  a.advance();
  CHECK(writer.has_room());
  a.close();
  CHECK(all_gone(writer));
  for (int i = 0; i < 10; ++i) {
    CHECK(writer.has_room());
    write_frame(writer);
  }
}

// A frame that brings something for each reader once: whoever sees to it does so once, however its publishing
// and their leaving meet.
TEST(what_frames_bring_is_seen_to_once_by_one_side) {
  constexpr uint32_t kReaders = 3, kSlots = 8;
  constexpr uint64_t kMost = kSlots;
  size_t readers_own = 0, writers_own = 0;
  for (int round = 0; round < (check::kThreadSanitizer ? 50 : 200); ++round) {
    Channel c(kReaders, kSlots, 64, 0);
    std::atomic<uint32_t> seen_to[kMost][kReaders] = {};
    std::atomic<uint32_t> started{0};
    const auto start = [&] {
      started.fetch_add(1);
      while (started.load() <= kReaders) std::this_thread::yield();
    };
    std::vector<std::thread> threads;
    for (uint32_t r = 0; r < kReaders; ++r)
      threads.emplace_back([&, r] {
        RingReader reader = c.reader(r);
        start();
        while (!reader.empty() && reader.next() < r + uint64_t(round) % 3) seen_to[reader.next()][r].fetch_add(1), reader.advance();
        reader.leave();
        while (!reader.empty()) seen_to[reader.next()][r].fetch_add(1), reader.advance();
        reader.close();
      });
    RingWriter writer = c.writer();
    size_t left = 0;
    start();
    for (uint64_t n = 0; n < kMost; ++n) {
      REQUIRE(writer.has_room());
      writer.next_slot()->tag = n;
      const auto behind = writer.left_behind(writer.publish());
      for (uint32_t r = 0; r < kReaders; ++r) seen_to[n][r].fetch_add(behind[r]);
      left += behind.count();
    }
    for (auto& thread : threads) thread.join();
    CHECK(all_gone(writer));
    for (auto& of : seen_to)
      for (auto& count : of) CHECK_EQ(count.load(), 1u);
    writers_own += left;
    readers_own += kMost * kReaders - left;
  }
  CHECK(writers_own != 0 && readers_own != 0);
}

TEST(the_writer_knows_which_of_very_many_readers_have_left) {
  Channel c(kMaxReaders, 4, 64, 0);
  RingWriter writer = c.writer();
  RingReader first = c.reader(0), middle = c.reader(64), last = c.reader(kMaxReaders - 1);
  first.leave();
  last.close();
  REQUIRE(writer.has_room());
  const auto left = writer.left_behind(writer.publish());
  for (uint32_t r = 0; r < kMaxReaders; ++r) CHECK_EQ(left[r], r == 0 || r == kMaxReaders - 1);
  middle.leave();
  CHECK(!middle.empty());
}

TEST(what_has_come_is_there_until_a_leaving_reader_has_taken_it) {
  Channel c(1, 4, 64, 0);
  RingWriter writer = c.writer();
  RingReader reader = c.reader(0);
  for (int i = 0; i < 3; ++i) write_frame((writer.has_room(), writer));
  reader.advance();
  reader.leave();
  write_frame((writer.has_room(), writer));  // late
  CHECK_EQ(writer.left_behind(3).to_ulong(), 1u);
  CHECK(!all_gone(writer));
  CHECK(writer.has_room());
  write_frame(writer);
  CHECK(!writer.has_room());  // what it has not taken stays whole
  for (uint64_t number : {1, 2}) {
    REQUIRE(!reader.empty());
    CHECK(!c.header->cursors()[0].never_takes(number));
    CHECK(frame_is_whole(reader, number));
    reader.advance();
  }
  CHECK(reader.empty());
  CHECK(writer.has_room());
  reader.close();
  CHECK(reader.empty());
  CHECK_EQ(reader.next(), 3u);
  for (uint64_t number : {0, 1, 2}) CHECK(!c.header->cursors()[0].never_takes(number));
  for (uint64_t number : {3, 4, 5}) CHECK(c.header->cursors()[0].never_takes(number));
}

TEST(a_reader_that_closes_at_once_leaves_what_has_come) {
  Channel c(1, 4, 64, 0);
  RingWriter writer = c.writer();
  RingReader reader = c.reader(0);
  for (int i = 0; i < 4; ++i) write_frame((writer.has_room(), writer));
  reader.advance();
  reader.close();
  CHECK(reader.empty());
  CHECK(all_gone(writer));
  CHECK(writer.has_room());
  CHECK(!c.header->cursors()[0].never_takes(0));
  for (uint64_t number : {1, 2, 3, 4}) CHECK(c.header->cursors()[0].never_takes(number));
}

TEST(a_writer_asleep_is_woken_by_a_close) {
  Channel c(1, 1, 64, kWriterMayWait);
  RingWriter writer = c.writer();
  REQUIRE(writer.has_room());
  write_frame(writer);
  check::Child child([&] {
    ::usleep(20'000);
    c.reader(0).close();
  });
  Waiter waiter(&c.doorbell(0));
  CHECK(wait_for_room(c, writer, waiter));
  CHECK(all_gone(writer));
  CHECK(child.passed());
}

TEST(a_writer_asleep_is_woken_by_a_death) {
  Channel c(2, 1, 64, kWriterMayWait);
  RingWriter writer = c.writer();
  REQUIRE(writer.has_room());
  write_frame(writer);
  c.reader(0).advance();
  std::thread other([&] {
    ::usleep(20'000);
    c.process_table->announce_death(2);
  });
  Waiter waiter(&c.doorbell(0));
  CHECK(wait_for_room(c, writer, waiter));
  other.join();
  CHECK(!all_gone(writer));
  write_frame(writer);
  CHECK(!writer.has_room());  // the living one counts
  c.process_table->announce_death(1);
  CHECK(all_gone(writer));
  CHECK(writer.has_room());
}

TEST(another_process_in_a_dead_reader_s_slot_holds_nobody_up) {
  Channel c(1, 1, 64, 0);
  RingWriter writer = c.writer();
  REQUIRE(writer.has_room());
  write_frame(writer);
  c.process_table->announce_death(1);
  c.process_table->prepare(1, "somebody else");
  CHECK(writer.has_room());
  CHECK(all_gone(writer));
}

TEST(both_ends_can_be_opened_again) {
  Channel c(1, 4, 64, 0);
  for (int i = 0; i < 10; ++i) {
    RingWriter writer = c.writer();
    CHECK_EQ(writer.head(), uint64_t(i));
    REQUIRE(writer.has_room());
    write_frame(writer);
    RingReader reader = c.reader(0);
    CHECK_EQ(reader.next(), uint64_t(i));
    CHECK(frame_is_whole(reader, uint64_t(i)));
    reader.advance();
  }
}
