// Any bytes where a segment is said to hold a ring: Segment::ring refuses them, or the ring lies inside.
// Then the header changes under both ends, as a peer that has gone wrong may change it: what they touch
// still lies in the ring.
#include <vector>

#include "fuzz_input.h"
#include "ring.h"

using namespace conveyor;

namespace {

constexpr size_t kPages = 4;

struct Shared {
  std::shared_ptr<ProcessTable> process_table = ProcessTable::create(4);
  std::shared_ptr<Segment> segment = Segment::create(kPages * kPage);
  char* base = map_shared(segment->fd(), 0, kPages * kPage);
};

uint32_t near_something(fuzz::Input& input) {
  const uint8_t how = input.take<uint8_t>();
  if (how & 1) return input.take<uint32_t>();
  return (how & 2 ? 1u << (how >> 3) : uint32_t(how >> 2) * uint32_t(kCacheLine)) + (how & 4 ? 1 : 0);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static Shared shared;
  fuzz::Input input(data, size);
  std::memset(shared.base, 0, kPages * kPage);
  const uint8_t how = input.take<uint8_t>();
  const size_t offset = how & 1 ? input.take<uint64_t>() : input.take<uint16_t>() % (kPages * kPage + 1) / kCacheLine * kCacheLine;
  if (offset < kPages * kPage && kPages * kPage - offset >= sizeof(RingHeader)) {
    auto* header = reinterpret_cast<RingHeader*>(shared.base + offset / kCacheLine * kCacheLine);
    header->magic = how & 2 ? input.take<uint32_t>() : kRingMagic;
    header->slots = near_something(input);
    header->stride = near_something(input);
    header->readers = how & 4 ? near_something(input) : 1 + (how >> 3) % 3;
    header->flags = input.take<uint8_t>();
    header->head.store(input.take<uint64_t>());
  }
  Ring ring;
  try {
    ring = shared.segment->ring(offset);
  } catch (const std::system_error&) {
    return 0;
  }
  FUZZ_CHECK(offset % kCacheLine == 0 && ring.readers >= 1 && ring.readers <= kMaxReaders && ring.stride > sizeof(SlotHeader));
  const char* base = reinterpret_cast<char*>(ring.header) - offset;
  FUZZ_CHECK(ring.first == reinterpret_cast<char*>(&ring.cursor(ring.readers)));
  FUZZ_CHECK(uint64_t(ring.slots) * ring.stride <= size_t(base + kPages * kPage - ring.first));
  auto inside = [&](const void* slot) {
    const auto* at = static_cast<const char*>(slot);
    FUZZ_CHECK(at >= ring.first && at + ring.stride <= base + kPages * kPage && size_t(at - ring.first) % ring.stride == 0);
  };

  for (uint32_t i = 0; i < 4; ++i) shared.process_table->prepare(i, "");
  std::vector<Target> targets(ring.readers, Target{1, 1});
  RingWriter writer(shared.segment, offset, shared.process_table, targets);
  RingReader reader(shared.segment, offset, ring.readers - 1, shared.process_table, Target{0, 1});
  auto* header = reinterpret_cast<RingHeader*>(shared.base + offset);
  bool left = false;  // then the head says nothing any more
  for (int step = 0; step < 32 && input.left() != 0; ++step) switch (const uint8_t what = input.take<uint8_t>(); what % 6) {
      case 0:
        if (!writer.has_room()) break;
        inside(writer.next_slot());
        writer.next_slot()->tag = what;
        writer.publish();
        break;
      case 1:
        inside(reader.front());
        (void)read_once(*reader.front());
        try {
          if (!reader.empty()) reader.advance();
          FUZZ_CHECK(left || header->head.load() - reader.next() <= ring.slots);
        } catch (const std::system_error& error) {  // a head that cannot be
          FUZZ_CHECK(error.code().value() == EPROTO && header->head.load() - reader.next() > ring.slots);
        }
        break;
      case 2:
        writer.wants_room();
        (void)writer.has_room();
        break;
      case 3:
        reader.close();
        left = true;
        FUZZ_CHECK(reader.empty() && writer.left_behind(reader.next())[ring.readers - 1]);
        break;
      default:  // all but the cursors
        input.take_into(header, sizeof *header);
    }
  FUZZ_CHECK(writer.slots() == ring.slots && writer.capacity() == ring.capacity() && reader.readers() == ring.readers);
  return 0;
}
