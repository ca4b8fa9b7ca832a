// The arena at its caps: what may be taken, who is asked for memory, and who holds it.
#include <algorithm>

#include "section.h"

namespace conveyor {

namespace {

// For others, who are asked at a cap: a stopped process does not answer.
constexpr uint64_t kPatienceNs = 1'000'000'000;

std::string number(uint64_t n) { return std::to_string(n); }

}  // namespace

template <class Still, class Done>
bool Arena::wait_for(Section& section, std::vector<Board::Asked> asked, uint64_t deadline, const Still& still, const Done& done) {
  while (!asked.empty()) {
    const uint32_t given = memory_->given.load(std::memory_order_seq_cst);
    if (done()) return true;
    still(asked);
    const uint64_t now = now_ns();
    if (now >= deadline) break;
    if (asked.empty()) continue;
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
  std::erase_if(found, [this](uint32_t slot) { return slot != 0 && board_->slot(slot)->status.state.load(std::memory_order_seq_cst) == uint32_t(State::kIdle); });
  found.resize(kNotedHolders, UINT32_MAX);
  for (uint32_t i = 0; i < kNotedHolders; ++i) board_->slot(slot_)->holders[i].store(found[i] + 1, std::memory_order_seq_cst);
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

void Arena::charge_bytes(Section& section, size_t bytes, size_t payload, const std::shared_ptr<Budget>& budget, bool may_wait) {
  auto fits = [&] { return budget->out.load(std::memory_order_relaxed) + bytes <= budget->cap + excess_of_graph(bytes); };
  if (!fits()) look_at_all();
  // What nobody can get any more is held as well, until who holds it is asked.
  if (!fits() && may_ask(may_wait)) {
    std::vector<Board::Asked> asked;
    for (const uint32_t slot : holders_now(budget.get())) board_->ask_for_leftovers(slot, asked);
    wait_for(section, std::move(asked), now_ns() + kPatienceNs, [this](auto& who) { board_->still_asked_for_leftovers(who); },
             [&] { return look_at_all(), fits(); });
    // So is what is on its way to a device.
    asked.clear();
    if (!fits())
      for (const uint32_t slot : holders_now(budget.get())) board_->ask_for_pins(slot, asked);
    wait_for(section, std::move(asked), now_ns() + kPatienceNs, [this](auto& who) { board_->still_asked_for_pins(who); }, [&] { return look_at_all(), fits(); });
    if (closed_) closed();
  }
  if (!fits()) {
    const auto mine = [&](const Block* b) { return b->budget == budget; };
    const size_t values = size_t(std::count_if(out_.begin(), out_.end(), mine));
    throw ArenaFull("the graph's memory cap of " + number(budget->cap) + " bytes (memory_bytes) has no room for " + number(payload) +
                    " more: " + number(values) + " values of together " + number(budget->out.load(std::memory_order_relaxed)) +
                    " bytes are still held by their readers", holdings_now(budget.get()), bytes <= budget->cap ? ArenaFull::Cap::kGraph : ArenaFull::Cap::kNone);
  }
  budget->out.fetch_add(bytes, std::memory_order_relaxed);
}

void Arena::charge(Block* block, const std::shared_ptr<Budget>& budget, bool may_wait) {
  if (!budget || block->budget) return;
  Section section(*this);
  charge_bytes(section, block->used, block->used, budget, may_wait);
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
  if (board_ && board_->any_starving()) returns_->wake();
}

// A process may be killed between the two, and its share is then taken off the session's: so what is taken
// is counted in the session first, and what is given back is counted there last. It is never too little.
void Arena::count(int64_t bytes) {
  if (bytes > 0) memory_->bytes.fetch_add(uint64_t(bytes), std::memory_order_relaxed);
  if (board_ && has_slot_) board_->slot(slot_)->memory.fetch_add(uint64_t(bytes), std::memory_order_seq_cst);
  if (bytes >= 0) return;
  memory_->give_back(uint64_t(-bytes));
  stir();
}

// At the cap, memory that is free but warm has to be found here, although that takes its time: there is
// no other. First our own, then that of the other processes, who are asked for it.
void Arena::take_memory(Section& section, size_t more, bool beyond_cap, bool may_wait) {
  if (beyond_cap) return count(int64_t(more));
  auto taken = [&] {
    if (!memory_->take(more, cap_ + excess(more))) return false;
    // A process that is killed before this leaves what it has taken counted: never too little.
    if (board_) board_->slot(slot_)->memory.fetch_add(more, std::memory_order_relaxed);
    return true;
  };
  auto taken_of_own = [&] {
    look_at_all();
    for (;;) {
      bool found = false;
      section.unlocked([&] { found = give_some(0, more) != 0; });
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
      std::vector<Board::Asked> asked;
      for (uint32_t i = 0, n = board_->used(); i < n; ++i) board_->ask_for_leftovers(i, asked);
      if (!asked.empty()) {
        if (wait_for(section, std::move(asked), deadline, [this](auto& who) { board_->still_asked_for_leftovers(who); }, taken) || taken_of_own()) return;
      }
      // Nor does memory go that somebody has pinned.
      asked.clear();
      for (uint32_t i = 0, n = board_->used(); i < n; ++i) board_->ask_for_pins(i, asked);
      if (!asked.empty()) {
        if (wait_for(section, std::move(asked), deadline, [this](auto& who) { board_->still_asked_for_pins(who); }, taken) || taken_of_own()) return;
      }
      if (wait_for(section, board_->ask_for_memory(slot_), deadline, [this](auto& who) { board_->still_asked(who); }, taken)) return;
    }
  }
  full();
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
  if (board_) {
    text += "; the session's arenas:";
    const char* comma = " ";
    for (uint32_t i = 0, n = board_->used(); i < n; ++i) {
      const uint64_t bytes = board_->slot(i)->memory.load(std::memory_order_relaxed);
      if (bytes == 0) continue;
      text.append(comma).append(board_->name(i)).append(" ").append(number(bytes));
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
        same = found.insert(found.end(), Holding{block->readers, slot, readers.board->name(slot)});
      }
      same->bytes += block->touched;
      same->tags.push_back(block->tag);
    }
  }
  return found;
}

}  // namespace conveyor
