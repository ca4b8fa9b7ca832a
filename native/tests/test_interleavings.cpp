// The bell and the ring under every schedule: the real code, compiled here with atomics and futexes
// that ask a scheduler who goes next. It searches, depth first, all schedules in which a thread that
// could go on is preempted at most a few times (Musuvathi and Qadeer, "Iterative context bounding",
// 2007): nearly all such bugs need two or three. A schedule in which everybody sleeps and somebody is
// not done is a lost wake-up.
//
// What this cannot see: effects of the memory order (all operations are sequentially consistent here).
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <unordered_map>
#include <vector>

#include "check.h"

namespace model {

struct Abandoned {};  // thrown in threads that are asleep when a schedule ends

// std::binary_semaphore of libstdc++ 12 can sleep for ever (GCC bug 104928).
class Semaphore {
 public:
  Semaphore() { ::sem_init(&semaphore_, 0, 0); }
  ~Semaphore() { ::sem_destroy(&semaphore_); }
  Semaphore(const Semaphore&) = delete;
  Semaphore& operator=(const Semaphore&) = delete;
  void release() { ::sem_post(&semaphore_); }
  void acquire() {
    while (::sem_wait(&semaphore_) != 0) {
    }
  }

 private:
  sem_t semaphore_;
};

class Explorer;
thread_local Explorer* explorer = nullptr;
thread_local int self = -1;

class Explorer {
 public:
  Explorer(int preemptions, std::vector<std::function<void()>> bodies) : preemptions_(preemptions), bodies_(std::move(bodies)), threads_(bodies_.size()) {
    // Handing over is cheapest on one core.
    cpu_set_t all, one;
    sched_getaffinity(0, sizeof all, &all);
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    sched_setaffinity(0, sizeof one, &one);
    for (size_t i = 0; i < threads_.size(); ++i) threads_[i].os = std::thread([this, i] { run(int(i)); });
    sched_setaffinity(0, sizeof all, &all);
  }
  ~Explorer() {
    quit_ = true;
    for (Thread& t : threads_) t.turn.release();
    for (Thread& t : threads_) t.os.join();
  }

  // Runs all schedules, `reset` before each and `judge` after each. False at the first one that hangs or
  // is judged wrong; then its steps are printed.
  bool explore(const std::function<void()>& reset, const std::function<bool()>& judge) {
    do {
      reset();
      steps_.clear();
      depth_ = 0;
      used_ = 0;
      stuck_ = false;
      for (Thread& t : threads_) t.state = State::kReady;
      const int first = choose(-1);
      threads_[size_t(first)].turn.release();
      over_.acquire();
      ++schedules_;
      if (stuck_ || !judge()) {
        std::fprintf(stderr, "\nschedule %zu %s:\n", schedules_, stuck_ ? "leaves somebody asleep" : "ends wrong");
        for (const Step& s : steps_) std::fprintf(stderr, "  thread %d: %s %s\n", s.thread, s.what, label ? label(s.word).c_str() : "");
        return false;
      }
    } while (next_schedule());
    return true;
  }
  size_t schedules() const { return schedules_; }

  // What a word is called in the steps.
  std::function<std::string(const void*)> label;

  // Called before every operation on shared memory.
  void step(const char* what, const void* word) {
    hand_over(choose(self));
    steps_.push_back({self, what, word});
    if (steps_.size() > 5000) throw std::runtime_error("a schedule has no end");
  }
  void sleep_on(const void* word, bool timed) {
    Thread& me = threads_[size_t(self)];
    me.state = timed ? State::kTimed : State::kAsleep;
    me.word = word;
    hand_over(choose(self));
  }
  void wake(const void* word) {
    for (Thread& t : threads_)
      if (asleep(t) && t.word == word) t.state = State::kReady;
  }

