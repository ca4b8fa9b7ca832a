#include "failures.h"

#include "exit.h"

namespace conveyor {

namespace {
constexpr size_t kReleaseGilFrom = 32 * 1024;
}

void Writer::prepare(Encoded& e, bool beyond_cap) {
  check_owner(fork_);
  const std::shared_ptr<Budget> none, &budget = beyond_cap ? none : ring.readers()->budget;
  if (e.made && e.size <= ring.capacity()) {
    try {
      return arena->charge(e.made->block, budget, false);
    } catch (const ArenaFull&) {  // others may have something to let go of
    }
    Unlocked unlocked;
    return arena->charge(e.made->block, budget, true);
  }
  if (e.made) {
    // The table does not fit the slot (a very long meta): fall back to copying the value.
    e.made.reset();
    e.layout = lay_out_table(size_t(PyBytes_GET_SIZE(e.meta.ptr())), {size_t(e.views[0].len)});
    e.size = e.layout.total;
  }
  if (e.size <= ring.capacity()) return;
  e.arena = arena;
  const auto place = [&](bool may_wait) {
    e.block = arena->allocate(e.size, budget, beyond_cap, may_wait);
    e.write_body(e.block->data());
  };
  if (e.size < kReleaseGilFrom) {
    try {
      return place(false);
    } catch (const ArenaFull&) {  // others may have memory to give
    }
  }
  Unlocked unlocked;
  place(true);
}

uint64_t Writer::commit(Encoded& e, uint64_t tag, Kind kind) noexcept {
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
    arena->publish(block, ring.readers(), tag, ring.head());
    e.block = nullptr;
  } else {
    slot->block = 0;
  }
  if (slot->block == 0 || e.made) e.write_body(reinterpret_cast<char*>(slot + 1));
  const size_t sent_bytes = e.size + (e.made ? e.layout.entries[0].length : 0);
  bytes += sent_bytes;
  defined_ |= (e.flags & kDefinitions) != 0;
  if (recorder_) recorder_->sending(index_, output_, tag, sent_bytes, kind == Kind::kError, quick);
  const uint64_t number = ring.publish();
  // What it defines is on its way. But those for whom it came too late never come for its claims.
  if (e.flags & kRefs) e.unclaimed = ring.left_behind(number);
  if (e.unclaimed.none()) e.sent = nb::object();
  return number;
}

void Writer::send_error(const char* meta, size_t size, uint64_t tag) noexcept {
  if (fork_ != fork_generation.load(std::memory_order_relaxed)) end_forked_child("code that encodes a value");
  Encoded e;
  e.codec = kBytes;
  e.data = meta;
  e.size = size;
  try {
    prepare(e, true);
  } catch (...) {
    e.data = kUnsaidMeta;  // fits in every slot
    e.size = std::strlen(kUnsaidMeta);
  }
  commit(e, tag, Kind::kError);
}

void Writer::define_again() {
  lost_ = ring.lost();  // before: what is lost meanwhile is seen next time
  if (sent.is_none()) return;
  Calling python;
  nb::object result = nb::steal(PyObject_CallMethod(sent.ptr(), "forget", nullptr));
  if (!result.is_valid()) throw nb::python_error();
}

SlotHeader Reader::checked_front() const {
  const SlotHeader slot = read_once(*ring.front());
  const bool in_slot = slot.block == 0 || (slot.flags & kExternal);
  const uint64_t room = slot.block_size < kBlockHeader ? 0 : slot.block_size - kBlockHeader;
  if (slot.size > (in_slot ? uint64_t(ring.capacity()) : room))
    throw std::system_error(EPROTO, std::generic_category(), "a frame's size is not valid");
  return slot;
}

