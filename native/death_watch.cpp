#include "death_watch.h"

#include <unistd.h>

#include <algorithm>
#include <array>

#ifndef SYS_futex_waitv
#define SYS_futex_waitv 449
#endif

namespace conveyor {

namespace {

struct WaitEntry {  // struct futex_waitv, which older headers lack
  uint64_t value;
  uint64_t address;
  uint32_t flags;
  uint32_t reserved;
};
constexpr uint32_t kSize32 = 2;
constexpr size_t kMaxWait = 128;

long futex_waitv(WaitEntry* entries, unsigned n) {
  return syscall(SYS_futex_waitv, entries, n, 0, nullptr, CLOCK_MONOTONIC);
}

}  // namespace

bool DeathWatch::supported() {
  // A kernel that has it says that nothing to wait for makes no sense. An older one does not know it, and
  // where system calls are filtered (containers of older runtimes) the answer may be any error.
  return futex_waitv(nullptr, 0) < 0 && errno == EINVAL;
}

DeathWatch::DeathWatch(std::shared_ptr<ProcessTable> process_table, int eventfd) : process_table_(std::move(process_table)), eventfd_(eventfd) {
  const SignalsBlocked blocked;
  thread_ = std::thread([this] { run(); });
}

DeathWatch::~DeathWatch() { stop(); }

void DeathWatch::stop() {
  if (!thread_.joinable()) return;
  if (fork_ != fork_generation.load(std::memory_order_relaxed)) {
    // In a forked child the thread does not exist: it can be neither joined nor detached.
    abandon(std::move(thread_));
    return;
  }
  stop_.store(true, std::memory_order_release);
  process_table_->header()->alarm.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(&process_table_->header()->alarm);
  thread_.join();
}

void DeathWatch::add(uint32_t slot) {
  {
    std::lock_guard lock(mutex_);
    watched_.push_back(slot);
  }
  process_table_->header()->alarm.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(&process_table_->header()->alarm);
}

void DeathWatch::remove(uint32_t slot) {
  std::lock_guard lock(mutex_);
  std::erase(watched_, slot);
}

void DeathWatch::run() {
  const bool many = supported();
  // Not on the heap: where that has no memory this thread would end the process.
  std::array<WaitEntry, kMaxWait> entries;
  size_t count = 0;
  auto watch = [&](std::atomic<uint32_t>* word, uint32_t value) {
    entries[count++] = {value, reinterpret_cast<uint64_t>(word), kSize32, 0};
  };
  for (;;) {
    // Read before looking at anything: whoever changes something bumps it afterwards.
    const uint32_t alarm = process_table_->header()->alarm.load(std::memory_order_seq_cst);
    if (stop_.load(std::memory_order_acquire)) return;
    count = 0;
    bool fired = false;
    watch(&process_table_->header()->alarm, alarm);
    {
      // Held for the whole look: after `remove` nothing is said of a slot, and one that is announced
      // dead is off the list before anybody can put its next process on it.
      std::lock_guard lock(mutex_);
      std::erase_if(watched_, [&](uint32_t index) {
        ProcessTableSlot* slot = process_table_->slot(index);
        if (slot->nudge.exchange(0, std::memory_order_seq_cst) != 0) process_table_->nudge(index);
        const Condition condition = slot->condition.load(std::memory_order_acquire);
        bool dead = condition == Condition::kDying;
        std::atomic<uint32_t>* word = liveness_futex(slot);
        uint32_t value = word->load(std::memory_order_acquire);
        // One that has taken its liveness futex is watched even before it says that it is alive.
        if (condition == Condition::kAlive || (condition == Condition::kStarting && value != 0)) {
          // Owned: raise the waiters flag, as a contending locker would, so that the kernel wakes us.
          while ((value & FUTEX_TID_MASK) != 0 && (value & (FUTEX_OWNER_DIED | FUTEX_WAITERS)) == 0)
            if (word->compare_exchange_weak(value, value | FUTEX_WAITERS, std::memory_order_acq_rel)) value |= FUTEX_WAITERS;
          dead = (value & FUTEX_OWNER_DIED) || (value & FUTEX_TID_MASK) == 0;
          fired |= dead;
          if (!dead && many && count < kMaxWait) watch(word, value);
        }
        if (dead) process_table_->announce_death(index);
        return dead;
      });
    }
    if (fired && eventfd_ >= 0) write_event(eventfd_);
    // One of the words has moved (EAGAIN), or a wake-up without a reason: look again. Anything else says that
    // the kernel does not wait, and would say so at once every time; then the alarm alone has to do.
    const bool waited = many && (futex_waitv(entries.data(), unsigned(count)) >= 0 || errno == EAGAIN || errno == EINTR);
    if (!waited) futex_wait(&process_table_->header()->alarm, alarm, nullptr);
  }
}

}  // namespace conveyor
