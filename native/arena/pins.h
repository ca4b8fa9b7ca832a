// Blocks of arenas whose memory a process has pinned for a device.
//
// A device that has pinned pages reads and writes those very pages. If a hole is punched under them, the file gets
// other pages for that place later, and the device goes on with the former ones. So who pins a block marks it
// first, in its header, and the arena's process gives no memory back that lies in a marked block.
#pragma once

#include <memory>

#include "view.h"

namespace conveyor {

constexpr uint32_t kMostPinners = 0xfffe;  // slots from here on pin nothing
// A process on the process table, as a mark names it. Never 0. A process that has died may have its mark taken for a later one's
// of its slot: then the memory stays longer than it need, and no mark is lost.
inline uint32_t pinner(uint32_t slot, uint32_t incarnation) { return (slot + 1) << 16 | (incarnation & 0xffff); }

// Whether the process that a mark names is there. Any mark may have been written by a broken peer.
bool pins(const ProcessTable& process_table, uint32_t mark);
// Whether some process that is there has marked this block.
bool pinned(const ProcessTable& process_table, const BlockHeader& header);

// One mark of this process on one block. The block's memory stays where it is, and as it is, until release().
class BlockPin {
 public:
  // Of `slot`, which is this process's. The caller keeps the block from coming back to its writer meanwhile: by a
  // lease on it, or because it is its own and not published. Throws ENOSPC if as many have marked it as can.
  BlockPin(std::shared_ptr<Mapping> mapping, char* block, std::shared_ptr<Returns> returns, std::shared_ptr<ProcessTable> process_table, uint32_t slot);
  ~BlockPin() { release(); }
  BlockPin(const BlockPin&) = delete;
  BlockPin& operator=(const BlockPin&) = delete;

  // What is to be pinned: whole pages, all of which have memory.
  char* address() const { return block_; }
  size_t size() const { return size_; }
  // Whether this process was forked since: the mark is its parent's.
  bool inherited() const { return fork_ != fork_generation.load(std::memory_order_relaxed); }
  // No device has the memory any more. Cannot fail.
  void release() noexcept;

 private:
  std::shared_ptr<Mapping> mapping_;  // as long as a device has it; none: released
  char* const block_;
  size_t size_;
  const std::shared_ptr<Returns> returns_;  // of the block's process
  const uint32_t mark_;
  uint32_t place_;
  const uint64_t fork_ = fork_generation.load(std::memory_order_relaxed);
};

// How a process that has marked blocks hears that memory is short (ProcessTable::ask_for_pins). One thread waits.
class PinWords {
 public:
  PinWords(std::shared_ptr<ProcessTable> process_table, uint32_t slot) : process_table_(std::move(process_table)), slot_(slot), words_(process_table_->slot(slot)->pins) {}

  // Whether there is anything to ask this process for. Before the first mark, and after the last.
  void hold(bool some) { words_.wanted.store(some ? 1 : 0, std::memory_order_seq_cst); }
  // Sleep until woken, or for `ns` (0: without a limit). True: somebody needs memory, and waits for answer().
  bool wait(uint64_t ns);
  // All that could be let go of for those who had asked before wait() returned has been.
  void answer();
  void wake() { words_.wake(); }
  const std::shared_ptr<ProcessTable>& process_table() const { return process_table_; }
  uint32_t slot() const { return slot_; }

 private:
  const std::shared_ptr<ProcessTable> process_table_;
  const uint32_t slot_;
  Returns& words_;
  uint32_t seen_ = 0;    // of the words' count
  uint32_t request_id_ = 0;  // of who had asked
};

}  // namespace conveyor