// Of a body in a block, as much as `announce` looks at, for which no mapping is needed: a table without
// buffers, and the header that the meta bytes of a frame with definitions begin with, which has its length in
// front (channel/byvalue.py).
std::shared_ptr<OwnedMemory> Reader::head_of(const SlotHeader& slot) const {
  const uint64_t body = slot.block - 1 + kBlockHeader;
  const auto check = [](bool valid) {
    if (!valid) throw std::system_error(EPROTO, std::generic_category(), "a frame's header is not valid");
  };
  TableHeader table;
  check(slot.size >= sizeof table);
  view->copy(body, &table, sizeof table);
  check(table.buffers <= kMaxBuffers);
  const size_t meta_at = sizeof table + table.buffers * sizeof(BufferEntry);
  uint32_t length;
  check(meta_at <= slot.size && table.meta_length <= slot.size - meta_at && table.meta_length >= sizeof length);
  view->copy(body + meta_at, &length, sizeof length);
  check(length <= table.meta_length - sizeof length);
  const TableHeader own{uint32_t(sizeof length + length), 0};
  auto head = std::make_shared<OwnedMemory>(sizeof own + own.meta_length);
  std::memcpy(head->data, &own, sizeof own);
  view->copy(body + meta_at, head->data + sizeof own, own.meta_length);
  return head;
}

// Takes the lease last: a frame that cannot be made has taken none.
Frame Reader::frame_of(const SlotHeader& slot, bool mapped) const {
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
  if (mapped) {
    f.lease = std::make_shared<Lease>(*view, slot.block - 1, slot.block_size, ring.reader());
    if (f.body == nullptr) f.body = f.lease->data();
    return f;
  }
  if (f.body == nullptr && (f.flags & kDefinitions) && f.kind != Kind::kError) {
    f.memory = head_of(slot);
    f.body = f.memory->data;
  }
  f.unmapped = std::make_shared<UnmappedLease>(view, slot.block - 1, slot.block_size, ring.reader());
  return f;
}

void Reader::load_unread() {
  if (front_) return;
  const SlotHeader slot = checked_front();
  try {
    front_ = frame_of(slot);
    return;
  } catch (const std::bad_alloc&) {
    if (slot.block == 0) throw;
  } catch (const std::system_error& error) {
    const int number = error.code().value();
    if (number == EPROTO || number == EFAULT) throw;  // there is no such block
  }
  front_ = frame_of(slot, false);
}

Frame Reader::take() {
  load_front();
  return take_unread();
}

Frame Reader::take_unread() noexcept {
  CONVEYOR_ASSERT(front_);
  Frame f = std::move(*front_);
  front_.reset();
  tag = f.tag;
  kind = f.kind;
  bytes += f.size + f.beside;
  ring.advance();
  return f;
}

void Reader::release_front(const SlotHeader& slot) noexcept {
  tag = slot.tag;
  kind = slot.kind;
  if (!front_ && slot.block != 0) view->forgo(slot.block - 1, slot.block_size, ring.reader());
  front_.reset();
  ring.advance();
}

void Reader::give_up() noexcept {
  const SlotHeader slot = read_once(*ring.front());
  if (slot.flags & kDefinitions) ring.lose();
  const size_t in_block = slot.block_size > kBlockHeader ? slot.block_size - kBlockHeader : 0;
  const bool names_refs = (slot.flags & kRefs) && slot.kind != Kind::kError;
  const bool in_slot = (slot.block == 0 || (slot.flags & kExternal)) && slot.size <= ring.capacity();
  nb::object claims;
  if (names_refs && in_slot) claims = claims_of(reinterpret_cast<const char*>(ring.front() + 1), slot.size, in_block);
  release_front(slot);
  give_up_claims(std::move(claims));
}

bool Reader::announce_front(bool unwanted) {
  const SlotHeader slot = read_once(*ring.front());
  if (!(slot.flags & kDefinitions) || slot.kind == Kind::kError) return true;
  if (!front_) load_front();
  const uint64_t number = ring.next();
  const Frame f = *front_;
  unwanted ? discard(f) : announce(f);
  return ring.next() == number && !ring.empty();
}

void Reader::skip() {
  const uint64_t number = ring.next();
  const SlotHeader slot = read_once(*ring.front());
  bool known = !(slot.flags & kDefinitions) || slot.kind == Kind::kError;
  if (!known) {
    try {
      if (!announce_front(true)) return;
      known = true;
    } catch (nb::python_error& error) {
      if (!is_final(error.value())) {  // Ctrl-C, say: it is skipped when it is tried again
        if ((slot.flags & kRefs) && ring.next() == number && !ring.empty()) give_up();  // but its claims are given up
        throw;
      }
    } catch (const std::exception&) {  // its definitions are sent again
    }
    if (ring.next() != number || ring.empty()) return;
  }
  known ? release_front(slot) : give_up();
}

