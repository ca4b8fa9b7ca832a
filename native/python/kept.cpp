#include "kept.h"

#include <atomic>

#include "platform.h"

namespace conveyor {

namespace {

struct Kept {
  PyObject* object;
  Kept* next = nullptr;
};

// Never destroyed: arenas may outlive static destructors. A stack without a lock, since a process may be forked
// while a thread is in the middle of it.
std::atomic<Kept*> aside{nullptr};
std::atomic<uint32_t> changes{0};  // futex word
std::atomic<uint32_t> wanted{0};   // 1: somebody sleeps on it
std::atomic<uint32_t> stops{0};    // futex word

// A process that sends one value after the other puts one aside for each: nobody is woken, nor takes the GIL, more
// often than this.
constexpr uint64_t kPauseNs = 1'000'000;

void put_aside(const Kept* one) noexcept {
  auto* node = const_cast<Kept*>(one);
  Kept* first = aside.load(std::memory_order_relaxed);
  do node->next = first;
  while (!aside.compare_exchange_weak(first, node, std::memory_order_release, std::memory_order_relaxed));
  // Sequentially consistent, as there: who is about to sleep sees the change, or is seen here.
  changes.fetch_add(1, std::memory_order_seq_cst);
  if (wanted.load(std::memory_order_seq_cst) != 0) futex_wake_all(&changes);
}

}  // namespace

std::shared_ptr<const void> kept(nb::object object) {
  auto* made = new Kept{object.release().ptr()};
  return std::shared_ptr<const Kept>(made, put_aside);  // which is called if this has no memory, too
}

nb::list no_longer_kept() {
  nb::list found;
  Kept* node = aside.exchange(nullptr, std::memory_order_acquire);
  while (node != nullptr) {
    std::unique_ptr<Kept> one(node);
    node = node->next;
    found.append(nb::steal(one->object));
  }
  return found;
}

bool wait_for_no_longer_kept() {
  const uint32_t stopped = stops.load(std::memory_order_seq_cst);
  thread_local uint64_t last_ns = 0;  // when it last returned
  const uint64_t now = now_ns();
  if (now - last_ns < kPauseNs) {
    const timespec pause = to_timespec(last_ns + kPauseNs - now);
    futex_wait(&stops, stopped, &pause);
  }
  for (;;) {
    wanted.store(1, std::memory_order_seq_cst);
    const uint32_t seen = changes.load(std::memory_order_seq_cst);
    const bool some = aside.load(std::memory_order_seq_cst) != nullptr;
    if (some || stops.load(std::memory_order_seq_cst) != stopped) {
      wanted.store(0, std::memory_order_seq_cst);
      last_ns = now_ns();
      return some;
    }
    futex_wait(&changes, seen, nullptr);
  }
}

void stop_waiting_for_no_longer_kept() {
  stops.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(&stops);
  changes.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(&changes);
}

}  // namespace conveyor
