// The memory a process writes its large payloads into: one sparse memfd, blocks of a few sizes for
// each doubling, reused while their pages are warm, given back when they have been idle.
//
// A lock of its own guards it: the threads of the program hold it for short, whether they have the GIL or
// not, and so does the thread that gives memory back, which never takes the GIL. Held
// by nobody who touches cold memory, punches holes, or destroys what blocks have kept.
#pragma once

#include <array>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "../process_table.h"
#include "view.h"

namespace conveyor {

// Which addresses of an arena are nobody's: neighbours are one, so what small blocks gave back can serve
// a large one. Strong: what throws has changed nothing.
class FreeAddresses {
 public:
  explicit FreeAddresses(uint64_t size) { add(0, size); }

  // The start of `size` bytes that are free no more; from the smallest gap that holds them, so that the
  // large ones stay. `window`: they lie within one window of this size; 0: anywhere. `alignment`: a power of two.
  std::optional<uint64_t> take(uint64_t size, uint64_t window, uint64_t alignment = 1) {
    // A gap may be cut by a window's end, or begin anywhere, so a few are looked at; the last is the largest.
    int looks = 16;
    for (auto gap = by_size_.lower_bound({size, 0}); gap != by_size_.end(); ++gap) {
      if (--looks == 0) gap = std::prev(by_size_.end());
      const auto [length, start] = *gap;
      uint64_t at = (start + alignment - 1) & ~(alignment - 1);
      if (window != 0 && at % window + size > window) at = (at / window + 1) * window;
      if (at + size > start + length) continue;
      const uint64_t before = at - start, after = start + length - at - size;
      if (before != 0 && after != 0) add(at + size, after);
      if (before != 0)
        move(start, length, start, before);
      else if (after != 0)
        move(start, length, at + size, after);
      else
        remove(start, length);
      return at;
    }
    return std::nullopt;
  }

  // Throws only if it has no neighbour.
  void give(uint64_t at, uint64_t size) {
    const auto next = by_start_.lower_bound(at);
    const bool joins_next = next != by_start_.end() && next->first == at + size;
    if (next != by_start_.begin()) {
      const auto [start, length] = *std::prev(next);
      if (start + length == at) {
        if (joins_next) {
          const auto [other, more] = *next;
          remove(other, more);
          size += more;
        }
        return move(start, length, start, length + size);
      }
    }
    if (!joins_next) return add(at, size);
    const auto [start, length] = *next;
    move(start, length, at, size + length);
  }

  size_t gaps() const { return by_start_.size(); }

 private:
  void add(uint64_t start, uint64_t length) {
    const auto added = by_start_.emplace(start, length).first;
    try {
      by_size_.emplace(length, start);
    } catch (...) {
      by_start_.erase(added);
      throw;
    }
  }
  // A gap that changes keeps its nodes: this cannot fail.
  void move(uint64_t start, uint64_t length, uint64_t to, uint64_t new_length) {
    auto by_start = by_start_.extract(start);
    by_start.key() = to;
    by_start.mapped() = new_length;
    by_start_.insert(std::move(by_start));
    auto by_size = by_size_.extract({length, start});
    by_size.value() = {new_length, to};
    by_size_.insert(std::move(by_size));
  }
  void remove(uint64_t start, uint64_t length) {
    by_start_.erase(start);
    by_size_.erase({length, start});
  }
  std::map<uint64_t, uint64_t> by_start_;
  std::set<std::pair<uint64_t, uint64_t>> by_size_;
};

// What the channels of one graph may have out of one process's arena, all together.
struct Budget : Shareable<Budget> {
  explicit Budget(size_t cap) : cap(cap) {}
  const size_t cap;
  // Bytes of blocks that are being written or published and were not yet seen free; with the arena's lock.
  std::atomic<size_t> out{0};
};

// How far one reader of a ring (ring.h) has come, in shared memory. Written by its reader alone, but for `end`.
struct alignas(kCacheLine) ReaderCursor {
  static constexpr uint64_t kOpen = 0;
  static constexpr uint64_t kLeaving = UINT64_MAX;

  std::atomic<uint64_t> next;   // number of the next frame this reader takes
  // kOpen; kLeaving; else one more than the number of the first frame that is the writer's own: this reader
  // takes those before it, or gives them up (RingReader::leave), and never looks at those from it on.
  std::atomic<uint64_t> end;
  std::atomic<uint64_t> wanted; // frames with a tag below this are not wanted any more
  std::atomic<uint32_t> lost;   // frames with definitions that this reader has taken and could not read

