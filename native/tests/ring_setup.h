// What tests of rings share: a channel, and frames that show whether they are whole.
#pragma once

#include <sys/mman.h>
#include <deque>
#include <functional>
#include <thread>

#include "check.h"
#include "ring.h"
#include "waiter.h"

namespace conveyor {

constexpr uint64_t kMs = 1'000'000;
constexpr uint64_t kLost = 20'000 * kMs;  // a sleep that lasts so long is a lost wake-up
constexpr uint32_t kBit = 3;

// One ring: the writer has slot 0 of the process table, reader r slot r + 1.
struct Channel {
  std::shared_ptr<ProcessTable> process_table;
  std::shared_ptr<Segment> segment;
  RingHeader* header;
  uint32_t readers;

  Channel(uint32_t readers, uint32_t slots, uint32_t stride, uint32_t flags) : process_table(ProcessTable::create(readers + 1)), readers(readers) {
    for (uint32_t i = 0; i <= readers; ++i) {
      process_table->prepare(i, "");
      process_table->slot(i)->condition.store(Condition::kAlive);
    }
    segment = Segment::create(RingHeader::bytes(slots, stride, readers));
    header = segment->make_ring(0, slots, stride, readers, flags);
  }
  RingWriter writer() const {
    std::vector<Target> targets;
    for (uint32_t r = 0; r < readers; ++r) targets.push_back({r + 1, kBit});
    return RingWriter(segment, 0, process_table, targets);
  }
  RingReader reader(uint32_t r) const { return RingReader(segment, 0, r, process_table, {0, kBit}); }
  Doorbell& doorbell(uint32_t slot) const { return process_table->slot(slot)->doorbell; }
  bool rung(uint32_t slot) const { return doorbell(slot).ready[0].exchange(0) != 0; }
};

inline bool sleep_once(Waiter& waiter, uint32_t seen, uint64_t number) {
  const uint64_t start = now_ns();
  if (number % 3 == 0 && waiter.spin(seen, start)) return true;
  const bool moved = waiter.park(seen, start + kLost);
  waiter.learn_parked(start);
  if (!moved) CHECK(!"a ring was lost");
  return moved;
}

// False if it waits in vain.
inline bool wait_for_room(const Channel& c, RingWriter& writer, Waiter& waiter) {
  for (;;) {
    if (writer.has_room()) return true;
    const uint32_t seen = c.doorbell(0).count.load();
    writer.wants_room();
    if (writer.has_room()) return true;
    if (!sleep_once(waiter, seen, writer.head())) return false;
  }
}

uint64_t word_of(uint64_t number, uint64_t i) { return (number + 1) * 0x9e3779b97f4a7c15u + i; }

// Sizes vary, so that a frame that is not whole differs from the one before it.
inline void write_frame(RingWriter& writer) {
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

inline bool frame_is_whole(const RingReader& reader, uint64_t number) {
  const SlotHeader* slot = reader.front();
  const auto* body = reinterpret_cast<const uint64_t*>(slot + 1);
  const uint64_t words = number % (reader.capacity() / 8 + 1);
  bool whole = slot->tag == number && slot->kind == Kind::kValue && slot->codec == uint16_t(number) && slot->size == words * 8;
  for (uint64_t i = 0; i < words && whole; ++i) whole = body[i] == word_of(number, i);
  return whole;
}

inline void write_all(const Channel& c, uint64_t frames) {
  RingWriter writer = c.writer();
  Waiter waiter(&c.doorbell(0));
  while (writer.head() < frames) {
    if (!wait_for_room(c, writer, waiter)) return;
    write_frame(writer);
  }
}

inline void read_all(const Channel& c, uint32_t r, uint64_t frames) {
  RingReader reader = c.reader(r);
  Doorbell& doorbell = c.doorbell(r + 1);
  Waiter waiter(&doorbell);
  while (reader.next() < frames) {
    const uint32_t seen = waiter.count();
    doorbell.ready[0].exchange(0, std::memory_order_acquire);
    if (reader.empty() && !sleep_once(waiter, seen, reader.next())) return;
    while (!reader.empty()) {
      if (!CHECK(frame_is_whole(reader, reader.next()))) return;
      reader.advance();
    }
  }
  CHECK(reader.empty());
}

inline void stream(bool processes, uint32_t readers, uint32_t slots, uint32_t stride, uint64_t frames) {
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
inline bool all_gone(const RingWriter& writer) {
  const ReaderSet& readers = *writer.readers();
  for (uint32_t r = 0; r < readers.slots.size(); ++r)
    if (!readers.cursors[r]->closed() && !readers.gone(r)) return false;
  return true;
}

}  // namespace conveyor
