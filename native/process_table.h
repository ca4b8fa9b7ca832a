// The process table: a slot for each process of a session, mapped by all of them. It holds the process's doorbell,
// its liveness futex, its status, and what it waits for; and it counts the memory behind all arenas of the session.
#pragma once

#include <pthread.h>
#include <string.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "platform.h"

namespace conveyor {

constexpr uint32_t kProcessTableMagic = 0x42564e43;
constexpr uint32_t kMostSlots = 1 << 16;  // of a process table that is opened: more than any has
constexpr uint32_t kProcessTableVersion = 7;
constexpr size_t kDoorbellWords = 14;
constexpr uint32_t kDoorbellBits = kDoorbellWords * 64;
constexpr uint32_t kNotedHolders = 8;
constexpr uint32_t kHazards = kPage / sizeof(uint64_t);
constexpr uint32_t kAttentionBit = 0;  // whatever has no bit of its own: a death, an end, a wish: whoever sleeps looks anew

// An event count with a ready bitmap. A writer publishes, sets its channel's bit, bumps `count`, and
// makes a system call only if somebody sleeps. A waiter notes `count`, looks, and sleeps only if
// `count` has not moved since.
//
// Notifiers only add to a doorbell: bits, and the count. Who sleeps is written by the sleepers alone, so a
// notifier that stops or dies between any two of its steps, or that wakes the wrong one, takes nothing
// from the notifiers after it: they find the same sleepers and wake them. That costs a system call for
// each ring until the sleeper runs.
struct alignas(kCacheLine) Doorbell {
  std::atomic<uint32_t> count;     // futex word
  std::atomic<uint32_t> sleepers;  // threads in the futex, or about to be; each counts itself
  std::atomic<uint32_t> armed;     // 1: a thread sleeps on the eventfd, or is about to (see Inbox)
  std::atomic<uint64_t> ready[kDoorbellWords];
};
static_assert(sizeof(Doorbell) == 2 * kCacheLine);

enum class Condition : uint32_t { kFree = 0, kStarting = 1, kAlive = 2, kDying = 3, kDead = 4 };
enum class State : uint32_t { kIdle = 0, kRunning = 1 };

// A short text of one writer, for people: a seqlock. Zero terminated, whoever has died while writing it.
template <size_t kSize>
struct NotedText {
  void set(std::string_view said) {
    const uint32_t before = version.load(std::memory_order_relaxed);
    version.store(before + 1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    const size_t n = std::min(said.size(), kSize - 1);
    ::memcpy(text, said.data(), n);
    text[n] = 0;
    version.store(before + 2, std::memory_order_release);
  }
  // A writer that died half way leaves an odd version, and then the text may be torn.
  std::string get() const {
    char copy[kSize];
    for (int attempt = 0; attempt < 100; ++attempt) {
      const uint32_t before = version.load(std::memory_order_acquire);
      ::memcpy(copy, text, sizeof copy);
      std::atomic_thread_fence(std::memory_order_acquire);
      if (!(before & 1) && version.load(std::memory_order_relaxed) == before) break;
    }
    return {copy, ::strnlen(copy, sizeof copy - 1)};
  }

  std::atomic<uint32_t> version;
  char text[kSize];
};

// What a process is doing, for others to read at any time, also when it is stopped or dead.
struct Status {
  std::atomic<uint32_t> state;
  std::atomic<uint32_t> graph;      // graph number, 0: an ordinary call
  std::atomic<uint32_t> node;       // task number within the graph
  std::atomic<uint32_t> requested;      // how often others wanted its waiters to look once more
  std::atomic<uint32_t> signal;     // fatal signal, set by the handler before the process dies
  std::atomic<uint32_t> exiting;    // 1: it ends because user code has raised SystemExit
  std::atomic<uint64_t> execution;  // execution or call number
  std::atomic<uint64_t> since_ns;   // CLOCK_MONOTONIC
  NotedText<88> what;               // method name
  std::atomic<uint64_t> decoding_since_ns;  // when it began to decode a value in Python; 0: it decodes none
  NotedText<60> importing;          // the module that is imported for that; empty: none is
};

// Which value of another process's memory a process waits for; of several the first. For people, who may see parts of two.
struct Fetching {
  std::atomic<uint32_t> from;    // 1 + the slot of whose memory it is; 0: it waits for none
  std::atomic<uint32_t> others;  // how many more it waits for
  std::atomic<uint64_t> number;  // the value's
  std::atomic<uint64_t> total;   // its bytes; 0: they are not on their way, but held back
  std::atomic<uint64_t> done;    // how many there are; written by who brings them
  std::atomic<uint64_t> since_ns;
};

// --- memory: what all arenas of a session have, and how a process is told to look for what it can give back ---

// Of one process: what its thread that gives memory back sleeps on (Arena::run).
struct Returns {
  std::atomic<uint32_t> count;     // futex word; bumped by who has news
  std::atomic<uint32_t> wanted;    // 1: the thread wants to know that a lease on one of its blocks has ended
  std::atomic<uint32_t> requested;     // how often somebody has wanted all that is free to be given back now
  std::atomic<uint32_t> answered;  // it has been given back since it was asked for this often
  std::atomic<uint32_t> keeping;   // published blocks that something is attached to
  std::atomic<uint32_t> kept_news;    // how often some of them may have come back
  std::atomic<uint32_t> kept_wanted;  // 1: the thread wants to be woken for that
  std::atomic<uint32_t> lingering;    // values that are kept for those alone who read them here (hazards.h)

