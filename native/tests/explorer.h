// Runs threads under every schedule. The code under test is compiled with atomics, mutexes, futexes and
// eventfds (modelled.h) that come here before every operation on something shared, to ask who goes next.
//
// Two searches, both depth first, both over the real code from the start each time:
// - `all`: every interleaving, each once up to the order of operations that commute (sleep sets:
//   Godefroid, "Partial-Order Methods for the Verification of Concurrent Systems", 1996). Two operations
//   commute if they are on different words or both only read. A body that touches plain shared memory
//   must say so with a `step` of its own.
// - `bounded`: every schedule in which a thread that could go on is preempted at most a few times
//   (Musuvathi and Qadeer, "Iterative context bounding", 2007): nearly all bugs need two or three.
// A schedule in which everybody sleeps and somebody is not done is a lost wake-up. Time passes only when
// nobody can do anything.
//
// Some bodies may stop for ever (`may_stop`): SIGSTOP, a debugger, a core that others use up. One that is
// stopped is one that is never chosen again; so wherever nobody but such bodies could go on, the schedule
// may also end there, and all others must be done. That is every point at which each of them, and any
// number of them together, can stop.
//
// A body may kill others between any two of their steps (`kill`), which take no more of them: a process that dies. Nothing
// is thrown in them, and nothing of theirs is destroyed. What is left in their store buffers is lost, as if they had died
// before those stores; the search drains them before the kill as well, so all that can be left behind is seen.
//
// That a property can fail is shown with a `Fault`: one operation left out, or done late, in the real code.
//
// With `buffers` the threads have x86's memory (TSO: Owens, Sarkar and Sewell, "A Better x86 Memory Model", 2009): a
// relaxed or release store goes into a buffer of its thread's, which sees its own stores there. A buffer drains first in,
// first out, and each drain is a step that the search places. A sequentially consistent store, a read-modify-write, a
// lock and a system call go on only when their thread's buffer is empty.
//
// Not modelled: reordering of loads, or of stores with each other, as on ARM; nor plain stores, which happen at once.
#pragma once

#include <sched.h>
#include <semaphore.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "check.h"

