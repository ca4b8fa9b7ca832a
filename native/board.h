// The board: one page for each process of a session, mapped by all of them. A page holds the
// process's doorbell, its life word and its status.
#pragma once

#include <pthread.h>
#include <sys/eventfd.h>

#include <array>
#include <memory>
#include <mutex>
#include <vector>

#include "platform.h"

namespace conveyor {

constexpr uint32_t kBoardMagic = 0x42564e43;
constexpr uint32_t kBoardVersion = 1;
constexpr size_t kBellWords = 14;
constexpr uint32_t kBellBits = kBellWords * 64;
constexpr uint32_t kAttentionBit = 0;  // a death, or a control message on the socket

// An event count with a ready bitmap. A writer publishes, sets its channel's bit, bumps `count`, and
// makes a system call only if somebody sleeps. A waiter notes `count`, looks, and sleeps only if
// `count` has not moved since.
struct alignas(kCacheLine) Bell {
  std::atomic<uint32_t> count;     // futex word
  std::atomic<uint32_t> sleepers;  // threads in the futex, or about to be; each counts itself
  std::atomic<uint32_t> armed;     // 1: somebody sleeps on the eventfd; taken down by who writes it
  std::atomic<uint64_t> ready[kBellWords];
};
static_assert(sizeof(Bell) == 2 * kCacheLine);

enum class Condition : uint32_t { kFree = 0, kStarting = 1, kAlive = 2, kDying = 3, kDead = 4 };
enum class State : uint32_t { kIdle = 0, kRunning = 1, kWaiting = 2 };

// What a process is doing, for others to read at any time, also when it is stopped or dead.
struct Status {
  std::atomic<uint32_t> state;
  std::atomic<uint32_t> graph;      // graph number, 0: an ordinary call
  std::atomic<uint32_t> node;       // task number within the graph
  std::atomic<uint32_t> waits_for;  // board slot + 1 of the process waited for, 0: nobody
  std::atomic<uint32_t> waits;      // how many waits have begun: tells one wait from the next
  std::atomic<uint32_t> checks;     // how often a waiter has looked in vain and gone back to sleep
  std::atomic<uint32_t> signal;     // fatal signal, set by the handler before the process dies
  std::atomic<uint32_t> leaving;    // 1: it ends because user code has raised SystemExit
  std::atomic<uint64_t> execution;  // execution or call number
  std::atomic<uint64_t> since_ns;   // CLOCK_MONOTONIC
  std::atomic<uint32_t> what_version;
  char what[88];                    // method name, zero terminated
};

struct alignas(kPage) BoardSlot {
  Bell bell;
  pthread_mutex_t life;  // robust; held by the process's main thread until it ends
  alignas(kCacheLine) std::atomic<Condition> condition;
  std::atomic<uint32_t> pid;
  std::atomic<uint32_t> nudge;        // somebody without its eventfd wants it woken
  std::atomic<uint32_t> incarnation;  // counts the processes that have had this slot
  std::atomic<uint32_t> died;         // which death of the session this was, from 1; 0: not announced
  Status status;
  char name[64];  // for people, zero terminated; written before the process starts
};
static_assert(sizeof(BoardSlot) == kPage);

struct alignas(kPage) BoardHeader {
  uint32_t magic;
  uint32_t version;
  uint32_t slots;
  std::atomic<uint32_t> used;  // slots from here on have never been prepared
  alignas(kCacheLine) std::atomic<uint32_t> deaths;  // every waiter compares it with what it has seen
  alignas(kCacheLine) std::atomic<uint32_t> alarm;   // futex word of the service thread
};

// The kernel's view of a robust mutex is its first word: the owner's thread id, plus two flags.
inline std::atomic<uint32_t>* life_word(BoardSlot* slot) {
  static_assert(offsetof(pthread_mutex_t, __data.__lock) == 0);
  return reinterpret_cast<std::atomic<uint32_t>*>(&slot->life);
}

class Board {
 public:
  static std::shared_ptr<Board> create(uint32_t slots);
  static std::shared_ptr<Board> attach(int fd);
  ~Board();