  void wake() {
    count.fetch_add(1, std::memory_order_seq_cst);
    futex_wake_all(&count);
  }
  // A lease has ended, by its reader's word, its leaving or its death. Dekker with Arena::run: it raises
  // `wanted` and then looks at the leases; who ends one looks at `wanted` afterwards. Nobody but the
  // thread takes `wanted` down, so one that stops half way keeps nobody else from waking it.
  void note() {
    if (wanted.load(std::memory_order_seq_cst) != 0) wake();
  }
  // As note(), of a block that something is attached to: that waits for nobody's quiet moment. Dekker likewise.
  void note_kept() {
    kept_news.fetch_add(1, std::memory_order_seq_cst);
    if (kept_wanted.load(std::memory_order_seq_cst) != 0) wake();
  }
  // As note(), of a reader that is dead, or has left: on which blocks is not known here. Dekker with
  // Arena::publish, which counts the block in `keeping` and then looks whether it is still held; and with
  // Arena::linger likewise.
  void note_any() {
    if (keeping.load(std::memory_order_seq_cst) != 0 || lingering.load(std::memory_order_seq_cst) != 0)
      note_kept();
    else
      note();
  }
  // For pending(). A number for each, so that who asks while an earlier one is being answered has another
  // answer of its own.
  uint32_t ask() {
    const uint32_t request_id = requested.fetch_add(1, std::memory_order_seq_cst) + 1;
    wake();
    return request_id;
  }
  // Not answered yet, by the process that was asked: a later one begins to count again.
  bool pending(uint32_t request_id) const {
    return int32_t(answered.load(std::memory_order_seq_cst) - request_id) < 0 && int32_t(requested.load(std::memory_order_seq_cst) - request_id) >= 0;
  }
};

// Of the whole session.
struct SessionMemory {
  std::atomic<uint64_t> bytes;   // with memory behind them, of all processes
  std::atomic<uint64_t> freed;   // that have been given back, ever
  std::atomic<uint64_t> returned;  // published blocks that have come back while somebody starved
  std::atomic<uint32_t> given;   // futex word: how often a process has given back what it was asked for, or has ended

  void give_back(uint64_t less) {
    bytes.fetch_sub(less, std::memory_order_relaxed);
    freed.fetch_add(less, std::memory_order_relaxed);
  }

  void note_given() {
    given.fetch_add(1, std::memory_order_seq_cst);
    futex_wake_all(&given);
  }

