// Values that others read in the arena of who keeps them though nothing else keeps them there: whoever owns the
// reference may die, and the chain of leases from the reader to the keeper with it.
//
// Who is about to read announces the value's number on the process table, and looks afterwards whether the value's anchor still
// says that it is kept. Who keeps it takes the anchor down, and looks afterwards whether anybody has announced the
// number. Each does the one before the other, so at least one of two who meet sees the other: either the reader finds
// that the value has gone, or the keeper that it must stay (Arena::linger). Nobody waits for anybody. What a process has
// announced ends with it.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "process_table.h"

namespace conveyor {

// That this process reads the value of some number where it lies.
class Hazard {
 public:
  // In `slot`, which is this process's; `keeper`: to tell the process that keeps the value of its end. The caller has to
  // see afterwards that the value is kept still. Nothing: as many are announced as can be.
  static std::shared_ptr<Hazard> announce(std::shared_ptr<ProcessTable> process_table, uint32_t slot, uint64_t number, std::shared_ptr<Returns> keeper);
  ~Hazard();
  Hazard(const Hazard&) = delete;
  Hazard& operator=(const Hazard&) = delete;

 private:
  Hazard() = default;
  std::shared_ptr<ProcessTable> process_table_;
  std::shared_ptr<Returns> keeper_;
  std::atomic<uint64_t>* word_ = nullptr;
  uint64_t announced_ = 0;  // what the word says
  const uint64_t fork_ = fork_generation.load(std::memory_order_relaxed);  // in a child it is the parent's
};

// Whether some process that lives has announced this number.
bool is_announced(const ProcessTable& process_table, uint64_t number);
// All numbers that the process in `slot` has announced, some of them more than once.
std::vector<uint64_t> announced_by(const ProcessTable& process_table, uint32_t slot);

}  // namespace conveyor
