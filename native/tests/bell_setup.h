// What tests of doorbells share: who rings, and ways to sleep.
#pragma once

#include <poll.h>
#include <sys/mman.h>
#include <algorithm>
#include <array>
#include <functional>
#include <thread>
#include <vector>

#include "process_table.h"
#include "check.h"
#include "waiter.h"

namespace conveyor {

constexpr uint64_t kMs = 1'000'000;
// A sleep that is not ended by a ring ends here, and is noted as a lost wake-up.
constexpr uint64_t kLost = 20'000 * kMs;

inline std::shared_ptr<ProcessTable> process_table_of(uint32_t slots) {
  auto process_table = ProcessTable::create(slots);
  for (uint32_t i = 0; i < slots; ++i) {
    process_table->prepare(i, "slot " + std::to_string(i));
    process_table->slot(i)->condition.store(Condition::kAlive);
  }
  return process_table;
}

// Memory that forked processes share.
template <class T>
struct Shared {
  Shared() : at(static_cast<T*>(::mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {}
  ~Shared() { ::munmap(static_cast<void*>(at), sizeof(T)); }
  T* operator->() const { return at; }
  T* at;
};

enum class How { kSpin, kFutex, kPoll };

// Sleeps until the count differs from `seen`.
inline bool sleep_once(ProcessTable& process_table, uint32_t slot, Waiter& waiter, uint32_t seen, How how, int event) {
  const uint64_t deadline = now_ns() + kLost;
  Doorbell& doorbell = process_table.slot(slot)->doorbell;
  switch (how) {
    case How::kSpin: {
      const uint64_t start = now_ns();
      if (waiter.spin(seen, start)) return true;
      const bool moved = waiter.park(seen, deadline);
      waiter.learn_parked(start);
      return moved;
    }
    case How::kFutex:
      return waiter.park(seen, deadline);
    case How::kPoll:
      while (waiter.arm_event(seen)) {
        if (now_ns() > deadline) return false;
        pollfd p = {event, POLLIN, 0};
        const timespec left = to_timespec(kLost);
        if (::ppoll(&p, 1, &left, nullptr) == 1) {
          uint64_t n;
          waiter.disarm_event();
          CHECK(::read(event, &n, sizeof n) == sizeof n || errno == EAGAIN);
        }
      }
      return doorbell.count.load() != seen;
  }
  return false;
}

// What notifiers publish: for each bit a number that only grows, counted before the ring.
struct Published {
  std::array<std::atomic<uint64_t>, kDoorbellBits> number;
};

inline void ring_at_random(ProcessTable& process_table, uint32_t slot, Published& published, uint64_t seed, int times) {
  check::Random random(seed);
  for (int i = 0; i < times; ++i) {
    // Few bits most of the time, so that notifiers meet.
    const auto bit = uint32_t(random.below(4) != 0 ? random.below(3) * 64 : random.below(kDoorbellBits));
    published.number[bit].fetch_add(1, std::memory_order_relaxed);
    process_table.notify(slot, bit);
    if (random.below(16) == 0) ::sched_yield();
    if (random.below(256) == 0) ::usleep(50);  // let the waiter fall asleep
  }
}

// Takes ready bits until all of `total` publications were seen through them.
inline void take_all(ProcessTable& process_table, uint32_t slot, Published& published, uint64_t total, How how, int event) {
  Doorbell& doorbell = process_table.slot(slot)->doorbell;
  Waiter waiter(&doorbell);
  std::vector<uint64_t> seen_number(kDoorbellBits);
  uint64_t sum = 0;
  for (;;) {
    const uint32_t seen = waiter.count();
    for (uint32_t word = 0; word < kDoorbellWords; ++word) {
      uint64_t bits = doorbell.ready[word].exchange(0, std::memory_order_acquire);
      for (; bits != 0; bits &= bits - 1) {
        const uint32_t bit = word * 64 + uint32_t(__builtin_ctzll(bits));
        const uint64_t number = published.number[bit].load(std::memory_order_relaxed);
        CHECK(number >= seen_number[bit]);
        sum += number - seen_number[bit];
        seen_number[bit] = number;
      }
    }
    if (sum >= total) break;
    if (!sleep_once(process_table, slot, waiter, seen, how, event)) {
      CHECK(!"a ring was lost");
      return;
    }
  }
  CHECK_EQ(sum, total);
}

inline void many_ringers(bool processes, How how) {
  constexpr int kNotifiers = 4;
  const int times = check::kThreadSanitizer ? 5'000 : 20'000;
  auto process_table = process_table_of(1);
  Shared<Published> published;
  const int event = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  process_table->set_eventfd(0, event, 1);
  auto notifier = [&](uint64_t seed) { ring_at_random(*process_table, 0, *published.at, seed, times); };
  const uint64_t total = uint64_t(kNotifiers) * uint64_t(times);
  if (processes) {
    std::vector<check::Child> children;
    for (int i = 0; i < kNotifiers; ++i) children.emplace_back([&] { notifier(uint64_t(i)); });
    take_all(*process_table, 0, *published.at, total, how, event);
    for (auto& child : children) CHECK(child.passed());
  } else {
    std::vector<std::thread> threads;
    for (int i = 0; i < kNotifiers; ++i) threads.emplace_back([&, i] { notifier(uint64_t(i)); });
    take_all(*process_table, 0, *published.at, total, how, event);
    for (auto& thread : threads) thread.join();
  }
  ::close(event);
}

}  // namespace conveyor