  // One step, so that of two who ask at the same time only as many pass as there is room for.
  bool take(uint64_t more, uint64_t cap) {
    uint64_t now = bytes.load(std::memory_order_relaxed);
    do {
      if (now > cap || more > cap - now) return false;
    } while (!bytes.compare_exchange_weak(now, now + more, std::memory_order_relaxed));
    return true;
  }
};

// --- waits: each one that keeps a process from its work is a row of its page, for others to follow (runtime/deadlock.py) ---

constexpr size_t kWaitRows = 40;
constexpr size_t kWaitWords = 13;  // of text, in words of eight bytes

// One wait. What a work is, and a mode, is Python's to interpret, but for this: the last bit of a work says
// which lane does it, and the lane as a whole is the work that has no other bits.
struct WaitNote {
  uint64_t work;      // what it keeps from being done, and so do others of the same work until one of them ends
  uint64_t stamp;     // tells the waits of a work from those before them
  uint32_t answered;  // it has looked in vain since the process was asked that often
  uint32_t mode;
  uint32_t slot;      // who has to do something: a process, by its slot on the process table
  uint64_t target;    // and which work of it
  std::string text;
};

inline constexpr uint64_t lane_of(uint64_t work) { return work & 1; }

// All waits of one process, which writes them in one thread at a time. A seqlock: a version that is odd means
// that they are being written, or that the writer has died half way. All words are atomic, so that who reads
// meanwhile reads something, and finds out by the version: each is released after the odd version and acquired
// before the version is looked at again, so none is of a write that the reader does not hear of.
class WaitNotes {
 public:
  // At most kWaitRows.
  void note(const std::vector<WaitNote>& notes) {
    const uint32_t version = version_.load(std::memory_order_relaxed);
    version_.store(version | 1, std::memory_order_relaxed);
    for (size_t i = 0; i < notes.size(); ++i) rows_[i].set(notes[i]);
    count_.store(uint32_t(notes.size()), std::memory_order_release);
    // Sequentially consistent with the looks of others: of two that begin to wait for each other at least
    // one sees the other's note.
    version_.store((version | 1) + 1, std::memory_order_seq_cst);
  }

  // Those that keep `work` from being done: of its lane, if that waits; else of the work itself. None:
  // it is done when its turn comes. Nothing at all: they were being written all the time.
  std::optional<std::vector<WaitNote>> of(uint64_t work) const {
    std::optional<std::vector<WaitNote>> found = matching([work](uint64_t does) { return does == work || does == lane_of(work); });
    if (found && std::ranges::any_of(*found, [work](const WaitNote& note) { return note.work == lane_of(work); }))
      std::erase_if(*found, [work](const WaitNote& note) { return note.work != lane_of(work); });
    return found;
  }

  // All there are, for who follows them elsewhere.
  std::optional<std::vector<WaitNote>> all() const {
    return matching([](uint64_t) { return true; });
  }

  // For a new process. Before it is there: the version goes on, so that who reads meanwhile finds out.
  void reset() {
    count_.store(0, std::memory_order_relaxed);
    version_.fetch_add(2 - (version_.load(std::memory_order_relaxed) & 1), std::memory_order_release);
  }

 private:
  static constexpr int kAttempts = 100;

  template <class Wanted>
  std::optional<std::vector<WaitNote>> matching(const Wanted& wanted) const {
    for (int attempt = 0; attempt < kAttempts; ++attempt) {
      const uint32_t version = version_.load(std::memory_order_acquire);
      if (version & 1) continue;
      std::vector<WaitNote> found;
      // What a peer can write is not trusted.
      const size_t count = std::min(size_t(count_.load(std::memory_order_acquire)), kWaitRows);
      for (size_t i = 0; i < count; ++i)
        if (wanted(rows_[i].work.load(std::memory_order_acquire))) found.push_back(rows_[i].get());
      if (version_.load(std::memory_order_seq_cst) == version) return found;
    }
    return std::nullopt;
  }

  struct Row {
    std::atomic<uint64_t> work;
    std::atomic<uint64_t> stamp;
    std::atomic<uint64_t> target;
    std::atomic<uint32_t> slot;
    std::atomic<uint32_t> answered;
    std::atomic<uint64_t> mode;
    std::atomic<uint64_t> text[kWaitWords];  // cut; the rest is zero

    void set(const WaitNote& note) {
      work.store(note.work, std::memory_order_release);
      stamp.store(note.stamp, std::memory_order_release);
      target.store(note.target, std::memory_order_release);
      slot.store(note.slot, std::memory_order_release);
      answered.store(note.answered, std::memory_order_release);
      mode.store(note.mode, std::memory_order_release);
      uint64_t words[kWaitWords] = {};
      ::memcpy(words, note.text.data(), std::min(note.text.size(), sizeof words));
      for (size_t i = 0; i < kWaitWords; ++i) text[i].store(words[i], std::memory_order_release);
    }

