// What a process keeps where it was made, and whom it has told where that is: a table in its memory, which the other
// processes of the session read (read_directory), whatever this one is doing. Its address stands on the process table.
//
// Entries are never unmapped, and are used again. An entry is written by who has it alone, between two values of
// its version, which is odd meanwhile. Nobody who reads it holds up who writes it.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace conveyor {

enum class EntryKind : uint32_t { kNone = 0, kKept = 1, kHeld = 2, kSent = 3 };

constexpr size_t kEntryWords = 6;

struct alignas(64) Entry {
  // The anchor of a value that is kept: its number, from before it can be read until it is about to go. Zero in all
  // other entries, so that none of them is taken for the value's.
  std::atomic<uint64_t> number;
  std::atomic<uint32_t> version;
  std::atomic<EntryKind> kind;
  // Kept: bytes, since when (CLOCK_MONOTONIC), address and length of its names, checksum (0: none).
  // Held: the value's number.
  // Sent: the value's number, the address of the block's header, the lease's generation, which reader's it is, that
  // reader's slot and incarnation.
  std::atomic<uint64_t> words[kEntryWords];
};
static_assert(sizeof(Entry) == 64);

// Who has an entry. Its end makes it anybody's.
class EntryHold {
 public:
  EntryHold();  // std::bad_alloc
  ~EntryHold();
  EntryHold(EntryHold&& other) noexcept : entry_(std::exchange(other.entry_, nullptr)) {}
  EntryHold(const EntryHold&) = delete;
  Entry* operator->() const { return entry_; }
  Entry* get() const { return entry_; }
  void write(EntryKind kind, std::initializer_list<uint64_t> words, uint64_t number = 0) noexcept;

 private:
  Entry* entry_;
};

// Text that is there as long as the process, at the same place for the same text.
const std::string& lasting(const std::string& text);

// A value that others may read. `names` must be lasting.
class Anchor {
 public:
  explicit Anchor(uint64_t number, uint64_t bytes = 0, const std::string* names = nullptr, uint64_t checksum = 0);
  ~Anchor();
  Anchor(const Anchor&) = delete;
  uint64_t address() const { return reinterpret_cast<uintptr_t>(entry_.get()); }

 private:
  EntryHold entry_;
};

using Numbers = std::vector<uint64_t>;

// That this process holds a frame of its own making that keeps these values, and what is attached to that.
struct Held {
  Held(Numbers numbers, std::shared_ptr<const void> what);
  bool any() const { return what_ != nullptr; }
  const Numbers numbers;

 private:
  std::shared_ptr<const void> what_;
  std::vector<EntryHold> entries_;
};

// One reader of a block.
struct LeasePlace {
  uint32_t slot;
  uint32_t incarnation;
};

// That a block keeps these values for its readers. Made before the block is published, which cannot fail.
class Sent {
 public:
  Sent(const Numbers& numbers, std::vector<LeasePlace> readers);
  // As it is about to be published with that generation.
  void publish(const void* header, uint32_t generation, std::shared_ptr<const void> what, const Numbers& numbers) noexcept;

 private:
  std::shared_ptr<const void> what_;
  std::vector<LeasePlace> readers_;
  std::vector<EntryHold> entries_;
};

// Where this process's directory is.
uint64_t directory_address();

// The checksum of the value `number` of the process `pid`, whose anchor is there; 0: it has none. Throws
// std::system_error: ESTALE where it is kept no more, or what the system says.
uint64_t checksum_at(pid_t pid, uint64_t anchor, uint64_t number);

struct KeptValue {
  uint64_t number;
  uint64_t bytes;
  uint64_t since;
  std::string names;
};

// As it was at some moment between the call and the return, each entry for itself.
struct DirectoryReading {
  std::vector<KeptValue> kept;
  Numbers held;
  struct Lease {
    uint64_t number;
    LeasePlace reader;
  };
  std::vector<Lease> sent;  // those whose leases have not ended
};

// Throws std::system_error where the process's memory cannot be read, or is no directory (EPROTO).
DirectoryReading read_directory(pid_t pid, uint64_t address);

}  // namespace conveyor
