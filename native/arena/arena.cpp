#include "arena.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "../hazards.h"
#include "pins.h"
#include "populate.h"

namespace conveyor {

namespace {

const size_t kSmallest = kGranule;

// How many published blocks an allocation looks at: those published last, which are likely to be back
// and warm, and some of all others in turn; and how many more before it takes memory that was never used.
// Bounded, because most of them may be held for long: then every send would look at all of them.
constexpr size_t kNewest = 4, kOthers = 4, kNewestBeforeMore = 32, kOthersBeforeMore = 12;

// Room for `count` + 1 elements; grows by doubling, as push_back does.
template <class T>
void reserve_one_more(std::vector<T>& list, size_t count) {
  if (list.capacity() <= count) list.reserve(std::max<size_t>(8, 2 * count + 1));
}

}  // namespace

// The lock, and what lost its last user meanwhile destroyed after it: that may take any time, and other locks.
class Arena::Section {
 public:
  explicit Section(Arena& arena) : arena_(arena) { arena_.mutex_.lock(); }
  ~Section() {
    // Some of them, so that the list keeps its capacity (see Arena::block_of). That is more than one section
    // adds in the long run.
    std::array<std::shared_ptr<const void>, 16> dropped;
    arena_.take_dropped(dropped);
    arena_.mutex_.unlock();
  }
  Section(const Section&) = delete;
  Section& operator=(const Section&) = delete;
  template <class Body>
  void unlocked(Body&& body) {
    arena_.mutex_.unlock();
    struct Again {
      std::mutex& mutex;
      ~Again() { mutex.lock(); }
    } again{arena_.mutex_};
    body();
  }

