// A ring in shared memory: one writer, a fixed set of readers, numbered slots. No locks: the writer
// alone moves `head`, each reader alone moves its own cursor.
#pragma once

#include <bitset>
#include <cstring>
#include <memory>

#include "arena/arena.h"
#include "process_table.h"

namespace conveyor {

constexpr uint32_t kRingMagic = 0x474e4952;

enum class Kind : uint16_t { kValue = 1, kError = 2, kCall = 3, kControl = 4 };

enum SlotFlags : uint32_t {
  kDefinitions = 1,  // the body defines classes or functions that later frames refer to
  kExternal = 2,     // the buffer lies at the start of the block, the body in the slot
  kRefs = 4,         // the value refers to refs, which the header names (with kDefinitions)
  kBound = 8,        // the value refers to definitions that the channel may have carried before
  kKeeps = 16,       // its writer keeps something as long as anybody has the frame, which lies in a block therefore
  kSure = 32,        // and with kKeeps: who has the frame keeps it, whoever else dies than who has made it. See SureLease
};

struct SlotHeader {
  uint64_t tag;         // execution or call number
  Kind kind;
  uint16_t codec;
  uint32_t flags;
  uint64_t size;        // of the body
  uint64_t block;       // arena offset + 1, 0: the body is in the slot
  uint64_t block_size;
};
static_assert(sizeof(SlotHeader) == 40);

enum RingFlags : uint32_t {
  kWriterMayWait = 1,
  kSilent = 2,  // nobody waits for a frame: its readers know by other means when it is there
};

struct alignas(kCacheLine) RingHeader {
  uint32_t magic;
  uint32_t slots;   // a power of two
  uint32_t stride;  // bytes from slot to slot
  uint32_t readers;
  uint32_t flags;
  alignas(kCacheLine) std::atomic<uint64_t> head;  // number of frames published
  // The number of frames from which on the writer has room, once all readers have taken so many: who comes
  // to it rings. 0: nobody has asked. It stays when it has served, since no reader comes to it again.
  alignas(kCacheLine) std::atomic<uint64_t> room_at;
  // then ReaderCursor[readers], then the slots

  ReaderCursor* cursors() { return reinterpret_cast<ReaderCursor*>(this + 1); }
  static size_t bytes(uint32_t slots, uint32_t stride, uint32_t readers) {
    return sizeof(RingHeader) + readers * sizeof(ReaderCursor) + size_t(slots) * stride;
  }
};
static_assert(sizeof(RingHeader) == 3 * kCacheLine);

// What a peer may write at any time is read once, and the copy is checked and used.
template <class T>
T read_once(const T& shared) {
  T value;
  __atomic_load(&shared, &value, __ATOMIC_RELAXED);
  return value;
}

inline SlotHeader read_once(const SlotHeader& shared) {
  return {read_once(shared.tag),  read_once(shared.kind),  read_once(shared.codec),     read_once(shared.flags),
          read_once(shared.size), read_once(shared.block), read_once(shared.block_size)};
}

// A ring as this process sees it. Its shape was checked when it was attached to, and is kept here:
// nothing that is written to the shared header later leads out of the segment.
struct Ring {
  RingHeader* header;
  uint32_t slots;
  uint32_t stride;
  uint32_t readers;
  uint32_t flags;
  char* first;

