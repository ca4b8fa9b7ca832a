// The processes of other hosts, as this host's have them: slots of its process table whose doorbells are the pump's. All doorbells of a
// pump share one eventfd. The pump's thread holds the liveness futexes, so where its process dies, all of them have.
#pragma once

#include <sys/eventfd.h>

#include <bit>
#include <memory>
#include <vector>

#include "../arena/arena.h"

namespace conveyor::net {

struct Proxy {
  uint32_t slot;
  uint32_t incarnation;
  uint32_t host;
  std::shared_ptr<Arena> arena;  // where what the process sends comes to lie here
  Doorbell* doorbell;
  uint32_t seen;
};

class Proxies {
 public:
  explicit Proxies(std::shared_ptr<ProcessTable> process_table) : process_table_(std::move(process_table)), event_(own(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK))) {
    if (event_.get() < 0) throw_errno("eventfd");
  }
  int eventfd() const { return event_.get(); }

  // In the pump's thread, as all that follows.
  void add(uint32_t slot, uint32_t incarnation, uint32_t host, const std::string& name, std::shared_ptr<Arena> arena) {
    if (slot >= process_table_->slots() || find(slot) != nullptr) throw std::system_error(EINVAL, std::generic_category(), "proxy");
    all_.reserve(all_.size() + 1);
    // The host that numbers the processes has prepared the slot before it was known where the process would be, and
    // may have sent to it: that would be lost, and its readers be taken for dead meanwhile.
    const ProcessTableSlot* const s = process_table_->slot(slot);
    if (s->incarnation.load(std::memory_order_relaxed) != incarnation || s->condition.load(std::memory_order_acquire) != Condition::kStarting)
      process_table_->prepare(slot, name, incarnation);
    process_table_->slot(slot)->is_remote.store(host + 1, std::memory_order_relaxed);
    process_table_->set_eventfd(slot, event_.get(), process_table_->slot(slot)->incarnation.load(std::memory_order_relaxed));
    process_table_->live(slot);
    Doorbell* const doorbell = &process_table_->slot(slot)->doorbell;
    all_.push_back({slot, process_table_->slot(slot)->incarnation.load(std::memory_order_relaxed), host, std::move(arena), doorbell, doorbell->count.load()});
  }
  // It is dead, if it was not before.
  void remove(uint32_t slot) {
    Proxy* const proxy = find(slot);
    if (proxy == nullptr) return;
    process_table_->announce_death(slot);
    ::pthread_mutex_unlock(&process_table_->slot(slot)->life);
    process_table_->forget_eventfd(slot);
    *proxy = std::move(all_.back());
    all_.pop_back();
  }
  Proxy* find(uint32_t slot) {
    for (Proxy& p : all_)
      if (p.slot == slot) return &p;
    return nullptr;
  }
  const Proxy* find(uint32_t slot) const { return const_cast<Proxies*>(this)->find(slot); }
  const std::vector<Proxy>& all() const { return all_; }

  bool moved() const {
    for (const Proxy& p : all_)
      if (p.doorbell->count.load(std::memory_order_seq_cst) != p.seen) return true;
    return false;
  }
  // Calls `take(proxy, bit)` for what was rung since. The count is read first: what was rung before it is found.
  template <class Take>
  bool take(const Take& take) {
    bool any = false;
    for (Proxy& p : all_) {
      const uint32_t count = p.doorbell->count.load(std::memory_order_seq_cst);
      if (count == p.seen) continue;
      p.seen = count;
      any = true;
      for (size_t i = 0; i < kDoorbellWords; ++i) {
        if (p.doorbell->ready[i].load(std::memory_order_relaxed) == 0) continue;
        for (uint64_t bits = p.doorbell->ready[i].exchange(0, std::memory_order_acquire); bits != 0; bits &= bits - 1)
          take(std::as_const(p), uint32_t(i * 64) + uint32_t(std::countr_zero(bits)));
      }
    }
    return any;
  }
  // Before the thread sleeps on the eventfd: true if it may. Dekker with ProcessTable::strike, for each doorbell: the flag, then
  // the count. Afterwards disarm(), which takes the event down.
  bool arm() {
    for (Proxy& p : all_) p.doorbell->armed.store(1, std::memory_order_seq_cst);
    return !moved();
  }
  void disarm() {
    for (Proxy& p : all_) p.doorbell->armed.store(0, std::memory_order_relaxed);
  }
  void drain() {
    uint64_t n;
    while (::read(event_.get(), &n, sizeof n) < 0 && errno == EINTR) {
    }
  }

 private:
  const std::shared_ptr<ProcessTable> process_table_;
  const Fd event_;
  std::vector<Proxy> all_;
};

}  // namespace conveyor::net