 private:
  Arena& arena_;
};

// Four classes for each doubling: at most a fifth of a block is not asked for, and what is not
// touched has no memory behind it anyway.
size_t Arena::class_size(size_t index) {
  const size_t doubling = index / 4, quarter = index % 4;
  return align_up((kSmallest << doubling) + (kSmallest << doubling) / 4 * quarter, kGranule);
}

size_t Arena::class_of(size_t size) {
  if (size <= kSmallest) return 0;
  const size_t doubling = std::bit_width((size - 1) / kSmallest) - 1;
  for (size_t index = doubling * 4;; ++index)
    if (class_size(index) >= size) return index;
}

Block* Arena::allocate(size_t payload, const std::shared_ptr<Budget>& budget, bool beyond_cap, bool may_wait) {
  const bool first = first_may_cross;
  if (inherited_) throw ArenaFull("this memory belongs to the process that this one was forked from");
  const size_t need = kBlockHeader + payload;
  const size_t bytes = align_up(need, kGranule);
  if (!beyond_cap && (payload > cap_ || bytes > cap_))  // the sum may have wrapped around
    throw ArenaFull("a value of " + std::to_string(payload) + " bytes is larger than the session's memory cap of " + std::to_string(cap_) + " bytes");
  if (payload > size_) throw ArenaFull("the arena has no addresses left");
  const size_t index = class_of(need);
  if (budget && bytes > budget->cap)
    throw ArenaFull("a value of " + std::to_string(payload) + " bytes is larger than the graph's memory cap of " + std::to_string(budget->cap) + " bytes (memory_bytes)");
  Block* block;
  size_t cold;
  {
    Section section(*this);
    if (closed_) closed();
    if (!started_ && process_table_) start_thread();
    size_t newest = out_.size();
    look(kNewest, newest);
    look(kOthers, scan_);
    if (free_[index].empty()) {
      look(kNewestBeforeMore, newest);
      look(kOthersBeforeMore, scan_);
    }
    if (budget) charge_bytes(section, bytes, payload, budget, first, may_wait);
    block = nullptr;
    try {
      block = block_of(index);
      if (block == nullptr) look_at_all();
      // Blocks of other sizes that are free have addresses, but these are theirs as long as there is memory
      // behind them.
      for (bool found = true; block == nullptr && found; block = block_of(index))
        section.unlocked([&] { found = give_some(0, SIZE_MAX) != 0; });
      if (block == nullptr) throw ArenaFull("the arena has no addresses left");
      // A warm block takes no more memory. But above the cap it is for those alone who may cross that: it would keep the
      // session there, and who is to go first would wait for who came later. One that has more than is asked for is free
      // memory of our own, which goes back first at the cap.
      if (!beyond_cap && block->touched > bytes && memory_->bytes.load(std::memory_order_relaxed) > cap_ + excess(bytes) && !pinned(block)) {
        chill(section, block);
        if (closed_) closed();
      }
      cold = block->touched;
      const size_t more = bytes > block->touched ? bytes - block->touched : 0;
      if (more != 0 || memory_->bytes.load(std::memory_order_relaxed) > cap_) {
        // The block is ours already: nobody can take it while the lock is given up for a moment.
        take_memory(section, more, excess(bytes), beyond_cap || (first && has_nothing_but(block->touched)), may_wait);
        touched_.fetch_add(more, std::memory_order_relaxed);
        block->touched += more;
      }
    } catch (...) {
      if (budget) uncount(*budget, bytes);
      // As long as before, or whoever tries again and again would keep it from going back.
      if (block != nullptr && block->touched != 0) free(block, block->freed_ns);
      else if (block != nullptr && block->touched == 0) dissolve(block);
      throw;
    }
    block->used = bytes;
    block->budget = budget;
    ++block->generation;  // also of a value that is never published: see PinWords.block
  }
  populate(block, cold);
  BlockHeader* header = block->header();
  header->magic = kBlockMagic;
  header->backed = block->touched;
  header->readers = 0;
  return block;
}

// A block of the class, warm if one is free; nullptr if there are no addresses for it.
Block* Arena::block_of(size_t index) {
  if (closed_) closed();  // while the lock was given up
  // For what all blocks, and one more, drop when they are free: their readers, budgets and what is attached.
  // What their former lives have dropped may be there still.
  reserve_one_more(dropped_, dropped_.size() + 3 * all_.size() + 3);
  auto& list = free_[index];
  if (!list.empty()) {
    Block* block = list.back();
    list.pop_back();
    return block;
  }
  const size_t size = class_size(index);
  const bool big = size >= kBigBlock;
  auto fresh = std::make_unique<Block>();
  // Now, so that publish() and release(), which come after the point of no return or while an exception is
  // on its way, cannot fail: every block is in one of these lists at most.
  reserve_one_more(all_, all_.size());
  reserve_one_more(out_, all_.size());
  reserve_one_more(list, blocks_[index]);
  const size_t window_size = big ? 0 : kWindow;
  std::optional<uint64_t> at;
  if (size >= kHugePage) at = addresses_.take(size, window_size, kHugePage);  // so that it has more of them: see populate()
  if (!at) at = addresses_.take(size, window_size);
  if (!at) return nullptr;
  fresh->offset = *at;
  fresh->size = size;
  try {
    if (big) {
      fresh->mapping = std::make_shared<Mapping>(fd_, *at, size);
      fresh->base = fresh->mapping->base;
    } else {
      const size_t window = *at / kWindow;
      if (window >= windows_.size()) windows_.resize(window + 1);
      if (!windows_[window]) windows_[window] = std::make_shared<Mapping>(fd_, window * kWindow, kWindow);
      fresh->mapping = windows_[window];
      fresh->base = fresh->mapping->base + *at % kWindow;
    }
  } catch (...) {
    addresses_.give(*at, size);
    throw;
  }
  ++blocks_[index];
  fresh->place = all_.size();
  all_.push_back(std::move(fresh));
  return all_.back().get();
}

void Arena::populate(Block* block, size_t from) {
  // What is this process's alone it writes to again and again.
  const uint64_t dear = process_table_ ? kDearHugePageNs : UINT64_MAX;
  if (from >= block->touched || conveyor::populate(block->base + from, block->offset + from, block->touched - from, dear)) return;
  const size_t bytes = block->used;
  give_up(block, from);
  throw ArenaFull("the system has no memory for a value of " + std::to_string(bytes) + " bytes (it is below the session's memory cap of " +
                  std::to_string(cap_) + " bytes, which is too high for this machine or container)");
}

// A block of whose pages beyond `from` some are not there: they must not be taken for warm.
void Arena::give_up(Block* block, size_t from) {
  const uint64_t now = now_ns();
  Section section(*this);
  chill(section, block, from);
  free(block, now);
}

// Give back the memory of a block of the caller's beyond `from`, if that can be.
void Arena::chill(Section& section, Block* block, size_t from) {
  if (!fd_) return;
  bool cold = false;
  ++punching_;
  section.unlocked([&] { cold = punch(block->offset + from, block->offset + block->touched); });
  stop_punching();
  if (!cold) return;
  const size_t less = block->touched - from;
  block->touched = from;
  touched_.fetch_sub(less, std::memory_order_relaxed);
  count(-int64_t(less));
}

void Arena::closed() { throw ArenaFull("the session has been shut down, and its memory with it"); }

void Arena::publish(Block* block, std::shared_ptr<ReaderSet> readers, uint64_t tag, uint64_t number, std::shared_ptr<const void> attached) noexcept {
  BlockHeader* header = block->header();
  const uint32_t generation = ++block->generation & 0x7fffffff;
  header->readers = uint32_t(readers->slots.size());
  CONVEYOR_ASSERT(header->readers <= kMaxReaders);
  // Relaxed: the ring's release publishes them.
  for (uint32_t i = 0; i < header->readers; ++i)
    header->lease[i].store(BlockHeader::held(generation), std::memory_order_relaxed);
  block->readers = std::move(readers);
  block->tag = tag;
  block->number = number;
  block->attached = std::move(attached);
  if (block->attached) {
    header->readers |= kTells;
    returns_->keeping.fetch_add(1, std::memory_order_seq_cst);
  }
  bool outlasts = false;
  {
    Section section(*this);
    out_.push_back(block);
    // Where its readers have left, or died, before it was here to be found, nobody ends a lease on it any
    // more, and nobody else wakes the thread for it. Whoever leaves from now on does (Returns::note).
    if (block->held()) {
      outlasts = closed_ && block->attached;
    } else if (!closed_) {
      block->attached ? returns_->note_kept() : returns_->wake();
    } else {
      out_.pop_back();  // nor is there a thread any more
      free(block, now_ns());
    }
  }
  if (outlasts) look_after();
}

void Arena::release(Block* block) noexcept {
  if (inherited_) return;
  const uint64_t now = now_ns();
  Section section(*this);
  free(block, now);
}

void Arena::free(Block* block, uint64_t now) noexcept {
  block->freed_ns = now;
  if (block->budget) {
    uncount(*block->budget, block->used);
    dropped_.push_back(std::move(block->budget));
  }
  if (block->readers) dropped_.push_back(std::move(block->readers));
  if (block->attached) {
    dropped_.push_back(std::move(block->attached));
    returns_->keeping.fetch_sub(1, std::memory_order_relaxed);
    returns_->note_kept();  // for who destroys it
  }
  free_[class_of(block->size)].push_back(block);
  if (closed_ && !fd_) return drop_pages(block);
  if (asleep_) {
    asleep_ = false;
    returns_->wake();
  }
}

size_t Arena::take_dropped(std::span<std::shared_ptr<const void>> some) noexcept {
  size_t taken = 0;
  for (; taken < some.size() && !dropped_.empty(); ++taken) {
    some[taken] = std::move(dropped_.back());
    dropped_.pop_back();
  }
  return taken;
}

// Backwards from `from`, and round.
void Arena::look(size_t at_most, size_t& from) {
  uint64_t now = 0;
  for (size_t left = std::min(at_most, out_.size()); left > 0 && !out_.empty(); --left) {
    if (from == 0 || from > out_.size()) from = out_.size();
    const size_t i = --from;
    ++looks_;
    Block* block = out_[i];
    if (block->held()) continue;
    out_[i] = out_.back();
    out_.pop_back();
    if (now == 0) now = now_ns();
    free(block, now);
    if (process_table_ && process_table_->any_starving()) memory_->returned.fetch_add(1, std::memory_order_relaxed);
  }
}

// From the end, because a hole is filled with the last, which must have been looked at.
void Arena::look_at_all() {
  size_t from = out_.size();
  look(SIZE_MAX, from);
}

std::pair<int, uint64_t> Arena::file() const {
  std::lock_guard lock(mutex_);
  struct stat file;
  if (!fd_ || inherited_) return {-1, 0};
  if (::fstat(fd_->get(), &file) != 0) throw_errno("arena");
  return {fd_->get(), file.st_ino};
}

size_t Arena::blocks_out() const {
  std::lock_guard lock(mutex_);
  return out_.size();
}

uint64_t Arena::looks() const {
  std::lock_guard lock(mutex_);
  return looks_;
}

size_t Arena::gaps() const {
  std::lock_guard lock(mutex_);
  return addresses_.gaps();
}

size_t Arena::bytes_out() const {
  std::lock_guard lock(mutex_);
  size_t sum = 0;
  for (const Block* block : out_) sum += block->touched;
  return sum;
}

namespace {

// For others, who are asked at a cap: a stopped process does not answer.
constexpr uint64_t kPatienceNs = 1'000'000'000;

std::string number(uint64_t n) { return std::to_string(n); }

}  // namespace

template <class Still, class Done>
bool Arena::wait_for(Section& section, std::vector<ProcessTable::Requested> requested, uint64_t deadline, const Still& still, const Done& done) {
  while (!requested.empty()) {
    const uint32_t given = memory_->given.load(std::memory_order_seq_cst);
    if (done()) return true;
    still(requested);
    const uint64_t now = now_ns();
    if (now >= deadline) break;
    if (requested.empty()) continue;
    const timespec left = to_timespec(deadline - now);
    section.unlocked([&] { futex_wait(&memory_->given, given, &left); });
  }
  return done();
}

std::vector<uint32_t> Arena::holders(const Budget* of) const {
  std::lock_guard lock(mutex_);
  return holders_now(of);
}

void Arena::note_holders() {
  std::vector<uint32_t> found = holders();
  // The driver runs the program, whatever its page says.
  std::erase_if(found, [this](uint32_t slot) { return slot != 0 && process_table_->slot(slot)->status.state.load(std::memory_order_seq_cst) == uint32_t(State::kIdle); });
  found.resize(kNotedHolders, UINT32_MAX);
  for (uint32_t i = 0; i < kNotedHolders; ++i) process_table_->slot(slot_)->holders[i].store(found[i] + 1, std::memory_order_seq_cst);
}

std::vector<uint32_t> Arena::holders_now(const Budget* of) const {
  std::vector<uint32_t> found;
  for (const Block* block : out_) {
    if (of != nullptr && block->budget.get() != of) continue;
    const std::vector<uint32_t>& slots = block->readers->slots;
    for (uint32_t r = 0; r < slots.size(); ++r)
      if (block->held_by(r) && std::find(found.begin(), found.end(), slots[r]) == found.end()) found.push_back(slots[r]);
  }
  return found;
}

thread_local size_t Arena::given = 0;
thread_local bool Arena::first_may_cross = false;

void Arena::charge_bytes(Section& section, size_t bytes, size_t payload, const std::shared_ptr<Budget>& budget, bool first, bool may_wait) {
  auto fits = [&] { return budget->out.load(std::memory_order_relaxed) + bytes <= budget->cap + excess_of_graph(bytes); };
  if (!fits()) look_at_all();
  // What nobody can get any more is held as well, until who holds it is asked.
  if (!fits() && may_ask(may_wait)) {
    std::vector<ProcessTable::Requested> requested;
    for (const uint32_t slot : holders_now(budget.get())) process_table_->ask_for_leftovers(slot, requested);
    wait_for(section, std::move(requested), now_ns() + kPatienceNs, [this](auto& who) { process_table_->still_requested_for_leftovers(who); },
             [&] { return look_at_all(), fits(); });
    // So is what is on its way to a device.
    requested.clear();
    if (!fits())
      for (const uint32_t slot : holders_now(budget.get())) process_table_->ask_for_pins(slot, requested);
    wait_for(section, std::move(requested), now_ns() + kPatienceNs, [this](auto& who) { process_table_->still_requested_for_pins(who); }, [&] { return look_at_all(), fits(); });
    if (closed_) closed();
  }
  if (!fits()) {
    const auto mine = [&](const Block* b) { return b->budget == budget; };
    const size_t values = size_t(std::count_if(out_.begin(), out_.end(), mine));
    if (!first || values != 0 || bytes > budget->cap)
      throw ArenaFull("the graph's memory cap of " + number(budget->cap) + " bytes (memory_bytes) has no room for " + number(payload) +
                    " more: " + number(values) + " values of together " + number(budget->out.load(std::memory_order_relaxed)) +
                    " bytes are still held by their readers", holdings_now(budget.get()), bytes <= budget->cap ? ArenaFull::Cap::kGraph : ArenaFull::Cap::kNone);
  }
  budget->out.fetch_add(bytes, std::memory_order_relaxed);
}

void Arena::charge(Block* block, const std::shared_ptr<Budget>& budget, bool may_wait) {
  if (!budget || block->budget) return;
  Section section(*this);
  charge_bytes(section, block->used, block->used, budget, false, may_wait);
  block->budget = budget;
}

void Arena::uncharge(Block* block) {
  if (inherited_) return;
  Section section(*this);
  if (!block->budget) return;
  uncount(*block->budget, block->used);
  dropped_.push_back(std::move(block->budget));
}

// Its thread tells those who starve.
void Arena::uncount(Budget& budget, size_t bytes) noexcept {
  budget.out.fetch_sub(bytes, std::memory_order_relaxed);
  uncounted_.fetch_add(1, std::memory_order_seq_cst);
  stir();
}

void Arena::stir() noexcept {
  if (process_table_ && process_table_->any_starving()) returns_->wake();
}

// A process may be killed between the two, and its share is then taken off the session's: so what is taken
// is counted in the session first, and what is given back is counted there last. It is never too little.
void Arena::count(int64_t bytes) {
  if (bytes > 0) memory_->bytes.fetch_add(uint64_t(bytes), std::memory_order_relaxed);
  if (process_table_ && has_slot_) process_table_->slot(slot_)->memory.fetch_add(uint64_t(bytes), std::memory_order_seq_cst);
  if (bytes >= 0) return;
  memory_->give_back(uint64_t(-bytes));
  stir();
}

// At the cap, memory that is free but warm has to be found here, although that takes its time: there is
// no other. First our own, then that of the other processes, who are asked for it.
void Arena::take_memory(Section& section, size_t more, size_t excess, bool beyond_cap, bool may_wait) {
  if (beyond_cap) return count(int64_t(more));
  auto taken = [&] {
    if (!memory_->take(more, cap_ + excess)) return false;
    // A process that is killed before this leaves what it has taken counted: never too little.
    if (process_table_) process_table_->slot(slot_)->memory.fetch_add(more, std::memory_order_relaxed);
    return true;
  };
  auto taken_of_own = [&] {
    look_at_all();
    for (;;) {
      bool found = false;
      section.unlocked([&] { found = give_some(0, std::max<size_t>(more, 1)) != 0; });
      if (closed_) closed();
      if (taken()) return true;
      if (found) continue;
      if (punching_ == 0) return false;
      // What another thread is giving back just now is in none of our lists, and still counted.
      const uint32_t seen = punched_.load(std::memory_order_relaxed);  // with the lock, as it is changed
      section.unlocked([&] { futex_wait(&punched_, seen, nullptr); });
    }
  };
  if (taken() || taken_of_own()) return;
  if (may_ask(may_wait)) {
    const uint64_t deadline = now_ns() + kPatienceNs;
    for (uint64_t freed = ~uint64_t(0); freed != memory_->freed.load(std::memory_order_relaxed) && now_ns() < deadline;) {
      // Once more if some has come back meanwhile: others, who want some as well, may have been faster.
      freed = memory_->freed.load(std::memory_order_relaxed);
      // What nobody can get any more holds blocks of ours, and of those that are asked afterwards.
      std::vector<ProcessTable::Requested> requested;
      for (uint32_t i = 0, n = process_table_->used(); i < n; ++i) process_table_->ask_for_leftovers(i, requested);
      if (!requested.empty()) {
        if (wait_for(section, std::move(requested), deadline, [this](auto& who) { process_table_->still_requested_for_leftovers(who); }, taken) || taken_of_own()) return;
      }
      // Nor does memory go that somebody has pinned.
      requested.clear();
      for (uint32_t i = 0, n = process_table_->used(); i < n; ++i) process_table_->ask_for_pins(i, requested);
      if (!requested.empty()) {
        if (wait_for(section, std::move(requested), deadline, [this](auto& who) { process_table_->still_requested_for_pins(who); }, taken) || taken_of_own()) return;
      }
      if (wait_for(section, process_table_->ask_for_memory(slot_), deadline, [this](auto& who) { process_table_->still_requested(who); }, taken)) return;
    }
  }
  full();
}

// Whether nothing of this arena is in use but a block with so many bytes behind it.
bool Arena::has_nothing_but(size_t bytes) const {
  size_t used = touched_.load(std::memory_order_relaxed);
  for (auto& list : free_)
    for (const Block* block : list) used -= block->touched;
  return out_.empty() && used <= bytes;
}

bool Arena::has_nothing_out() {
  Section section(*this);
  look_at_all();
  return has_nothing_but(0);
}

void Arena::full() const {
  size_t held = 0, unpublished = touched_.load(std::memory_order_relaxed);
  for (const Block* block : out_) held += block->touched;
  unpublished -= held;
  for (auto& list : free_)
    for (const Block* block : list) unpublished -= block->touched;
  std::string text = "the session's memory cap of " + number(cap_) + " bytes is reached: ";
  if (out_.empty()) text += "no value of this process is held by its readers";
  else text += number(out_.size()) + " values of this process, of together " + number(held) + " bytes, are still held by their readers";
  if (unpublished != 0) text += ", " + number(unpublished) + " bytes are being written or belong to arrays that were made in place";
  if (process_table_) {
    text += "; the session's arenas:";
    const char* comma = " ";
    for (uint32_t i = 0, n = process_table_->used(); i < n; ++i) {
      const uint64_t bytes = process_table_->slot(i)->memory.load(std::memory_order_relaxed);
      if (bytes == 0) continue;
      text.append(comma).append(process_table_->name(i)).append(" ").append(number(bytes));
      comma = ", ";
    }
  }
  throw ArenaFull(text, holdings_now(nullptr), ArenaFull::Cap::kSession);
}

std::vector<Holding> Arena::holdings(const Budget* of) const {
  std::lock_guard lock(mutex_);
  return holdings_now(of);
}

std::vector<Holding> Arena::holdings_now(const Budget* of) const {
  std::vector<Holding> found;
  for (const Block* block : out_) {
    const ReaderSet& readers = *block->readers;
    if (of != nullptr && block->budget.get() != of) continue;
    for (uint32_t r = 0; r < readers.slots.size(); ++r) {
      if (!block->held_by(r)) continue;
      const uint32_t slot = readers.slots[r];
      auto same = std::find_if(found.begin(), found.end(), [&](const Holding& h) { return h.channel == block->readers && h.slot == slot; });
      if (same == found.end()) {
        same = found.insert(found.end(), Holding{block->readers, slot, readers.process_table->name(slot)});
      }
      same->bytes += block->touched;
      same->tags.push_back(block->tag);
    }
  }
  return found;
}

namespace {

constexpr size_t kLooks = 256;    // published blocks looked at with the lock held
constexpr size_t kDetach = 1024;  // free blocks that go back at a time
constexpr uint64_t kKeptPauseNs = 1'000'000;
constexpr uint64_t kKeptRest = 8;  // so many times as long as it has looked: there may be tens of thousands of blocks

}  // namespace

// Needs no descriptor. What is not to be had in this way goes with the arena.
void Arena::drop_pages(Block* block) noexcept {
  if (block->touched == 0 || pinned(block) || ::madvise(block->base, block->touched, MADV_REMOVE) != 0) return;
  touched_.fetch_sub(block->touched, std::memory_order_relaxed);
  count(-int64_t(block->touched));
  block->touched = 0;
}

void Arena::stop_punching() {
  punched_.fetch_add(1, std::memory_order_relaxed);
  futex_wake_all(&punched_);
  if (--punching_ != 0 || !closed_) return;
  fd_.reset();
  for (auto& list : free_)  // since the last of them were looked for
    for (Block* block : list) drop_pages(block);
  // Arrays made in place keep it open for the fork handler.
  for (auto& window : windows_)
    if (window) window->close_file();
  for (auto& block : all_)
    if (block->mapping) block->mapping->close_file();
}

// A block without memory has no marks, and to look for them would give it some. The same flag for all arenas spares
// those of sessions without devices a look at cold memory. It is up before any mark is made by who holds a lease, and
// blocks are asked when their leases have ended: who ends one has been seen to.
bool Arena::pinned(const Block* block) const {
  return process_table_ && block->touched != 0 && process_table_->header()->pinning.load(std::memory_order_relaxed) != 0 && conveyor::pinned(*process_table_, *block->header());
}

std::vector<Block*> Arena::detach(uint64_t now, uint64_t idle_ns, size_t count, size_t bytes) {
  std::vector<Block*> blocks;
  blocks.reserve(std::min(count, all_.size()));  // from here on nothing fails: none of them is lost
  size_t sum = 0;
  // The large ones first: they are few.
  for (size_t i = free_.size(); i-- > 0 && blocks.size() < count && sum < bytes;) {
    auto& list = free_[i];
    size_t n = 0, stay = 0;
    for (; n < list.size() && blocks.size() < count && sum < bytes && now - list[n]->freed_ns >= idle_ns; ++n) {
      if (pinned(list[n])) {
        list[stay++] = list[n];
        continue;
      }
      sum += list[n]->touched;
      blocks.push_back(list[n]);
    }
    list.erase(list.begin() + ptrdiff_t(stay), list.begin() + ptrdiff_t(n));
  }
  return blocks;
}

bool Arena::punch(uint64_t start, uint64_t end) {
  while (::fallocate(fd_->get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, off_t(start), off_t(end - start)) != 0)
    if (errno != EINTR) return false;
  return true;
}

// Sorts them; the first so many have no memory any more.
size_t Arena::punch(std::vector<Block*>& blocks) {
  // Neighbours with one call.
  std::sort(blocks.begin(), blocks.end(), [](const Block* a, const Block* b) { return a->offset < b->offset; });
  size_t done = 0;
  while (done < blocks.size()) {
    const uint64_t start = blocks[done]->offset;
    uint64_t end = start;
    size_t next = done;
    do end = blocks[next]->offset + blocks[next]->touched;
    while (++next < blocks.size() && blocks[next]->offset == end);
    if (end != start && !punch(start, end)) break;
    done = next;
  }
  for (size_t i = 0; i < done; ++i)
    if (blocks[i]->size >= kBigBlock) blocks[i]->mapping.reset();
  return done;
}

// A block without memory is no more; its addresses may serve any size.
void Arena::dissolve(Block* block) noexcept {
  touched_.fetch_sub(block->touched, std::memory_order_relaxed);
  count(-int64_t(block->touched));
  try {
    addresses_.give(block->offset, block->size);
  } catch (const std::bad_alloc&) {  // these addresses are lost; there are many more than memory
  }
  --blocks_[class_of(block->size)];
  all_.back()->place = block->place;
  std::swap(all_[block->place], all_.back());
  all_.pop_back();
}

size_t Arena::give_some(uint64_t idle_ns, size_t bytes) {
  if (!holes_.load(std::memory_order_relaxed)) return 0;
  std::vector<Block*> blocks;
  {
    std::lock_guard lock(mutex_);
    if (!fd_) return 0;
    blocks = detach(now_ns(), idle_ns, kDetach, bytes);
    if (blocks.empty()) return 0;
    ++punching_;
  }
  const size_t punched = punch(blocks);
  std::lock_guard lock(mutex_);
  stop_punching();
  if (punched != blocks.size()) holes_.store(false, std::memory_order_relaxed);  // not supported here: the pages stay warm instead
  for (size_t i = 0; i < punched; ++i) dissolve(blocks[i]);
  for (size_t i = punched; i < blocks.size(); ++i) free_[class_of(blocks[i]->size)].push_back(blocks[i]);
  return punched;
}

// Every block that was published before is looked at: only such as have been looked at, or are newer, move.
void Arena::sweep() {
  size_t from = SIZE_MAX;
  for (bool more = true; more;) {
    std::lock_guard lock(mutex_);
    from = std::min(from, out_.size());
    const size_t looks = std::min(from, kLooks);
    if (looks != 0) look(looks, from);
    more = from != 0 && looks != 0;
  }
}

uint64_t Arena::give_back(uint64_t idle_ns) {
  sweep();
  destroy_dropped();
  destroy_lingering();
  while (give_some(idle_ns, SIZE_MAX) != 0) {
  }
  std::lock_guard lock(mutex_);
  uint64_t first = UINT64_MAX;
  if (holes_.load(std::memory_order_relaxed))
    for (auto& list : free_) {
      // What is pinned is not due: who lets go of it wakes the thread.
      const auto loose = std::find_if(list.begin(), list.end(), [this](const Block* block) { return !pinned(block); });
      if (loose != list.end()) first = std::min(first, (*loose)->freed_ns);
    }
  asleep_ = first == UINT64_MAX;
  return asleep_ ? 0 : first + idle_ns;
}

// The readers of a block that is done keep a graph's segment mapped, and what is attached may be of any size.
void Arena::destroy_dropped() noexcept {
  for (bool more = true; more;) {
    std::array<std::shared_ptr<const void>, 16> dropped;
    std::lock_guard lock(mutex_);  // given back before they go
    more = take_dropped(dropped) == dropped.size();
  }
}

void Arena::give_back_soon() {
  if (inherited_) return;
  sweep();
  destroy_dropped();
  returns_->ask();
}

void Arena::start_thread() {
  started_ = true;
  const SignalsBlocked blocked;
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::exception&) {
    started_ = false;  // no thread is to be had now: the next allocation tries again
  }
}