  ReaderCursor& cursor(uint32_t reader) const { return header->cursors()[reader]; }
  char* slot(uint64_t number) const { return first + (number & (slots - 1)) * stride; }
  uint32_t capacity() const { return uint32_t(stride - sizeof(SlotHeader)); }
};

// A shared mapping that holds rings; lives as long as anything in it is used.
class Segment : public Shareable<Segment> {
 public:
  Segment(Fd fd, size_t size) : fd_(std::move(fd)), size_(size), base_(map_shared(fd_.get(), 0, size)) {}
  // Of a file that others keep open: the mapping is enough here.
  Segment(int fd, size_t size) : size_(size), base_(map_shared(fd, 0, size)) {}
  ~Segment() { ::munmap(base_, size_); }
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  static std::shared_ptr<Segment> create(size_t size) {
    return std::make_shared<Segment>(make_memfd("conveyor-segment", align_up(size, kGranule)), align_up(size, kGranule));
  }
  static std::shared_ptr<Segment> attach(int fd) {
    const off_t size = ::lseek(fd, 0, SEEK_END);
    if (size <= 0) throw_errno("segment size");
    return std::make_shared<Segment>(fd, size_t(size));
  }
  int fd() const { return fd_.get(); }
  // Once everybody has it, the mapping is enough.
  void close_fd() { fd_.reset(); }
  size_t size() const { return size_; }
  // `length` bytes that are no ring, at a multiple of a cache line.
  char* at(size_t offset, size_t length) const {
    if (offset % kCacheLine != 0 || offset > size_ || length > size_ - offset)
      throw std::system_error(EINVAL, std::generic_category(), "segment");
    return base_ + offset;
  }

  RingHeader* make_ring(size_t offset, uint32_t slots, uint32_t stride, uint32_t readers, uint32_t flags) {
    if (!can_be(offset, slots, stride, readers)) throw std::system_error(EINVAL, std::generic_category(), "ring");
    auto* ring = reinterpret_cast<RingHeader*>(base_ + offset);
    ring->slots = slots;
    ring->stride = stride;
    ring->readers = readers;
    ring->flags = flags;
    ring->magic = kRingMagic;
    return ring;
  }
  Ring ring(size_t offset) {
    if (offset % kCacheLine == 0 && offset < size_ && size_ - offset >= sizeof(RingHeader)) {
      auto* header = reinterpret_cast<RingHeader*>(base_ + offset);
      Ring ring{header, read_once(header->slots), read_once(header->stride), read_once(header->readers), read_once(header->flags), nullptr};
      if (read_once(header->magic) == kRingMagic && can_be(offset, ring.slots, ring.stride, ring.readers)) {
        ring.first = reinterpret_cast<char*>(header->cursors() + ring.readers);
        return ring;
      }
    }
    throw std::system_error(EPROTO, std::generic_category(), "no ring here");
  }

 private:
  bool can_be(size_t offset, uint32_t slots, uint32_t stride, uint32_t readers) const {
    return slots != 0 && (slots & (slots - 1)) == 0 && stride % kCacheLine == 0 && stride > sizeof(SlotHeader) && readers != 0 &&
           readers <= kMaxReaders && offset % kCacheLine == 0 && offset <= size_ &&
           RingHeader::bytes(slots, stride, readers) <= size_ - offset;
  }

  Fd fd_;
  size_t size_;
  char* base_;
};

// Whom to wake for a frame.
struct Target {
  uint32_t slot;
  uint32_t bit;
};

class RingWriter {
 public:
  // `is_remote`: readers on other hosts, whose cursors here are closed. They are told by other means.
  RingWriter(std::shared_ptr<Segment> segment, size_t offset, std::shared_ptr<ProcessTable> process_table, std::vector<Target> targets,
             const std::bitset<kMaxReaders>& is_remote = {})
      : segment_(std::move(segment)), ring_(segment_->ring(offset)), process_table_(std::move(process_table)) {
    if (targets.size() != ring_.readers) throw std::system_error(EINVAL, std::generic_category(), "ring targets");
    for (const Target& t : targets)
      if (t.slot >= process_table_->slots() || t.bit >= kDoorbellBits) throw std::system_error(EINVAL, std::generic_category(), "ring targets");
    readers_ = std::make_shared<ReaderSet>();
    readers_->process_table = process_table_;
    readers_->segment = segment_;  // where the cursors are
    for (uint32_t i = 0; i < targets.size(); ++i) {
      readers_->add(targets[i].slot, &ring_.cursor(i));
      if (is_remote.test(i)) continue;
      doorbells_.push_back(&process_table_->slot(targets[i].slot)->doorbell);
      targets_.push_back(targets[i]);
    }
    head_ = ring_.header->head.load(std::memory_order_relaxed);
  }

