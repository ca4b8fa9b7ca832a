// Memory of files that other processes share and that objects of users lie in, and what a fork makes of it.
//
// Every shared mapping that is given to users is a Mapping, and whatever of theirs lies in it has a Hold on
// it. So the fork handler knows all of them: in the child, each mapping with holds becomes private as a
// whole, and the parent keeps what was held at the fork as it is until that child, and all children of its,
// are gone. (Not among them: the files of snapshots. They are shown read-only, and are never used again.)
#pragma once

#include <array>
#include <functional>
#include <memory>

#include "../platform.h"

namespace conveyor {

// A private mapping of a part of a file; none if `base` is null.
struct PrivateView {
  char* base = nullptr;
  uint64_t offset = 0;  // in the file
  size_t size = 0;
};

// A part of a file, mapped shared for as long as this lives. A forked child has as many mappings as its
// parent, whatever is held in them, and pages of a file cost nothing until somebody writes.
class Mapping {
 public:
  Mapping(std::shared_ptr<const Fd> file, uint64_t offset, size_t size);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  // Let go of the file, now or when nobody holds anything here any more; then nobody will.
  void close_file();
  // Private views of the same file, kept between two uses. One that fits exactly, if there is any.
  PrivateView take_private(uint64_t offset, size_t size);
  // `view` shows what the file has. What is to be unmapped in its place, if anything.
  PrivateView keep_private(PrivateView view);
  // While somebody holds something here.
  int fd() const { return file_->get(); }
  uint64_t offset() const { return offset_; }  // in the file

  char* const base;
  const size_t size;

 private:
  friend struct Holds;
  friend class Hold;
  friend class MappingObserver;
  void make_private() const;
  std::shared_ptr<const Fd> file_;  // open for the fork handler
  const uint64_t offset_;
  // With the mutex of Holds:
  size_t holds_ = 0;
  bool file_unused_ = false;  // but for what is held
  std::array<PrivateView, 8> private_{};  // the one kept last comes first
  Mapping* previous_ = nullptr;
  Mapping* next_ = nullptr;
};

// Hears of every mapping as long as it is there, and of those that were there before: to register the memory with
// a device, say. Both are called with a lock held, in whatever thread maps or unmaps: they must not fail, map,
// unmap, or take a lock under which somebody maps. In a forked child nobody hears of anything.
//
// What is mapped stays mapped while its arena gives back memory that is free, and gets other pages for it later.
// A device that has pinned the former pages does not see the new ones: who pins them marks their block (pins.h).
class MappingObserver {
 public:
  using Call = std::function<void(char* base, size_t size)>;
  // `mapped` comes after the memory is there, `unmapped` before it goes. The end of the observer is `unmapped`
  // for all that is still mapped.
  MappingObserver(Call mapped, Call unmapped);
  ~MappingObserver();
  MappingObserver(const MappingObserver&) = delete;
  MappingObserver& operator=(const MappingObserver&) = delete;

 private:
  friend class Mapping;
  void tell(const Call& call, const Mapping& mapping) const noexcept;
  const Call mapped_, unmapped_;
  const uint64_t fork_ = fork_generation.load(std::memory_order_relaxed);
};

// Something of a user's that lies in a mapping. Inert in a forked child: there it is the parent's.
// Neither begins nor ends while a fork is under way.
class Hold {
 public:
  // Throws ESHUTDOWN if the mapping has let go of its file.
  explicit Hold(Mapping& mapping);
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;

  // Whether this process was forked since.
  bool inherited() const { return generation_ != fork_generation.load(std::memory_order_relaxed); }
  // Whether a child that was forked since, or a child of such a one, still lives.
  bool pinned() const;
  // Must be called once. `end` keeps the mapping alive, and is called when no child is left that may read
  // what was held: now, or by a thread that waits for that, without the GIL. Does nothing in a child.
  template <class End>
  void leave(End end) noexcept {
    if (inherited()) return;
    uint64_t left;
    if (leave_now(left)) return end();
    try {
      defer(left, std::move(end));
    } catch (const std::bad_alloc&) {  // as if the child lived as long as this process
    }
  }

 private:
  bool leave_now(uint64_t& left) noexcept;
  void defer(uint64_t left, std::function<void()> end) const;
  Mapping& mapping_;
  uint64_t born_;  // forks of this process before it
  uint64_t generation_;
};

// How many holds there are.
size_t live_holds();
// What that thread does, whenever a child has ended: whatever only waited for it. False if no child is left
// to wait for, and the thread ends. Nobody else may in a process that has the thread: it would sleep for ever
// on descriptors that were closed behind it.
bool release_unpinned();

}  // namespace conveyor
