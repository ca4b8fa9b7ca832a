// What tests of a channel's ends share: processes of a session, with rings between them.
#pragma once

#include <sys/eventfd.h>

#include <memory>
#include <string>
#include <vector>

#include "inbox.h"
#include "receiver.h"
#include "sender.h"

namespace conveyor {

constexpr size_t kMiB = size_t(1) << 20;
constexpr size_t kFile = 16 * kWindow;
constexpr uint32_t kSlots = 8;
constexpr uint32_t kStride = 512;
constexpr uint32_t kCapacity = kStride - sizeof(SlotHeader);
constexpr uint16_t kRaw = kBytes;

const size_t kRingBytes = align_up(RingHeader::bytes(kSlots, kStride, 2), kCacheLine);

// What the processes of a session share.
struct Shared {
  static constexpr uint32_t kProcesses = 3;
  std::shared_ptr<ProcessTable> process_table = ProcessTable::create(kProcesses);
  std::shared_ptr<Segment> segment = Segment::create(4 * kRingBytes);
  Fd files[kProcesses];

  Shared() {
    for (uint32_t i = 0; i < kProcesses; ++i) {
      process_table->prepare(i, "process " + std::to_string(i));
      process_table->slot(i)->condition.store(Condition::kAlive);
      files[i] = Arena::create_file(kFile);
    }
    for (uint32_t ring = 0; ring < 4; ++ring) segment->make_ring(ring * kRingBytes, kSlots, kStride, 1, kWriterMayWait);
  }
};

// One of them: what it has mapped is its own.
struct Process {
  const Shared& shared;
  uint32_t slot;
  std::shared_ptr<ProcessTable> process_table;
  std::shared_ptr<Segment> segment;
  std::shared_ptr<Arena> arena;
  Inbox inbox;

  Process(const Shared& shared, uint32_t slot, size_t cap = 256 * kMiB, uint64_t idle_ns = Arena::kIdleNs)
      : shared(shared), slot(slot), process_table(ProcessTable::attach(shared.process_table->fd())), segment(Segment::attach(shared.segment->fd())),
        arena(std::make_shared<Arena>(shared.files[slot].get(), kFile, cap, process_table, slot, idle_ns)), inbox(process_table, slot, event().get(), 0) {}

  static const Fd& event() {
    static const Fd fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    return fd;
  }
  // The bit of ring `n` is n + 1.
  std::unique_ptr<Sender> sender(uint32_t ring, uint32_t to) {
    return std::make_unique<Sender>(segment, ring * kRingBytes, process_table, std::vector<Target>{{to, ring + 1}}, arena);
  }
  std::shared_ptr<ArenaView> view(uint32_t from) { return std::make_shared<ArenaView>(shared.files[from].get(), kFile, process_table, from); }
  std::unique_ptr<Receiver> receiver(uint32_t ring, uint32_t from) { return receiver(ring, from, view(from)); }
  std::unique_ptr<Receiver> receiver(uint32_t ring, uint32_t from, std::shared_ptr<ArenaView> through) {
    return std::make_unique<Receiver>(segment, ring * kRingBytes, 0, process_table, Target{from, ring + 1}, std::move(through), true);
  }
  template <class Condition>
  void wait(const Condition& condition) {
    for (;;) {
      const uint32_t seen = inbox.count();
      if (condition()) return;
      inbox.wait(seen, 0);
    }
  }
  void wait_for_room(Sender& sender) {
    wait([&] {
      if (sender.ring.has_room()) return true;
      sender.ring.wants_room();
      return sender.ring.has_room();
    });
  }
};

}  // namespace conveyor
