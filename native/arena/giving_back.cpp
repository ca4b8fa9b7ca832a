// What gives an arena's memory back: a thread of each process that has one, which never takes the GIL and
// sleeps without a timeout while nothing is free.
#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>

#include "arena.h"
#include "pins.h"
#include "../signals_blocked.h"

namespace conveyor {

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
  return board_ && block->touched != 0 && board_->header()->pinning.load(std::memory_order_relaxed) != 0 && conveyor::pinned(*board_, *block->header());
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

// Gives back blocks that have been free for `idle_ns`, of at least `bytes` if there are; how many.
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
    return starving != (board_ && board_->any_starving()) || stop_.load(std::memory_order_seq_cst) || returns_->pending(returns_->asked.load(std::memory_order_seq_cst)) || returns_->kept_news.load(std::memory_order_seq_cst) != news;
  };
  for (;;) {
    // Before it looks: who has news bumps the word afterwards.
    const uint32_t seen = returns_->count.load(std::memory_order_seq_cst);
    returns_->wanted.store(1, std::memory_order_seq_cst);
    if (stop_.load(std::memory_order_seq_cst)) return;
    const uint32_t latest = returns_->kept_news.load(std::memory_order_seq_cst);
    const bool had_news = std::exchange(news, latest) != latest;
    const uint32_t ticket = returns_->asked.load(std::memory_order_seq_cst);
    const bool asked = returns_->pending(ticket);
    starving = board_ && board_->any_starving();
    uint64_t due;
    const uint64_t began = now_ns();
    try {
      due = give_back(asked || starving ? 0 : idle_ns_);
      if (board_ && (asked || starving)) note_holders();
    } catch (const std::bad_alloc&) {  // not even for a list of blocks is there memory: later
      due = now_ns() + idle_ns_;
    }
    if (asked) {
      // Only those who asked before it looked: who asks later gets a look of its own.
      returns_->answered.store(ticket, std::memory_order_seq_cst);
      memory_->note_given();
      continue;
    }
    if (starving) {
      returns_->kept_wanted.store(1, std::memory_order_seq_cst);
      if (const uint64_t latest = this->news(); latest != told) {
        told = latest;
        board_->ring_starving();
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

}  // namespace conveyor
