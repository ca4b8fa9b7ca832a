// Results that were dropped before they came: who lets go of them when they are here.
//
// A window notes what was dropped, and discards it when it next looks at its rings. Until then such a frame
// keeps its memory, or the memory of others, so a window that has any enters itself here, and a thread of the
// process (runtime/process.py) has it look.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "waiter.h"

namespace conveyor {

// A window's place in the ring of those that have leftovers. Guarded by what guards the windows: the GIL.
struct Leftover {
  Leftover* previous = this;
  Leftover* next = this;

  bool entered() const { return next != this; }
  void leave() {
    previous->next = next;
    next->previous = previous;
    previous = next = this;
  }
};

// An error that somebody was to get, and nobody has. `more`: there was more to come from there.
struct Unseen {
  std::string error;
  bool more;
};

// The thread is idle while there are no leftovers; then nothing wakes it. The first one makes a sweep due,
// which waits a moment: more may come. What has not come by then is watched for on the process's doorbell, and
// the next ring makes a sweep due. So the thread wakes once in that moment at most, however much is dropped.
class Leftovers {
 public:
  Leftovers(std::shared_ptr<ProcessTable> process_table, uint32_t slot) : process_table_(std::move(process_table)), words_(process_table_->slot(slot)->leftovers), doorbell_(process_table_->slot(slot)->doorbell), waiter_(&doorbell_) {}

  // `one` has leftovers. `here()`: whether some may be in a ring already, so that the doorbell does not ring for
  // them; asked only where it matters, since looking takes the writer's cache line. Finalizers do this: it
  // cannot fail. With that lock, as begin() and end().
  template <class Here>
  void enter(Leftover& one, const Here& here) noexcept {
    if (!one.entered()) {
      one.previous = all_.previous;
      one.next = &all_;
      all_.previous->next = &one;
      all_.previous = &one;
    }
    make_due(here);
  }

  // The thread has something to say of which this knows nothing. As enter().
  void note_more() noexcept { make_due([] { return true; }); }
  // Nobody will get this error: the thread says so. More of them at a time than a log takes are forgotten. As enter().
  void note_unseen(std::string_view error, bool more) noexcept {
    constexpr size_t kMost = 64;
    if (unseen_.size() >= kMost) return;
    try {
      unseen_.push_back({std::string(error), more});
    } catch (const std::bad_alloc&) {  // nor is there memory to say it
      return;
    }
    note_more();
  }
  std::vector<Unseen> take_unseen() { return std::exchange(unseen_, {}); }

  // Sleep until a sweep is due, or somebody needs the memory (ProcessTable::ask_for_leftovers). False: stop. Without
  // that lock. `quiet_ns`: how long the thread waits for more.
  bool wait(uint64_t quiet_ns) {
    uint64_t due = 0;
    for (;;) {
      // Before it looks: who has news bumps the word afterwards.
      const uint32_t news = words_.count.load(std::memory_order_seq_cst);
      if (stop_.load(std::memory_order_seq_cst)) return false;
      const State state = state_.load(std::memory_order_seq_cst);
      if (state == State::kIdle) {
        futex_wait(&words_.count, news, nullptr);
        continue;
      }
      if (words_.pending(words_.requested.load(std::memory_order_seq_cst))) return true;
      if (state == State::kWatching) {
        waiter_.park(seen_, 0);
        State watching = State::kWatching;
        state_.compare_exchange_strong(watching, State::kDue, std::memory_order_seq_cst);
        continue;
      }
      const uint64_t now = now_ns();
      if (due == 0) due = now + quiet_ns;
      if (now >= due || process_table_->any_starving()) return true;
      const timespec left = to_timespec(due - now);
      futex_wait(&words_.count, news, &left);
    }
  }

  // A sweep: `begin` gives the windows to look at one by one, `end` says that they have looked.
  template <class Each>
  void begin(const Each& each) {
    request_id_ = words_.requested.load(std::memory_order_seq_cst);
    // Before the looks: what comes later notifies once more, and what is dropped from now on and is
    // here makes another sweep due.
    seen_ = waiter_.count();
    state_.store(State::kWatching, std::memory_order_seq_cst);
    for (Leftover* one = all_.next; one != &all_; one = one->next) each(*one);
  }
  void end() {
    State watching = State::kWatching;
    if (!all_.entered() && state_.compare_exchange_strong(watching, State::kIdle, std::memory_order_seq_cst)) {
      words_.wanted.store(0, std::memory_order_seq_cst);
      // Nothing is left, which is the answer to everybody who has found `wanted` up, and waits for one.
      request_id_ = words_.requested.load(std::memory_order_seq_cst);
    }
    if (!words_.pending(request_id_)) return;
    words_.answered.store(request_id_, std::memory_order_seq_cst);
    process_table_->header()->memory.note_given();
  }

  // The thread is to end.
  void stop() {
    stop_.store(true, std::memory_order_seq_cst);
    words_.wake();
    process_table_->stir(doorbell_);
  }

 private:
  enum class State : uint32_t { kIdle, kWatching, kDue };
  template <class Here>
  void make_due(const Here& here) noexcept {
    const State state = state_.load(std::memory_order_relaxed);
    if (state == State::kDue || (state == State::kWatching && !here())) return;
    words_.wanted.store(1, std::memory_order_seq_cst);
    state_.store(State::kDue, std::memory_order_seq_cst);
    words_.wake();
    if (state == State::kWatching) process_table_->stir(doorbell_);
  }
  std::shared_ptr<ProcessTable> process_table_;
  Returns& words_;
  Doorbell& doorbell_;
  Waiter waiter_;  // the thread's own: it neither spins nor learns
  Leftover all_;
  std::vector<Unseen> unseen_;
  std::atomic<State> state_{State::kIdle};
  std::atomic<bool> stop_{false};
  uint32_t seen_ = 0;    // the doorbell's count before the last sweep
  uint32_t request_id_ = 0;  // who had asked before it
};

}  // namespace conveyor
