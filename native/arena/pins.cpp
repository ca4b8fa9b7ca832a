#include "pins.h"

namespace conveyor {

bool pins(const ProcessTable& process_table, uint32_t mark) {
  if (mark == 0) return false;
  const uint32_t slot = (mark >> 16) - 1;
  if (slot >= process_table.slots()) return false;
  const uint32_t incarnation = process_table.slot(slot)->incarnation.load(std::memory_order_relaxed);
  return (incarnation & 0xffff) == (mark & 0xffff) && !process_table.gone(slot, incarnation);
}

// Sequentially consistent for Arena::run, as leases are: the thread raises `wanted`, then looks here; who takes a
// mark away looks at `wanted` afterwards. That a mark is seen at all before memory goes needs less: it was made by
// who held a lease, whose end the writer has seen (Block::held_by), or by the writer's own process.
bool pinned(const ProcessTable& process_table, const BlockHeader& header) {
  for (const std::atomic<uint32_t>& mark : header.pins)
    if (pins(process_table, mark.load(std::memory_order_seq_cst))) return true;
  return false;
}

BlockPin::BlockPin(std::shared_ptr<Mapping> mapping, char* block, std::shared_ptr<Returns> returns, std::shared_ptr<ProcessTable> process_table, uint32_t slot)
    : mapping_(std::move(mapping)), block_(block), returns_(std::move(returns)), mark_(pinner(slot, process_table->slot(slot)->incarnation.load(std::memory_order_relaxed))) {
  if (slot >= kMostPinners) throw std::system_error(ENOSPC, std::generic_category(), "pin a block");
  auto* header = reinterpret_cast<BlockHeader*>(block_);
  // What lies behind its mapping's end is none of it, whatever its header says.
  const size_t room = size_t(mapping_->base + mapping_->size - block_);
  size_ = std::min<size_t>(header->backed, room) / kGranule * kGranule;
  // Relaxed: whoever looks at marks has learned of the lease's end before, which comes after this.
  process_table->header()->pinning.store(1, std::memory_order_relaxed);
  for (place_ = 0; place_ < kMaxPins; ++place_) {
    uint32_t there = header->pins[place_].load(std::memory_order_relaxed);
    // A mark of a process that is no more is nobody's: of two who find it, one gets the place. Acquire: that one's
    // device, if it was still reading, is done.
    while (!pins(*process_table, there))
      if (header->pins[place_].compare_exchange_strong(there, mark_, std::memory_order_seq_cst, std::memory_order_acquire)) return;
  }
  throw std::system_error(ENOSPC, std::generic_category(), "pin a block");
}

void BlockPin::release() noexcept {
  if (!mapping_) return;
  if (inherited()) {
    mapping_.reset();
    return;
  }
  uint32_t expected = mark_;
  // Release: the device has let go of the pages, before they can go. Only our own: if this process was taken for
  // dead, the block may be another one by now.
  reinterpret_cast<BlockHeader*>(block_)->pins[place_].compare_exchange_strong(expected, 0, std::memory_order_seq_cst, std::memory_order_relaxed);
  mapping_.reset();
  if (returns_) returns_->note();
}

bool PinWords::wait(uint64_t ns) {
  // Before it looks: who has news bumps the word afterwards.
  const uint32_t news = words_.count.load(std::memory_order_seq_cst);
  request_id_ = words_.requested.load(std::memory_order_seq_cst);
  if (words_.pending(request_id_)) return true;
  if (news == seen_) {
    const timespec limit = to_timespec(ns);
    futex_wait(&words_.count, news, ns != 0 ? &limit : nullptr);
  }
  seen_ = words_.count.load(std::memory_order_seq_cst);
  request_id_ = words_.requested.load(std::memory_order_seq_cst);
  return words_.pending(request_id_);
}

void PinWords::answer() {
  words_.answered.store(request_id_, std::memory_order_seq_cst);
  process_table_->header()->memory.note_given();
}

}  // namespace conveyor
