// Rings that somebody has written over, or that cannot be.
#include "ring_setup.h"

using namespace conveyor;

TEST(a_ring_that_cannot_be_is_refused) {
  auto segment = Segment::create(1 << 16);
  auto make = [&](size_t offset, uint32_t slots, uint32_t stride, uint32_t readers) { segment->make_ring(offset, slots, stride, readers, 0); };
  CHECK_THROWS(std::system_error, make(0, 0, 64, 1));
  CHECK_THROWS(std::system_error, make(0, 3, 64, 1));           // no power of two
  CHECK_THROWS(std::system_error, make(0, 4, 65, 1));           // not aligned
  CHECK_THROWS(std::system_error, make(0, 4, 0, 1));
  CHECK_THROWS(std::system_error, make(32, 4, 64, 1));
  CHECK_THROWS(std::system_error, make(0, 4, 64, 0));
  CHECK_THROWS(std::system_error, make(0, 4, 64, kMaxReaders + 1));
  CHECK_THROWS(std::system_error, make(0, 2048, 64, 1));        // larger than the segment
  CHECK_THROWS(std::system_error, make(0, 1u << 31, 1u << 31, 1));
  CHECK_THROWS(std::system_error, make((1 << 16) - 64, 1, 64, 1));
  CHECK_THROWS(std::system_error, segment->ring(0));            // none was made
  CHECK_THROWS(std::system_error, segment->ring(1 << 20));
  CHECK_THROWS(std::system_error, Segment::attach(-1));
  make(0, 4, 64, 2);
  auto process_table = ProcessTable::create(3);
  CHECK_THROWS(std::system_error, RingWriter(segment, 0, process_table, {{1, 1}}));  // has two readers
  CHECK_THROWS(std::system_error, RingReader(segment, 0, 2, process_table, {0, 1}));
  CHECK_THROWS(std::system_error, RingReader(segment, 64, 0, process_table, {0, 1}));
}

// What a peer that has gone wrong may leave where a ring should be.
TEST(an_attached_ring_is_checked_as_one_that_is_made) {
  auto segment = Segment::create(1 << 16);
  RingHeader* header = segment->make_ring(0, 4, 64, 2, 0);
  auto refused = [&](auto&& spoil) {
    segment->make_ring(0, 4, 64, 2, 0);
    CHECK_EQ(segment->ring(0).slots, 4u);
    spoil();
    CHECK_THROWS(std::system_error, segment->ring(0));
  };
  refused([&] { header->magic ^= 1; });
  for (uint32_t slots : {0u, 3u, 2048u, 1u << 31}) refused([&] { header->slots = slots; });
  for (uint32_t stride : {0u, 63u, 65u, 1u << 20, 0xffffffc0u}) refused([&] { header->stride = stride; });
  for (uint32_t readers : {0u, uint32_t(kMaxReaders) + 1, 0xffffffffu}) refused([&] { header->readers = readers; });
  // Sums that would be small again beyond 64 bits.
  for (size_t offset : {SIZE_MAX - 63, SIZE_MAX - 255, size_t(1) << 16, (size_t(1) << 16) - 64}) CHECK_THROWS(std::system_error, segment->ring(offset));
}

TEST(what_is_written_to_a_header_later_leads_nowhere) {
  auto segment = Segment::create(1 << 16);
  RingHeader* header = segment->make_ring(0, 4, 128, 1, 0);
  auto process_table = ProcessTable::create(3);
  for (uint32_t i = 0; i < 3; ++i) process_table->prepare(i, "");
  RingWriter writer(segment, 0, process_table, {{1, 1}});
  RingReader reader(segment, 0, 0, process_table, {0, 1});
  const SlotHeader* front = reader.front();
  header->slots = header->stride = header->readers = 1u << 31;
  header->flags = 0xffffffff;
  CHECK(reader.front() == front);
  CHECK_EQ(reader.readers(), 1u);
  CHECK_EQ(reader.capacity(), uint32_t(128 - sizeof(SlotHeader)));
  for (uint64_t n = 0; n < 9; ++n) {
    CHECK(writer.has_room());
    writer.next_slot()->tag = n;
    writer.publish();
    CHECK_EQ(reader.front()->tag, n);
    reader.advance();
    CHECK_EQ(reader.front() == front, n % 4 == 3);
  }
  CHECK(!all_gone(writer));
}