    WaitNote get() const {
      uint64_t words[kWaitWords];
      for (size_t i = 0; i < kWaitWords; ++i) words[i] = text[i].load(std::memory_order_acquire);
      const char* start = reinterpret_cast<const char*>(words);
      return {work.load(std::memory_order_acquire),
              stamp.load(std::memory_order_acquire),
              answered.load(std::memory_order_acquire),
              uint32_t(mode.load(std::memory_order_acquire)),
              slot.load(std::memory_order_acquire),
              target.load(std::memory_order_acquire),
              {start, ::strnlen(start, sizeof words)}};
    }
  };

  std::atomic<uint32_t> version_;
  std::atomic<uint32_t> count_;
  Row rows_[kWaitRows];
};

// --- the table ---

struct alignas(kPage) ProcessTableSlot {
  Doorbell doorbell;
  pthread_mutex_t life;  // robust; held by the process's main thread until it ends
  alignas(kCacheLine) std::atomic<Condition> condition;
  std::atomic<uint32_t> pid;
  std::atomic<uint32_t> nudge;        // somebody without its eventfd wants it woken; taken by the death watch
  std::atomic<uint32_t> incarnation;  // counts the processes that have had this slot; written before they start
  std::atomic<uint32_t> died;         // which death of the session this was, from 1; 0: not announced
  std::atomic<uint32_t> is_remote;    // 1 + the number of the host that the process is on, if this slot is its proxy here (net/pump.h)
  Status status;
  alignas(kCacheLine) Returns returns;
  alignas(kCacheLine) Returns leftovers;  // the same for what it has dropped and not let go of; `wanted`: there may be some
  alignas(kCacheLine) Returns pins;  // the same for blocks that it has pinned for a device (pins.h); `wanted`: there are some
  std::atomic<uint64_t> memory;  // the process's part of the session's: written by its arena
  std::atomic<uint32_t> starving;  // what it waits for memory for, at a cap (ProcessTable::starve)
  std::atomic<uint32_t> waiting;   // how many waits for this library its main thread is in, one within the other
  std::atomic<uint32_t> holders[kNotedHolders];  // 1 + the slots of processes that hold values of its arena and run something; 0: no more. As of when it was last asked for memory, or somebody starves
  std::atomic<uint32_t> is_rank;  // whether it has ever joined a collective group
  // Of what the process keeps: how many hold back its being fetched, and have that fail (conveyor.testing). Who fetches
  // looks before; it waits with the doorbell that is rung afterwards, so these words order nothing.
  std::atomic<uint32_t> transfers_held;
  std::atomic<uint32_t> transfers_failing;
  Fetching fetching;
  std::atomic<uint64_t> directory;  // where it is in the process's memory (directory.h); 0: it has none yet
  std::atomic<uint32_t> hazards_used;  // of `hazards`; from here on they have never been used by this process
  char name[64];  // for people, zero terminated (not to be relied upon); written before the process starts
  // From here on what the slot's next process goes on with.
  WaitNotes waits;  // the last: of the second page only what is used is ever touched
  // Numbers of values that the process reads where they lie (hazards.h); 0: none. Touched when the first is.
  alignas(kPage) std::atomic<uint64_t> hazards[kHazards];
};
static_assert(sizeof(ProcessTableSlot) == 3 * kPage);

struct alignas(kPage) ProcessTableHeader {
  uint32_t magic;
  uint32_t version;
  uint32_t slots;
  std::atomic<uint32_t> used;  // slots from here on have never been prepared
  alignas(kCacheLine) std::atomic<uint32_t> deaths;  // every waiter compares it with what it has seen
  std::atomic<uint32_t> starving;  // 1: some process waits for memory at a cap
  alignas(kCacheLine) std::atomic<uint32_t> alarm;   // futex word of the death watch
  std::atomic<uint64_t> session;      // no other session's, of those whose errors may be held; the same on all its hosts
  alignas(kCacheLine) SessionMemory memory;
  std::atomic<uint32_t> pinning;  // 1: some process has pinned blocks for a device, now or before (pins.h)
};

// The kernel's view of a robust mutex is its first word: the owner's thread id, plus two flags.
inline std::atomic<uint32_t>* liveness_futex(ProcessTableSlot* slot) {
  static_assert(offsetof(pthread_mutex_t, __data.__lock) == 0);
  return reinterpret_cast<std::atomic<uint32_t>*>(&slot->life);
}

class ProcessTable : public Shareable<ProcessTable> {
 public:
  static std::shared_ptr<ProcessTable> create(uint32_t slots);
  static std::shared_ptr<ProcessTable> attach(int fd);
  // For who has no part in the session, and nothing but what reads is called of it: its memory cannot be written.
  static std::shared_ptr<ProcessTable> look(int fd);
  ~ProcessTable();