 private:
  enum class State { kReady, kAsleep, kTimed, kDone };
  struct Thread {
    std::thread os;
    Semaphore turn;
    State state = State::kReady;
    const void* word = nullptr;
  };
  struct Choice {
    std::vector<int> options;  // the first one preempts nobody
    size_t taken;
    int used;                  // preemptions before it
    bool costs;                // whether the others preempt
  };

  struct Step {
    int thread;
    const char* what;
    const void* word;
  };

  static bool asleep(const Thread& t) { return t.state == State::kAsleep || t.state == State::kTimed; }

  // Who goes next, when `current` (-1: nobody) is about to do something. -1: nobody can.
  int choose(int current) {
    if (depth_ == choices_.size()) {
      Choice c{{}, 0, used_, false};
      if (current >= 0 && threads_[size_t(current)].state == State::kReady) {
        c.options.push_back(current);
        c.costs = true;
      }
      if (!c.costs || used_ < preemptions_)
        for (size_t i = 0; i < threads_.size(); ++i)
          if (int(i) != current && threads_[i].state == State::kReady) c.options.push_back(int(i));
      if (c.options.empty())  // time passes only when nobody has anything to do
        for (size_t i = 0; i < threads_.size(); ++i)
          if (threads_[i].state == State::kTimed) c.options.push_back(int(i));
      if (c.options.empty()) return -1;
      choices_.push_back(std::move(c));
    }
    const Choice& c = choices_[depth_++];
    if (c.costs && c.taken != 0) ++used_;
    const int next = c.options[c.taken];
    threads_[size_t(next)].state = State::kReady;
    return next;
  }

  bool next_schedule() {
    while (!choices_.empty() && choices_.back().taken + 1 == choices_.back().options.size()) choices_.pop_back();
    if (choices_.empty()) return false;
    ++choices_.back().taken;
    return true;
  }

  void hand_over(int next) {
    if (next == self) return;
    if (next < 0) end();
    // From here on the other one has the turn, and everything that goes with it.
    threads_[size_t(next)].turn.release();
    threads_[size_t(self)].turn.acquire();
    if (stuck_) throw Abandoned{};
  }

  // Nobody can go on: abandons all that are asleep, one after the other, this one last.
  void end() {
    stuck_ = true;
    ended_by_ = self;
    for (Thread& t : threads_)
      if (asleep(t) && &t != &threads_[size_t(self)]) {
        t.turn.release();
        left_.acquire();
      }
    throw Abandoned{};
  }

  void run(int number) {
    self = number;
    explorer = this;
    Thread& me = threads_[size_t(number)];
    for (;;) {
      me.turn.acquire();
      if (quit_) return;
      Semaphore* next = &over_;
      try {
        bodies_[size_t(number)]();
        me.state = State::kDone;
        if (!std::all_of(threads_.begin(), threads_.end(), [](Thread& t) { return t.state == State::kDone; })) {
          const int other = choose(number);
          if (other < 0) end();
          next = &threads_[size_t(other)].turn;
        }
      } catch (const Abandoned&) {
        if (ended_by_ != number) next = &left_;
      }
      next->release();
    }
  }

