// What tests of pumps share: hosts in one process, each with a process table, arenas and a pump of its own.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <thread>

#include "check.h"
#include "net/pump.h"
#include "receiver.h"
#include "sender.h"
#include "waiter.h"

namespace conveyor {

constexpr size_t kKiB = 1024, kMiB = kKiB * kKiB;
constexpr size_t kFile = 16 * kWindow;
constexpr uint32_t kSlots = 8, kStride = 512, kCapacity = kStride - sizeof(SlotHeader);
constexpr uint64_t kSecond = 1'000'000'000;

inline std::pair<Fd, Fd> socket_pair() {
  int fds[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) != 0) throw_errno("socketpair");
  return {Fd(fds[0]), Fd(fds[1])};
}

// Over the loopback interface.
inline std::pair<Fd, Fd> tcp_pair() {
  Fd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)), one(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in at = {};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof at;
  if (::bind(listener.get(), reinterpret_cast<sockaddr*>(&at), size) != 0 || ::listen(listener.get(), 1) != 0 ||
      ::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&at), &size) != 0 || ::connect(one.get(), reinterpret_cast<sockaddr*>(&at), size) != 0)
    throw_errno("tcp");
  return {std::move(one), Fd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC))};
}

// Where each process lives: slot s on host `of[s]`. Their numbers are the same on all hosts.
using Homes = std::vector<uint32_t>;

struct Host {
  uint32_t self;
  Homes homes;
  std::shared_ptr<ProcessTable> process_table;
  std::vector<Fd> files;
  std::vector<std::shared_ptr<Arena>> arenas;  // of processes here, and of the proxies
  std::map<uint64_t, std::shared_ptr<Segment>> segments;
  std::unique_ptr<net::HostPump> pump;

  Host(uint32_t self, const Homes& homes, uint64_t window_ns = 20 * kSecond, size_t cap = 512 * kMiB) : self(self), homes(homes), process_table(ProcessTable::create(uint32_t(homes.size()))) {
    for (uint32_t s = 0; s < homes.size(); ++s) {
      files.push_back(Arena::create_file(kFile));
      if (homes[s] == self) {
        process_table->prepare(s, "process " + std::to_string(s));
        process_table->slot(s)->condition.store(Condition::kAlive);
      }
      arenas.push_back(std::make_shared<Arena>(files[s].get(), kFile, cap, process_table, s, kSecond));
    }
    pump = std::make_unique<net::HostPump>(process_table, self, window_ns);
    for (uint32_t s = 0; s < homes.size(); ++s)
      if (homes[s] != self) pump->add_proxy(s, 1, homes[s], "proxy " + std::to_string(s), arenas[s]);
  }
  std::shared_ptr<ArenaView> view(uint32_t slot) { return std::make_shared<ArenaView>(files[slot].get(), kFile, process_table, slot); }
  // Ring i: its writer, and its readers. Bit 3 of all doorbells.
  struct Shape {
    uint32_t writer;
    std::vector<uint32_t> readers;
    uint32_t flags = kWriterMayWait;
  };
  static size_t offset(const std::vector<Shape>& rings, size_t ring) {
    size_t at = 0;
    for (size_t i = 0; i < ring; ++i) at += align_up(RingHeader::bytes(kSlots, kStride, uint32_t(rings[i].readers.size())), kCacheLine);
    return at;
  }
  static constexpr uint32_t kSets = 4, kTasks = 70;
  void mirror(uint64_t id, const std::vector<Shape>& rings) {
    const size_t limits = offset(rings, rings.size());
    auto segment = segments[id] = Segment::create(limits + Limits::bytes(kSets, kTasks));
    std::vector<net::RingSpec> specs;
    for (size_t i = 0; i < rings.size(); ++i) {
      segment->make_ring(offset(rings, i), kSlots, kStride, uint32_t(rings[i].readers.size()), rings[i].flags);
      net::RingSpec spec{offset(rings, i), {rings[i].writer, 3}, {}, homes[rings[i].writer] == self ? view(rings[i].writer) : nullptr};
      for (const uint32_t r : rings[i].readers) spec.readers.push_back({r, 3});
      specs.push_back(spec);
    }
    pump->mirror(id, segment, specs, {{limits, kSets, kTasks, homes[0]}});
  }
  Limits limits(uint64_t id, const std::vector<Shape>& rings) { return Limits(segments[id], offset(rings, rings.size()), kSets, kTasks); }
  std::unique_ptr<Sender> sender(uint64_t id, const std::vector<Shape>& rings, size_t ring) {
    std::vector<Target> targets;
    for (const uint32_t r : rings[ring].readers) targets.push_back({r, 3});
    return std::make_unique<Sender>(segments[id], offset(rings, ring), process_table, targets, arenas[rings[ring].writer]);
  }
  std::unique_ptr<Receiver> receiver(uint64_t id, const std::vector<Shape>& rings, size_t ring, uint32_t reader) {
    return std::make_unique<Receiver>(segments[id], offset(rings, ring), reader, process_table, Target{rings[ring].writer, 3}, view(rings[ring].writer), true);
  }
  template <class Ready>
  bool wait(uint32_t slot, const Ready& ready, uint64_t for_ns = 120 * kSecond) {
    Waiter waiter(&process_table->slot(slot)->doorbell);
    const uint64_t end = now_ns() + for_ns;
    for (;;) {
      const uint32_t seen = waiter.count();
      if (ready()) return true;
      if (now_ns() >= end) return CHECK(!"it has not come"), false;
      if (!waiter.spin(seen, now_ns())) waiter.park(seen, end);
    }
  }
  bool wait_for_room(uint32_t slot, Sender& sender) {
    return wait(slot, [&] {
      if (sender.ring.has_room()) return true;
      sender.ring.wants_room();
      return sender.ring.has_room();
    });
  }
};

inline void join(Host& a, Host& b, std::pair<Fd, Fd> ends = tcp_pair()) {
  a.pump->connect(std::move(ends.first), b.self);
  b.pump->connect(std::move(ends.second), a.self);
}

// Of every size: in the slot, in small blocks, in pieces, in blocks mapped alone.
inline size_t size_of(uint64_t n, bool large = true) {
  constexpr size_t sizes[] = {0, 1, 100, kCapacity, kCapacity + 1, 5'000, 100'000, 256 * kKiB, kMiB + 7, 17 * kMiB};
  return sizes[n % (std::size(sizes) - (large ? 0 : 2))];
}
inline char letter(uint64_t n, size_t at) { return char(n * 31 + at / 977); }

inline bool send(Host& from, uint32_t slot, Sender& sender, uint64_t n, size_t size, uint32_t flags = 0) {
  if (!from.wait_for_room(slot, sender)) return false;
  Outgoing out;
  out.tag = n;
  out.codec = kBytes;
  out.flags = flags;
  out.size = size;
  sender.reserve(out);
  char* const body = sender.body_of(out);
  for (size_t i = 0; i < size; ++i) body[i] = letter(n, i);
  sender.publish(out);
  return true;
}
inline bool is_whole(const Frame& frame, uint64_t n, size_t size) {
  if (frame.tag != n || frame.size != size || frame.codec != kBytes) return false;
  for (size_t i = 0; i < frame.size; i += frame.size > 10'000 ? 509 : 1)
    if (frame.body[i] != letter(n, i)) return false;
  return frame.size == 0 || frame.body[frame.size - 1] == letter(n, frame.size - 1);
}

}  // namespace conveyor