  int fd() const { return fd_.get(); }
  uint32_t slots() const { return count_; }
  BoardHeader* header() const { return header_; }
  BoardSlot* slot(uint32_t index) const { return &slots_[index]; }

  // The eventfd that wakes process `index` when it sleeps in ppoll; kept as a duplicate.
  void set_eventfd(uint32_t index, int fd);
  void forget_eventfd(uint32_t index);
  // At the end of a session: what is left to do works on the mapping alone.
  void close_fds();

  // True if the process that had `index` as its `incarnation`th is no more.
  bool gone(uint32_t index, uint32_t incarnation) const {
    const BoardSlot* s = slot(index);
    const Condition c = s->condition.load(std::memory_order_acquire);
    return c == Condition::kDead || c == Condition::kFree || s->incarnation.load(std::memory_order_relaxed) != incarnation;
  }
  // A slot for a new process: everything zero, the life word made.
  void prepare(uint32_t index, const std::string& name);
  // Take the life word with the calling thread, which must be the process's main thread.
  void live(uint32_t index);
  // From now on a fatal signal of this process is announced before a core is dumped.
  void guard_signals(uint32_t index);

  // Set `bit` in the bell of process `index` and wake whoever sleeps on it.
  void ring(uint32_t index, uint32_t bit);
  void ring(Bell* bell, uint32_t bit, uint32_t index);
  // Wake it even if its flags are down: whoever took them down could not.
  void nudge(uint32_t index);
  // Mark `index` dead and tell every living process. Returns false if it was known already.
  bool announce_death(uint32_t index);

 private:
  Board(Fd fd, uint32_t slots, bool fresh);
  Fd fd_;
  size_t size_;
  BoardHeader* header_;
  BoardSlot* slots_;
  uint32_t used() const;
  uint32_t count_;  // of slots; the shared header says so too, but peers can write there
  std::mutex eventfds_mutex_;
  std::vector<int> eventfds_;
};

inline void Board::ring(Bell* bell, uint32_t bit, uint32_t index) {
  // The bit's release makes what was published before visible to whoever takes the bit.
  bell->ready[bit >> 6].fetch_or(uint64_t(1) << (bit & 63), std::memory_order_release);
  // Dekker with Waiter::park: we bump `count`, then look for sleepers; it announces itself, then looks
  // at `count`. Both sides are sequentially consistent, so at least one of us sees the other.
  bell->count.fetch_add(1, std::memory_order_seq_cst);
  // A sleeper in the futex takes itself off the count. If ringers did, a late one could take off a
  // sleeper that has seen its ring already and sleeps for the next.
  if (bell->sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(&bell->count);
  // With the eventfd a late one is harmless: it writes after it has taken the flag down, and what is
  // written stays until the sleeper reads it.
  if (bell->armed.load(std::memory_order_seq_cst) != 0 && bell->armed.exchange(0, std::memory_order_seq_cst) != 0) {
    // The service thread rings while others forget processes: without the lock it could write into
    // whatever file got the descriptor's number next.
    std::lock_guard lock(eventfds_mutex_);
    const int fd = eventfds_[index];
    if (fd < 0) {
      // Not a peer of ours, so we cannot wake it ourselves: the driver's service thread can.
      slot(index)->nudge.store(1, std::memory_order_seq_cst);
      header_->alarm.fetch_add(1, std::memory_order_seq_cst);
      futex_wake_all(&header_->alarm);
      return;
    }
    const uint64_t one = 1;
    // The counter cannot overflow: it is written once for each time a sleeper raised its flag.
    if (::write(fd, &one, sizeof one) < 0 && errno != EAGAIN) {
      CONVEYOR_ASSERT(errno == EINTR);
    }
  }
}

inline void Board::ring(uint32_t index, uint32_t bit) { ring(&slot(index)->bell, bit, index); }

}  // namespace conveyor
