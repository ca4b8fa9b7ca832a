// The ring: every frame once, in order and whole, at every reader; a full ring, closed and dead
// readers; rings and blocks together, as a channel uses them.
#include <sys/mman.h>

#include <deque>
#include <functional>
#include <thread>

#include "check.h"
#include "ring.h"
#include "waiter.h"

using namespace conveyor;

namespace {

constexpr uint64_t kMs = 1'000'000;
constexpr uint64_t kLost = 20'000 * kMs;  // a sleep that lasts so long is a lost wake-up
constexpr uint32_t kBit = 3;

// One ring: the writer has slot 0 of the board, reader r slot r + 1.
struct Channel {
  std::shared_ptr<Board> board;
  std::shared_ptr<Segment> segment;
  RingHeader* header;
  uint32_t readers;

  Channel(uint32_t readers, uint32_t slots, uint32_t stride, uint32_t flags) : board(Board::create(readers + 1)), readers(readers) {
    for (uint32_t i = 0; i <= readers; ++i) {
      board->prepare(i, "");
      board->slot(i)->condition.store(Condition::kAlive);
    }
    segment = Segment::create(RingHeader::bytes(slots, stride, readers));
    header = segment->make_ring(0, slots, stride, readers, flags);
  }
  RingWriter writer() const {
    std::vector<Target> targets;
    for (uint32_t r = 0; r < readers; ++r) targets.push_back({r + 1, kBit});
    return RingWriter(segment, 0, board, targets);
  }
  RingReader reader(uint32_t r) const { return RingReader(segment, 0, r, board, {0, kBit}); }
  Bell& bell(uint32_t slot) const { return board->slot(slot)->bell; }
  bool rung(uint32_t slot) const { return bell(slot).ready[0].exchange(0) != 0; }
};

bool sleep_once(Waiter& waiter, uint32_t seen, uint64_t number) {
  const uint64_t start = now_ns();
  if (number % 3 == 0 && waiter.spin(seen, start)) return true;
  const bool moved = waiter.park(seen, start + kLost);
  waiter.learn_parked(start);
  if (!moved) CHECK(!"a ring was lost");
  return moved;
}

// False if it waits in vain.
bool wait_for_room(const Channel& c, RingWriter& writer, Waiter& waiter) {
  for (;;) {
    if (writer.has_room()) return true;
    const uint32_t seen = c.bell(0).count.load();
    writer.wants_room();
    if (writer.has_room()) return true;
    if (!sleep_once(waiter, seen, writer.head())) return false;
  }
}

uint64_t word_of(uint64_t number, uint64_t i) { return (number + 1) * 0x9e3779b97f4a7c15u + i; }

// Sizes vary, so that a frame that is not whole differs from the one before it.
void write_frame(RingWriter& writer) {
  const uint64_t number = writer.head();
  SlotHeader* slot = writer.next_slot();
  const uint64_t words = number % (writer.capacity() / 8 + 1);
  slot->tag = number;
  slot->kind = Kind::kValue;
  slot->codec = uint16_t(number);
  slot->flags = 0;
  slot->size = words * 8;
  slot->block = 0;
  auto* body = reinterpret_cast<uint64_t*>(slot + 1);
  for (uint64_t i = 0; i < words; ++i) body[i] = word_of(number, i);
  CHECK_EQ(writer.publish(), number);
}

bool frame_is_whole(const RingReader& reader, uint64_t number) {
  const SlotHeader* slot = reader.front();
  const auto* body = reinterpret_cast<const uint64_t*>(slot + 1);
  const uint64_t words = number % (reader.capacity() / 8 + 1);
  bool whole = slot->tag == number && slot->kind == Kind::kValue && slot->codec == uint16_t(number) && slot->size == words * 8;
  for (uint64_t i = 0; i < words && whole; ++i) whole = body[i] == word_of(number, i);
  return whole;
}

void write_all(const Channel& c, uint64_t frames) {
  RingWriter writer = c.writer();
  Waiter waiter(&c.bell(0));
  while (writer.head() < frames) {
    if (!wait_for_room(c, writer, waiter)) return;
    write_frame(writer);
  }
}

void read_all(const Channel& c, uint32_t r, uint64_t frames) {
  RingReader reader = c.reader(r);
  Bell& bell = c.bell(r + 1);
  Waiter waiter(&bell);
  while (reader.next() < frames) {
    const uint32_t seen = waiter.count();
    bell.ready[0].exchange(0, std::memory_order_acquire);
    if (reader.empty() && !sleep_once(waiter, seen, reader.next())) return;
    while (!reader.empty()) {
      if (!CHECK(frame_is_whole(reader, reader.next()))) return;
      reader.advance();
    }
  }
  CHECK(reader.empty());
}

void stream(bool processes, uint32_t readers, uint32_t slots, uint32_t stride, uint64_t frames) {
  Channel c(readers, slots, stride, kWriterMayWait);
  if (processes) {
    std::vector<check::Child> children;
    for (uint32_t r = 0; r < readers; ++r) children.emplace_back([&, r] { read_all(c, r, frames); });
    write_all(c, frames);
    for (auto& child : children) CHECK(child.passed());
  } else {
    std::vector<std::thread> threads;
    for (uint32_t r = 0; r < readers; ++r) threads.emplace_back([&, r] { read_all(c, r, frames); });
    write_all(c, frames);
    for (auto& thread : threads) thread.join();
  }
  CHECK_EQ(c.header->head.load(), frames);
  for (uint32_t r = 0; r < readers; ++r) CHECK_EQ(c.header->cursors()[r].next.load(), frames);
}

constexpr uint64_t kFrames = 100'000;

// Whether nobody reads what is written: each reader has closed its end, or is dead.
bool all_gone(const RingWriter& writer) {
  const ReaderSet& readers = *writer.readers();
  for (uint32_t r = 0; r < readers.slots.size(); ++r)
    if (!readers.cursors[r]->closed() && !readers.gone(r)) return false;
  return true;
}

}  // namespace

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

