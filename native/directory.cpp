#include "directory.h"

#include <limits.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <bit>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "arena/view.h"
#include "platform.h"

namespace conveyor {

namespace {

constexpr uint64_t kDirectoryMagic = 0x6f74636572696443;
constexpr size_t kFirstChunk = 512;  // entries; each further chunk has twice as many
constexpr size_t kChunks = 24;
constexpr uint64_t kLongestNames = 1 << 17;  // bytes of them that are read: what is longer is cut off

// What others read first. Entries are told by their place: those of a chunk follow those of the one before.
struct Head {
  uint64_t magic = kDirectoryMagic;
  std::atomic<uint64_t> used{0};  // entries from here on have never been used
  std::array<std::atomic<uint64_t>, kChunks> chunks{};
};

struct Directory {
  Head head;
  ForkMutex mutex;
  std::vector<Entry*> free;  // has room for all
  size_t chunk = 0;          // how many there are
  size_t left = 0;           // of the last one, that have never been used
  Entry* next = nullptr;
  std::unordered_set<std::string> texts;

  // Never destroyed: values may outlive static destructors, and others may be reading.
  static Directory& get() {
    static auto* directory = new Directory;
    return *directory;
  }

  Entry* take() {
    std::lock_guard lock(mutex);
    if (!free.empty()) {
      Entry* entry = free.back();
      free.pop_back();
      return entry;
    }
    if (left == 0) grow();
    --left;
    // Release: who reads it finds the chunk.
    head.used.store(head.used.load(std::memory_order_relaxed) + 1, std::memory_order_release);
    return next++;
  }
  void give(Entry* entry) noexcept {
    std::lock_guard lock(mutex);
    free.push_back(entry);
  }

