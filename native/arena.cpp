#include "arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstring>

namespace conveyor {

namespace {
constexpr size_t kSmallest = kPage;
constexpr uint64_t kTrimEveryNs = 1'000'000'000;
constexpr uint64_t kIdleNs = 10'000'000'000;
}  // namespace

Arena::Arena(int fd, size_t size, size_t cap) : fd_(dup_cloexec(fd)), size_(size / kWindow * kWindow), cap_(cap) {}

Arena::~Arena() {
  for (char* window : windows_)
    if (window != nullptr) ::munmap(window, kWindow);
  for (auto& block : all_)
    if (block->size >= kBigBlock) ::munmap(block->base, block->size);
}

// Four classes for each doubling: at most a fifth of a block is not asked for, and what is not
// touched has no memory behind it anyway.
size_t Arena::class_size(size_t index) {
  const size_t doubling = index / 4, quarter = index % 4;
  return align_up((kSmallest << doubling) + (kSmallest << doubling) / 4 * quarter, kPage);
}

size_t Arena::class_of(size_t size) {
  if (size <= kSmallest) return 0;
  const size_t doubling = std::bit_width((size - 1) / kSmallest) - 1;
  for (size_t index = doubling * 4;; ++index)
    if (class_size(index) >= size) return index;
}

Block* Arena::allocate(size_t payload, bool beyond_cap) {
  if (fd_.get() < 0) throw ArenaFull("the session has been shut down, and its memory with it");
  if (payload > cap_ && !beyond_cap)
    throw ArenaFull("a value of " + std::to_string(payload) + " bytes is larger than the memory cap of " + std::to_string(cap_) + " bytes");
  const size_t need = kBlockHeader + payload;
  const size_t index = class_of(need);
  const size_t size = class_size(index);
  auto& list = free_[index];
  // Look at a few published blocks each time, so that the newest come back warm; at all of them
  // before new memory is taken.
  reclaim(8);
  if (list.empty()) reclaim(SIZE_MAX);
  const uint64_t now = now_ns();
  if (now - trimmed_ns_ > kTrimEveryNs) trim(kIdleNs);
  Block* block;
  if (!list.empty()) {
    block = list.back();
    list.pop_back();
  } else {
    uint64_t at = top_;
    if (size < kBigBlock && at % kWindow + size > kWindow) at = align_up(at, kWindow);
    // Big blocks are mapped alone, but windows must not overlap them: they start and end at windows.
    if (size >= kBigBlock) at = align_up(at, kWindow);
    const uint64_t end = size >= kBigBlock ? align_up(at + size, kWindow) : at + size;
    if (end > size_) throw ArenaFull("the arena has no addresses left");
    auto fresh = std::make_unique<Block>();
    fresh->offset = at;
    fresh->size = size;
    fresh->touched = 0;
    fresh->generation = 0;
    if (size >= kBigBlock) {
      fresh->base = map_shared(fd_.get(), at, size);
    } else {
      const size_t window = at / kWindow;
      if (window >= windows_.size()) windows_.resize(window + 1, nullptr);
      if (windows_[window] == nullptr) windows_[window] = map_shared(fd_.get(), window * kWindow, kWindow);
      fresh->base = windows_[window] + at % kWindow;
    }
    top_ = end;
    block = fresh.get();
    all_.push_back(std::move(fresh));
  }
  const uint64_t touch = block->used = align_up(need, kPage);
  if (touch > block->touched) {
    const size_t more = touch - block->touched;
    if (touched_ + more > cap_ && !beyond_cap) {
      try {
        make_room(more);
      } catch (...) {
        release(block);
        throw;
      }
    }
    touched_ += more;
    block->touched = touch;
  }
  BlockHeader* header = block->header();
  header->magic = kBlockMagic;
  header->size = block->size;
  header->readers = 0;
  return block;
}

void Arena::publish(Block* block, std::shared_ptr<ReaderSet> readers, uint64_t tag) {
  BlockHeader* header = block->header();
  const uint32_t generation = ++block->generation & 0x7fffffff;
  header->readers = uint32_t(readers->slots.size());
  CONVEYOR_ASSERT(header->readers <= kMaxReaders);
  // Relaxed: the ring's release publishes them.
  for (uint32_t i = 0; i < header->readers; ++i)
    header->lease[i].store(BlockHeader::held(generation), std::memory_order_relaxed);
  if (readers->budget) readers->budget->out += block->used;
  block->readers = std::move(readers);
  block->tag = tag;
  out_.push_back(block);
}

void Arena::release(Block* block) {
  block->freed_ns = now_ns();
  block->readers.reset();
  free_[class_of(block->size)].push_back(block);
}

void Arena::reclaim(size_t at_most) {
  // Newest first from where the last look ended: a value that was just read is free again and warm,
  // while values that somebody keeps for long gather at the front and are looked at in turn.
  // All: from the end, because a hole is filled with the last, which must have been looked at.
  if (at_most >= out_.size()) scan_ = out_.size();
  for (size_t left = std::min(at_most, out_.size()); left > 0 && !out_.empty(); --left) {
    if (scan_ == 0 || scan_ > out_.size()) scan_ = out_.size();
    const size_t i = --scan_;
    Block* block = out_[i];
    bool free = true;
    for (uint32_t r = 0; r < block->readers->slots.size() && free; ++r) free = !block->held_by(r);
    if (!free) continue;
    out_[i] = out_.back();
    out_.pop_back();
    if (block->readers->budget) block->readers->budget->out -= block->used;
    release(block);
  }
}

void Arena::check_budget(const ReaderSet& readers, size_t payload) {
  if (!readers.budget) return;
  const Budget& budget = *readers.budget;
  const size_t bytes = align_up(kBlockHeader + payload, kPage);
  if (budget.out + bytes <= budget.cap) return;
  reclaim(SIZE_MAX);
  if (budget.out + bytes <= budget.cap) return;
  const size_t values = size_t(std::count_if(out_.begin(), out_.end(), [&](const Block* b) { return b->readers->budget == readers.budget; }));
  throw ArenaFull("the graph's memory cap of " + std::to_string(budget.cap) + " bytes (memory_bytes) has no room for " +
                  std::to_string(payload) + " more: " + std::to_string(values) + " values of together " + std::to_string(budget.out) +
                  " bytes are still held by their readers", holdings(&budget));
}

Block* Arena::find(const void* p) const {
  // Only blocks made in place are looked up, and their number is small next to the cost of a copy.
  const char* c = static_cast<const char*>(p);
  for (auto& block : all_)
    if (c >= block->base && c < block->base + block->size) return block.get();
  return nullptr;
}

size_t Arena::bytes_out() const {
  size_t sum = 0;
  for (Block* block : out_) sum += block->touched;
  return sum;
}

void Arena::punch(Block* block) {
  if (block->touched == 0) return;
  if (::fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, off_t(block->offset), off_t(block->touched)) != 0)
    return;  // not supported here: the pages stay warm instead
  touched_ -= block->touched;
  block->touched = 0;
}