  uint32_t capacity() const { return ring_.capacity(); }
  uint32_t slots() const { return ring_.slots; }
  uint64_t head() const { return head_; }
  const std::shared_ptr<ReaderSet>& readers() const { return readers_; }
  const std::shared_ptr<ProcessTable>& process_table() const { return process_table_; }

  // A reader whose cursor says that it has taken more than there is (a peer has written over it) counts as
  // one that has taken everything: that spoils its own input, and nobody else's.
  // `frames`: how many there is to be room for.
  bool has_room(uint32_t frames = 1) {
    if (head_ - slowest_ + frames <= ring_.slots) return true;
    uint64_t slowest = head_;
    for (uint32_t i = 0; i < ring_.readers; ++i) {
      ReaderCursor& c = ring_.cursor(i);
      // Acquire: the reader's last look at a slot comes before we write it again.
      if (c.closed() || readers_->gone(i)) continue;
      // Acquire: the reader's last look at the slot comes before we write it again. Sequentially
      // consistent, because a writer that is about to sleep relies on it (see wants_room).
      const uint64_t next = c.next.load(std::memory_order_seq_cst);
      if (next < slowest) slowest = next;
    }
    slowest_ = slowest;
    return head_ - slowest_ + frames <= ring_.slots;
  }

  // For rings whose writer may wait, where it has found no room: ask the readers to ring our doorbell when there is
  // some. It looks once more before it sleeps.
  //
  // Several threads may share the writer, and wait at the same time. So what one has asked for is not taken back
  // by another that finds room: it only stops to matter. Another one writes over it at a later head, and then
  // every reader has come to the earlier number, and either rings for that or has yet to look and, as it goes
  // on, comes to the later one.
  void wants_room() { ring_.header->room_at.store(head_ - ring_.slots + 1, std::memory_order_seq_cst); }

  // Grows when a reader has lost definitions.
  uint32_t lost() const {
    uint32_t sum = 0;
    // Relaxed: it publishes nothing. Who sees it late sends one more frame that refers to what was lost.
    for (uint32_t i = 0; i < ring_.readers; ++i) sum += ring_.cursor(i).lost.load(std::memory_order_relaxed);
    return sum;
  }

  // Which readers have left before frame `number`, which has been published last, and never look at it:
  // what it brings them is the writer's to give up. All others take it or give it up themselves, unless they
  // die before: who keeps what it brings hears of that. May be asked once; see RingReader::leave.
  std::bitset<kMaxReaders> left_behind(uint64_t number) const {
    std::bitset<kMaxReaders> left;
    for (uint32_t i = 0; i < ring_.readers; ++i) {
      std::atomic<uint64_t>& end = ring_.cursor(i).end;
      uint64_t said = end.fetch_add(0, std::memory_order_acq_rel);
      // The reader may have looked at the head already, or be about to: it finds this instead.
      if (said == ReaderCursor::kLeaving &&
          end.compare_exchange_strong(said, number + 2, std::memory_order_acq_rel, std::memory_order_acquire))
        continue;
      if (said != ReaderCursor::kOpen && number + 1 >= said) left.set(i);
    }
    return left;
  }

  // Frames with a tag below this are wanted by no reader.
  uint64_t wanted() const {
    uint64_t least = ring_.cursor(0).wanted.load(std::memory_order_acquire);
    for (uint32_t i = 1; i < ring_.readers; ++i) least = std::min(least, ring_.cursor(i).wanted.load(std::memory_order_acquire));
    return least;
  }

  // The slot of the next frame, for the writer to fill; only if has_room().
  SlotHeader* next_slot() {
    CONVEYOR_ASSERT(head_ - slowest_ < ring_.slots);
    return reinterpret_cast<SlotHeader*>(ring_.slot(head_));
  }

