#include "window.h"

#include "failures.h"
#include "hooks.h"

namespace conveyor {

namespace {
// Of how many submissions it is noted what is known of their errors.
constexpr size_t kNoted = 256;
}  // namespace

bool InFlightWindow::has_room() {
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

int64_t InFlightWindow::submit(nb::handle value, uint64_t deadline) {
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

int64_t InFlightWindow::submit_many(nb::tuple values, uint64_t deadline) {
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

uint64_t InFlightWindow::completed() const {
  uint64_t least = next_;
  for (Reader* r : readers_) least = std::min(least, first_ + r->ring.head());
  return least;
}

// A block that cannot be mapped here just now is in nobody's way: that is tried again by who gets it. What
// Python has raised (Ctrl-C, no memory for a definition) ends the caller's look, and the frame stays; so does
// a lack of memory for a slot's contents, which would leave nobody else any.
void InFlightWindow::stash_front(size_t i) {
  Reader& reader = *readers_[i];
  const uint64_t tag = read_once(reader.ring.front()->tag);
  const uint64_t number = reader.ring.next();
  const uint64_t began = recorder_ && recorder_->tracing() ? now_ns() : 0;
  // An error is read: it may be that nobody knows of it.
  if (!dropped_[i].empty() && dropped_[i].contains(tag) && reader.ring.front()->kind != Kind::kError) {
    const SlotHeader slot = read_once(*reader.ring.front());
    try {
      reader.skip();
    } catch (...) {
      if (reader.ring.next() != number) forget_dropped(tag, i);
      throw;
    }
    if (reader.ring.next() == number) return;
    forget_dropped(tag, i);
    return taken(tag, i, began, slot.size, slot.kind == Kind::kError);
  }
  nb::object refs, definitions;
  try {
    reader.load_unread();
    if (!reader.announce_front() || !reader.take_front_claims(refs)) return;
    definitions = reader.front_definitions();
  } catch (nb::python_error& error) {
    if (!is_final(error.value()) || reader.ring.next() != number || reader.ring.empty()) throw;
    return stash_broken(i);
  } catch (const std::system_error&) {
    return stash_broken(i);
  }
  if (!dropped_[i].empty() && dropped_[i].contains(tag)) {  // while its definitions were learnt
    const Frame f = reader.take_loaded();
    taken(f.tag, i, began, f.size + f.beside, f.kind == Kind::kError);
    if (f.kind == Kind::kError && f.body != nullptr) note_unseen(tag, {f.body, f.size});
    forget_dropped(tag, i);
    return discard(f);
  }
  auto place = stashes_[i].try_emplace(tag).first;  // if this throws, the frame is still in the ring
  static_cast<Frame&>(place->second) = reader.take_loaded();
  place->second.refs = std::move(refs);
  place->second.definitions = std::move(definitions);
  const Frame& f = place->second;
  taken(f.tag, i, began, f.size + f.beside, f.kind == Kind::kError);
}

void InFlightWindow::stash_broken(size_t i) {
  Reader& reader = *readers_[i];
  Stashed failure;
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
void InFlightWindow::drain() {
  check_owner(fork_);
  FirstError error;
  error.attempt([this] { hear(); });
  for (size_t i = 0; i < readers_.size(); ++i)
    error.attempt([this, i] {
      while (!readers_[i]->ring.empty()) stash_front(i);
    });
  error.raise();
}

void InFlightWindow::sweep() {
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

void InFlightWindow::leave() {
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

bool InFlightWindow::ready(uint64_t number, size_t i) {
  check_owner(fork_);
  if (handed_.contains({number, i})) return true;
  if (awaits_siblings(number, i)) return false;
  if (failures_ && failures_->has(number, i)) return true;
  const auto is_here = [&](Kind kind) {
    if (kind == Kind::kError) hear();
    return !too_early(number, kind);
  };
  auto stashed = stashes_[i].find(number);
  if (stashed != stashes_[i].end()) return is_here(stashed->second.kind);
  RingReader& ring = readers_[i]->ring;
  while (!ring.empty()) {
    if (ring.front()->tag == number) return is_here(ring.front()->kind);
    stash_front(i);
  }
  if (handed_.contains({number, i})) return true;
  stashed = stashes_[i].find(number);
  if (stashed != stashes_[i].end()) return is_here(stashed->second.kind);
  hear();
  return failures_ && failures_->has(number, i);
}

nb::object InFlightWindow::take_stashed(uint64_t number, size_t i) {
  auto& stash = stashes_[i];
  try {
    Stashed& frame = stash.find(number)->second;
    frame.map();
    nb::object value = keep(frame, frame.refs, frame.definitions);  // runs no Python code
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

nb::object InFlightWindow::take(uint64_t number, size_t i, uint64_t since) {
  nb::object value = find(number, i, since);
  if (failures_ && value.is_valid() && nb::isinstance<ErrorFrame>(value)) note_told(number);
  return value;
}

nb::object InFlightWindow::find(uint64_t number, size_t i, uint64_t since) {
  check_owner(fork_);
  if (!handed_.empty()) {
    auto found = handed_.find({number, i});
    if (found != handed_.end()) return found->second;
  }
  if (awaits_siblings(number, i)) return nb::object();
  if (failures_ && !failures_->empty()) {
    // First: it may run any code, to which the failure has to be there still.
    if (failures_->has(number, i)) discard_stashed(number, i);
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
      if (found->second.kind == Kind::kError && hear()) return find(number, i, since);
      if (too_early(number, found->second.kind)) return nb::object();
      nb::object value = take_stashed(number, i);
      taking(number, i, since);
      return value;
    }
  }
  Reader& reader = *readers_[i];
  while (!reader.ring.empty()) {
    if (reader.ring.front()->tag == number) {
      if (reader.ring.front()->kind == Kind::kError && hear()) return find(number, i, since);
      if (too_early(number, reader.ring.front()->kind)) return nb::object();
      const uint64_t before = reader.bytes;
      nb::object value = reader.receive_snapshot();
      if (!value.is_valid()) return find(number, i, since);  // somebody has stashed it meanwhile
      const uint64_t began = taking(number, i, since);
      taken(number, i, began, reader.bytes - before, began != 0 && nb::isinstance<ErrorFrame>(value));
      return value;
    }
    stash_front(i);
  }
  return hear() && failures_->has(number, i) ? find(number, i, since) : nb::object();
}

void InFlightWindow::hand(uint64_t number, size_t i, nb::object value) {
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

bool InFlightWindow::resolved(uint64_t number, size_t i) {
  if (handed_.empty()) return false;
  auto found = handed_.find({number, i});
  if (found == handed_.end()) return false;
  nb::object value = std::move(found->second);  // dropping it may run any code
  handed_.erase(found);
  return true;
}

void InFlightWindow::drop(uint64_t number, size_t i) {
  if (fork_ != fork_generation.load(std::memory_order_relaxed)) return;
  if (resolved(number, i)) return;
  if (recorder_) requested_since_[i].erase(number);
  if (failures_ && failures_->has(number, i)) {  // a frame that is to come is dropped anyway
    note_unseen(number, failures_->error_of(number));
    failures_->close(number, i);
    return discard_stashed(number, i);
  }
  if (stashes_[i].contains(number)) return discard_stashed(number, i);
  note_dropped(number, i);
}

void InFlightWindow::drop_cancelled(uint64_t number, size_t i) {
  if (fork_ != fork_generation.load(std::memory_order_relaxed)) return;
  cancelled_.insert(number);
  drop(number, i);
  forget_unless_dropped(number);
}

namespace {

// What is kept for the log of an error. A large one ends with a short one and that one's size (codec/errors.py).
std::string_view shortened(std::string_view error) noexcept {
  if (error.size() <= kMostLogged) return error;
  uint32_t size;
  std::memcpy(&size, error.data() + error.size() - sizeof size, sizeof size);
  if (size > kMostLogged - sizeof size) return kLargeMeta;  // so it is within the error, whatever that says
  return error.substr(error.size() - sizeof size - size, size);
}

}  // namespace

// Nobody gets this error of that submission. Others may still get one.
void InFlightWindow::note_unseen(uint64_t number, std::string_view error) noexcept {
  if (!leftovers_ || error == kCancelledMeta || error == kOverdueMeta || cancelled_.contains(number)) return;
  error = shortened(error);
  if (failures_) {
    if (told_.contains(number)) return;
    if (!abandoned_.contains(number)) {
      try {
        unseen_.try_emplace(number, error);
        if (unseen_.size() > kNoted) unseen_.erase(unseen_.begin());
      } catch (const std::bad_alloc&) {
      }
      return;
    }
    note_told(number);
  }
  leftovers_->note_unseen(error, next_ > number + 1);
}

void InFlightWindow::note_told(uint64_t number) noexcept {
  unseen_.erase(number);
  try {
    told_.insert(number);
  } catch (const std::bad_alloc&) {
  }
  if (told_.size() > kNoted) told_.erase(told_.begin());
}

void InFlightWindow::abandon(uint64_t number) noexcept {
  if (!failures_ || fork_ != fork_generation.load(std::memory_order_relaxed)) return;
  // What is still to come of it may be an error.
  if (std::ranges::any_of(dropped_, [&](const NumberSet& dropped) { return dropped.contains(number); })) abandoned_.insert(number);
  auto found = unseen_.find(number);
  if (found == unseen_.end()) return;
  const std::string error = std::move(found->second);
  unseen_.erase(found);
  if (told_.contains(number)) return;
  note_told(number);
  if (leftovers_) leftovers_->note_unseen(error, next_ > number + 1);
}

// What was dropped has come, or is lost.
void InFlightWindow::forget_dropped(uint64_t number, size_t i) noexcept {
  dropped_[i].erase(number);
  forget_unless_dropped(number);
}

void InFlightWindow::forget_unless_dropped(uint64_t number) noexcept {
  if ((abandoned_.empty() && cancelled_.empty()) || std::ranges::any_of(dropped_, [&](const NumberSet& dropped) { return dropped.contains(number); })) return;
  abandoned_.erase(number);
  cancelled_.erase(number);
}

// Nobody has a result any more: of what has come the errors are read.
void InFlightWindow::note_last() noexcept {
  if (fork_ != fork_generation.load(std::memory_order_relaxed)) return;
  for (size_t i = 0; i < readers_.size(); ++i) {
    RingReader& ring = readers_[i]->ring;
    try {
      for (uint64_t n = ring.next(); !ring.empty(); n = ring.next()) {
        if (ring.front()->kind == Kind::kError) stash_front(i);
        else readers_[i]->skip();
        if (ring.next() == n) break;
      }
    } catch (...) {  // what is left of it is given up
      if (PyErr_Occurred()) PyErr_Clear();
    }
    for (auto& [number, f] : stashes_[i])
      if (f.kind == Kind::kError && f.body != nullptr) note_unseen(number, {f.body, f.size});
  }
  for (auto& [number, error] : std::exchange(unseen_, {}))
    if (leftovers_ && !told_.contains(number)) leftovers_->note_unseen(error, next_ > number + 1);
}

void InFlightWindow::discard_stashed(uint64_t number, size_t i) {
  auto found = stashes_[i].find(number);
  if (found == stashes_[i].end()) return;
  const Stashed f = std::move(found->second);
  stashes_[i].erase(found);
  if (f.kind == Kind::kError && f.body != nullptr) note_unseen(number, {f.body, f.size});
  try {
    discard(f);
  } catch (...) {
    readers_[i]->lose(f);
    throw;
  }
}

void InFlightWindow::discard_all() {
  if (fork_ != fork_generation.load(std::memory_order_relaxed)) return;
  FirstError error;
  for (size_t i = 0; i < readers_.size(); ++i) {
    for (auto& [number, frame] : std::exchange(stashes_[i], {}))
      if (frame.flags & kRefs) error.attempt([&frame] { discard(frame); });
    error.attempt([this, i] { readers_[i]->close(); });
  }
  error.raise();
}

size_t InFlightWindow::requested() const {
  size_t n = 0;
  for (auto& requested : requested_since_) n += requested.size();
  return n;
}

size_t InFlightWindow::stashed() const {
  size_t n = 0;
  for (auto& stash : stashes_) n += stash.size();
  return n;
}

size_t InFlightWindow::stashed_bytes() const {
  size_t n = 0;
  for (auto& stash : stashes_)
    for (auto& [number, frame] : stash) n += frame.size;
  return n;
}

void InFlightWindow::record(std::shared_ptr<Recorder> own, std::vector<std::pair<std::shared_ptr<Recorder>, uint32_t>> outputs,
                  std::vector<std::shared_ptr<Recorder>> all) {
  if (outputs.size() != readers_.size()) throw std::system_error(EINVAL, std::generic_category(), "window outputs");
  outputs_ = std::move(outputs);
  all_ = std::move(all);
  submitted_at_.resize(own->place().slots);
  requested_since_.resize(readers_.size());
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

void InFlightWindow::count_completed() {
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

uint64_t InFlightWindow::submission_begins() {
  if (!recorder_) return 0;
  // Before the places of those times are used again. There is room, so that execution is complete.
  if (next_ - counted_ >= submitted_at_.size()) count_completed();
  if (recorder_->tracing() && next_ >= drain_at_) {
    for (auto& member : all_) member->drain();
    drain_at_ = next_ + turn_;
  }
  return now_ns();
}

void InFlightWindow::submitting(uint64_t number, uint64_t began) {
  if (!recorder_) return;
  submitted_at_[number & (submitted_at_.size() - 1)] = began;
  recorder_->set_clock(began);
}

void InFlightWindow::submission_ends(uint64_t number, uint64_t began) {
  if (!recorder_) return;
  recorder_->stale();
  if (recorder_->tracing()) recorder_->trace({began, now_ns(), number, 0, 0, 0, EventKind::kExecute, 0, 0});
}

uint64_t InFlightWindow::taking(uint64_t number, size_t i, uint64_t since) {
  if (!recorder_) return 0;
  uint64_t requested = since;
  if (!requested_since_[i].empty()) {
    auto found = requested_since_[i].find(number);
    if (found != requested_since_[i].end()) {
      requested = found->second;
      requested_since_[i].erase(found);
    }
  }
  const bool traced = recorder_->tracing();
  const uint64_t now = requested != 0 || traced ? now_ns() : 0;
  recorder_->received(uint32_t(i)).waiting.note(requested != 0 ? now - requested : 0);
  if (!traced) return 0;
  if (since != 0) recorder_->trace({since, now, number, 0, uint32_t(i), 0, EventKind::kWait, 0, 0});
  return now;
}

void InFlightWindow::taken(uint64_t number, size_t i, uint64_t began, uint64_t bytes, bool failed) {
  if (began != 0) recorder_->trace({began, now_ns(), number, bytes, uint32_t(i), 0, EventKind::kReceive, uint16_t(failed ? kFailed : 0), 0});
}

void InFlightWindow::wait_ends(uint64_t number, size_t i, uint64_t since) {
  if (!recorder_) return;
  requested_since_[i].emplace(number, since);
  if (recorder_->tracing()) recorder_->trace({since, now_ns(), number, 0, uint32_t(i), 0, EventKind::kWait, kSkipped, 0});
}

}  // namespace conveyor