void Arena::make_room(size_t bytes) {
  reclaim(SIZE_MAX);
  for (auto& list : free_)
    for (Block* block : list) {
      if (touched_ + bytes <= cap_) return;
      punch(block);
    }
  if (touched_ + bytes <= cap_) return;
  size_t unpublished = touched_ - bytes_out();
  for (auto& list : free_)
    for (Block* block : list) unpublished -= block->touched;
  std::string made;
  if (unpublished != 0) made = ", " + std::to_string(unpublished) + " bytes are being written or belong to arrays that were made in place";
  throw ArenaFull("the memory cap of " + std::to_string(cap_) + " bytes is reached: " + std::to_string(out_.size()) +
                  " values of together " + std::to_string(bytes_out()) +
                  " bytes are still held by their readers" + made, holdings());
}

std::vector<Holding> Arena::holdings(const Budget* of) const {
  std::vector<Holding> found;
  for (const Block* block : out_) {
    const ReaderSet& readers = *block->readers;
    if (of != nullptr && readers.budget.get() != of) continue;
    for (uint32_t r = 0; r < readers.slots.size(); ++r) {
      if (!block->held_by(r)) continue;
      const uint32_t slot = readers.slots[r];
      auto same = std::find_if(found.begin(), found.end(), [&](const Holding& h) { return h.channel == block->readers && h.slot == slot; });
      if (same == found.end()) {
        const char* name = readers.board->slot(slot)->name;
        same = found.insert(found.end(), Holding{block->readers, slot, std::string(name, ::strnlen(name, sizeof readers.board->slot(slot)->name))});
      }
      same->bytes += block->touched;
      same->tags.push_back(block->tag);
    }
  }
  return found;
}

void Arena::trim(uint64_t idle_ns) {
  const uint64_t now = now_ns();
  trimmed_ns_ = now;
  for (auto& list : free_)
    for (Block* block : list)
      if (now - block->freed_ns > idle_ns) punch(block);
}

}  // namespace conveyor