  int fd() const { return fd_.get(); }
  uint32_t slots() const { return count_; }
  // Slots from here on have never had a process. Looking at a page allocates it, so only these are looked at.
  uint32_t used() const { return std::min(header_->used.load(std::memory_order_acquire), count_); }
  ProcessTableHeader* header() const { return header_; }
  // No index that comes from shared memory gets here unchecked: a peer may have written anything there.
  ProcessTableSlot* slot(uint32_t index) const {
    CONVEYOR_ASSERT(index < count_);
    return &slots_[index];
  }

  // The eventfd that wakes the `incarnation`th process of slot `index` when it sleeps in ppoll; kept as a
  // duplicate. A former process's replaces no later one's: descriptors that were sent on two ways may
  // arrive in the wrong order.
  void set_eventfd(uint32_t index, int fd, uint32_t incarnation);
  void forget_eventfd(uint32_t index);
  // The one that is kept, still the process table's; -1 if there is none.
  int eventfd(uint32_t index);
  // At the end of a session: what is left to do works on the mapping alone.
  void close_fds();

  // True if the process that had `index` as its `incarnation`th is no more.
  bool gone(uint32_t index, uint32_t incarnation) const {
    const ProcessTableSlot* s = slot(index);
    // Sequentially consistent for Arena::run, which costs no more than acquire.
    const Condition c = s->condition.load(std::memory_order_seq_cst);
    return c == Condition::kDead || c == Condition::kFree || s->incarnation.load(std::memory_order_relaxed) != incarnation;
  }
  // A slot for a new process: everything zero, the liveness futex made. `incarnation`: of a process of another host,
  // which has been counted there; 0: the next one here.
  void prepare(uint32_t index, const std::string& name, uint32_t incarnation = 0);
  // Take the liveness futex with the calling thread, which must be the process's main thread.
  void live(uint32_t index);
  // From now on a fatal signal of this process is announced before a core is dumped.
  void guard_signals(uint32_t index);
  // The calling thread gives back the liveness futex that it has taken: the process leaves the session and goes on.
  // Everybody takes it for dead first, so that nobody takes a word without an owner for a death of its own.
  void retire(uint32_t index);

  std::string name(uint32_t index) const {
    const ProcessTableSlot* s = slot(index);
    return {s->name, ::strnlen(s->name, sizeof s->name)};
  }
  // Whether the process in `index` may come to collective operations; of one of another host that is not known. Acquire
  // and release: who calls ranks has heard of the group behind what its members say here.
  bool is_rank(uint32_t index) const {
    const ProcessTableSlot* s = slot(index);
    return s->is_rank.load(std::memory_order_acquire) != 0 || s->is_remote.load(std::memory_order_relaxed) != 0;
  }
  void become_rank(uint32_t index) { slot(index)->is_rank.store(1, std::memory_order_release); }
  // The process in `index` has ended, and its arena with it: what it had is the session's again. Where
  // others still hold values of it, their memory lives on uncounted.
  void forget_memory(uint32_t index) {
    header_->memory.give_back(slot(index)->memory.exchange(0, std::memory_order_relaxed));
    header_->memory.note_given();
    notify_starving();
  }
  // Have all processes but `index` that have memory look for what they can give back; who has been asked.
  struct Requested {
    uint32_t slot;
    uint32_t request_id;
  };
  std::vector<Requested> ask_for_memory(uint32_t index);
  // Leaves those who may still give something: they have not looked yet, or their end is not known here yet.
  void still_requested(std::vector<Requested>& who) const;
  // The same for what process `index` has dropped and not let go of (leftovers.h), whoever owns the memory:
  // adds to `requested` if there may be some.
  void ask_for_leftovers(uint32_t index, std::vector<Requested>& requested);
  void still_requested_for_leftovers(std::vector<Requested>& who) const;
  // The same for blocks that process `index` has pinned for a device and does not use, or reads to its device.
  void ask_for_pins(uint32_t index, std::vector<Requested>& requested);
  void still_requested_for_pins(std::vector<Requested>& who) const;