  const int preemptions_;
  std::vector<std::function<void()>> bodies_;
  std::vector<Thread> threads_;
  std::vector<Choice> choices_;
  size_t depth_ = 0;
  int used_ = 0;
  size_t schedules_ = 0;
  std::vector<Step> steps_;
  bool stuck_ = false, quit_ = false;
  int ended_by_ = -1;
  Semaphore over_;
  Semaphore left_;
};

inline void step(const char* what, const void* word) {
  if (explorer != nullptr) explorer->step(what, word);
}

template <class T>
class Atomic {
 public:
  Atomic() = default;
  constexpr Atomic(T value) : value_(value) {}
  Atomic(const Atomic&) = delete;
  T load(std::memory_order = std::memory_order_seq_cst) const { return step("load", this), value_; }
  void store(T value, std::memory_order = std::memory_order_seq_cst) { step("store", this), value_ = value; }
  T exchange(T value, std::memory_order = std::memory_order_seq_cst) { return step("exchange", this), std::exchange(value_, value); }
  T fetch_add(T n, std::memory_order = std::memory_order_seq_cst) { return step("fetch_add", this), std::exchange(value_, T(value_ + n)); }
  T fetch_sub(T n, std::memory_order = std::memory_order_seq_cst) { return step("fetch_sub", this), std::exchange(value_, T(value_ - n)); }
  bool compare_exchange_strong(T& expected, T wanted, std::memory_order = std::memory_order_seq_cst,
                               std::memory_order = std::memory_order_seq_cst) {
    step("compare_exchange", this);
    if (value_ == expected) return value_ = wanted, true;
    return expected = value_, false;
  }
  T fetch_or(T bits, std::memory_order = std::memory_order_seq_cst) { return step("fetch_or", this), std::exchange(value_, T(value_ | bits)); }

 private:
  T value_;
};

template <class... A>
long system_call(long number, A... arguments) {
  const uintptr_t a[] = {(uintptr_t)arguments...};
  if (explorer == nullptr || number != SYS_futex) return ::syscall(number, arguments...);
  const auto* word = reinterpret_cast<const uint32_t*>(a[0]);
  if (a[1] == FUTEX_WAKE) {
    explorer->step("futex wake", word);
    explorer->wake(word);
    return 0;
  }
  explorer->step("futex wait", word);
  if (*word != uint32_t(a[2])) return errno = EAGAIN, -1;
  explorer->sleep_on(word, a[3] != 0);
  return 0;
}

// An eventfd that a thread of the model sleeps on is the word `&events`.
inline int events = 0;
inline ssize_t write_event(int fd, const void* data, size_t size) {
  if (explorer != nullptr) {
    ++events;
    explorer->wake(&events);
  }
  return ::write(fd, data, size);
}

}  // namespace model

namespace std {
template <class T>
using model_atomic = model::Atomic<T>;
}
#define atomic model_atomic
#define syscall model::system_call
#define write model::write_event
// `::write(...)` becomes `::model::write_event(...)`.
#include "ring.h"
#include "waiter.h"

#include "board.cpp"
#undef atomic
#undef syscall
#undef write

using namespace conveyor;

