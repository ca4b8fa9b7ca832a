#include "receiver.h"

namespace conveyor {

namespace {

// What is smaller is no reason to cross a cap.
constexpr size_t kLargeGiven = 64 * 1024;

}  // namespace

SlotHeader Receiver::checked_front() const {
  const SlotHeader slot = read_once(*ring.front());
  const bool in_slot = slot.block == 0 || (slot.flags & kExternal);
  const uint64_t room = slot.block_size < kBlockHeader ? 0 : slot.block_size - kBlockHeader;
  if (slot.size > (in_slot ? uint64_t(ring.capacity()) : room))
    throw std::system_error(EPROTO, std::generic_category(), "a frame's size is not valid");
  return slot;
}

// Takes the lease last: a frame that cannot be made has taken none.
Frame Receiver::frame_of(const SlotHeader& slot, bool mapped) const {
  Frame f;
  f.tag = slot.tag;
  f.kind = slot.kind;
  f.codec = slot.codec;
  f.flags = slot.flags;
  f.size = slot.size;
  f.readonly = readonly;
  if (slot.block == 0 || (f.flags & kExternal)) {
    f.memory = std::make_shared<OwnedMemory>(f.size);
    std::memcpy(f.memory->data, ring.front() + 1, f.size);
    f.body = f.memory->data;
    if (slot.block != 0 && slot.block_size > kBlockHeader)
      if (const auto table = read_table(f.body, f.size, slot.block_size - kBlockHeader))
        for (const BufferEntry& entry : table->entries)
          if (entry.offset & kInBlock) f.beside += entry.length;
  }
  if (slot.block == 0) return f;
  if (!mapped) {
    f.unmapped = std::make_shared<UnmappedLease>(view, slot.block - 1, slot.block_size, ring.reader());
    return f;
  }
  f.lease = std::make_shared<Lease>(*view, slot.block - 1, slot.block_size, ring.reader());
  if (f.body == nullptr) f.body = f.lease->data();
  return f;
}

void Receiver::load_front() {
  if (front_)
    front_->map();
  else
    front_ = frame_of(checked_front(), true);
}

void Receiver::load_unread() {
  if (front_) return;
  const SlotHeader slot = checked_front();
  try {
    front_ = frame_of(slot, true);
    return;
  } catch (const std::bad_alloc&) {
    if (slot.block == 0) throw;
  } catch (const std::system_error& error) {
    const int number = error.code().value();
    if (number == EPROTO || number == EFAULT) throw;  // there is no such block
  }
  front_ = frame_of(slot, false);
}

Frame Receiver::take() {
  load_front();
  return take_loaded();
}

Frame Receiver::take_unmapped() {
  if (!front_) front_ = frame_of(checked_front(), false);
  return take_loaded();
}

Frame Receiver::take_loaded() noexcept {
  CONVEYOR_ASSERT(front_);
  Frame f = std::move(*front_);
  front_.reset();
  tag = f.tag;
  kind = f.kind;
  // As the arena has counted them: were it more, a method could fill what the one behind it needs to end.
  const size_t held = f.block_room() == 0 ? 0 : kBlockHeader + (f.flags & kExternal ? f.beside : f.size);
  given = held >= kLargeGiven ? align_up(held, kGranule) : 0;
  bytes += f.size + f.beside;
  ring.advance();
  return f;
}

void Receiver::release_front(const SlotHeader& slot) noexcept {
  tag = slot.tag;
  kind = slot.kind;
  if (!front_ && slot.block != 0) view->skip_block(slot.block - 1, slot.block_size, ring.reader());
  front_.reset();
  ring.advance();
}

void Receiver::pass() noexcept {
  const SlotHeader slot = read_once(*ring.front());
  if (slot.flags & kDefinitions) ring.lose();
  release_front(slot);
}

void Receiver::close() noexcept {
  if (ring.inherited()) return;
  ring.leave();
  try {
    while (!ring.empty()) release_front(read_once(*ring.front()));
  } catch (const std::system_error&) {  // a broken ring, of which whoever waited for it was told
  }
  front_.reset();
  ring.close();
  view.reset();  // no frame will be looked for there
}

}  // namespace conveyor