  // Where a body in that slot lies; capacity() bytes.
  char* next_body() { return reinterpret_cast<char*>(next_slot() + 1); }

  uint64_t publish() {
    const uint64_t number = head_++;
    ring_.header->head.store(head_, std::memory_order_release);  // the slot's contents come before it
    if (!(ring_.flags & kSilent))
      for (size_t i = 0; i < targets_.size(); ++i) process_table_->notify(doorbells_[i], targets_[i].bit, targets_[i].slot);
    return number;
  }

 private:
  std::shared_ptr<Segment> segment_;
  Ring ring_;
  std::shared_ptr<ProcessTable> process_table_;
  std::vector<Target> targets_;  // those that are rung
  std::vector<Doorbell*> doorbells_;     // theirs
  std::shared_ptr<ReaderSet> readers_;
  uint64_t head_ = 0;
  uint64_t slowest_ = 0;
};

// Every published frame's lease is ended, even if the frame is never read: a reader that leaves closes
// its cursor, and what it has not taken by then holds no block any more (ReaderCursor::never_takes), nor
// does what is published afterwards.
//
// A frame may bring more than memory (kRefs), for each reader once, and either the reader sees to it or the
// writer does, who may publish while the reader leaves. Which of them is settled with one word, ReaderCursor::
// end, and without waiting: the reader says there that it leaves, then looks at the head; the writer
// publishes, then looks at the word. Both change the word in doing so, if only from a value to itself. So one
// of them comes second there, and sees what the other had done before:
// - the writer was first: its frame is below the head that the reader sees. The reader's.
// - the reader was first: the writer finds that it leaves, and neither can know whether that head was read
//   before the frame was published or after. Then the first of them to put a limit in the word's place has
//   settled it: the writer says that its frame is still the reader's, the reader says what it saw.
// Frames that are published when there is a limit are on one side of it or the other.
class RingReader {
 public:
  RingReader(std::shared_ptr<Segment> segment, size_t offset, uint32_t reader, std::shared_ptr<ProcessTable> process_table, Target writer)
      : segment_(std::move(segment)), ring_(segment_->ring(offset)), reader_(reader), process_table_(std::move(process_table)), writer_(writer) {
    if (reader >= ring_.readers || writer.slot >= process_table_->slots() || writer.bit >= kDoorbellBits) throw std::system_error(EINVAL, std::generic_category(), "ring reader");
    next_ = cursor().next.load(std::memory_order_relaxed);
    head_ = &ring_.header->head;
  }

  uint64_t next() const { return next_; }
  // Throws where the writer cannot have written that (see `broken`): whoever goes through the frames up to
  // the head comes to an end. After `leave` it is the limit: what comes later is not there.
  uint64_t head() const {
    // Acquire pairs with the writer's release: the slots below `head` are whole.
    const uint64_t head = head_->load(std::memory_order_acquire);
    if (head - next_ > ring_.slots) [[unlikely]] broken(head);
    return head;
  }
  bool empty() const { return head() == next_; }
  // Whether frame `number` has been published. False if that cannot be known: the ring is broken.
  bool has_come(uint64_t number) const noexcept {
    const uint64_t head = head_->load(std::memory_order_acquire);
    return number < next_ || (head - next_ <= ring_.slots && number < head);
  }
  uint32_t reader() const { return reader_; }
  uint32_t readers() const { return ring_.readers; }
  uint32_t capacity() const { return ring_.capacity(); }

