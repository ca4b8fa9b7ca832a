// The ring: frames in order, room, and who is rung for it.
#include "ring_setup.h"

using namespace conveyor;

TEST(one_reader_in_a_thread) { stream(false, 1, 4, 128, kFrames); }
TEST(one_reader_in_a_process) { stream(true, 1, 4, 128, kFrames); }
TEST(three_readers_in_threads) { stream(false, 3, 4, 128, kFrames / 4); }
TEST(three_readers_in_processes) { stream(true, 3, 4, 128, kFrames / 4); }
TEST(a_ring_of_one_slot) { stream(true, 2, 1, 64, kFrames / 10); }
TEST(a_long_ring_of_long_slots) { stream(true, 2, 64, 2048, kFrames / 4); }

TEST(frame_numbers_go_on_over_32_bits) {
  Channel c(1, 4, 64, kWriterMayWait);
  const uint64_t start = (uint64_t(1) << 32) - 5;
  c.header->head.store(start);
  c.header->cursors()[0].next.store(start);
  std::thread other([&] { read_all(c, 0, start + 20); });
  write_all(c, start + 20);
  other.join();
}

TEST(a_ring_is_full_when_its_slowest_reader_says_so) {
  Channel c(2, 4, 64, 0);
  RingWriter writer = c.writer();
  RingReader a = c.reader(0), b = c.reader(1);
  for (int i = 0; i < 4; ++i) {
    REQUIRE(writer.has_room());
    write_frame(writer);
  }
  CHECK(!writer.has_room());
  CHECK(c.rung(1) && c.rung(2));
  for (int i = 0; i < 4; ++i) a.advance();
  CHECK(a.empty());
  CHECK(!writer.has_room());
  b.advance();
  CHECK(writer.has_room());
  write_frame(writer);
  CHECK(!writer.has_room());
  CHECK(!a.empty());
  CHECK(frame_is_whole(a, 4));
  CHECK(frame_is_whole(b, 1));
  CHECK(!c.rung(0));  // such a writer does not wait, so nobody rings it
}

TEST(only_a_writer_that_requested_is_rung_for_room) {
  Channel c(1, 2, 64, kWriterMayWait);
  RingWriter writer = c.writer();
  RingReader reader = c.reader(0);
  for (int i = 0; i < 2; ++i) write_frame((writer.has_room(), writer));
  reader.advance();
  CHECK(!c.rung(0));
  CHECK(writer.has_room());
  write_frame(writer);
  CHECK(!writer.has_room());
  writer.wants_room();
  reader.advance();
  CHECK(c.rung(0));
  reader.advance();
  CHECK(!c.rung(0));  // once for each time it asks
}

TEST(a_writer_asleep_is_woken_for_room) {
  Channel c(1, 1, 64, kWriterMayWait);
  RingWriter writer = c.writer();
  REQUIRE(writer.has_room());
  write_frame(writer);
  std::thread other([&] {
    ::usleep(20'000);
    c.reader(0).advance();
  });
  Waiter waiter(&c.doorbell(0));
  CHECK(wait_for_room(c, writer, waiter));
  other.join();
}

TEST(rings_lie_side_by_side_in_a_segment) {
  const size_t bytes = align_up(RingHeader::bytes(2, 64, 3), kCacheLine);
  auto segment = Segment::create(3 * bytes);
  for (size_t i = 0; i < 3; ++i) segment->make_ring(i * bytes, 2, 64, 3, 0);
  auto same = Segment::attach(segment->fd());
  CHECK_EQ(same->size(), segment->size());
  CHECK_EQ(same->fd(), -1);  // a mapping needs no descriptor of its own
  segment->close_fd();
  CHECK_EQ(segment->fd(), -1);
  segment->ring(bytes).header->head.store(7);
  CHECK_EQ(same->ring(bytes).header->head.load(), 7u);
  CHECK_EQ(same->ring(0).header->head.load(), 0u);
  CHECK_EQ(same->ring(2 * bytes).header->head.load(), 0u);
  CHECK(same->ring(bytes).slot(1) + 64 <= reinterpret_cast<char*>(same->ring(2 * bytes).header));
}

// Both readers have to take a frame before there is room; the one that stops right after it has taken its own
// must not keep the other one's ring from the writer.
TEST(a_reader_that_stops_takes_nobody_s_ring_from_a_waiting_writer) {
  Channel c(2, 2, 128, kWriterMayWait);
  RingWriter writer = c.writer();
  for (int i = 0; i < 2; ++i) {
    CHECK(writer.has_room());
    writer.publish();
  }
  CHECK(!writer.has_room());
  writer.wants_room();
  c.header->cursors()[0].next.store(1);  // the first reader took a frame, and stopped before it rang
  RingReader second = c.reader(1);
  second.advance();
  CHECK(c.rung(0));
  CHECK(writer.has_room());
}

TEST(each_reader_rings_once_for_what_a_writer_has_requested) {
  Channel c(2, 4, 64, kWriterMayWait);
  RingWriter writer = c.writer();
  RingReader first = c.reader(0), second = c.reader(1);
  while (writer.has_room()) write_frame(writer);
  writer.wants_room();
  first.advance();
  CHECK(c.rung(0));
  writer.wants_room();  // there is none yet
  first.advance();
  first.advance();
  CHECK(!c.rung(0));  // it keeps nobody waiting
  second.advance();
  CHECK(c.rung(0));
  write_frame((writer.has_room(), writer));
  for (int i = 0; i < 3; ++i) second.advance();
  CHECK(!c.rung(0));
}

// As when two threads send on one channel, and the second one finds the room that the first one waits for.
TEST(a_writer_that_finds_room_takes_no_ring_from_one_that_waits) {
  Channel c(1, 1, 64, kWriterMayWait);
  RingWriter writer = c.writer();
  RingReader reader = c.reader(0);
  write_frame((writer.has_room(), writer));
  CHECK(!writer.has_room());
  writer.wants_room();                   // somebody sleeps from now on
  c.header->cursors()[0].next.store(1);  // the reader has taken a frame, and is about to look whom to ring
  CHECK(writer.has_room());
  CHECK_EQ(c.header->room_at.load(), 1u);
}