void Arena::stop_thread() {
  if (!thread_.joinable()) return;
  if (inherited_) {
    // In a forked child the thread does not exist: it can be neither joined nor detached.
    abandon(std::move(thread_));
    return;
  }
  stop_.store(true, std::memory_order_seq_cst);
  returns_->wake();
  thread_.join();
}

// A block that has been free for `idle_ns_` goes back. A lease may end just after the thread has looked, and
// it looks again when the first of the free blocks is due: within a little more than twice this. After
// leases have ended it waits for a third of it before it looks: more may end, and who drops values one by
// one should not wake it for each. What is attached to blocks is let go of at once, but not more often than each
// kKeptPauseNs, since whoever fetches values from here would wake it for each, nor for more than a part of its time.
// While some process starves it keeps nothing, hears of the end of each lease, and rings for what has come of it.
void Arena::run() {
  // Sleeps until it is woken, or for `ns` (0: no limit). What has come since `seen` wakes it at once.
  auto sleep = [this](uint32_t seen, uint64_t ns) {
    const timespec timeout = to_timespec(ns);
    futex_wait(&returns_->count, seen, ns != 0 ? &timeout : nullptr);
  };
  uint32_t news = 0;  // of what is attached, that it has looked after
  uint64_t told = UINT64_MAX;  // to those who starve
  bool starving = false;
  auto called = [&] {
    return starving != (process_table_ && process_table_->any_starving()) || stop_.load(std::memory_order_seq_cst) || returns_->pending(returns_->requested.load(std::memory_order_seq_cst)) || returns_->kept_news.load(std::memory_order_seq_cst) != news;
  };
  for (;;) {
    // Before it looks: who has news bumps the word afterwards.
    const uint32_t seen = returns_->count.load(std::memory_order_seq_cst);
    returns_->wanted.store(1, std::memory_order_seq_cst);
    if (stop_.load(std::memory_order_seq_cst)) return;
    const uint32_t latest = returns_->kept_news.load(std::memory_order_seq_cst);
    const bool had_news = std::exchange(news, latest) != latest;
    const uint32_t request_id = returns_->requested.load(std::memory_order_seq_cst);
    const bool requested = returns_->pending(request_id);
    starving = process_table_ && process_table_->any_starving();
    uint64_t due;
    const uint64_t began = now_ns();
    try {
      due = give_back(requested || starving ? 0 : idle_ns_);
      if (process_table_ && (requested || starving)) note_holders();
    } catch (const std::bad_alloc&) {  // not even for a list of blocks is there memory: later
      due = now_ns() + idle_ns_;
    }
    if (requested) {
      // Only those who asked before it looked: who asks later gets a look of its own.
      returns_->answered.store(request_id, std::memory_order_seq_cst);
      memory_->note_given();
      continue;
    }
    if (starving) {
      returns_->kept_wanted.store(1, std::memory_order_seq_cst);
      if (const uint64_t latest = this->news(); latest != told) {
        told = latest;
        process_table_->notify_starving();
      }
      // What is free by now may have been freed after the look: nobody has woken this thread for it.
      if (!called()) sleep(seen, due == 0 ? 0 : kKeptPauseNs);
      continue;
    }
    if (had_news) {
      // It looks again by itself: who frees the first block meanwhile need not wake it, once for each value.
      {
        std::lock_guard lock(mutex_);
        asleep_ = false;
      }
      returns_->kept_wanted.store(0, std::memory_order_seq_cst);
      returns_->wanted.store(0, std::memory_order_seq_cst);
      const uint64_t pause = std::max(kKeptPauseNs, kKeptRest * (now_ns() - began));
      sleep(returns_->count.load(std::memory_order_seq_cst), stop_.load(std::memory_order_seq_cst) ? 1 : pause);
      continue;
    }
    returns_->kept_wanted.store(1, std::memory_order_seq_cst);
    if (called()) continue;
    if (due == 0) sleep(seen, 0);
    returns_->wanted.store(0, std::memory_order_seq_cst);
    const uint32_t quiet = returns_->count.load(std::memory_order_seq_cst);
    if (called()) continue;
    const uint64_t now = now_ns();
    sleep(quiet, due == 0 ? std::max<uint64_t>(idle_ns_ / 3, 1) : due > now ? due - now : 1);
  }
}

