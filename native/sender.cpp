#include "sender.h"

namespace conveyor {

void Sender::reserve(Outgoing& out, bool beyond_cap, bool may_wait) {
  if (inherited()) throw std::system_error(EPERM, std::generic_category(), "a ring belongs to the process that this one was forked from");
  if (out.size <= ring.capacity() && !(out.flags & kKeeps)) return;
  CONVEYOR_ASSERT(out.block == nullptr);
  size_t size = out.size;
  if (out.flags & kKeeps) {
    size = trailer_at(size) + trailer_size(out.keeps);
    if (!out.keeps.empty()) {
      const ReaderSet& readers = *ring.readers();
      std::vector<LeasePlace> places;
      for (size_t i = 0; i < readers.slots.size(); ++i) places.push_back({readers.slots[i], readers.incarnations[i]});
      out.noted = std::make_shared<Sent>(out.keeps, std::move(places));
    }
  }
  out.block = arena->allocate(size, beyond_cap ? nullptr : ring.readers()->budget, beyond_cap, may_wait);
  out.arena = arena;
}

uint64_t Sender::publish(Outgoing& out) noexcept {
  CONVEYOR_ASSERT(!inherited());
  CONVEYOR_ASSERT(out.block != nullptr || out.size <= ring.capacity());
  const bool quick = out.codec < kFirstPython && out.block == nullptr;
  SlotHeader* slot = ring.next_slot();
  slot->tag = out.tag;
  slot->kind = out.kind;
  slot->codec = out.codec;
  slot->flags = out.flags;
  slot->size = out.size;
  slot->block = 0;
  if (out.block != nullptr) {
    slot->block = out.block->offset + 1;
    slot->block_size = out.block->size;
    if ((out.flags & kKeeps) && !(out.flags & kExternal)) write_trailer(out.block->data(), out.size, out.keeps);
    std::shared_ptr<const void> attached = std::move(out.attached);
    if (out.noted) {
      out.noted->publish(out.block->header(), out.block->next_generation(), std::move(attached), out.keeps);
      attached = std::move(out.noted);
    }
    arena->publish(out.block, ring.readers(), out.tag, ring.head(), std::move(attached));
    out.block = nullptr;
  }
  const size_t sent = out.size + out.beside;
  bytes += sent;
  // Before the frame: whoever has a result sees the counts of what led to it.
  if (recorder_) recorder_->sending(index_, output_, out.tag, sent, out.kind == Kind::kError, quick);
  return ring.publish();
}

bool Sender::send(uint64_t tag, Kind kind, uint16_t codec, std::span<const char> body, bool may_wait) {
  if (!ring.has_room()) return false;
  Outgoing out;
  out.tag = tag;
  out.kind = kind;
  out.codec = codec;
  out.size = body.size();
  reserve(out, false, may_wait);
  if (!body.empty()) std::memcpy(body_of(out), body.data(), body.size());
  publish(out);
  return true;
}

bool Sender::forward(const Frame& frame, bool may_wait) {
  if (frame.flags & kRefs) throw std::system_error(ENOTSUP, std::generic_category(), "a value with refs inside is not sent on");
  if (!ring.has_room()) return false;
  Outgoing out;
  out.tag = frame.tag;
  out.kind = frame.kind;
  out.codec = frame.codec;
  out.flags = frame.flags & ~uint32_t(kExternal | kSure);  // whether this process outlives the others is not known here
  out.size = frame.size;
  if (frame.flags & kKeeps) {
    out.attached = std::make_shared<const Frame>(frame);
    out.keeps = frame.keeps();
  }
  if (!(frame.flags & kExternal)) {
    reserve(out, false, may_wait);
    frame.read(0, body_of(out), frame.size);
    publish(out);
    return true;
  }
  // Its buffers come to lie behind the body: how much fits the slot is this channel's affair.
  auto table = read_table(frame.body, frame.size, frame.block_room());
  if (!table) throw std::system_error(EPROTO, std::generic_category(), "a frame's layout is not valid");
  std::vector<BufferEntry> moved = table->entries;
  for (BufferEntry& entry : moved)
    if (entry.offset & kInBlock) {
      entry.offset = align_up(out.size, kBufferAlign);
      out.size = entry.offset + entry.length;
    }
  reserve(out, false, may_wait);
  char* const body = body_of(out);
  frame.read(0, body, frame.size);
  std::memcpy(body + sizeof(TableHeader), moved.data(), moved.size() * sizeof(BufferEntry));
  for (size_t i = 0; i < moved.size(); ++i)
    if (const BufferEntry& from = table->entries[i]; from.offset & kInBlock) frame.read_block(from.offset & ~kInBlock, body + moved[i].offset, from.length);
  publish(out);
  return true;
}

}  // namespace conveyor