namespace {

// What a reader does with its bell: take the bits in `wanted`, sleeping while there are none.
void take_bits(Bell& bell, uint64_t wanted) {
  Waiter waiter(&bell);
  for (;;) {
    const uint32_t seen = waiter.count();
    wanted &= ~bell.ready[0].exchange(0);
    if (wanted == 0) return;
    waiter.park(seen, 0);
  }
}

// What is waited for where several wait on one bell.
model::Atomic<int> published{0};

void publish(Board& board, uint32_t bit) {
  published.fetch_add(1);
  board.ring(0, bit);
}

void wait_for(Bell& bell, int enough) {
  Waiter waiter(&bell);
  for (;;) {
    const uint32_t seen = waiter.count();
    if (published.load() >= enough) return;
    waiter.park(seen, 0);
  }
}

// The same asleep in a poll on the eventfd (Inbox::park_main).
void poll_for(Bell& bell, int enough) {
  Waiter waiter(&bell);
  for (;;) {
    const uint32_t seen = waiter.count();
    if (published.load() >= enough) return;
    if (!waiter.arm_event(seen)) continue;
    model::step("poll", &model::events);
    if (model::events == 0) model::explorer->sleep_on(&model::events, false);
    model::events = 0;
  }
}

struct Bells {
  std::shared_ptr<Board> board = Board::create(4);
  explicit Bells() { reset(); }
  void reset() {
    for (uint32_t i = 0; i < 4; ++i) {
      board->prepare(i, "");
      board->slot(i)->condition.store(Condition::kAlive);
    }
    model::events = 0;
    published.store(0);
  }
  Bell& bell(uint32_t i) { return board->slot(i)->bell; }
};

// Names for the words of a board, and of what else is shared.
std::string label_of(const Board& board, const void* word) {
  const auto* at = static_cast<const char*>(word);
  for (uint32_t i = 0; i < 4; ++i) {
    BoardSlot* slot = board.slot(i);
    const Bell& bell = slot->bell;
    const std::string of = " of slot " + std::to_string(i);
    if (word == &bell.count) return "count" + of;
    if (word == &bell.sleepers) return "sleepers" + of;
    if (word == &bell.armed) return "armed" + of;
    if (word == &slot->condition) return "condition" + of;
    if (at >= reinterpret_cast<const char*>(bell.ready) && at < reinterpret_cast<const char*>(&bell + 1)) return "ready" + of;
    if (at >= reinterpret_cast<const char*>(slot) && at < reinterpret_cast<const char*>(slot + 1)) return "something" + of;
  }
  if (word == &published) return "published";
  if (word == &model::events) return "eventfd";
  return "something in the ring";
}

void explore(const Bells& b, int preemptions, size_t at_least, std::vector<std::function<void()>> bodies, const std::function<void()>& reset, const std::function<bool()>& judge = [] { return true; }) {
  model::Explorer explorer(preemptions, std::move(bodies));
  explorer.label = [&](const void* word) { return label_of(*b.board, word); };
  CHECK(explorer.explore(reset, judge));
  CHECK(explorer.schedules() >= at_least || check::failures() != 0);
  std::printf("[%zu schedules] ", explorer.schedules());
}

// ThreadSanitizer sees nothing here that it does not see elsewhere.
constexpr int kMore = check::kThreadSanitizer ? 0 : 1;  // preemptions

}  // namespace

// The harness itself: it must find a lost wake-up where there is one.
TEST(a_bell_that_looks_before_it_counts_is_caught) {
  Bells b;
  Bell& bell = b.bell(0);
  model::Explorer explorer(2, {[&] { wait_for(bell, 1); },
                               [&] {
                                 published.store(1);
                                 const bool wake = bell.sleepers.load() != 0;  // the two lines of Board::ring in
                                 bell.count.fetch_add(1);                    // the wrong order
                                 if (wake) model::system_call(SYS_futex, &bell.count, FUTEX_WAKE, 1);
                               }});
  std::fflush(stderr);
  const int saved = ::dup(2);
  const int null = ::open("/dev/null", O_WRONLY);
  ::dup2(null, 2);
  CHECK(!explorer.explore([&] { b.reset(); }, [] { return true; }));
  ::dup2(saved, 2);
  ::close(saved);
  ::close(null);
}

TEST(one_ringer_one_sleeper) {
  Bells b;
  explore(b, 3 + kMore, 100, {[&] { take_bits(b.bell(0), 6); }, [&] { b.board->ring(0, 1), b.board->ring(0, 2); }}, [&] { b.reset(); });
}

TEST(two_ringers_one_sleeper) {
  Bells b;
  explore(b, 2 + kMore, 100, {[&] { take_bits(b.bell(0), 14); }, [&] { b.board->ring(0, 1); }, [&] { b.board->ring(0, 2), b.board->ring(0, 3); }}, [&] { b.reset(); });
}

TEST(one_ringer_two_sleepers) {
  Bells b;
  explore(b, 1 + kMore, 100, {[&] { wait_for(b.bell(0), 2); }, [&] { wait_for(b.bell(0), 2); }, [&] { publish(*b.board, 1), publish(*b.board, 1); }}, [&] { b.reset(); });
}

TEST(a_sleeper_in_the_futex_and_one_in_poll) {
  Bells b;
  const int event = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  b.board->set_eventfd(0, event);
  explore(b, 1 + kMore, 100, {[&] { wait_for(b.bell(0), 2); }, [&] { poll_for(b.bell(0), 2); }, [&] { publish(*b.board, 1), publish(*b.board, 1); }}, [&] { b.reset(); });
  ::close(event);
}

