#include "hazards.h"

namespace conveyor {

namespace {

// Numbers of values need 57 bits. A process that has left the session may let go of what it has announced when its slot
// has become another's: it finds that a word says something else, also where both have announced the same value.
constexpr int kNumberBits = 57;

uint64_t word_of(uint64_t number, uint32_t incarnation) { return (number & ((uint64_t(1) << kNumberBits) - 1)) | uint64_t(incarnation) << kNumberBits; }

// Sequentially consistent, as all here: who announces makes the count cover its word before it writes that.
uint32_t used_of(const ProcessTableSlot* slot) { return std::min(slot->hazards_used.load(std::memory_order_seq_cst), kHazards); }

bool lives(const ProcessTableSlot* slot) {
  const Condition condition = slot->condition.load(std::memory_order_seq_cst);
  return condition != Condition::kFree && condition != Condition::kDead;
}

}  // namespace

std::shared_ptr<Hazard> Hazard::announce(std::shared_ptr<ProcessTable> process_table, uint32_t slot, uint64_t number, std::shared_ptr<Returns> keeper) {
  std::shared_ptr<Hazard> hazard(new Hazard);
  ProcessTableSlot* const own = process_table->slot(slot);
  hazard->announced_ = word_of(number, own->incarnation.load(std::memory_order_relaxed));
  if (hazard->announced_ == 0) return nullptr;
  for (uint32_t i = 0; i < kHazards; ++i) {
    if (own->hazards[i].load(std::memory_order_relaxed) != 0) continue;
    for (uint32_t used = own->hazards_used.load(std::memory_order_seq_cst); used <= i;)
      if (own->hazards_used.compare_exchange_strong(used, i + 1, std::memory_order_seq_cst)) break;
    uint64_t nothing = 0;
    if (!own->hazards[i].compare_exchange_strong(nothing, hazard->announced_, std::memory_order_seq_cst)) continue;
    hazard->word_ = &own->hazards[i];
    hazard->process_table_ = std::move(process_table);
    hazard->keeper_ = std::move(keeper);
    return hazard;
  }
  return nullptr;
}

Hazard::~Hazard() {
  if (word_ == nullptr || fork_ != fork_generation.load(std::memory_order_relaxed)) return;
  uint64_t expected = announced_;
  // Release among the rest: the value has been read before its memory can be used again.
  word_->compare_exchange_strong(expected, 0, std::memory_order_seq_cst);
  // Dekker with Arena::linger, which counts the value and then looks at these words.
  if (keeper_ && keeper_->lingering.load(std::memory_order_seq_cst) != 0) keeper_->note_kept();
}

bool is_announced(const ProcessTable& process_table, uint64_t number) {
  for (uint32_t slot = 0, slots = process_table.used(); slot < slots; ++slot) {
    const ProcessTableSlot* const process = process_table.slot(slot);
    if (!lives(process)) continue;
    // Of a process that has none the page that they are in is not looked at: that would allocate it.
    const uint32_t used = used_of(process);
    if (used == 0) continue;
    const uint64_t word = word_of(number, process->incarnation.load(std::memory_order_relaxed));
    for (uint32_t i = 0; i < used; ++i)
      if (process->hazards[i].load(std::memory_order_seq_cst) == word) return true;
  }
  return false;
}

std::vector<uint64_t> announced_by(const ProcessTable& process_table, uint32_t slot) {
  std::vector<uint64_t> numbers;
  const ProcessTableSlot* const process = process_table.slot(slot);
  if (!lives(process)) return numbers;
  for (uint32_t i = 0, used = used_of(process); i < used; ++i)
    if (const uint64_t word = process->hazards[i].load(std::memory_order_seq_cst); word != 0) numbers.push_back(word & ((uint64_t(1) << kNumberBits) - 1));
  return numbers;
}

}  // namespace conveyor