// The header of a slot that another process writes all the time: the copy is of values that were there.
TEST(a_slot_header_is_read_once) {
  SlotHeader shared{1, Kind::kValue, 2, 3, 4, 5, 6};
  const SlotHeader copy = read_once(shared);
  shared = {7, Kind::kError, 7, 7, 7, 7, 7};
  CHECK(copy.tag == 1 && copy.kind == Kind::kValue && copy.codec == 2 && copy.flags == 3 && copy.size == 4 && copy.block == 5 && copy.block_size == 6);
}

// Robustness against a peer that writes where it should not.

TEST(a_head_that_somebody_has_written_over_is_an_error_that_names_the_edge) {
  Channel c(1, 4, 128, 0);
  ::strncpy(c.process_table->slot(0)->name, "Maker", sizeof c.process_table->slot(0)->name - 1);
  RingWriter writer = c.writer();
  RingReader reader = c.reader(0);
  reader.carries = "graph 1, edge #2 (Maker.make)";
  for (int i = 0; i < 3; ++i) {
    CHECK(writer.has_room());
    writer.next_slot()->tag = uint64_t(i);
    writer.publish();
  }
  reader.advance();
  for (uint64_t wrong : {uint64_t(0), uint64_t(6), uint64_t(1) << 40, UINT64_MAX}) {
    c.header->head.store(wrong);
    try {
      (void)reader.empty();
      CHECK(!"nothing was thrown");
    } catch (const std::system_error& error) {
      CHECK_EQ(error.code().value(), EPROTO);
      CHECK(std::string(error.what()).find("graph 1, edge #2 (Maker.make)") != std::string::npos);
      CHECK(std::string(error.what()).find("written by Maker") != std::string::npos);
    }
    CHECK_THROWS(std::system_error, reader.head());
  }
  for (uint64_t possible : {uint64_t(1), uint64_t(5)}) {  // nothing, or a full ring
    c.header->head.store(possible);
    CHECK_EQ(reader.head(), possible);
    CHECK_EQ(reader.has_come(3), possible > 3);
  }
  // Where nothing may be thrown: what has been taken had come, and of all else nothing is known.
  c.header->head.store(UINT64_MAX);
  CHECK(reader.has_come(0));
  for (uint64_t number : {1, 3, 40}) CHECK(!reader.has_come(number));
  reader.leave();
  CHECK_THROWS(std::system_error, reader.empty());
  reader.close();
  CHECK(reader.empty());
  CHECK(all_gone(writer));
}

TEST(a_name_without_an_end_is_cut) {
  Channel c(1, 4, 128, 0);
  std::memset(c.process_table->slot(0)->name, 'x', sizeof c.process_table->slot(0)->name);
  CHECK_EQ(c.process_table->name(0), std::string(sizeof c.process_table->slot(0)->name, 'x'));
}

TEST(a_cursor_that_somebody_has_written_over_spoils_nobody_else_s_input) {
  Channel c(2, 4, 128, 0);
  RingWriter writer = c.writer();
  RingReader other = c.reader(1);
  for (int i = 0; i < 4; ++i) {
    CHECK(writer.has_room());
    writer.next_slot()->tag = uint64_t(i);
    writer.publish();
  }
  c.header->cursors()[0].next.store(UINT64_MAX);
  CHECK(!writer.has_room());  // the other reader has taken nothing
  other.advance();
  CHECK(writer.has_room());
}

TEST(ends_of_slots_and_bits_that_are_not_there_are_refused) {
  Channel c(1, 4, 128, 0);
  CHECK_THROWS(std::system_error, RingWriter(c.segment, 0, c.process_table, {{2, kBit}}));
  CHECK_THROWS(std::system_error, RingWriter(c.segment, 0, c.process_table, {{1, kDoorbellBits}}));
  CHECK_THROWS(std::system_error, RingReader(c.segment, 0, 0, c.process_table, {2, kBit}));
  CHECK_THROWS(std::system_error, RingReader(c.segment, 0, 0, c.process_table, {0, kDoorbellBits}));
}