  // Whether this reader looks at no slot any more, and at no block but those of frames that it has taken.
  // Acquire: its last look comes before whatever is done because of this. Sequentially consistent for
  // Arena::run: RingReader::close writes `end` last.
  bool closed() const {
    const uint64_t said = end.load(std::memory_order_seq_cst);
    return said != kOpen && said != kLeaving && next.load(std::memory_order_acquire) + 1 >= said;
  }
  // Whether frame `number` will never be taken: its lease on the frame's block has ended without a
  // Lease that could end it.
  bool never_takes(uint64_t number) const { return closed() && next.load(std::memory_order_relaxed) <= number; }
};

// The processes that may hold leases on a channel's blocks, to know which of them are dead or have left;
// and what the channel is, for the error at the cap.
struct ReaderSet {
  std::shared_ptr<ProcessTable> process_table;
  std::shared_ptr<const void> segment{};  // keeps the cursors mapped as long as a block may ask them
  std::vector<uint32_t> slots;
  std::vector<uint32_t> incarnations;
  std::vector<const ReaderCursor*> cursors;
  uint32_t graph = 0;   // 0: of no graph
  uint32_t edge = 0;
  std::string carries;  // in words
  std::shared_ptr<Budget> budget{};  // none: only the session's cap holds

  void add(uint32_t slot, const ReaderCursor* cursor) {
    slots.push_back(slot);
    cursors.push_back(cursor);
    incarnations.push_back(process_table->slot(slot)->incarnation.load(std::memory_order_relaxed));
  }
  bool gone(uint32_t reader) const { return process_table->gone(slots[reader], incarnations[reader]); }
};

// Its offset and size are its own until it is dissolved: then its addresses may serve other blocks.
struct Block {
  uint64_t offset;
  uint64_t size;     // of the class, header included
  char* base;        // mapped here
  std::shared_ptr<Mapping> mapping{};  // of its window, or its own
  size_t place;      // among all blocks
  uint64_t touched = 0;  // bytes from the start that may have pages behind them
  uint64_t used = 0;     // of these, the ones that its present value takes, header included
  uint64_t freed_ns = 0;
  uint32_t generation = 0;
  uint64_t tag = 0;      // of the frame it was published with: an execution, or a call
  uint64_t number = 0;   // of that frame in its ring
  std::shared_ptr<ReaderSet> readers{};
  std::shared_ptr<Budget> budget{};  // that it counts in
  std::shared_ptr<const void> attached{};  // as long as somebody may read it

  BlockHeader* header() const { return reinterpret_cast<BlockHeader*>(base); }
  char* data() const { return base + kBlockHeader; }
  size_t capacity() const { return size - kBlockHeader; }
  // That of its leases when it is published next.
  uint32_t next_generation() const { return (generation + 1) & 0x7fffffff; }
  // Whether reader `r` of a published block still has its lease. It has none once it has ended it, is
  // dead, or has left the ring without taking the frame.
  bool held_by(uint32_t r) const {
    // Acquire: the reader's last reads come before our next writes. Sequentially consistent for Arena::run.
    return header()->lease[r].load(std::memory_order_seq_cst) != BlockHeader::done(generation & 0x7fffffff) && !readers->gone(r) &&
           !readers->cursors[r]->never_takes(number);
  }
  bool held() const {
    for (uint32_t r = 0; r < readers->slots.size(); ++r)
      if (held_by(r)) return true;
    return false;
  }
};

// Values of one channel that one process still holds.
struct Holding {
  std::shared_ptr<const ReaderSet> channel;
  uint32_t slot;  // the process's
  std::string process;
  uint64_t bytes = 0;
  std::vector<uint64_t> tags{};
};

struct ArenaFull : std::runtime_error {
  // What has no room for a value now that is not too large for it.
  enum class Cap { kNone, kGraph, kSession };
  explicit ArenaFull(const std::string& message, std::vector<Holding> holdings = {}, Cap cap = Cap::kNone)
      : std::runtime_error(message), holdings(std::move(holdings)), cap(cap) {}
  std::vector<Holding> holdings;
  Cap cap;
};

// A value that lies in an arena, for when its keeper lets go of it.
struct Lingering {
  uint64_t number;
  std::shared_ptr<const void> what;  // that keeps its memory
};

class Arena : public Shareable<Arena> {
 public:
  // `cap` bounds the bytes that have memory behind them in all arenas of the session together, counted on
  // `process_table`, where this process has `slot`; without a process table (in a test), in this one, and nothing is given
  // back before it is asked for. The file is larger than the cap, because gaps between blocks cost nothing.
  // `idle_ns`: after how long the thread gives back what is free.
  static constexpr uint64_t kIdleNs = 3'000'000'000;
  Arena(int fd, size_t size, size_t cap, std::shared_ptr<ProcessTable> process_table = {}, uint32_t slot = 0, uint64_t idle_ns = kIdleNs);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  static Fd create_file(size_t size) { return make_memfd("conveyor-arena", size); }

