// Rings with blocks of an arena behind their frames.
#include "ring_setup.h"

using namespace conveyor;

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
  Waiter waiter(&c.doorbell(r + 1));
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
  Waiter waiter(&c.doorbell(0));
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
      c.process_table->prepare(r + 1, "");
      c.process_table->slot(r + 1)->condition.store(Condition::kAlive);
    }
    std::vector<check::Child> children;
    for (uint32_t r = 0; r < 2; ++r) children.emplace_back([&, r] { read_blocks(c, r, file.get(), UINT64_MAX, 10); });
    RingWriter writer = c.writer();
    Waiter waiter(&c.doorbell(0));
    const uint64_t first = random.below(300), second = first + random.below(300);
    while (!all_gone(writer)) {
      for (uint32_t r = 0; r < 2; ++r)
        if (writer.head() == (r == 0 ? first : second) && children[r].pid() > 0) {
          children[r].kill(SIGKILL);
          children[r].wait();
          c.process_table->announce_death(r + 1);
        }
      if (!wait_for_room(c, writer, waiter)) return;
      write_block(writer, arena, 8 * (1 + random.below(4'000)));
    }
    arena.give_back(UINT64_MAX);
    CHECK_EQ(arena.blocks_out(), 0u);
  }
}