 private:
  void grow() {
    if (chunk == kChunks) throw std::bad_alloc();
    const size_t entries = kFirstChunk << chunk;
    free.reserve((kFirstChunk << (chunk + 1)) - kFirstChunk);
    // Its pages come when they are used, all zero.
    void* at = ::mmap(nullptr, entries * sizeof(Entry), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) throw std::bad_alloc();
    next = static_cast<Entry*>(at);
    left = entries;
    head.chunks[chunk++].store(reinterpret_cast<uintptr_t>(at), std::memory_order_relaxed);
  }
};

// Copies of entries as they lay there, field by field of no certain time.
struct Raw {
  uint64_t number;
  uint32_t version;
  EntryKind kind;
  uint64_t words[kEntryWords];
};
static_assert(sizeof(Raw) == sizeof(Entry));

size_t copy_some(pid_t pid, std::vector<iovec>& to, std::vector<iovec>& from, size_t at) {
  const size_t count = std::min<size_t>(from.size() - at, IOV_MAX);
  const ssize_t copied = ::process_vm_readv(pid, &to[at], count, &from[at], count, 0);
  if (copied < 0) throw_errno("read another process's directory");
  return size_t(copied);
}

void copy(pid_t pid, uint64_t from, void* to, size_t size) {
  for (size_t done = 0; done < size;) {
    std::vector<iovec> target{{static_cast<char*>(to) + done, size - done}}, source{{reinterpret_cast<void*>(from + done), size - done}};
    const size_t copied = copy_some(pid, target, source, 0);
    if (copied == 0) throw std::system_error(EFAULT, std::generic_category(), "read another process's directory");
    done += copied;
  }
}

std::vector<Raw> copy_entries(pid_t pid, const std::array<uint64_t, kChunks>& chunks, uint64_t used) {
  std::vector<Raw> entries(used);
  uint64_t done = 0;
  for (size_t i = 0; done < used; ++i) {
    const uint64_t some = std::min<uint64_t>(used - done, kFirstChunk << i);
    copy(pid, chunks[i], &entries[done], some * sizeof(Raw));
    done += some;
  }
  return entries;
}

// Which of these leases are held. A block whose memory is not there any more has none.
std::vector<bool> held_leases(pid_t pid, const std::vector<Raw>& sent) {
  std::vector<uint32_t> words(sent.size(), 0);
  std::vector<iovec> to, from;
  for (size_t i = 0; i < sent.size(); ++i) {
    const uint64_t reader = std::min<uint64_t>(sent[i].words[3], kMaxReaders - 1);
    to.push_back({&words[i], sizeof words[i]});
    from.push_back({reinterpret_cast<void*>(sent[i].words[1] + offsetof(BlockHeader, lease) + reader * sizeof(uint32_t)), sizeof words[i]});
  }
  for (size_t at = 0; at < sent.size();) {
    try {
      at += std::max<size_t>(copy_some(pid, to, from, at) / sizeof(uint32_t), 1);
    } catch (const std::system_error& error) {
      if (error.code().value() != EFAULT) throw;
      ++at;
    }
  }
  std::vector<bool> held(sent.size());
  for (size_t i = 0; i < sent.size(); ++i) held[i] = words[i] == BlockHeader::held(uint32_t(sent[i].words[2]));
  return held;
}

}  // namespace

EntryHold::EntryHold() : entry_(Directory::get().take()) {}

EntryHold::~EntryHold() {
  if (entry_ == nullptr) return;
  write(EntryKind::kNone, {});
  Directory::get().give(entry_);
}

// A seqlock whose readers are other processes: they copy the version, the rest, and the version again, each by a system
// call of its own. The odd version is there before anything else changes, and what has changed is there before the
// even one: each is a release.
void EntryHold::write(EntryKind kind, std::initializer_list<uint64_t> words, uint64_t number) noexcept {
  const uint32_t version = entry_->version.load(std::memory_order_relaxed);
  entry_->version.store(version + 1, std::memory_order_relaxed);
  entry_->kind.store(kind, std::memory_order_release);
  size_t i = 0;
  for (const uint64_t word : words) entry_->words[i++].store(word, std::memory_order_release);
  // Release: what others may read by this number is there.
  if (kind == EntryKind::kKept) entry_->number.store(number, std::memory_order_release);
  entry_->version.store(version + 2, std::memory_order_release);
}

const std::string& lasting(const std::string& text) {
  Directory& directory = Directory::get();
  std::lock_guard lock(directory.mutex);
  return *directory.texts.insert(text).first;  // nodes stay where they are
}

Anchor::Anchor(uint64_t number, uint64_t bytes, const std::string* names, uint64_t checksum) {
  entry_.write(EntryKind::kKept, {bytes, now_ns(), names == nullptr ? 0 : reinterpret_cast<uintptr_t>(names->data()), names == nullptr ? 0 : names->size(), checksum}, number);
}

Anchor::~Anchor() {
  // Before that memory is anybody else's: those who copy it look at this afterwards. The store alone would not keep what
  // others write there later from being seen before it (on ARM). That stays behind the load, and the load behind the store.
  entry_->number.store(0, std::memory_order_seq_cst);
  static_cast<void>(entry_->number.load(std::memory_order_seq_cst));
}

Held::Held(Numbers all, std::shared_ptr<const void> what) : numbers(std::move(all)), what_(std::move(what)) {
  entries_.reserve(numbers.size());
  for (const uint64_t number : numbers) entries_.emplace_back().write(EntryKind::kHeld, {number});
}

Sent::Sent(const Numbers& numbers, std::vector<LeasePlace> readers) : readers_(std::move(readers)), entries_(numbers.size() * readers_.size()) {}

void Sent::publish(const void* header, uint32_t generation, std::shared_ptr<const void> what, const Numbers& numbers) noexcept {
  what_ = std::move(what);
  size_t i = 0;
  for (const uint64_t number : numbers)
    for (size_t reader = 0; reader < readers_.size(); ++reader)
      entries_[i++].write(EntryKind::kSent, {number, reinterpret_cast<uintptr_t>(header), generation, reader, readers_[reader].slot, readers_[reader].incarnation});
}

uint64_t checksum_at(pid_t pid, uint64_t anchor, uint64_t number) {
  Raw entry;
  copy(pid, anchor, &entry, sizeof entry);
  if (entry.number == number && entry.kind == EntryKind::kKept) return entry.words[4];
  throw std::system_error(ESTALE, std::generic_category(), "read another process's directory");
}

uint64_t directory_address() { return reinterpret_cast<uintptr_t>(&Directory::get().head); }

DirectoryReading read_directory(pid_t pid, uint64_t address) {
  struct {
    uint64_t magic, used;
    std::array<uint64_t, kChunks> chunks;
  } head;
  static_assert(sizeof head == sizeof(Head));
  copy(pid, address, &head, sizeof head);
  if (head.magic != kDirectoryMagic) throw std::system_error(EPROTO, std::generic_category(), "not a directory");
  const uint64_t used = head.used;
  // The chunks are copied behind the count: those that it counts are there.
  copy(pid, address, &head, sizeof head);
  if (used > (kFirstChunk << kChunks) - kFirstChunk) throw std::system_error(EPROTO, std::generic_category(), "not a directory");
  // The second copy of an entry is of one piece if its version was the same, and even, before and behind it. An
  // entry that has changed meanwhile is of a value that has gone, or was not there when it began.
  const std::vector<Raw> before = copy_entries(pid, head.chunks, used), entries = copy_entries(pid, head.chunks, used), behind = copy_entries(pid, head.chunks, used);
  DirectoryReading reading;
  std::unordered_map<uint64_t, std::string> names;
  std::vector<Raw> sent;
  for (size_t i = 0; i < entries.size(); ++i) {
    const Raw& entry = entries[i];
    if ((before[i].version & 1) || before[i].version != behind[i].version) continue;
    switch (entry.kind) {
      case EntryKind::kKept: {
        // It is about to go where the second word says so already.
        if (entry.number == 0) break;
        const auto [found, fresh] = names.try_emplace(entry.words[2]);
        if (fresh && entry.words[2] != 0) {
          found->second.resize(std::min(entry.words[3], kLongestNames));
          copy(pid, entry.words[2], found->second.data(), found->second.size());
        }
        reading.kept.push_back({entry.number, entry.words[0], entry.words[1], found->second});
        break;
      }
      case EntryKind::kHeld:
        reading.held.push_back(entry.words[0]);
        break;
      case EntryKind::kSent:
        sent.push_back(entry);
        break;
      case EntryKind::kNone:
        break;
    }
  }
  const std::vector<bool> held = held_leases(pid, sent);
  for (size_t i = 0; i < sent.size(); ++i)
    if (held[i]) reading.sent.push_back({sent[i].words[0], {uint32_t(sent[i].words[4]), uint32_t(sent[i].words[5])}});
  return reading;
}

}  // namespace conveyor
