// A native thread of the driver: sees actors die, and tells everyone. Never takes the GIL.
#pragma once

#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "process_table.h"

namespace conveyor {

class DeathWatch {
 public:
  // `told`: an eventfd that is written to whenever a liveness futex has fired, -1: none. It must outlive the watch.
  // A fatal signal's own announcement is not told there: that process is on its way.
  explicit DeathWatch(std::shared_ptr<ProcessTable> process_table, int eventfd = -1);
  ~DeathWatch();
  // Watch the liveness futex of process `slot` from now on (as soon as it has taken it).
  void add(uint32_t slot);
  void remove(uint32_t slot);
  void stop();
  const ProcessTable& process_table() const { return *process_table_; }
  // False where the kernel cannot wait for several futexes (before Linux 5.16): deaths are then known
  // only when the fork server reports them.
  static bool supported();

 private:
  void run();
  std::shared_ptr<ProcessTable> process_table_;
  const int eventfd_;
  ForkMutex mutex_;
  std::vector<uint32_t> watched_;
  const uint64_t fork_ = fork_generation.load();
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace conveyor