TEST(a_deadline_ends_a_sleep_in_vain) {
  Bells b;
  bool moved = true;
  explore(b, 2, 1, {[&] { moved = Waiter(&b.bell(0)).park(0, now_ns() + 1); }}, [&] { b.reset(); }, [&] { return !moved; });
}

namespace {

struct Pipe {
  Bells bells;
  std::shared_ptr<Segment> segment = Segment::create(1 << 16);
  RingHeader* header;
  std::unique_ptr<RingWriter> writer;
  std::vector<std::unique_ptr<RingReader>> readers;
  std::vector<uint64_t> received;

  Pipe(uint32_t slots, uint32_t count) : header(segment->make_ring(0, slots, 64, count, kWriterMayWait)), received(count) {}
  void reset() {
    bells.reset();
    header->head.store(0);
    header->writer_waits.store(0);
    std::vector<Target> targets;
    readers.clear();
    for (uint32_t r = 0; r < header->readers; ++r) {
      header->cursors()[r].next.store(0);
      header->cursors()[r].closed.store(0);
      readers.push_back(std::make_unique<RingReader>(segment, 0, r, bells.board, Target{0, 1}));
      targets.push_back({r + 1, 1});
      received[r] = 0;
    }
    writer = std::make_unique<RingWriter>(segment, 0, bells.board, targets);
  }

  void write(uint64_t frames) {
    Waiter waiter(&bells.bell(0));
    for (uint64_t n = 0; n < frames; ++n) {
      for (;;) {
        if (writer->has_room()) break;
        const uint32_t seen = waiter.count();
        writer->wants_room();
        if (writer->has_room()) break;
        waiter.park(seen, 0);
      }
      writer->next_slot()->tag = n;
      writer->publish();
    }
  }
  void read(uint32_t r, uint64_t frames) {
    Waiter waiter(&bells.bell(r + 1));
    while (received[r] < frames) {
      const uint32_t seen = waiter.count();
      if (readers[r]->empty()) {
        waiter.park(seen, 0);
        continue;
      }
      if (readers[r]->front()->tag != received[r]) throw std::runtime_error("a frame was overwritten");
      ++received[r];
      readers[r]->advance();
    }
  }
};

}  // namespace

TEST(a_full_ring_wakes_its_writer) {
  Pipe p(1, 1);
  explore(p.bells, 1 + kMore, 50, {[&] { p.write(3); }, [&] { p.read(0, 3); }}, [&] { p.reset(); }, [&] { return p.received[0] == 3; });
}

TEST(the_slower_of_two_readers_holds_the_writer) {
  Pipe p(1, 2);
  explore(p.bells, 1, 50, {[&] { p.write(2); }, [&] { p.read(0, 2); }, [&] { p.read(1, 2); }}, [&] { p.reset(); }, [&] { return p.received[0] == 2 && p.received[1] == 2; });
}

TEST(a_reader_that_closes_frees_its_writer) {
  Pipe p(1, 1);
  explore(p.bells, 2 + kMore, 50, {[&] { p.write(2); }, [&] { p.readers[0]->close(); }}, [&] { p.reset(); });
}

TEST(a_reader_that_dies_frees_its_writer) {
  Pipe p(1, 1);
  explore(p.bells, 2 + kMore, 50, {[&] { p.write(2); }, [&] { p.bells.board->announce_death(1); }}, [&] { p.reset(); });
}

TEST(a_reader_that_dies_leaves_the_other_one_its_frames) {
  Pipe p(1, 2);
  explore(p.bells, 1, 50, {[&] { p.write(2); }, [&] { p.read(0, 2); }, [&] { p.bells.board->announce_death(2); }}, [&] { p.reset(); }, [&] { return p.received[0] == 2; });
}
