#include "section.h"

#include <sys/stat.h>

#include <algorithm>
#include <bit>
#include <cstring>

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
    if (!started_ && board_) start_thread();
    size_t newest = out_.size();
    look(kNewest, newest);
    look(kOthers, scan_);
    if (free_[index].empty()) {
      look(kNewestBeforeMore, newest);
      look(kOthersBeforeMore, scan_);
    }
    if (budget) charge_bytes(section, bytes, payload, budget, may_wait);
    block = nullptr;
    try {
      block = block_of(index);
      if (block == nullptr) look_at_all();
      // Blocks of other sizes that are free have addresses, but these are theirs as long as there is memory
      // behind them.
      for (bool found = true; block == nullptr && found; block = block_of(index))
        section.unlocked([&] { found = give_some(0, SIZE_MAX) != 0; });
      if (block == nullptr) throw ArenaFull("the arena has no addresses left");
      cold = block->touched;
      if (bytes > block->touched) {
        // The block is ours already: nobody can take it while the lock is given up for a moment.
        take_memory(section, bytes - block->touched, beyond_cap, may_wait);
        touched_.fetch_add(bytes - block->touched, std::memory_order_relaxed);
        block->touched = bytes;
      }
    } catch (...) {
      if (budget) uncount(*budget, bytes);
      if (block != nullptr && block->touched != 0) free(block, now_ns());
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
  if (from >= block->touched || conveyor::populate(block->base + from, block->offset + from, block->touched - from)) return;
  const size_t bytes = block->used;
  give_up(block, from);
  throw ArenaFull("the system has no memory for a value of " + std::to_string(bytes) + " bytes (it is below the session's memory cap of " +
                  std::to_string(cap_) + " bytes, which is too high for this machine or container)");
}

// A block of whose pages beyond `from` some are not there: they must not be taken for warm.
void Arena::give_up(Block* block, size_t from) {
  const uint64_t now = now_ns();
  Section section(*this);
  bool cold = false;
  if (fd_) {
    ++punching_;
    section.unlocked([&] { cold = punch(block->offset + from, block->offset + block->touched); });
    stop_punching();
  }
  if (cold) {
    const size_t less = block->touched - from;
    block->touched = from;
    touched_.fetch_sub(less, std::memory_order_relaxed);
    count(-int64_t(less));
  }
  free(block, now);
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
    if (board_ && board_->any_starving()) memory_->returned.fetch_add(1, std::memory_order_relaxed);
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

}  // namespace conveyor
