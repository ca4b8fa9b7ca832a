#include "in_ring.h"

namespace conveyor::net {

namespace {

// Those on other hosts never come to this ring: no frame waits for them, and no block.
std::bitset<kMaxReaders> close_elsewhere(const Ring& ring, const std::bitset<kMaxReaders>& here) {
  std::bitset<kMaxReaders> is_remote;
  for (uint32_t r = 0; r < ring.readers; ++r) {
    if (here.test(r)) continue;
    is_remote.set(r);
    ring.cursor(r).end.store(1, std::memory_order_release);
  }
  return is_remote;
}

}  // namespace

InRing::InRing(const std::shared_ptr<Segment>& segment, uint64_t id, uint32_t index, size_t offset, const std::shared_ptr<ProcessTable>& process_table,
               const std::vector<Target>& readers, const std::bitset<kMaxReaders>& here, std::shared_ptr<Arena> arena,
               std::shared_ptr<Returning> returning, Unclaimed unclaimed, size_t times, uint32_t kept)
    : index(index), id_(id), ring_(segment->ring(offset)), sender_(segment, offset, process_table, readers, std::move(arena), close_elsewhere(ring_, here)), here_(here),
      readers_(uint32_t(readers.size())), returning_(std::move(returning)), unclaimed_(std::move(unclaimed)),
      times_(kept != 0 ? reinterpret_cast<Word*>(segment->at(times, kept * sizeof(Word))) : nullptr), kept_(kept) {
  for (const Target& t : readers) processes_.emplace_back(t.slot, process_table->slot(t.slot)->incarnation.load(std::memory_order_relaxed));
}

void InRing::check_size(const FrameHead& head, bool stands_in) const {
  const bool external = !stands_in && (head.flags & kExternal), keeps = !stands_in && (head.flags & kKeeps);
  bool fits;
  if (stands_in)
    fits = head.in_slot == 0 && head.block == 0;
  else if (external)
    fits = head.size == head.in_slot && head.block != 0;
  else if (keeps)  // behind its body stand the numbers of what it keeps
    fits = head.in_slot == 0 && head.size < kMostBytes && head.block >= trailer_at(head.size) + trailer_size({}) &&
           head.block - trailer_at(head.size) <= (1 + kMostNumbers) * sizeof(uint64_t);
  else
    fits = head.block == 0 ? head.size == head.in_slot : head.size == head.block && head.in_slot == 0;
  if (!fits) throw Violation("a frame of a wrong size");
}

char* InRing::frame(const FrameHead& head, uint16_t flags, size_t size) {
  if (in_slot_ != 0) throw Violation("a frame inside of another");
  if (begun_ && head.number != head_.number) throw Violation("a frame before the one before it was whole");
  if (head.number != sender_.ring.head()) throw Violation("a frame out of its order");
  if (!sender_.ring.has_room()) throw Violation("more frames than there is room for");
  if (head.kind < uint16_t(Kind::kValue) || head.kind > uint16_t(Kind::kControl)) throw Violation("a frame of no kind");
  const bool stands_in = flags & kStandIn, keeps = !stands_in && (head.flags & kKeeps);
  if (head.in_slot != size || head.in_slot > ring_.capacity() || head.block > kMostBytes) throw Violation("a frame of a wrong size");
  check_size(head, stands_in);
  if (!keeps)
    borrowed_.reset();
  else if (borrowed_ == nullptr)  // else it has begun anew
    borrowed_ = Returning::borrow(returning_, {id_, index, head.number});
  // Begun anew after a reconnect: the block may be there.
  const bool again = begun_ && out_.block != nullptr && head.block == head_.block;
  head_ = head;
  begun_ = true;
  got_ = 0;
  in_slot_ = head.in_slot;
  refused_ = stands_in;
  error_ = stands_in ? kNotBetweenHosts : nullptr;
  first_.clear();
  if (!again && out_.block != nullptr) {
    out_.arena->release(out_.block);
    out_.block = nullptr;
  }
  if (head.block != 0 && !again) {
    try {
      // Nobody is waited for: all other rings of this host would wait, too.
      out_.block = sender_.arena->allocate(head.block, {}, false, false);
      out_.arena = sender_.arena;
    } catch (const std::exception&) {
      refused_ = true;
      error_ = kHostIsFull;
    }
  }
  // Also of one that is refused: it may say where its header lies.
  return sender_.ring.next_body();
}

char* InRing::chunk(const ChunkHead& head, size_t size) {
  if (!begun_ || in_slot_ != 0 || head.number != head_.number || head.at != got_ || size > head_.block - got_) throw Violation("a piece of no frame");
  if (!refused_) return out_.block->data() + got_;
  if (got_ != 0 || !(head_.flags & kRefs) || (head_.flags & kExternal)) return nullptr;
  first_.resize(size);
  return first_.data();
}

bool InRing::received(size_t size) {
  if (in_slot_ != 0)
    in_slot_ -= size;
  else
    got_ += size;
  if (in_slot_ != 0 || got_ != head_.block) return false;
  publish();
  return true;
}

void InRing::cut(size_t size) {
  if (in_slot_ != 0) {  // it begins anew
    in_slot_ = 0;
    got_ = 0;
  } else if (begun_) {
    got_ += size;
  }
}

void InRing::publish() {
  begun_ = false;
  owes_have_ |= head_.block != 0;
  out_.tag = head_.tag;
  out_.codec = head_.codec;
  out_.kind = Kind(head_.kind);
  out_.flags = head_.flags & ~uint32_t(kSure);
  out_.size = head_.size;
  const auto header = claims();  // before a reader may end its lease, and an error takes its place
  if (refused_) {
    // What it would have defined has to be sent again.
    if (head_.flags & kDefinitions)
      for (uint32_t r = 0; r < readers_; ++r)
        if (here_.test(r)) ring_.cursor(r).lost.fetch_add(1, std::memory_order_relaxed);
    out_.kind = Kind::kError;
    out_.codec = kBytes;
    out_.flags = 0;
    out_.size = std::strlen(error_);  // fits in every slot
    std::memcpy(sender_.ring.next_body(), error_, out_.size);
  }
  if (borrowed_ != nullptr) {
    borrowed_->whole = true;
    if (!refused_) {
      if (!(out_.flags & kExternal)) out_.keeps = read_trailer(out_.block->data(), out_.size, head_.block);
      out_.attached = std::move(borrowed_);
    }
    borrowed_.reset();
  }
  // The arena counts what lies beside the body.
  out_.beside = out_.block != nullptr && (out_.flags & kExternal) ? head_.block : 0;
  if (times_ != nullptr) times_[head_.tag & (kept_ - 1)].store(now_ns(), std::memory_order_relaxed);
  sender_.publish(out_);
  out_.arena.reset();
  out_.keeps.clear();
  ++frames;
  if (!header) return;
  const auto left = refused_ ? here_ : sender_.ring.left_behind(sender_.ring.head() - 1) & here_;
  for (uint32_t r = 0; r < readers_; ++r)
    if (left.test(r)) unclaimed_(*header, processes_[r].first, processes_[r].second);
  first_ = {};
}

std::optional<std::string> InRing::claims() const {
  if (!(out_.flags & kRefs) || error_ == kNotBetweenHosts) return std::nullopt;  // what is not sent its host sees to
  const bool external = head_.block != 0 && (out_.flags & kExternal);
  if (refused_ && !external) return header_at(first_.data(), first_.size());
  const char* body = out_.block != nullptr && !external ? out_.block->data() : reinterpret_cast<const char*>(ring_.slot(head_.number)) + sizeof(SlotHeader);
  return header_in(body, out_.size, external ? head_.block : 0);
}

bool InRing::ask(uint64_t told) {
  // Exact where the writer may have no room; otherwise half a round is soon enough.
  const uint64_t head = sender_.ring.head();
  const uint64_t at = told + (head - told >= ring_.slots ? 1 : std::max<uint64_t>(1, ring_.slots / 2));
  // Dekker with RingReader::advance: we ask, then look; readers move, then look whether we have asked.
  ring_.header->room_at.store(at, std::memory_order_seq_cst);
  uint64_t slowest = head;
  for (uint32_t r = 0; r < readers_; ++r)
    if (waits_for(r)) slowest = std::min(slowest, ring_.cursor(r).next.load(std::memory_order_seq_cst));
  return slowest >= at;
}

}  // namespace conveyor::net