// Whatever is raised meanwhile, its claims are given up; more than once is as good as once (see Exports._use).
void Reader::close() {
  if (ring.inherited()) return;
  ring.leave();
  std::exception_ptr raised;
  try {
    while (!ring.empty()) {
      const SlotHeader slot = read_once(*ring.front());
      const uint64_t number = ring.next();
      if ((slot.flags & kRefs) && slot.kind != Kind::kError) {
        try {
          if (PyErr_CheckSignals() != 0) throw nb::python_error();  // not while it is done
        } catch (const nb::python_error&) {
          raised = std::current_exception();
        }
        bool known = false;
        try {
          load_front();
          const Frame f = *front_;
          discard(f);
          known = true;
        } catch (const nb::python_error& error) {
          if (!is_final(error.value())) raised = std::current_exception();
        } catch (const std::exception&) {  // nobody can read it
        }
        if (ring.next() != number) continue;  // Python code has taken it meanwhile
        if (!known) {
          give_up();
          continue;
        }
      }
      release_front(slot);
    }
  } catch (const std::system_error&) {  // a broken ring, of which whoever waited for it was told
  }
  front_.reset();
  ring.close();
  view.reset();  // no frame will be looked for there
  if (raised) std::rethrow_exception(raised);
}

Reader::~Reader() {
  nb::error_scope keep;
  try {
    close();
  } catch (nb::python_error& error) {
    error.discard_as_unraisable("values that nobody has received");
  }
}

nb::object Reader::receive_native() {
  const SlotHeader slot = checked_front();
  // Decoding runs no Python code, so nobody else can take this frame meanwhile.
  nb::object value = decode_native(slot.codec, reinterpret_cast<const char*>(ring.front() + 1), slot.size);
  tag = slot.tag;
  kind = slot.kind;
  bytes += slot.size;
  ring.advance();
  return value;
}

nb::object Reader::receive() {
  check_owner(fork_);
  std::optional<Frame> f;
  try {
    if (decodes_natively()) return receive_native();
    f = take();
  } catch (...) {
    give_up();
    throw;
  }
  try {
    return decode(*f);
  } catch (...) {
    lose(*f);
    if (f->flags & kRefs) give_up_claims(claims_of(f->body, f->size, f->block_room()));
    throw;
  }
}

nb::object Reader::receive_or_leave() {
  check_owner(fork_);
  const uint64_t number = ring.next();
  if (decodes_natively()) return receive_native();
  load_front();
  const Frame f = *front_;
  nb::object value = decode(f);
  if (ring.next() == number && !ring.empty()) take();
  return value;
}

nb::object Reader::receive_kept() {
  check_owner(fork_);
  const uint64_t number = ring.next();
  try {
    if (decodes_natively()) return receive_native();
    if (!announce_front()) return nb::object();
    load_front();
    nb::object value = keep(*front_);  // runs no Python code: the frame is still ours
    take();
    return value;
  } catch (...) {
    set_python_error();
    nb::python_error error;
    if (is_final(error.value()) && ring.next() == number && !ring.empty()) give_up();
    throw error;
  }
}

bool Gate::has_room() {
  check_owner(fork_);
  // The slots that this submission's results will need must be free: results that nobody has asked
  // for yet move to the stash, so they cost memory, not depth.
  for (bool again = true; again && next_ - first_ >= depth_;) {
    const uint64_t next = next_, oldest = next - first_ - depth_ + 1;  // so many must have been completed
    for (size_t i = 0; i < readers_.size(); ++i) {
      RingReader& ring = readers_[i]->ring;
      if (ring.next() >= oldest) continue;
      if (ring.head() < oldest) return false;
      while (ring.next() < oldest && !ring.empty()) stash_front(i);
      if (ring.next() < oldest) return false;  // it was closed meanwhile
    }
    again = next_ != next;  // learning definitions runs Python code, which may have submitted something itself
  }
  for (Writer* w : writers_)
    if (!w->ring.has_room()) return false;
  return true;
}