// All arenas of this process: fork() is held off while one of them is being changed, so that a child finds
// them whole. There they are inert, and the threads do not exist.
struct Arena::ForkHandlers {
  std::mutex mutex;
  std::vector<Arena*> all;

  static ForkHandlers& get() {
    static ForkHandlers* handlers = [] {
      install_fork_handlers();        // first, so that its lock is taken after ours: who has an arena's may take it
      auto* made = new ForkHandlers;  // never destroyed: arenas may outlive static destructors
      if (const int rc = pthread_atfork(before, in_parent, in_child); rc != 0) throw std::system_error(rc, std::generic_category(), "pthread_atfork");
      return made;
    }();
    return *handlers;
  }
  static void before() {
    get().mutex.lock();
    for (Arena* arena : get().all) arena->mutex_.lock();
  }
  static void in_parent() {
    for (Arena* arena : get().all) arena->mutex_.unlock();
    get().mutex.unlock();
  }
  static void in_child() {
    for (Arena* arena : get().all) arena->inherited_ = true;
    in_parent();
  }
};

Arena::Arena(int fd, size_t size, size_t cap, std::shared_ptr<ProcessTable> process_table, uint32_t slot, uint64_t idle_ns)
    : fd_(std::make_shared<const Fd>(dup_cloexec(fd))), size_(size / kWindow * kWindow), cap_(cap), process_table_(std::move(process_table)), slot_(slot), idle_ns_(idle_ns),
      memory_(process_table_ ? &process_table_->header()->memory : &own_memory_),
      returns_(process_table_ ? &process_table_->slot(slot)->returns : &own_returns_), addresses_(size_) {
  std::lock_guard lock(ForkHandlers::get().mutex);
  ForkHandlers::get().all.push_back(this);
}

