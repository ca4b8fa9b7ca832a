#include "out_ring.h"

#include <algorithm>

#include "../body.h"
#include "../frame.h"

namespace conveyor::net {

OutRing::OutRing(const std::shared_ptr<Segment>& segment, uint64_t id, uint32_t index, size_t offset, const std::shared_ptr<ProcessTable>& process_table,
                 Target writer, const std::vector<Reading>& readers, std::shared_ptr<ArenaView> view, std::shared_ptr<Lent> lent,
                 Unclaimed unclaimed)
    : index(index), segment_(segment), process_table_(process_table), id_(id), view_(std::move(view)), lent_(std::move(lent)), unclaimed_(std::move(unclaimed)) {
  for (const Reading& r : readers) ends_.push_back({r.reader, segment->ring(offset), std::make_unique<RingReader>(segment, offset, r.reader, process_table, writer),
                     r.target.slot, process_table->slot(r.target.slot)->incarnation.load(std::memory_order_relaxed)});
  sent_ = most_ = have_ = ends_.front().end->next();
}

OutRing::~OutRing() { forsake(); }

std::vector<SentClaims> OutRing::forsake() {
  for (End& e : ends_)
    if (!e.left && !process_table_->gone(e.slot, e.incarnation)) leave(e);
  // What was sent as a whole has come, or may: its host says when it is needed no more, or that it never came.
  try {
    for (Loaded& l : loaded_)
      if (l.head.number < most_) hand_over(l);
  } catch (const std::bad_alloc&) {  // their readers find that the values are gone
  }
  loaded_.clear();
  open_ = false;
  return std::exchange(sent_claims_, {});
}

void OutRing::hand_over(Loaded& loaded) {
  if (loaded.head.flags & kKeeps) lent_->add({id_, index, loaded.head.number}, loaded.leases);
}

uint64_t OutRing::limit() noexcept {
  // The writer waits for no reader that is dead, and has no lease for it.
  for (End& e : ends_)
    if (!e.left && process_table_->gone(e.slot, e.incarnation)) {
      e.left = true;
      wanted_ = std::ranges::any_of(ends_, [](const End& other) { return !other.left; });
    }
  // As RingReader::head, but a word that cannot be is no frame: it stays so, and the readers are told nothing.
  const uint64_t head = ends_.front().ring.header->head.load(std::memory_order_acquire);
  uint64_t slowest = head;
  for (const End& e : ends_)
    if (!e.left) slowest = std::min(slowest, e.end->next());
  return head - slowest <= ends_.front().ring.slots ? head : sent_;
}

void OutRing::look() noexcept {
  next_.upto = limit();
  next_.behind.resize(leads_.size());
  for (size_t i = 0; i < leads_.size(); ++i) next_.behind[i] = leads_[i]->limit();
}

bool OutRing::held() noexcept {
  if (begun_) return false;
  if (sent_ >= now_.upto) now_ = next_;
  // One that is not queued has nothing that could be sent.
  for (size_t i = 0; i < now_.behind.size(); ++i)
    if (leads_[i]->queued && leads_[i]->sent_ < now_.behind[i]) return true;
  return false;
}

void OutRing::open(uint64_t have, uint64_t at) {
  if (have > most_) throw Violation("a host has frames that it was never sent");
  sent_ = have;
  begun_ = false;
  at_ = 0;
  release(have);
  if (at != 0) {
    if (loaded_.empty() || loaded_.front().head.number != have || at > loaded_.front().head.block) throw Violation("a host has a part of a frame that it was never sent");
    begun_ = at < loaded_.front().head.block;
    at_ = at;
    if (!begun_) throw Violation("a host has a whole frame, and not published it");
  }
  open_ = true;
}

void OutRing::release(uint64_t have) {
  if (have < have_ || have > sent_) throw Violation("a host has frames that it was never sent");
  have_ = have;
  while (!loaded_.empty() && loaded_.front().head.number < have) {
    hand_over(loaded_.front());
    loaded_.pop_front();
  }
}

size_t OutRing::step(Connection& to) {
  const size_t before = to.waiting();
  if (!begun_) {
    begin(to);
    return to.waiting() - before;
  }
  Loaded* loaded = nullptr;
  for (Loaded& l : loaded_)
    if (l.head.number == sent_) loaded = &l;
  CONVEYOR_ASSERT(loaded != nullptr);
  const uint64_t size = std::min<uint64_t>(kChunkBytes, loaded->head.block - at_);
  to.put(Prefix{What::kChunk, 0, uint32_t(sizeof(ChunkHead) + size), id_});
  to.put(ChunkHead{index, 0, sent_, at_});
  to.attach(loaded->block + at_, size, loaded->leases.front());
  at_ += size;
  if (at_ == loaded->head.block) {
    begun_ = false;
    most_ = std::max(most_, ++sent_);
  }
  return to.waiting() - before;
}

void OutRing::begin(Connection& to) {
  const Ring& ring = ends_.front().ring;
  const auto* shared = reinterpret_cast<const SlotHeader*>(ring.slot(sent_));
  const SlotHeader slot = read_once(*shared);
  const char* body = reinterpret_cast<const char*>(shared + 1);
  // Whether the reader is sure of the value is not known: the frame's own host may be lost before.
  FrameHead head = {index, uint16_t(slot.kind), slot.codec, sent_, slot.tag, slot.flags & ~uint32_t(kSure), 0, slot.size, 0};
  bool whole = !(slot.flags & kKeeps) || slot.block != 0;
  // Whoever has written what no writer does spoils that frame: the other host would give this one up for it.
  if (slot.kind < Kind::kValue || slot.kind > Kind::kControl) {
    head.kind = uint16_t(Kind::kError);
    whole = false;
  }
  if (whole && (slot.block == 0 || (slot.flags & kExternal))) {
    whole = slot.size <= ring.capacity() && !(slot.block == 0 && (slot.flags & kExternal));
    head.in_slot = uint32_t(slot.size);
  }
  if (whole && slot.block != 0) whole = load(slot, head, body);
  if (!whole) {
    // Its block is nobody's here any more, from the first time on. Nor does anybody come for what it claims.
    if (sent_ >= most_)
      for (const End& e : ends_)
        if (!e.left) pass_over(slot, body, e);
    head.in_slot = 0;
    head.size = head.block = 0;
  }
  to.put(Prefix{What::kFrame, uint16_t(whole ? 0 : kStandIn), uint32_t(sizeof head + head.in_slot), id_});
  to.put(head);
  if (head.in_slot != 0) to.put(body, head.in_slot);
  ++frames;
  at_ = 0;
  begun_ = head.block != 0;
  if (!begun_) most_ = std::max(most_, ++sent_);
}

bool OutRing::load(const SlotHeader& slot, FrameHead& head, const char* body) {
  for (const Loaded& l : loaded_)
    if (l.head.number == sent_) {
      head = l.head;
      return true;
    }
  if (sent_ < most_) return false;  // an error has stood for it, and its block may be another frame's by now
  const uint64_t room = slot.block_size < kBlockHeader ? 0 : slot.block_size - kBlockHeader;
  if (slot.flags & kExternal) {
    // The slot may be written by anybody: what is looked into is a copy.
    const std::vector<char> copy(body, body + slot.size);
    const auto table = read_table(copy.data(), copy.size(), room);
    if (!table) return false;
    for (const BufferEntry& entry : table->entries)
      if (entry.offset & kInBlock) head.block = std::max(head.block, (entry.offset & ~kInBlock) + entry.length);
  } else {
    head.block = slot.size;
  }
  if (head.block == 0 || head.block > room) return false;
  Loaded loaded{head, {}, nullptr};
  try {
    for (const End& e : ends_)
      if (!e.left) loaded.leases.push_back(std::make_shared<Lease>(*view_, slot.block - 1, slot.block_size, e.reader));
    loaded.block = loaded.leases.front()->data();
    if ((slot.flags & kKeeps) && !(slot.flags & kExternal)) {
      // With the numbers of what it keeps, which stand behind the body.
      const size_t numbers = trailer_at(slot.size) + trailer_size(read_trailer(loaded.block, slot.size, room));
      if (numbers > room) return false;
      head.block = loaded.head.block = numbers;
    }
    loaded_.push_back(std::move(loaded));
  } catch (const std::exception&) {  // it cannot be mapped, or is none
    return false;
  }
  return true;
}

void OutRing::move(uint32_t reader, const CursorState& state) {
  for (End& e : ends_) {
    if (e.reader != reader) continue;
    if (e.left) return;
    if (state.next > sent_) throw Violation("a reader has taken frames that it was never sent");
    while (e.end->next() < state.next) e.end->advance();
    ReaderCursor& cursor = e.ring.cursor(reader);
    if (state.lost != cursor.lost.load(std::memory_order_relaxed)) cursor.lost.store(state.lost, std::memory_order_relaxed);
    if (state.wanted > cursor.wanted.load(std::memory_order_relaxed)) e.end->want(state.wanted);
    if (state.closed) leave(e);
    return;
  }
}

void OutRing::leave(End& end) {
  end.left = true;
  wanted_ = std::ranges::any_of(ends_, [](const End& other) { return !other.left; });
  end.end->leave();
  try {
    for (const uint64_t limit = end.end->head(); end.end->next() < limit; end.end->advance()) {
      // Those that are under way have leases of their own, which end when they have arrived.
      const uint64_t number = end.end->next();
      const auto loaded = std::ranges::find_if(loaded_, [&](const Loaded& l) { return l.head.number == number; });
      const SlotHeader* slot = end.end->at(number);
      const char* body = reinterpret_cast<const char*>(slot + 1);
      if (loaded != loaded_.end())
        note_sent(number, read_once(*slot), body, &*loaded, end);
      else if (number >= most_)
        pass_over(read_once(*slot), body, end);
      else if (number >= have_)
        note_sent(number, read_once(*slot), body, nullptr, end);
    }
  } catch (const std::system_error&) {  // a broken ring: its writer's to see
  }
  end.end->close();
}

void OutRing::pass_over(const SlotHeader& slot, const char* body, const End& end) {
  const bool external = slot.flags & kExternal;
  if (slot.flags & kRefs) {
    std::optional<std::string> header;
    try {
      if (slot.block == 0 || external) {
        header = header_in_slot(slot, body, end);
      } else if (slot.size <= slot.block_size - std::min<uint64_t>(slot.block_size, kBlockHeader)) {
        const Lease lease(*view_, slot.block - 1, slot.block_size, end.reader);  // ends with this
        header = header_in(lease.data(), slot.size, 0);
        if (header) unclaimed_(*header, end.slot, end.incarnation);
        return;
      }
      if (header) unclaimed_(*header, end.slot, end.incarnation);
    } catch (const std::exception&) {
      // It cannot be mapped, or noted: then its claims end with the reader's process.
    }
  }
  if (slot.block != 0) view_->skip_block(slot.block - 1, slot.block_size, end.reader);
}

std::optional<std::string> OutRing::header_in_slot(const SlotHeader& slot, const char* body, const End& end) const {
  if (slot.size > end.ring.capacity()) return std::nullopt;
  const std::string copy(body, slot.size);  // the slot may be written by anybody
  return header_in(copy.data(), copy.size(), slot.block_size < kBlockHeader ? 0 : slot.block_size - kBlockHeader);
}

void OutRing::note_sent(uint64_t number, const SlotHeader& slot, const char* body, const Loaded* loaded, const End& end) {
  if (!(slot.flags & kRefs)) return;
  try {
    std::optional<std::string> header;
    if (slot.block == 0 || (slot.flags & kExternal))
      header = header_in_slot(slot, body, end);
    else if (loaded != nullptr)  // else it has come
      header = header_in(loaded->block, loaded->head.size, 0);
    if (header) sent_claims_.push_back({index, number, std::move(*header), end.slot, end.incarnation});
  } catch (const std::bad_alloc&) {  // then its claims end with the reader's process
  }
}

}  // namespace conveyor::net
