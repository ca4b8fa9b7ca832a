#include "endpoints.h"

namespace conveyor {

namespace {
constexpr size_t kReleaseGilFrom = 32 * 1024;
}

void Writer::prepare(Encoded& e, bool beyond_cap) {
  if (e.made && e.size <= ring.capacity()) {
    if (!beyond_cap) arena->check_budget(*ring.readers(), e.made->length);
    return;
  }
  if (e.made) {
    // The table does not fit the slot (a very long meta): fall back to copying the value.
    e.made.reset();
    e.layout = lay_out_table(size_t(PyBytes_GET_SIZE(e.meta.ptr())), {size_t(e.views[0].len)});
    e.size = e.layout.total;
  }
  if (e.size <= ring.capacity()) return;
  if (!beyond_cap) arena->check_budget(*ring.readers(), e.size);
  e.block = arena->allocate(e.size, beyond_cap);
  e.arena = arena;
  if (e.size >= kReleaseGilFrom) {
    nb::gil_scoped_release unlocked;
    e.write_body(e.block->data());
  } else {
    e.write_body(e.block->data());
  }
}

uint64_t Writer::commit(Encoded& e, uint64_t tag, Kind kind) {
  const bool quick = e.codec < kFirstPython && e.block == nullptr && !e.made;
  SlotHeader* slot = ring.next_slot();
  slot->tag = tag;
  slot->kind = kind;
  slot->codec = e.codec;
  slot->flags = e.flags;
  slot->size = e.size;
  Block* block = e.block;
  if (e.made) {
    block = e.made->block;
    e.made->sent = true;
    slot->flags |= kExternal;
  }
  if (block != nullptr) {
    slot->block = block->offset + 1;
    slot->block_size = block->size;
    arena->publish(block, ring.readers(), tag);
    e.block = nullptr;
  } else {
    slot->block = 0;
  }
  if (slot->block == 0 || e.made) e.write_body(reinterpret_cast<char*>(slot + 1));
  bytes += e.size;
  e.sent = nb::object();  // what it defines is on its way
  if (recorder_) {
    if (block != nullptr) recorder_->arena_has(arena->bytes_touched());
    recorder_->sending(index_, output_, tag, e.size, kind == Kind::kError, quick);
  }
  return ring.publish();
}

SlotHeader Reader::checked_front() const {
  const SlotHeader slot = read_once(*ring.front());
  const bool in_slot = slot.block == 0 || (slot.flags & kExternal);
  if (in_slot ? slot.size > ring.capacity() : slot.size > slot.block_size)
    throw std::system_error(EPROTO, std::generic_category(), "conveyor: a frame's size is not valid");
  return slot;
}

Frame Reader::frame_of(const SlotHeader& slot) const {
  Frame f;
  f.tag = slot.tag;
  f.kind = slot.kind;
  f.codec = slot.codec;
  f.flags = slot.flags;
  f.size = slot.size;
  f.readonly = readonly;
  if (slot.block != 0) {
    f.lease = std::make_shared<Lease>(view, slot.block - 1, slot.block_size, ring.reader());
    if (!(f.flags & kExternal)) {
      if (f.size > f.lease->capacity()) throw std::system_error(EPROTO, std::generic_category(), "conveyor: a frame's size is not valid");
      f.body = f.lease->data();
    }
  }
  if (f.body == nullptr) {
    f.memory = std::make_shared<OwnedMemory>(f.size);
    std::memcpy(f.memory->data, ring.front() + 1, f.size);
    f.body = f.memory->data;
  }
  return f;
}

Frame Reader::take() {
  Frame f = announced_ ? std::move(*announced_) : frame_of(checked_front());
  announced_.reset();
  tag = f.tag;
  kind = f.kind;
  bytes += f.size;
  ring.advance();
  return f;
}

std::optional<Frame> Reader::take_announced() {
  if (!announced_) {
    const SlotHeader slot = checked_front();
    if (!(slot.flags & kDefinitions) || slot.kind == Kind::kError) return take();
    announced_ = frame_of(slot);
  }
  const uint64_t number = ring.next();
  const Frame f = *announced_;
  try {
    announce(f);
  } catch (nb::python_error& error) {
    // What cannot be announced must not stay in front of all others.
    if (is_final(error.value()) && ring.next() == number) take();
    throw;
  } catch (const nb::builtin_exception&) {
    if (ring.next() == number) take();
    throw;
  }
  if (ring.next() != number) return std::nullopt;
  return take();
}

nb::object Reader::receive() {
  const SlotHeader slot = checked_front();
  if (is_native(slot) && !announced_) {
    tag = slot.tag;
    kind = slot.kind;
    bytes += slot.size;
    // Decoding runs no Python code, so nobody else can take this frame meanwhile.
    nb::object value = decode_native(slot.codec, reinterpret_cast<const char*>(ring.front() + 1), slot.size);
    ring.advance();
    return value;
  }
  return decode(take());
}

bool Gate::has_room() {
  check_owner(fork_);
  // The slots that this submission's results will need must be free: results that nobody has asked
  // for yet move to the stash, so they cost memory, not depth.
  if (next_ - first_ >= depth_) {
    const uint64_t oldest = next_ - first_ - depth_ + 1;  // so many must have been completed
    for (size_t i = 0; i < readers_.size(); ++i) {
      RingReader& ring = readers_[i]->ring;
      if (ring.next() >= oldest) continue;
      if (ring.head() < oldest) return false;
      while (ring.next() < oldest) stash_front(i);
    }
  }
  for (Writer* w : writers_)
    if (!w->ring.has_room()) return false;
  return true;
}

int64_t Gate::submit(nb::handle value, uint64_t deadline) {
  if (!has_room()) return -1;
  const uint64_t began = submission_begins();
  Writer& w = *writers_[0];
  Encoded e;
  w.encode_value(e, value);
  w.prepare(e);
  if (!has_room()) return -1;  // encoding runs Python code, which may have submitted something itself
  const uint64_t number = next_++;
  if (limits_ != nullptr) limits_->begin(number, deadline);
  submitting(number, began);
  w.commit(e, number, kind_);
  submission_ends(number, began);
  return int64_t(number);
}

int64_t Gate::submit_many(nb::tuple values, uint64_t deadline) {
  if (!has_room()) return -1;
  const uint64_t began = submission_begins();
  const size_t n = writers_.size();
  std::vector<Encoded> encoded(n);
  for (size_t i = 0; i < n; ++i) {
    writers_[i]->encode_value(encoded[i], values[i]);
    writers_[i]->prepare(encoded[i]);
  }
  if (!has_room()) return -1;
  const uint64_t number = next_++;
  if (limits_ != nullptr) limits_->begin(number, deadline);
  submitting(number, began);
  for (size_t i = 0; i < n; ++i) writers_[i]->commit(encoded[i], number, kind_);
  submission_ends(number, began);
  return int64_t(number);
}

uint64_t Gate::completed() const {
  uint64_t least = next_;
  for (Reader* r : readers_) least = std::min(least, first_ + r->ring.head());
  return least;
}

void Gate::stash_front(size_t i) {
  const uint64_t began = recorder_ && recorder_->tracing() ? now_ns() : 0;
  std::optional<Frame> f = readers_[i]->take_announced();
  if (!f) return;
  taken(f->tag, i, began, f->size, f->kind == Kind::kError);
  if (!dropped_[i].empty() && dropped_[i].erase(f->tag) != 0) return;
  const uint64_t tag = f->tag;
  stashes_[i].emplace(tag, std::move(*f));
}

void Gate::drain() {
  check_owner(fork_);
  for (size_t i = 0; i < readers_.size(); ++i)
    while (!readers_[i]->ring.empty()) stash_front(i);
}

bool Gate::ready(uint64_t number, size_t i) {
  check_owner(fork_);
  if (stashes_[i].contains(number) || handed_.contains({number, i})) return true;
  RingReader& ring = readers_[i]->ring;
  while (!ring.empty()) {
    if (ring.front()->tag == number) return true;
    stash_front(i);
  }
  return stashes_[i].contains(number) || handed_.contains({number, i});
}

nb::object Gate::decode_or_keep(Frame f, size_t i) {
  try {
    return decode(f);
  } catch (nb::python_error& error) {
    // Interrupted (Ctrl-C) rather than impossible: the result is still to be had.
    const uint64_t tag = f.tag;
    if (!is_final(error.value())) stashes_[i].emplace(tag, std::move(f));
    throw;
  }
}

nb::object Gate::take(uint64_t number, size_t i, uint64_t since) {
  check_owner(fork_);
  if (!handed_.empty()) {
    auto found = handed_.find({number, i});
    if (found != handed_.end()) return found->second;
  }
  // Cancelled while somebody waits for it: were it taken here, the mark would stay for ever.
  if (!dropped_[i].empty() && dropped_[i].contains(number)) return nb::object();
  auto& stash = stashes_[i];
  if (!stash.empty()) {
    auto found = stash.find(number);
    if (found != stash.end()) {
      Frame f = std::move(found->second);
      stash.erase(found);
      taking(number, i, since);
      return decode_or_keep(std::move(f), i);
    }
  }
  Reader& reader = *readers_[i];
  while (!reader.ring.empty()) {
    if (reader.ring.front()->tag == number) {
      const uint64_t began = taking(number, i, since);
      const uint64_t before = reader.bytes;
      nb::object value = reader.decodes_natively() ? reader.receive() : decode_or_keep(reader.take(), i);
      taken(number, i, began, reader.bytes - before, began != 0 && nb::isinstance<ErrorFrame>(value));
      return value;
    }
    stash_front(i);
  }
  return nb::object();
}

void Gate::hand(uint64_t number, size_t i, nb::object value) { handed_.insert_or_assign({number, i}, std::move(value)); }

bool Gate::settled(uint64_t number, size_t i) {
  if (handed_.empty()) return false;
  auto found = handed_.find({number, i});
  if (found == handed_.end()) return false;
  nb::object value = std::move(found->second);  // dropping it may run any code
  handed_.erase(found);
  return true;
}

void Gate::drop(uint64_t number, size_t i) {
  if (fork_ != fork_generation.load(std::memory_order_relaxed)) return;
  if (settled(number, i)) return;
  if (recorder_) asked_since_[i].erase(number);
  auto found = stashes_[i].find(number);
  if (found != stashes_[i].end()) {
    Frame f = std::move(found->second);
    stashes_[i].erase(found);
    announce(f);
  } else {
    dropped_[i].insert(number);
  }
}

size_t Gate::stashed() const {
  size_t n = 0;
  for (auto& stash : stashes_) n += stash.size();
  return n;
}

size_t Gate::stashed_bytes() const {
  size_t n = 0;
  for (auto& stash : stashes_)
    for (auto& [number, frame] : stash) n += frame.size;
  return n;
}

// What is noted

void Gate::record(std::shared_ptr<Recorder> own, std::vector<std::pair<std::shared_ptr<Recorder>, uint32_t>> outputs,
                  std::vector<std::shared_ptr<Recorder>> all) {
  if (outputs.size() != readers_.size()) throw std::system_error(EINVAL, std::generic_category(), "gate outputs");
  outputs_ = std::move(outputs);
  all_ = std::move(all);
  submitted_at_.resize(own->place().slots);
  asked_since_.resize(readers_.size());
  uint64_t turn = UINT64_MAX;
  for (auto& member : all_) {
    const RecorderPlace& place = member->place();
    // A receive may be waited for in several pieces.
    const uint64_t events = 1 + place.tasks + 4 * place.receives + place.sends;
    turn = std::min(turn, place.capacity / events);
  }
  turn_ = turn > 2 * depth_ ? turn - depth_ : 1;
  recorder_ = std::move(own);
  for (size_t i = 0; i < writers_.size(); ++i) writers_[i]->record(recorder_, uint32_t(i), -1);
}

void Gate::count_completed() {
  if (!recorder_ || readers_.empty() || fork_ != fork_generation.load(std::memory_order_relaxed)) return;
  const size_t mask = submitted_at_.size() - 1;
  // The heads are acquired: the times were written before them.
  for (const uint64_t done = completed(); counted_ < done; ++counted_) {
    const uint64_t began = submitted_at_[counted_ & mask];
    uint64_t end = began;
    for (auto& [writer, output] : outputs_) end = std::max(end, value_of(writer->sent_at(output, counted_)));
    recorder_->task(0).running.note(end - began);
  }
}

uint64_t Gate::submission_begins() {
  if (!recorder_) return 0;
  // Before the places of those times are used again. There is room, so that execution is complete.
  if (next_ - counted_ >= submitted_at_.size()) count_completed();
  if (recorder_->tracing() && next_ >= drain_at_) {
    for (auto& member : all_) member->drain();
    drain_at_ = next_ + turn_;
  }
  return now_ns();
}

void Gate::submitting(uint64_t number, uint64_t began) {
  if (!recorder_) return;
  submitted_at_[number & (submitted_at_.size() - 1)] = began;
  recorder_->set_clock(began);
}

void Gate::submission_ends(uint64_t number, uint64_t began) {
  if (!recorder_) return;
  recorder_->stale();
  if (recorder_->tracing()) recorder_->trace({began, now_ns(), number, 0, 0, 0, EventKind::kExecute, 0, 0});
}

uint64_t Gate::taking(uint64_t number, size_t i, uint64_t since) {
  if (!recorder_) return 0;
  uint64_t asked = since;
  if (!asked_since_[i].empty()) {
    auto found = asked_since_[i].find(number);
    if (found != asked_since_[i].end()) {
      asked = found->second;
      asked_since_[i].erase(found);
    }
  }
  const bool traced = recorder_->tracing();
  const uint64_t now = asked != 0 || traced ? now_ns() : 0;
  recorder_->received(uint32_t(i)).waiting.note(asked != 0 ? now - asked : 0);
  if (!traced) return 0;
  if (since != 0) recorder_->trace({since, now, number, 0, uint32_t(i), 0, EventKind::kWait, 0, 0});
  return now;
}

void Gate::taken(uint64_t number, size_t i, uint64_t began, uint64_t bytes, bool failed) {
  if (began != 0) recorder_->trace({began, now_ns(), number, bytes, uint32_t(i), 0, EventKind::kReceive, uint16_t(failed ? kFailed : 0), 0});
}

void Gate::wait_ends(uint64_t number, size_t i, uint64_t since) {
  if (!recorder_) return;
  asked_since_[i].emplace(number, since);
  if (recorder_->tracing()) recorder_->trace({since, now_ns(), number, 0, uint32_t(i), 0, EventKind::kWait, kSkipped, 0});
}

}  // namespace conveyor