int64_t Gate::submit(nb::handle value, uint64_t deadline) {
  if (!has_room()) return -1;
  hear_before_submission();
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
  hear_before_submission();
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

// A block that cannot be mapped here just now is in nobody's way: that is tried again by who gets it. What
// Python has raised (Ctrl-C, no memory for a definition) ends the caller's look, and the frame stays; so does
// a lack of memory for a slot's contents, which would leave nobody else any.
void Gate::stash_front(size_t i) {
  Reader& reader = *readers_[i];
  const uint64_t tag = read_once(reader.ring.front()->tag);
  const uint64_t number = reader.ring.next();
  const uint64_t began = recorder_ && recorder_->tracing() ? now_ns() : 0;
  if (!dropped_[i].empty() && dropped_[i].contains(tag)) {
    const SlotHeader slot = read_once(*reader.ring.front());
    try {
      reader.skip();
    } catch (...) {
      if (reader.ring.next() != number) dropped_[i].erase(tag);
      throw;
    }
    if (reader.ring.next() == number) return;
    dropped_[i].erase(tag);
    return taken(tag, i, began, slot.size, slot.kind == Kind::kError);
  }
  try {
    reader.load_unread();
    if (!reader.announce_front()) return;
  } catch (nb::python_error& error) {
    if (!is_final(error.value()) || reader.ring.next() != number || reader.ring.empty()) throw;
    return stash_broken(i);
  } catch (const std::system_error&) {
    return stash_broken(i);
  }
  if (!dropped_[i].empty() && dropped_[i].contains(tag)) {  // while its definitions were learnt
    const Frame f = reader.take_unread();
    dropped_[i].erase(tag);
    taken(f.tag, i, began, f.size + f.beside, f.kind == Kind::kError);
    return discard(f);
  }
  auto place = stashes_[i].try_emplace(tag).first;  // if this throws, the frame is still in the ring
  place->second = reader.take_unread();
  const Frame& f = place->second;
  taken(f.tag, i, began, f.size + f.beside, f.kind == Kind::kError);
}

void Gate::stash_broken(size_t i) {
  Reader& reader = *readers_[i];
  Frame failure;
  failure.tag = read_once(reader.ring.front()->tag);
  failure.kind = Kind::kError;
  failure.body = kBrokenMeta;
  failure.size = std::strlen(kBrokenMeta);
  stashes_[i].insert_or_assign(failure.tag, failure);
  reader.give_up();
}

namespace {

// The first exception of several things that are all to be tried.
class FirstError {
 public:
  template <class Body>
  void attempt(Body&& body) {
    try {
      body();
    } catch (...) {
      if (!first_) first_ = std::current_exception();
    }
  }
  bool any() const { return first_ != nullptr; }
  void raise() const {
    if (first_) std::rethrow_exception(first_);
  }

 private:
  std::exception_ptr first_;
};

}  // namespace

// A ring may be broken, or somebody interrupt: the others are drained all the same.
void Gate::drain() {
  check_owner(fork_);
  FirstError error;
  error.attempt([this] { hear(); });
  for (size_t i = 0; i < readers_.size(); ++i)
    error.attempt([this, i] {
      while (!readers_[i]->ring.empty()) stash_front(i);
    });
  error.raise();
}

void Gate::sweep() {
  if (fork_ != fork_generation.load(std::memory_order_relaxed)) return;
  for (size_t i = 0; i < readers_.size(); ++i) {
    RingReader& ring = readers_[i]->ring;
    uint64_t end = ring.next();  // of what has to leave the ring
    if (dropped_[i].empty()) continue;
    for (uint64_t n = end, head = ring.head(); n < head; ++n)
      if (dropped_[i].contains(ring.tag_of(n))) end = n + 1;
    while (ring.next() < end && !ring.empty()) stash_front(i);
  }
}

void Gate::leave() {
  check_owner(fork_);
  for (Reader* reader : readers_) reader->ring.leave();
  FirstError error;
  error.attempt([this] { drain(); });
  // Where Ctrl-C came between, what has come is still somebody's result. What is not had now either is lost.
  if (error.any()) FirstError().attempt([this] { drain(); });
  for (Reader* reader : readers_) error.attempt([reader] { reader->close(); });
  if (failures_) error.attempt([this] { failures_->leave(); });
  forget_leftovers();
  error.raise();
}

bool Gate::ready(uint64_t number, size_t i) {
  check_owner(fork_);
  if (stashes_[i].contains(number) || handed_.contains({number, i})) return true;
  RingReader& ring = readers_[i]->ring;
  while (!ring.empty()) {
    if (ring.front()->tag == number) return true;
    stash_front(i);
  }
  if (stashes_[i].contains(number) || handed_.contains({number, i})) return true;
  hear();
  return failures_ && failures_->has(number, i);
}

nb::object Gate::take_stashed(uint64_t number, size_t i) {
  auto& stash = stashes_[i];
  try {
    Frame& frame = stash.find(number)->second;
    map_block(frame);
    nb::object value = keep(frame);  // runs no Python code
    stash.erase(number);
    return value;
  } catch (...) {
    set_python_error();
    nb::python_error error;
    // Short of memory, rather than impossible: the result is still to be had.
    if (is_final(error.value())) stash.erase(number);
    throw error;
  }
}

nb::object Gate::take(uint64_t number, size_t i, uint64_t since) {
  check_owner(fork_);
  if (!handed_.empty()) {
    auto found = handed_.find({number, i});
    if (found != handed_.end()) return found->second;
  }
  if (failures_ && !failures_->empty()) {
    nb::object failure = failures_->take(number, i);
    if (failure.is_valid()) {
      taking(number, i, since);
      return failure;
    }
  }
  // Cancelled while somebody waits for it: were it taken here, the mark would stay for ever.
  if (!dropped_[i].empty() && dropped_[i].contains(number)) return nb::object();
  auto& stash = stashes_[i];
  if (!stash.empty()) {
    auto found = stash.find(number);
    if (found != stash.end()) {
      if (found->second.kind == Kind::kError && hear()) return take(number, i, since);
      nb::object value = take_stashed(number, i);
      taking(number, i, since);
      return value;
    }
  }
  Reader& reader = *readers_[i];
  while (!reader.ring.empty()) {
    if (reader.ring.front()->tag == number) {
      if (reader.ring.front()->kind == Kind::kError && hear()) return take(number, i, since);
      const uint64_t before = reader.bytes;
      nb::object value = reader.receive_kept();
      if (!value.is_valid()) return take(number, i, since);  // somebody has stashed it meanwhile
      const uint64_t began = taking(number, i, since);
      taken(number, i, began, reader.bytes - before, began != 0 && nb::isinstance<ErrorFrame>(value));
      return value;
    }
    stash_front(i);
  }
  return hear() && failures_->has(number, i) ? take(number, i, since) : nb::object();
}

void Gate::hand(uint64_t number, size_t i, nb::object value) {
  if (spare_hand_.empty()) {
    handed_.insert_or_assign({number, i}, std::move(value));
    return;
  }
  spare_hand_.key() = {number, i};
  spare_hand_.mapped() = std::move(value);
  auto placed = handed_.insert(std::move(spare_hand_));
  if (placed.inserted) return;
  placed.position->second = std::move(placed.node.mapped());
  spare_hand_ = std::move(placed.node);
}

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
  if (failures_ && failures_->close(number, i)) return;  // its frame is dropped anyway
  auto found = stashes_[i].find(number);
  if (found != stashes_[i].end()) {
    const Frame f = std::move(found->second);
    stashes_[i].erase(found);
    try {
      discard(f);
    } catch (...) {
      readers_[i]->lose(f);
      throw;
    }
  } else {
    note_dropped(number, i);
  }
}

void Gate::discard_all() {
  if (fork_ != fork_generation.load(std::memory_order_relaxed)) return;
  FirstError error;
  for (size_t i = 0; i < readers_.size(); ++i) {
    for (auto& [number, frame] : std::exchange(stashes_[i], {}))
      if (frame.flags & kRefs) error.attempt([&frame] { discard(frame); });
    error.attempt([this, i] { readers_[i]->close(); });
  }
  error.raise();
}

size_t Gate::asked() const {
  size_t n = 0;
  for (auto& asked : asked_since_) n += asked.size();
  return n;
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

}  // namespace conveyor