  // Process `index` waits for memory at a cap from now on, for `what`, as the processes have agreed; 0: it does no longer.
  // Meanwhile all arenas give back at once what is free, and ring for it. A process that dies waits no longer.
  void starve(uint32_t index, uint32_t what);
  uint32_t starving(uint32_t index) const {
    const ProcessTableSlot* s = slot(index);
    return s->condition.load(std::memory_order_seq_cst) == Condition::kAlive ? s->starving.load(std::memory_order_seq_cst) : 0;
  }
  bool any_starving() const { return header_->starving.load(std::memory_order_seq_cst) != 0; }
  // Have those who wait for memory look: some has been given back, or a process has nothing to do any more.
  void notify_starving();

  // Have those who sleep in the futex of a doorbell look again; nothing is ready.
  void stir(Doorbell& doorbell) const {
    doorbell.count.fetch_add(1, std::memory_order_seq_cst);
    if (doorbell.sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(&doorbell.count);
  }
  // Set `bit` in the doorbell of process `index` and wake whoever sleeps on it.
  void notify(uint32_t index, uint32_t bit);
  void notify(Doorbell* doorbell, uint32_t bit, uint32_t index);
  // The death watch's, for those who have asked it to: it has the eventfd of every process that runs.
  void nudge(uint32_t index);
  // Mark `index` dead and tell every living process. Returns false if it was known already.
  bool announce_death(uint32_t index);

 private:
  enum class Use { kCreate, kAttach, kLook };
  static std::shared_ptr<ProcessTable> open(int fd, Use use);
  ProcessTable(Fd fd, uint32_t slots, Use use);
  Fd fd_;
  size_t size_;
  ProcessTableHeader* header_;
  ProcessTableSlot* slots_;
  // Everything of a ring but the eventfd; true if that must be written too.
  bool strike(Doorbell* doorbell, uint32_t bit);
  bool strike(Doorbell* doorbell);
  bool find_starving() const;
  void wake_starved();
  // False if the descriptor that is here, if any, is not of the process that has the slot now.
  bool write_eventfd(uint32_t index);
  void notify_sleeper_in_poll(uint32_t index);

  uint32_t count_;  // of slots; the shared header says so too, but peers can write there
  struct Eventfd {
    int fd = -1;
    uint32_t incarnation = 0;  // of whose it is
  };
  // The death watch rings while others forget processes: without it, it could write into whatever file
  // got the descriptor's number next. It is this process's own: nobody waits for one that is stopped.
  ForkMutex eventfds_mutex_;
  std::vector<Eventfd> eventfds_;
};

inline bool ProcessTable::strike(Doorbell* doorbell, uint32_t bit) {
  // The bit's release makes what was published before visible to whoever takes the bit.
  doorbell->ready[bit >> 6].fetch_or(uint64_t(1) << (bit & 63), std::memory_order_release);
  return strike(doorbell);
}

// Whether this thread has woken a process since it waited last.
inline thread_local bool has_woken = false;

inline bool ProcessTable::strike(Doorbell* doorbell) {
  // Dekker with Waiter::park and Waiter::arm_event: we bump `count`, then look for sleepers; they announce
  // themselves, then look at `count`. Both sides are sequentially consistent, so at least one of us sees
  // the other.
  doorbell->count.fetch_add(1, std::memory_order_seq_cst);
  if (doorbell->sleepers.load(std::memory_order_seq_cst) != 0) {
    futex_wake_all(&doorbell->count);
    has_woken = true;
  }
  return doorbell->armed.load(std::memory_order_seq_cst) != 0;
}

inline void ProcessTable::notify(Doorbell* doorbell, uint32_t bit, uint32_t index) {
  CONVEYOR_ASSERT(doorbell == &slot(index)->doorbell && bit < kDoorbellBits);
  if (strike(doorbell, bit)) notify_sleeper_in_poll(index);
}

inline void ProcessTable::notify(uint32_t index, uint32_t bit) { notify(&slot(index)->doorbell, bit, index); }

}  // namespace conveyor