Arena::~Arena() {
  stop_thread();
  {
    std::lock_guard lock(ForkHandlers::get().mutex);
    std::erase(ForkHandlers::get().all, this);
  }
  if (!inherited_) count(-int64_t(bytes_touched()));
}

void Arena::close() {
  if (inherited_) return;
  {
    std::lock_guard lock(mutex_);
    if (std::exchange(closed_, true)) return;
    ++punching_;
  }
  // Nobody starts it any more.
  stop_thread();
  give_back(0);
  {
    std::lock_guard lock(mutex_);
    stop_punching();
  }
  look_after();
}

// Have a closed arena looked after while its blocks keep something, by one thread.
void Arena::look_after() noexcept {
  {
    std::lock_guard lock(mutex_);
    if (outlasted_ || !keeps_any()) return;
    outlasted_ = true;
  }
  const SignalsBlocked blocked;
  try {
    std::thread([self = owner()] { self->outlast(); }).detach();
  } catch (const std::exception&) {  // no thread is to be had: what is kept stays as long as the arena
    std::lock_guard lock(mutex_);
    outlasted_ = false;
  }
}

bool Arena::keeps_any() const {
  return !lingering_.empty() || std::ranges::any_of(out_, [](const Block* block) { return block->attached != nullptr; });
}