  // Bytes that the method which runs on this thread was given: its arguments' blocks, which go with its end. What it sends
  // takes their place, and crosses a cap if the rest is not above it. So where arguments fill the cap their methods end,
  // whatever the size of their results, and in a row of methods each is ahead of the one before it. `kAsMuch`: a result is
  // passed on, which takes its own place, and is ahead of the method that makes the next one.
  static thread_local size_t given;
  // Whether what this thread allocates crosses a memory cap if it is all that this arena has. The others may hold all
  // memory with what is wanted later than this, and wait for it without end.
  static thread_local bool first_may_cross;
  // Whether nothing of this arena is in use.
  bool has_nothing_out();
  static constexpr size_t kAsMuch = 1;

  // A block with room for `payload` bytes, for the caller alone until it is published or released; its
  // memory is there. It counts in `budget`, if there is one. `beyond_cap`: for what must get through when
  // memory is short. `may_wait`: for other processes, who are asked at a cap, unless this one starves (ProcessTable::starve):
  // then they give without being asked. Not with the GIL, which the driver needs to learn that one of them has ended.
  Block* allocate(size_t payload, const std::shared_ptr<Budget>& budget = {}, bool beyond_cap = false, bool may_wait = true);
  // Count a block that was allocated without a budget in one; throws ArenaFull if that has no room.
  void charge(Block* block, const std::shared_ptr<Budget>& budget, bool may_wait = true);
  void uncharge(Block* block);
  // Hand `block` to its readers with frame `number`: it comes back when each of them is done, dead, or
  // has left before it took that frame. Cannot fail: a frame that is under way can be told of no error.
  // `attached` is destroyed some time after that, by any thread that looks (give_back_soon() has one look now),
  // without the lock; it must not keep this arena alive.
  void publish(Block* block, std::shared_ptr<ReaderSet> readers, uint64_t tag, uint64_t number, std::shared_ptr<const void> attached = {}) noexcept;
  // Whether some process has announced that it reads a value here (hazards.h). Of one whose anchor is down: no other will.
  bool is_read(uint64_t number) const noexcept;
  // Keep it as long as that is so. Takes the first of `one`, which is destroyed as what is attached to blocks is. Cannot
  // fail.
  void linger(std::list<Lingering>& one) noexcept;
  // Give back a block that was not published. Cannot fail.
  void release(Block* block) noexcept;

  // The number of its descriptor in this process, and its file's, which no other arena has; -1: it is closed.
  std::pair<int, uint64_t> file() const;
  size_t bytes_touched() const { return touched_.load(std::memory_order_relaxed); }
  size_t blocks_out() const;
  size_t bytes_out() const;
  // Who has not ended which leases, as the lease words say; of each process and channel together.
  // `of`: only blocks of this budget.
  std::vector<Holding> holdings(const Budget* of = nullptr) const;
  // The processes that have not ended their leases on blocks of this arena. `of`: as for holdings().
  std::vector<uint32_t> holders(const Budget* of = nullptr) const;
  // Changes when memory is given back, in any arena, or this one's part of a budget.
  uint64_t news() const { return memory_->freed.load(std::memory_order_seq_cst) + uncounted_.load(std::memory_order_seq_cst); }
  uint64_t returned() const { return memory_->returned.load(std::memory_order_relaxed); }
  size_t cap() const { return cap_; }
  size_t gaps() const;
  // How often a published block has been asked whether it is still held.
  uint64_t looks() const;

  // Take back all blocks that are done, and give back the memory of those that have been free for
  // `idle_ns`. When the next one will have been; 0: none is free.
  uint64_t give_back(uint64_t idle_ns);
  // Have the thread do so now, with all that is free; lets go of what blocks that are done have kept.
  void give_back_soon();
  // At the end of a session: nothing more can be allocated, and what is free is given back, now or when it is
  // released. May be called while other threads allocate, or publish.
  void close();
  // What is left of it counts for the session alone from now on: the slot on the process table is about to be another process's,
  // which is on another host, or was; what others still hold of this arena goes back later.
  void leave_slot();

  struct ForkHandlers;

 protected:
  // Gives back blocks that have been free for `idle_ns`, of at least `bytes` if there are; how many.
  size_t give_some(uint64_t idle_ns, size_t bytes);

 private:
  class Section;
  static size_t class_of(size_t size);
  static size_t class_size(size_t index);

