// Memory of other processes, read where it lies (process_vm_readv(2)): its owner takes no part, and has copied
// nothing. What says that it is still there is an anchor, a word of the owner's that is read behind it.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

namespace conveyor {

// A part of a process's memory.
struct Range {
  uint64_t address;
  uint64_t length;
};

// Copy memory of the process `pid`: `from`, one after the other, to `to`, which are as long together. Then look whether the
// word at `anchor` holds `number`: otherwise what was copied may be anything. Throws std::system_error: ESTALE where
// it does not, what the system says where that memory cannot be read (ESRCH: there is no such process, EPERM: we
// may not, EFAULT: nothing is mapped there).
void read_peer(pid_t pid, std::vector<iovec> from, std::vector<iovec> to, uint64_t anchor, uint64_t number);

// Let `pid`, and what descends from it, read this process where only its own parents may otherwise (Yama(8)).
void let_read(pid_t pid) noexcept;
// Whether other processes of this user may read `ranges` of this one: false of memory that the kernel lets nobody else
// read (devices' mappings, memfd_secret(2)), and of all where this process is not dumpable any more (setuid(2),
// PR_SET_DUMPABLE).
bool readable(std::span<const Range> ranges) noexcept;
// Whether the system lets this process read the memory of process `pid`, whatever is mapped there.
bool may_read(pid_t pid) noexcept;

}  // namespace conveyor