// A closed arena has no thread, but leases go on ending: those on values that are held, and those on blocks that were
// kept by what was just let go of. What is attached to blocks is somebody's, and goes with the last of them. The flag
// is not taken down: the slot may be another process's by then, whose own thread waits by it.
void Arena::outlast() noexcept {
  for (;;) {
    const uint32_t seen = returns_->count.load(std::memory_order_seq_cst);
    returns_->kept_wanted.store(1, std::memory_order_seq_cst);  // before it looks: Returns::note_kept
    sweep();
    destroy_dropped();
    destroy_lingering();
    {
      std::lock_guard lock(mutex_);
      if (!keeps_any()) {
        outlasted_ = false;
        return;
      }
    }
    futex_wait(&returns_->count, seen, nullptr);
  }
}

void Arena::leave_slot() {
  if (inherited_) return;
  std::lock_guard lock(mutex_);
  if (!std::exchange(has_slot_, false) || !process_table_) return;
  process_table_->slot(slot_)->memory.fetch_sub(touched_.load(std::memory_order_relaxed), std::memory_order_seq_cst);
}

bool Arena::is_read(uint64_t number) const noexcept { return !inherited_ && process_table_ && is_announced(*process_table_, number); }

void Arena::linger(std::list<Lingering>& one) noexcept {
  bool late;
  {
    std::lock_guard lock(mutex_);
    lingering_.splice(lingering_.end(), one, one.begin());
    late = closed_;
  }
  // Before the thread looks at the words: who has let go of one before that has seen no value that lingers, and who does
  // so afterwards tells the thread (Hazard).
  returns_->lingering.fetch_add(1, std::memory_order_seq_cst);
  returns_->note_kept();
  if (late) look_after();
}

// In a closed arena, too: no other value comes to lie there, but its pages would go.
void Arena::destroy_lingering() noexcept {
  std::list<Lingering> gone;  // destroyed without the lock
  std::lock_guard lock(mutex_);
  for (auto at = lingering_.begin(); at != lingering_.end();) {
    const auto one = at++;
    if (is_announced(*process_table_, one->number)) continue;
    gone.splice(gone.end(), lingering_, one);
    returns_->lingering.fetch_sub(1, std::memory_order_relaxed);
  }
}

}  // namespace conveyor