TEST(only_a_writer_that_asked_is_rung_for_room) {
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
  Waiter waiter(&c.bell(0));
  CHECK(wait_for_room(c, writer, waiter));
  other.join();
}

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
  Waiter waiter(&c.bell(0));
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
    c.board->announce_death(2);
  });
  Waiter waiter(&c.bell(0));
  CHECK(wait_for_room(c, writer, waiter));
  other.join();
  CHECK(!all_gone(writer));
  write_frame(writer);
  CHECK(!writer.has_room());  // the living one counts
  c.board->announce_death(1);
  CHECK(all_gone(writer));
  CHECK(writer.has_room());
}

TEST(another_process_in_a_dead_reader_s_slot_holds_nobody_up) {
  Channel c(1, 1, 64, 0);
  RingWriter writer = c.writer();
  REQUIRE(writer.has_room());
  write_frame(writer);
  c.board->announce_death(1);
  c.board->prepare(1, "somebody else");
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
  auto board = Board::create(3);
  CHECK_THROWS(std::system_error, RingWriter(segment, 0, board, {{1, 1}}));  // has two readers
  CHECK_THROWS(std::system_error, RingReader(segment, 0, 2, board, {0, 1}));
  CHECK_THROWS(std::system_error, RingReader(segment, 64, 0, board, {0, 1}));
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
  auto board = Board::create(3);
  for (uint32_t i = 0; i < 3; ++i) board->prepare(i, "");
  RingWriter writer(segment, 0, board, {{1, 1}});
  RingReader reader(segment, 0, 0, board, {0, 1});
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

namespace {

constexpr size_t kArenaFile = 4 * kWindow;

// A frame whose body lies in a block of the writer's arena.
void write_block(RingWriter& writer, Arena& arena, size_t size) {
  Block* block = arena.allocate(size);
  const uint64_t number = writer.head();
  auto* words = reinterpret_cast<uint64_t*>(block->data());
  for (size_t i = 0; i < size / 8; ++i) words[i] = word_of(number, i);
  SlotHeader* slot = writer.next_slot();
  slot->tag = number;
  slot->size = size;
  slot->block = block->offset + 1;
  slot->block_size = block->size;
  arena.publish(block, writer.readers(), 0, writer.head());
  writer.publish();
}

// A reader that keeps up to `held` values, and looks at each once more before it lets it go.
void read_blocks(const Channel& c, uint32_t r, int arena_fd, uint64_t frames, size_t held) {
  RingReader reader = c.reader(r);
  Waiter waiter(&c.bell(r + 1));
  auto view = std::make_shared<ArenaView>(arena_fd, kArenaFile);
  check::Random random(r);
  struct Value {
    uint64_t number;
    size_t size;
    std::unique_ptr<Lease> lease;
  };
  std::deque<Value> values;
  auto is_whole = [](const Value& v) {
    const auto* words = reinterpret_cast<const uint64_t*>(v.lease->data());
    for (size_t i = 0; i < v.size / 8; ++i)
      if (words[i] != word_of(v.number, i)) return false;
    return true;
  };
  while (reader.next() < frames) {
    const uint32_t seen = waiter.count();
    if (reader.empty()) {
      if (!sleep_once(waiter, seen, reader.next())) return;
      continue;
    }
    const SlotHeader* slot = reader.front();
    values.push_back({slot->tag, size_t(slot->size), std::make_unique<Lease>(*view, slot->block - 1, slot->block_size, r)});
    CHECK_EQ(slot->tag, reader.next());
    reader.advance();
    CHECK(is_whole(values.back()));
    while (values.size() > random.below(held + 1)) {
      const size_t i = random.below(values.size());
      CHECK(is_whole(values[i]));
      values.erase(values.begin() + ptrdiff_t(i));
    }
  }
  CHECK_EQ(live_leases(), values.size());
}

}  // namespace

// The writer never has to wait for memory: what the readers hold at most fits under its cap.
TEST(blocks_stay_whole_while_readers_hold_them) {
  constexpr uint32_t kReaders = 3, kSlots = 4;
  constexpr size_t kHeld = 6, kLargest = 40'000;
  constexpr uint64_t kValues = 5'000;
  Channel c(kReaders, kSlots, 64, kWriterMayWait);
  Fd file = Arena::create_file(kArenaFile);
  Arena arena(file.get(), kArenaFile, kReaders * (kHeld + kSlots + 2) * 65'536);
  std::vector<check::Child> children;
  for (uint32_t r = 0; r < kReaders; ++r) children.emplace_back([&, r] { read_blocks(c, r, file.get(), kValues, kHeld); });
  RingWriter writer = c.writer();
  Waiter waiter(&c.bell(0));
  check::Random random(99);
  for (uint64_t i = 0; i < kValues; ++i) {
    if (!wait_for_room(c, writer, waiter)) break;
    write_block(writer, arena, 8 * (1 + random.below(kLargest / 8)));
  }
  for (auto& child : children) CHECK(child.passed());
  CHECK(arena.bytes_touched() <= arena.cap());
  arena.give_back(UINT64_MAX);
  CHECK_EQ(arena.blocks_out(), 0u);
}

// Readers that are killed at any moment, with values held and half read, cost the writer nothing.
TEST(killed_readers_give_back_what_they_held) {
  Channel c(2, 4, 64, kWriterMayWait);
  Fd file = Arena::create_file(kArenaFile);
  Arena arena(file.get(), kArenaFile, 4 << 20);
  check::Random random(5);
  for (int round = 0; round < 20; ++round) {
    c.header->head.store(0);
    for (uint32_t r = 0; r < 2; ++r) {
      c.header->cursors()[r].next.store(0);
      c.board->prepare(r + 1, "");
      c.board->slot(r + 1)->condition.store(Condition::kAlive);
    }
    std::vector<check::Child> children;
    for (uint32_t r = 0; r < 2; ++r) children.emplace_back([&, r] { read_blocks(c, r, file.get(), UINT64_MAX, 10); });
    RingWriter writer = c.writer();
    Waiter waiter(&c.bell(0));
    const uint64_t first = random.below(300), second = first + random.below(300);
    while (!all_gone(writer)) {
      for (uint32_t r = 0; r < 2; ++r)
        if (writer.head() == (r == 0 ? first : second) && children[r].pid() > 0) {
          children[r].kill(SIGKILL);
          children[r].wait();
          c.board->announce_death(r + 1);
        }
      if (!wait_for_room(c, writer, waiter)) return;
      write_block(writer, arena, 8 * (1 + random.below(4'000)));
    }
    arena.give_back(UINT64_MAX);
    CHECK_EQ(arena.blocks_out(), 0u);
  }
}

// Robustness against a peer that writes where it should not.

TEST(a_head_that_somebody_has_written_over_is_an_error_that_names_the_edge) {
  Channel c(1, 4, 128, 0);
  ::strncpy(c.board->slot(0)->name, "Maker", sizeof c.board->slot(0)->name - 1);
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
  std::memset(c.board->slot(0)->name, 'x', sizeof c.board->slot(0)->name);
  CHECK_EQ(c.board->name(0), std::string(sizeof c.board->slot(0)->name, 'x'));
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
  CHECK_THROWS(std::system_error, RingWriter(c.segment, 0, c.board, {{2, kBit}}));
  CHECK_THROWS(std::system_error, RingWriter(c.segment, 0, c.board, {{1, kBellBits}}));
  CHECK_THROWS(std::system_error, RingReader(c.segment, 0, 0, c.board, {2, kBit}));
  CHECK_THROWS(std::system_error, RingReader(c.segment, 0, 0, c.board, {0, kBellBits}));
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
  c.header->cursors()[0].next.store(1);  // the first reader took a frame, looked at the flag, and stopped
  CHECK(c.header->writer_waits.load() != 0);
  RingReader second = c.reader(1);
  second.advance();
  CHECK(c.rung(0));
  CHECK(c.header->writer_waits.load() != 0);  // the writer's to take down
  CHECK(writer.has_room());
  CHECK_EQ(c.header->writer_waits.load(), 0u);
}