namespace model {

struct Abandoned {};                        // thrown in threads that are asleep when a schedule ends
struct Wrong { std::string what; };         // thrown by a body that has seen what must not be

// An operation of the code under test that is not done, or only after the next `kLateBy` of its thread (or
// before it sleeps). kRelaxed: a sequentially consistent store that is a relaxed one; with `buffers`.
constexpr int kLateBy = 4;
struct Fault {
  enum How { kNone, kOmitted, kLate, kRelaxed } how = kNone;
  const char* what = "";
  const void* word = nullptr;
};

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
inline thread_local Explorer* explorer = nullptr;
inline thread_local int self = -1;

constexpr int kAll = -1;  // as the number of preemptions: no bound

class Explorer {
 public:
  // The last `daemons` bodies need not end.
  Explorer(int preemptions, std::vector<std::function<void()>> bodies, size_t daemons = 0)
      : preemptions_(preemptions), bodies_(std::move(bodies)), daemons_(daemons), threads_(bodies_.size()) {
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
  // is judged wrong; then its steps are printed (or not, if `quiet`).
  bool explore(const std::function<void()>& reset, const std::function<bool()>& judge, bool quiet = false) {
    judge_ = &judge;
    do {
      now = 1;
      reset();
      if (aliases) aliases_ = aliases();
      steps_.clear();
      choices_taken_ = 0;
      used_ = 0;
      sleep_ = 0;
      abandoned_ = pruned_ = false;
      failure_.clear();
      last_ = -1;
      drained_ = 0;
      for (Thread& t : threads_) t.state = State::kReady, t.local = true, t.late = nullptr, t.fences = false, t.buffer.clear();
      threads_[size_t(choose())].turn.release();
      over_.acquire();
      ++(pruned_ ? redundant_ : schedules_);
      if (!failure_.empty()) {
        if (quiet) return false;
        std::fprintf(stderr, "\nschedule %zu %s:\n", schedules_, failure_.c_str());
        for (const Step& s : steps_) std::fprintf(stderr, "  thread %d: %s %s\n", s.thread, s.what, label ? label(s.word).c_str() : "");
        return false;
      }
    } while (next_schedule());
    return true;
  }
  size_t schedules() const { return schedules_; }

  // Bodies that may stop for ever, one bit each.
  uint64_t may_stop = 0;
  // Whether stores that are not sequentially consistent are buffered.
  bool buffers = false;
  // What a word is called in the steps.
  std::function<std::string(const void*)> label;
  Fault fault;
  uint64_t now = 1;  // of the clock: it moves at every look
  // Memory that is mapped twice: its words at `at` are those at `is`. Asked for after each reset.
  struct Alias {
    const void* at;
    size_t size;
    const void* is;
  };
  std::function<std::vector<Alias>()> aliases;

  // Called before every operation on shared memory. `writes`: it does not commute with a read. `fences`: it waits until
  // the thread's buffer is empty.
  void step(const char* what, const void* word, bool writes, bool fences = true) {
    if (abandoned_) {
      if (++drained_ > 100'000) std::fprintf(stderr, "a thread that was left alone does not end\n"), std::abort();
      return;
    }
    Thread& me = threads_[size_t(self)];
    me.what = what;
    me.word = word = same(word);
    me.writes = writes;
    me.fences = fences;
    me.local = false;
    hand_over(choose());
    if (abandoned_) return;
    if (me.late && me.age++ >= kLateBy) std::exchange(me.late, nullptr)();
    steps_.push_back({self, what, word});
    if (steps_.size() > 5000) failure_ = "has no end", end();
  }
  // Whether a store of this order to `word` is buffered.
  bool buffered(const void* word, bool sequentially_consistent) const {
    if (!buffers || abandoned_) return false;
    return !sequentially_consistent || (fault.how == Fault::kRelaxed && same(word) == same(fault.word));
  }
  void buffer(void* at, const void* value, size_t size) {
    Store store{at, same(at), size, {}};
    std::memcpy(store.value, value, size);
    threads_[size_t(self)].buffer.push_back(store);
  }
  // The last value that this thread has in its buffer for `word`, or null.
  const void* own(const void* word) const {
    if (!buffers || abandoned_) return nullptr;
    word = same(word);
    const std::deque<Store>& buffer = threads_[size_t(self)].buffer;
    for (auto at = buffer.rbegin(); at != buffer.rend(); ++at)
      if (at->word == word) return at->value;
    return nullptr;
  }
  // `word` is destroyed.
  void forget(const void* word) {
    for (Thread& t : threads_) std::erase_if(t.buffer, [&](const Store& store) { return store.at == word; });
  }
  // True if the operation must be done; if it is to be done late, it has been kept for then.
  template <class Operation>
  bool does(const char* what, const void* word, Operation&& operation) {
    if (fault.how == Fault::kNone || fault.how == Fault::kRelaxed || same(word) != same(fault.word) || std::strcmp(what, fault.what) != 0) return true;
    if (fault.how == Fault::kLate && !abandoned_) {
      threads_[size_t(self)].late = std::forward<Operation>(operation);
      threads_[size_t(self)].age = 0;
    }
    return false;
  }
  void sleep_on(std::vector<const void*> words, bool timed) {
    if (!doze(std::move(words), timed)) throw Abandoned{};
  }
  // The same where nothing may be thrown: false if the schedule has ended.
  bool doze(std::vector<const void*> words, bool timed = false) {
    if (abandoned_) return false;
    Thread& me = threads_[size_t(self)];
    if (me.late) std::exchange(me.late, nullptr)();
    me.state = timed ? State::kTimed : State::kAsleep;
    for (const void*& word : words) word = same(word);
    me.words = std::move(words);
    hand_over(choose());
    return !abandoned_;
  }
  void wake(const void* word) {
    word = same(word);
    for (Thread& t : threads_)
      if (asleep(t) && std::find(t.words.begin(), t.words.end(), word) != t.words.end()) t.state = State::kReady, t.local = true;
  }
  bool abandoned() const { return abandoned_; }
  // The bodies in `victims`, one bit each, take no more steps: a process dies, with all of its threads. Who announces it
  // comes behind.
  void kill(uint64_t victims) {
    threads_[size_t(self)].victims = victims;
    step("kill", this, true);
    threads_[size_t(self)].victims = 0;
    if (abandoned_) return;
    for (size_t i = 0; i < threads_.size(); ++i) {
      if ((victims >> i & 1) == 0) continue;
      threads_[i].buffer.clear();
      if (threads_[i].state != State::kDone) threads_[i].state = State::kKilled;
    }
  }

 private:
  enum class State { kReady, kAsleep, kTimed, kDone, kKilled };
  static constexpr int kNobody = -1, kRedundant = -2, kStopped = -3;
  struct Store {
    void* at;
    const void* word;
    size_t size;
    char value[8];
  };
  struct Thread {
    std::thread os;
    Semaphore turn;
    State state = State::kReady;
    bool local = true;  // what it does next is not shared: started, or woken up
    const char* what = "";
    const void* word = nullptr;
    bool writes = false;
    bool fences = false;
    uint64_t victims = 0;      // of what it does next: kill
    std::deque<Store> buffer;  // the oldest first
    std::vector<const void*> words;  // that it sleeps on
    std::function<void()> late;
    int age = 0;
  };
  struct Choice {
    std::vector<int> options;  // the first one preempts nobody
    size_t taken;
    int used;        // preemptions before it
    bool costs;      // whether the others preempt
    uint64_t sleep;  // threads whose next operation has been tried before something that commutes with it
  };
  struct Step {
    int thread;
    const char* what;
    const void* word;
  };

  const void* same(const void* word) const {
    for (const Alias& a : aliases_) {
      const ptrdiff_t offset = static_cast<const char*>(word) - static_cast<const char*>(a.at);
      if (offset >= 0 && size_t(offset) < a.size) return static_cast<const char*>(a.is) + offset;
    }
    return word;
  }
  static bool asleep(const Thread& t) { return t.state == State::kAsleep || t.state == State::kTimed; }
  // A choice is a thread, or above their number a thread whose oldest store drains. That commutes with the thread's own
  // next operation: a load finds the value in either place, and what fences cannot go on before. A kill commutes with
  // nothing that its victims do.
  int count() const { return int(threads_.size()); }
  bool kills(int a, int b) const { return a < count() && (threads_[size_t(a)].victims >> (b % count()) & 1) != 0; }
  bool commute(int a, int b) const {
    if (a % count() == b % count()) return true;
    if (kills(a, b) || kills(b, a)) return false;
    const auto word = [&](int i) { return i < count() ? threads_[size_t(i)].word : threads_[size_t(i - count())].buffer.front().word; };
    const auto writes = [&](int i) { return i >= count() || threads_[size_t(i)].writes; };
    return word(a) != word(b) || (!writes(a) && !writes(b));
  }
  // How thread `i`, which is ready, goes on.
  int move(int i) const {
    const Thread& t = threads_[size_t(i)];
    return t.fences && !t.buffer.empty() ? i + count() : i;
  }
  void drain(int i) {
    std::deque<Store>& buffer = threads_[size_t(i)].buffer;
    std::memcpy(buffer.front().at, buffer.front().value, buffer.front().size);
    steps_.push_back({i, "drain", buffer.front().word});
    buffer.pop_front();
  }

  // Who goes next, or kNobody, or kRedundant: all that could happen now has been seen elsewhere, or
  // kStopped: whoever could go on never does.
  int choose() {
    for (;;) {
      const int next = pick();
      if (next < count()) return next;
      drain(next - count());
    }
  }
  int pick() {
    for (size_t i = 0; i < threads_.size(); ++i)
      if (threads_[i].state == State::kReady && threads_[i].local) return int(i);  // commutes with everything
    if (choices_taken_ == choices_.size()) {
      Choice c{{}, 0, used_, false, sleep_};
      bool redundant = false;
      auto add = [&](int i) {
        if (sleep_ >> i & 1)
          redundant = true;
        else
          c.options.push_back(i);
      };
      if (last_ >= 0 && threads_[size_t(last_)].state == State::kReady) {
        add(move(last_));
        c.costs = preemptions_ != kAll;
      }
      if (!c.costs || used_ < preemptions_)
        for (int i = 0; i < count(); ++i) {
          const bool ready = threads_[size_t(i)].state == State::kReady;
          if (ready && i != last_) add(move(i));
          if (!threads_[size_t(i)].buffer.empty() && !(ready && move(i) != i)) add(i + count());
        }
      // Also where all of them need not be tried here: this state has to be looked at once, and may be seen
      // no other time.
      if (only_those_are_ready_that_may_stop()) c.options.push_back(kStopped);
      if (c.options.empty() && redundant) return kRedundant;
      if (c.options.empty())
        for (size_t i = 0; i < threads_.size(); ++i)
          if (threads_[i].state == State::kTimed) c.options.push_back(int(i));
      if (c.options.empty()) return kNobody;
      choices_.push_back(std::move(c));
    }
    const Choice& c = choices_[choices_taken_++];
    used_ = c.used + (c.costs && c.taken != 0);
    const int next = c.options[c.taken];
    if (next == kStopped) return kStopped;
    Thread& t = threads_[size_t(next % count())];
    sleep_ = 0;
    if (next < count() && t.state == State::kTimed) {
      t.state = State::kReady;
      t.local = true;
    } else if (preemptions_ == kAll) {
      uint64_t tried = c.sleep;
      for (size_t i = 0; i < c.taken; ++i) tried |= uint64_t(1) << c.options[i];
      for (int i = 0; i < 2 * count(); ++i)
        if ((tried >> i & 1) && commute(i, next)) sleep_ |= uint64_t(1) << i;
    }
    if (next < count() || (t.state == State::kReady && move(next - count()) == next)) last_ = next % count();
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
    if (next < 0) return end(next);
    // From here on the other one has the turn, and everything that goes with it.
    threads_[size_t(next)].turn.release();
    threads_[size_t(self)].turn.acquire();
  }

  // Nobody goes on under this schedule, and so it is judged: the others come to their ends alone, one after the other, and
  // what they do does not count. Sleepers throw; nobody else does, who may be in a destructor.
  void end(int why = kNobody) {
    if (why == kRedundant)
      pruned_ = true;
    else if (failure_.empty() && !all_are_done(why == kStopped ? may_stop : 0))
      failure_ = why == kStopped ? "leaves somebody asleep, where somebody else has stopped" : "leaves somebody asleep";
    else if (failure_.empty() && !is_right())
      failure_ = "ends wrong";
    abandoned_ = true;
    for (Thread& t : threads_) t.buffer.clear();
    ended_by_ = self;
    for (Thread& t : threads_)
      if (t.state != State::kDone && &t != &threads_[size_t(self)]) {
        t.turn.release();
        left_.acquire();
      }
  }
  // What the judge does are no steps.
  bool is_right() {
    Explorer* const me = std::exchange(explorer, nullptr);
    const bool right = (*judge_)();
    explorer = me;
    return right;
  }
  // But for the daemons, the dead, and those in `stopped`.
  bool all_are_done(uint64_t stopped) const {
    for (size_t i = 0; i < threads_.size() - daemons_; ++i)
      if (threads_[i].state != State::kDone && threads_[i].state != State::kKilled && (stopped >> i & 1) == 0) return false;
    return true;
  }
  bool only_those_are_ready_that_may_stop() const {
    bool any = false;
    for (size_t i = 0; i < threads_.size(); ++i) {
      if (!threads_[i].buffer.empty()) return false;  // it drains, whoever has stopped
      if (threads_[i].state != State::kReady && threads_[i].state != State::kTimed) continue;
      if ((may_stop >> i & 1) == 0) return false;
      any = true;
    }
    return any;
  }

  void run(int number) {
    self = number;
    explorer = this;
    Thread& me = threads_[size_t(number)];
    for (;;) {
      me.turn.acquire();
      if (quit_) return;
      me.local = false;
      Semaphore* next = nullptr;
      try {
        bodies_[size_t(number)]();
      } catch (const Abandoned&) {
      } catch (const Wrong& wrong) {
        if (!abandoned_) failure_ = wrong.what, end();
      } catch (const std::exception& error) {
        if (!abandoned_) failure_ = error.what(), end();
      }
      if (!abandoned_) {
        if (me.late) std::exchange(me.late, nullptr)();
        me.state = State::kDone;
        const int other = choose();
        if (other >= 0)
          next = &threads_[size_t(other)].turn;
        else
          end(other);
      }
      me.state = State::kDone;
      if (next == nullptr) next = ended_by_ == number ? &over_ : &left_;
      next->release();
    }
  }

  const int preemptions_;
  const std::function<bool()>* judge_ = nullptr;
  std::vector<std::function<void()>> bodies_;
  const size_t daemons_;
  std::vector<Thread> threads_;
  std::vector<Alias> aliases_;
  std::vector<Choice> choices_;
  size_t choices_taken_ = 0;
  int used_ = 0;
  int last_ = -1;
  uint64_t sleep_ = 0;
  size_t schedules_ = 0, redundant_ = 0, drained_ = 0;
  std::vector<Step> steps_;
  bool abandoned_ = false, pruned_ = false, quit_ = false;
  std::string failure_;
  int ended_by_ = -1;
  Semaphore over_;
  Semaphore left_;
};

}  // namespace model
