// What keeps a process from its work: each wait that does is a row of its page of the process table, for others to
// follow (runtime/deadlock.py).
#pragma once

#include <string.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace conveyor {

constexpr size_t kWaitRows = 40;
constexpr size_t kWaitWords = 13;  // of text, in words of eight bytes

// One wait. What a work is, and a mode, is Python's to interpret, but for this: the last bit of a work says
// which lane does it, and the lane as a whole is the work that has no other bits.
struct WaitNote {
  uint64_t work;      // what it keeps from being done, and so do others of the same work until one of them ends
  uint64_t stamp;     // tells the waits of a work from those before them
  uint32_t answered;  // it has looked in vain since the process was asked that often
  uint32_t mode;
  uint32_t slot;      // who has to do something: a process, by its slot on the process table
  uint64_t target;    // and which work of it
  std::string text;
};

inline constexpr uint64_t lane_of(uint64_t work) { return work & 1; }

// All waits of one process, which writes them in one thread at a time. A seqlock: a version that is odd means
// that they are being written, or that the writer has died half way. All words are atomic, so that who reads
// meanwhile reads something, and finds out by the version: each is released after the odd version and acquired
// before the version is looked at again, so none is of a write that the reader does not hear of.
class WaitNotes {
 public:
  // At most kWaitRows.
  void note(const std::vector<WaitNote>& notes) {
    const uint32_t version = version_.load(std::memory_order_relaxed);
    version_.store(version | 1, std::memory_order_relaxed);
    for (size_t i = 0; i < notes.size(); ++i) rows_[i].set(notes[i]);
    count_.store(uint32_t(notes.size()), std::memory_order_release);
    // Sequentially consistent with the looks of others: of two that begin to wait for each other at least
    // one sees the other's note.
    version_.store((version | 1) + 1, std::memory_order_seq_cst);
  }

  // Those that keep `work` from being done: of its lane, if that waits; else of the work itself. None:
  // it is done when its turn comes. Nothing at all: they were being written all the time.
  std::optional<std::vector<WaitNote>> of(uint64_t work) const {
    std::optional<std::vector<WaitNote>> found = matching([work](uint64_t does) { return does == work || does == lane_of(work); });
    if (found && std::ranges::any_of(*found, [work](const WaitNote& note) { return note.work == lane_of(work); }))
      std::erase_if(*found, [work](const WaitNote& note) { return note.work != lane_of(work); });
    return found;
  }

  // All there are, for who follows them elsewhere.
  std::optional<std::vector<WaitNote>> all() const {
    return matching([](uint64_t) { return true; });
  }

  // For a new process. Before it is there: the version goes on, so that who reads meanwhile finds out.
  void reset() {
    count_.store(0, std::memory_order_relaxed);
    version_.fetch_add(2 - (version_.load(std::memory_order_relaxed) & 1), std::memory_order_release);
  }

 private:
  static constexpr int kAttempts = 100;

  template <class Wanted>
  std::optional<std::vector<WaitNote>> matching(const Wanted& wanted) const {
    for (int attempt = 0; attempt < kAttempts; ++attempt) {
      const uint32_t version = version_.load(std::memory_order_acquire);
      if (version & 1) continue;
      std::vector<WaitNote> found;
      // What a peer can write is not trusted.
      const size_t count = std::min(size_t(count_.load(std::memory_order_acquire)), kWaitRows);
      for (size_t i = 0; i < count; ++i)
        if (wanted(rows_[i].work.load(std::memory_order_acquire))) found.push_back(rows_[i].get());
      if (version_.load(std::memory_order_seq_cst) == version) return found;
    }
    return std::nullopt;
  }

  struct Row {
    std::atomic<uint64_t> work;
    std::atomic<uint64_t> stamp;
    std::atomic<uint64_t> target;
    std::atomic<uint32_t> slot;
    std::atomic<uint32_t> answered;
    std::atomic<uint64_t> mode;
    std::atomic<uint64_t> text[kWaitWords];  // cut; the rest is zero

    void set(const WaitNote& note) {
      work.store(note.work, std::memory_order_release);
      stamp.store(note.stamp, std::memory_order_release);
      target.store(note.target, std::memory_order_release);
      slot.store(note.slot, std::memory_order_release);
      answered.store(note.answered, std::memory_order_release);
      mode.store(note.mode, std::memory_order_release);
      uint64_t words[kWaitWords] = {};
      ::memcpy(words, note.text.data(), std::min(note.text.size(), sizeof words));
      for (size_t i = 0; i < kWaitWords; ++i) text[i].store(words[i], std::memory_order_release);
    }

    WaitNote get() const {
      uint64_t words[kWaitWords];
      for (size_t i = 0; i < kWaitWords; ++i) words[i] = text[i].load(std::memory_order_acquire);
      const char* start = reinterpret_cast<const char*>(words);
      return {work.load(std::memory_order_acquire),
              stamp.load(std::memory_order_acquire),
              answered.load(std::memory_order_acquire),
              uint32_t(mode.load(std::memory_order_acquire)),
              slot.load(std::memory_order_acquire),
              target.load(std::memory_order_acquire),
              {start, ::strnlen(start, sizeof words)}};
    }
  };

  std::atomic<uint32_t> version_;
  std::atomic<uint32_t> count_;
  Row rows_[kWaitRows];
};
}  // namespace conveyor