  // Of a frame that has been published and not been taken.
  Kind kind_of(uint64_t number) const { return read_once(reinterpret_cast<const SlotHeader*>(ring_.slot(number))->kind); }
  uint64_t tag_of(uint64_t number) const { return read_once(reinterpret_cast<const SlotHeader*>(ring_.slot(number))->tag); }
  // As !empty(), but it cannot fail: of a broken ring it says anything.
  bool has_some() const noexcept { return head_->load(std::memory_order_acquire) != next_; }
  const SlotHeader* front() const { return at(next_); }
  // Of a frame that has been published and not been taken: it stays as it is until then.
  const SlotHeader* at(uint64_t number) const { return reinterpret_cast<const SlotHeader*>(ring_.slot(number)); }

  void advance() {
    ++next_;
    if (ring_.flags & kWriterMayWait) {
      cursor().next.store(next_, std::memory_order_seq_cst);  // Dekker with wants_room + has_room
      if (ring_.header->room_at.load(std::memory_order_seq_cst) == next_) process_table_->notify(writer_.slot, writer_.bit);
    } else {
      cursor().next.store(next_, std::memory_order_release);  // our reads of the slot come before it
    }
  }

  // The writer looks when it is rung, or before its next frame.
  void want(uint64_t tag) {
    cursor().wanted.store(tag, std::memory_order_release);
    process_table_->notify(writer_.slot, writer_.bit);
  }

  void lose() { cursor().lost.fetch_add(1, std::memory_order_relaxed); }

  // Nothing that comes later is taken. What has come is the caller's to take, or to give up, and its slots
  // and blocks stay until then.
  void leave() {
    if (head_ == &limit_ || inherited()) return;
    cursor().end.exchange(ReaderCursor::kLeaving, std::memory_order_acq_rel);
    // Acquire pairs with the writer's release, as in head().
    uint64_t limit = ring_.header->head.load(std::memory_order_acquire);
    uint64_t said = ReaderCursor::kLeaving;
    if (!cursor().end.compare_exchange_strong(said, limit + 1, std::memory_order_acq_rel, std::memory_order_acquire)) limit = said - 1;
    limit_.store(limit, std::memory_order_relaxed);
    head_ = &limit_;
  }

  // Take no more. The caller has let go of what lies in front of the ring.
  void close() {
    if (closed_ || inherited()) return;
    leave();
    closed_ = true;
    limit_.store(next_, std::memory_order_relaxed);
    // Release: `next` is final, and our reads of the slots come before the writer's reuse of them.
    // Sequentially consistent for Returns::note.
    cursor().end.store(next_ + 1, std::memory_order_seq_cst);
    process_table_->slot(writer_.slot)->returns.note_any();
    if (ring_.flags & kWriterMayWait) process_table_->notify(writer_.slot, writer_.bit);
  }

  // In a forked child the ring is its parent's.
  bool inherited() const { return fork_ != fork_generation.load(std::memory_order_relaxed); }

  std::string carries;  // what goes over it, in words; for errors

 private:
  ReaderCursor& cursor() const { return ring_.cursor(reader_); }
  // No writer goes more than a round ahead of a reader that it has not seen dead or closed. So somebody who
  // has the ring mapped has written over its head, and what is in the slots is anybody's guess.
  [[noreturn, gnu::cold]] void broken(uint64_t head) const {
    throw std::system_error(EPROTO, std::generic_category(),
                            "conveyor: the ring for " + (carries.empty() ? "an unnamed edge" : carries) + ", written by " + process_table_->name(writer_.slot) +
                                ", is broken: " + std::to_string(next_) + " frames were taken from it, it holds " + std::to_string(ring_.slots) +
                                ", and its head says " + std::to_string(head) + ". A process that shares it has written over it, and should be killed");
  }
  std::shared_ptr<Segment> segment_;
  Ring ring_;
  uint32_t reader_;
  std::shared_ptr<ProcessTable> process_table_;
  Target writer_;
  uint64_t next_ = 0;
  const std::atomic<uint64_t>* head_;
  std::atomic<uint64_t> limit_{0};  // stands for the head once this reader leaves
  bool closed_ = false;
  const uint64_t fork_ = fork_generation.load();
};

}  // namespace conveyor