  // With the lock.
  void look(size_t at_most, size_t& from);
  void look_at_all();
  Block* block_of(size_t index);
  // How far a block of so many bytes may exceed the session's cap. A graph's counts what each process sends by
  // itself, and so none of what that is given.
  static size_t excess(size_t bytes) { return given != 0 ? bytes + (given == kAsMuch ? bytes : given) : 0; }
  static size_t excess_of_graph(size_t more) { return given != 0 ? more : 0; }
  void take_memory(Section& section, size_t more, size_t excess, bool beyond_cap, bool may_wait);
  void charge_bytes(Section& section, size_t bytes, size_t payload, const std::shared_ptr<Budget>& budget, bool first, bool may_wait);
  // Until `done()`, or all that `still` leaves none of have answered, or it is `deadline`; whether it is done.
  template <class Still, class Done>
  bool wait_for(Section& section, std::vector<ProcessTable::Requested> requested, uint64_t deadline, const Still& still, const Done& done);
  // The same, of a budget's blocks (null: of all).
  std::vector<uint32_t> holders_now(const Budget* of) const;
  bool may_ask(bool may_wait) const { return may_wait && process_table_ && process_table_->slot(slot_)->starving.load(std::memory_order_relaxed) == 0; }
  void uncount(Budget& budget, size_t bytes) noexcept;
  // On the process table, for those who wait for memory.
  void note_holders();
  // Have the thread look, if anybody starves.
  void stir() noexcept;
  void free(Block* block, uint64_t now) noexcept;
  // Some of `dropped_`, for the caller to destroy without the lock; how many.
  size_t take_dropped(std::span<std::shared_ptr<const void>> some) noexcept;
  std::vector<Holding> holdings_now(const Budget* of) const;
  bool has_nothing_but(size_t bytes) const;
  [[noreturn]] void full() const;
  [[noreturn]] static void closed();
  void count(int64_t bytes);
  bool keeps_any() const;
  // Take blocks that have been free for `idle_ns`, at most `count`, with at least `bytes` if there are.
  // Whether some process has pinned its memory, which is not to go then.
  bool pinned(const Block* block) const;
  std::vector<Block*> detach(uint64_t now, uint64_t idle_ns, size_t count, size_t bytes);
  void dissolve(Block* block) noexcept;
  void drop_pages(Block* block) noexcept;
  void stop_punching();
  void chill(Section& section, Block* block, size_t from = 0);

  // Without it.
  void populate(Block* block, size_t from);
  void give_up(Block* block, size_t from);
  bool punch(uint64_t start, uint64_t end);
  size_t punch(std::vector<Block*>& blocks);
  void sweep();
  void destroy_dropped() noexcept;
  void look_after() noexcept;
  void destroy_lingering() noexcept;
  void run();
  void outlast() noexcept;
  void start_thread();
  void stop_thread();

  std::shared_ptr<const Fd> fd_;  // none: closed
  const size_t size_;
  const size_t cap_;
  const std::shared_ptr<ProcessTable> process_table_;
  const uint32_t slot_;
  const uint64_t idle_ns_;
  SessionMemory own_memory_{};
  SessionMemory* const memory_;  // the session's
  Returns own_returns_{};
  Returns* const returns_;
  bool inherited_ = false;  // by a forked child: it is the parent's

  mutable std::mutex mutex_;
  FreeAddresses addresses_;
  std::atomic<size_t> touched_{0};
  size_t scan_ = 0;
  uint64_t looks_ = 0;
  std::vector<std::shared_ptr<Mapping>> windows_;
  std::vector<std::unique_ptr<Block>> all_;
  std::vector<Block*> out_;                    // published, not yet seen free
  std::array<std::vector<Block*>, 256> free_;  // each in the order in which they became free
  std::array<size_t, 256> blocks_{};           // of each class, free or not
  // To be destroyed without the lock. Has room for what all blocks keep.
  std::vector<std::shared_ptr<const void>> dropped_;
  std::list<Lingering> lingering_;
  bool closed_ = false;
  bool outlasted_ = false;  // it is closed, and a thread looks after what its blocks keep
  bool has_slot_ = true;
  size_t punching_ = 0;  // threads that use the descriptor without the lock: the last closes it, if the arena is closed
  std::atomic<uint64_t> uncounted_{0};  // how often something has been taken off a budget
  std::atomic<uint32_t> punched_{0};  // how often one of them has ended; a futex
  bool asleep_ = false;  // the thread waits for leases to end, and has nothing free
  std::atomic<bool> holes_{true};  // the file can have holes
  std::atomic<bool> stop_{false};
  bool started_ = false;
  std::thread thread_;
};

}  // namespace conveyor
