#include "peer.h"

#include <algorithm>
#include <cstring>


namespace conveyor::net {

namespace {

// So much is sent, or read, in one turn, before the others have theirs.
constexpr size_t kTurnBytes = 4 << 20;
constexpr size_t kBatchBytes = 64 << 10;

template <class T>
T read(const char* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

}  // namespace

void Peer::look(Mirror& mirror) {
  if (connection_ && has_handshake_) look_.insert(&mirror);
}

// --- in ---

bool Peer::receive() {
  if (!connection_) return false;
  bool any = false;
  try {
    bool more = true;
    for (size_t read = 0; connection_ && more && read < kTurnBytes;) {  // there is none behind a farewell
      const uint64_t before = connection_->received;
      char scratch[16 << 10];
      const bool nobody = left_ != 0 && to_ == nullptr;
      const size_t there = connection_->receive(nobody ? scratch : to_, nobody ? std::min(left_, sizeof scratch) : left_, more);
      const size_t n = size_t(connection_->received - before);
      if (n == 0) break;
      any = true;
      read += n;
      if (there != 0) piece_came(there);
      take_piece();
      if (left_ == 0) take_messages();
    }
    if (any) heard_ns_ = now_ns();
  } catch (const Broken& error) {
    drop(error.what());
  } catch (const Violation& error) {
    lose("it has said what makes no sense: ", error.what());
  } catch (const std::exception& error) {  // no memory, say: what had come comes again
    drop(error.what());
  }
  return any;
}

void Peer::piece_came(size_t size) {
  left_ -= size;
  if (to_ != nullptr) to_ += size;
  if (left_ != 0 || into_ == nullptr) return;
  InRing* const ring = std::exchange(into_, nullptr);
  Mirror* const mirror = std::exchange(into_mirror_, nullptr);
  to_ = nullptr;
  if (!ring->received(piece_)) return;
  ++counts_.frames_received;
  if (ring->owes_have() || ring->asks()) look_.insert(mirror);
}

void Peer::take_messages() {
  while (left_ == 0 && connection_->available() >= sizeof(Prefix)) {
    const auto prefix = read<Prefix>(connection_->data());
    const size_t head = checked_head(prefix);
    if (!has_handshake_ && prefix.what != What::kHandshake) throw Violation("no handshake");
    if (connection_->available() < sizeof prefix + head) {
      connection_->make_room(sizeof prefix + head);
      return;
    }
    const char* const body = connection_->data() + sizeof prefix;
    left_ = piece_ = prefix.size - head;
    into_ = nullptr;
    to_ = nullptr;
    heed(prefix, body);
    if (!connection_) return;
    connection_->take(sizeof prefix + head);
    if (prefix.what == What::kFrame && left_ == 0 && into_ != nullptr) piece_came(0);
    take_piece();
  }
}

void Peer::take_piece() {
  const size_t there = std::min(left_, connection_->available());
  if (there == 0) return;
  if (to_ != nullptr) std::memcpy(to_, connection_->data(), there);
  connection_->take(there);
  piece_came(there);
}

void Peer::heed(const Prefix& prefix, const char* body) {
  if (prefix.what == What::kHandshake) return on_handshake(read<Handshake>(body));
  if (prefix.what == What::kPing) return;
  if (prefix.what == What::kBye) return lose("it has ended");
  if (prefix.what == What::kDeath) return hub_.died(host, read<Death>(body));
  if (prefix.what == What::kReturned) return hear(read<Returned>(body), prefix.segment);
  if (prefix.what == What::kHeard) return hear(read<Heard>(body));
  if (prefix.what == What::kClose) return hear_closed(prefix, body);
  if (prefix.what == What::kClosed) {
    closing_.closed.erase(prefix.segment);
    return;
  }
  if (prefix.what == What::kClock) return requested_clock(read<Clock>(body));
  if (prefix.what == What::kClockIs) return hear(read<Clock>(body));
  if (prefix.what == What::kRing) {
    const auto rung = read<Rung>(body);
    if (rung.slot >= hub_.process_table()->slots() || rung.bit >= kDoorbellBits) throw Violation("a bell that is none");
    // Another host's process may have the slot by now.
    if (hub_.host_of(rung.slot) == hub_.self() && !hub_.process_table()->gone(rung.slot, rung.incarnation)) hub_.process_table()->notify(rung.slot, rung.bit);
    return;
  }
  // A segment that this host has not, or no more: nothing of it is wanted.
  Mirror* const mirror = hub_.mirror(prefix.segment);
  if (mirror == nullptr || !mirror->is_on(host)) return;
  switch (prefix.what) {
    case What::kOpen: {
      const auto head = read<OpenHead>(body);
      if (prefix.size != sizeof head + size_t(head.count) * sizeof(OpenEntry)) throw Violation("a message of a wrong size");
      mirror->opened(host, head, body + sizeof head);
      look_.insert(mirror);
      break;
    }
    case What::kFrame: {
      const auto head = read<FrameHead>(body);
      into_ = &mirror->in(host, head.ring);
      into_mirror_ = mirror;
      to_ = into_->frame(head, prefix.flags, left_);
      break;
    }
    case What::kChunk: {
      const auto head = read<ChunkHead>(body);
      into_ = &mirror->in(host, head.ring);
      into_mirror_ = mirror;
      to_ = into_->chunk(head, left_);
      break;
    }
    case What::kHave:
      mirror->hear(host, read<Have>(body));
      break;
    case What::kCredit:
      mirror->hear(host, read<Credit>(body));
      break;
    case What::kLimits: {
      const auto head = read<LimitsHead>(body);
      if (prefix.size != sizeof head + size_t(head.words) * sizeof(uint64_t)) throw Violation("a message of a wrong size");
      if (mirror->hear(host, head, body + sizeof head)) {
        wake_members(*mirror);
        hub_.tell_all(*mirror);
      }
      break;
    }
    case What::kFailures:
      if (mirror->hear(host, read<Failures>(body))) wake_members(*mirror);
      break;
    default:
      break;
  }
}

void Peer::wake_members(Mirror& mirror) {
  for (const Target& t : mirror.members()) hub_.process_table()->notify(t.slot, t.bit);
}

void Peer::on_handshake(const Handshake& handshake) {
  if (has_handshake_) throw Violation("a second handshake");
  if (handshake.magic != kHandshakeMagic || handshake.version != kWireVersion) throw Violation("it speaks another protocol");
  if (handshake.host != host) throw Violation("it is another host than it was");
  if (instance_ != 0 && instance_ != handshake.instance) throw Violation("it is another process than it was");
  instance_ = handshake.instance;
  has_handshake_ = true;
  deaths_ = hub_.deaths();
  closing_.begin_anew();
  next_told_ = unheard_;
  told_ = heard_by_it_;
  for (Mirror* mirror : hub_.mirrors_of(host)) {
    mirror->reconnected(host);
    look_.insert(mirror);
  }
  if (counts_.connections == 1) return;
  // Rings may have been lost with the former connection: whoever sleeps here, or there, looks anew.
  for (Mirror* mirror : hub_.mirrors_of(host)) {
    wake_members(*mirror);
    for (const Mirror::Doorbell& doorbell : mirror->doorbells())
      if (doorbell.host == host) notify(doorbell.target.slot, hub_.process_table()->slot(doorbell.target.slot)->incarnation.load(), doorbell.target.bit);
  }
}

// --- out ---

void Peer::tell_death(const Death& death) {
  if (!has_handshake_) return;
  deaths_.push_back(death);
  for (Mirror* mirror : hub_.mirrors_of(host)) look_.insert(mirror);  // what it wrote last may not have been seen yet
}

void Peer::put_deaths() {
  if (deaths_.empty() || !look_.empty()) return;
  const std::vector<Mirror*> mirrors = hub_.mirrors_of(host);
  std::erase_if(deaths_, [&](const Death& death) {
    if (std::ranges::any_of(mirrors, [&](const Mirror* m) { return m->owes(host, death.slot); })) return false;
    connection_->put(Prefix{What::kDeath, 0, sizeof death, 0});
    connection_->put(death);
    return true;
  });
}

bool Peer::put_control() {
  const size_t before = connection_->waiting();
  put_closed();
  // What a mirror's frames are sent up to is read before what goes ahead of them: see wire.h.
  while (!look_.empty()) {
    Mirror& mirror = **look_.begin();
    look_.erase(look_.begin());
    if (!mirror.is_open(host)) mirror.put_open(host, *connection_);
    for (OutRing* ring : mirror.out(host)) {
      ring->look();
      if (ring->queued || !ring->pending()) continue;
      ring->queued = true;
      ready_.emplace_back(&mirror, ring);
    }
    // Cursors before limits, which are told ahead of them: who says that he takes nothing more, and then lets go of frames,
    // has said it where there is room.
    mirror.look_at_cursors(host);
    if (mirror.look_at_limits()) hub_.tell_all(mirror);
    mirror.tell(host, *connection_);
    if (mirror.ask(host)) look_.insert(&mirror);
    if (connection_->waiting() > kBatchBytes) break;
  }
  for (const auto& [slot, incarnation, bit] : rung_) {
    connection_->put(Prefix{What::kRing, 0, sizeof(Rung), 0});
    connection_->put(Rung{slot, incarnation, bit, 0});
  }
  rung_.clear();
  put_returned();
  put_deaths();
  put_clock();  // last, as what is put before it is on its way longer
  return connection_->waiting() != before;
}

void Peer::put_frames() {
  while (!ready_.empty() && !connection_->has_payload() && connection_->waiting() < kBatchBytes) {
    const auto [mirror, ring] = ready_.front();
    ready_.pop_front();
    ring->queued = false;
    if (!ring->pending()) continue;
    const uint64_t frames = ring->frames;
    if (!ring->held()) ring->step(*connection_);
    counts_.frames_sent += ring->frames - frames;
    if (!ring->pending()) continue;
    ring->queued = true;
    ready_.emplace_back(mirror, ring);
  }
}

bool Peer::send() {
  if (!connection_) return false;
  bool any = false;
  try {
    for (const uint64_t start = connection_->sent; connection_->sent - start < kTurnBytes;) {
      if (connection_->waiting() != 0 && !connection_->flush()) break;
      if (!has_handshake_) break;
      put_control();
      put_frames();
      if (connection_->waiting() == 0) break;
      any = true;
      said_ns_ = now_ns();
    }
  } catch (const Broken& error) {
    drop(error.what());
  } catch (const Violation& error) {
    lose(error.what());
  } catch (const std::exception& error) {
    drop(error.what());
  }
  return any;
}

namespace {

constexpr size_t kClockSamples = 64;    // kept
constexpr size_t kClockQuestions = 64;  // that may wait for their answer: who asks, asks once at a time

}  // namespace

uint64_t Peer::ask_clock(uint32_t times) {
  clock_wanted_ = std::max(clock_wanted_, clock_answers_ + times);
  return clock_answers_ + times;
}

void Peer::requested_clock(const Clock& clock) {
  if (clock_questions_.size() == kClockQuestions) throw Violation("it asks for the time, again and again");
  clock_questions_.push_back(clock.requested);
}

void Peer::hear(const Clock& clock) {
  if (clock_requested_ == 0 || clock.requested != clock_requested_) throw Violation("the time, which nobody has asked for");
  clock_samples_.push_back({std::exchange(clock_requested_, 0), clock.says, now_ns()});
  if (clock_samples_.size() > kClockSamples) clock_samples_.pop_front();
  ++clock_answers_;
}

void Peer::put_clock() {
  for (const uint64_t requested : clock_questions_) {
    connection_->put(Prefix{What::kClockIs, 0, sizeof(Clock), 0});
    connection_->put(Clock{requested, now_ns()});
  }
  clock_questions_.clear();
  if (clock_wanted_ > clock_answers_ && clock_requested_ == 0) {
    clock_requested_ = now_ns();
    connection_->put(Prefix{What::kClock, 0, sizeof(Clock), 0});
    connection_->put(Clock{clock_requested_, 0});
  }
}

namespace {

constexpr size_t kMostHeard = 1 << 20;  // that it is not told of yet: it takes nothing, and says more and more

}  // namespace

void Peer::close(Mirror& mirror) noexcept {
  look_.erase(&mirror);
  std::erase_if(ready_, [&](const auto& r) { return r.first == &mirror; });
  if (into_mirror_ == &mirror) {
    into_ = nullptr;  // what still comes of it is dropped
    into_mirror_ = nullptr;
    to_ = nullptr;
  }
  try {
    std::vector<SentClaims> sent = mirror.forsake(host);
    if (state_ == State::kNew || state_ == State::kLost) return;  // nothing was sent, or nobody is there
    closing_.closed.insert_or_assign(mirror.id, mirror.haves(host));
    closing_.untold.push_back(mirror.id);
    if (!sent.empty()) closing_.sent.insert_or_assign(mirror.id, std::move(sent));
    if (const Haves* theirs = mirror.closed_with(host)) reconcile(mirror.id, *theirs);
  } catch (const std::exception&) {  // whether what was sent has come would never be known
    lose("there is no memory left for what of a segment was on its way to it");
  }
}

void Peer::reconcile(uint64_t id, const Haves& theirs) {
  lent_->reconcile(id, [&](uint32_t ring) { return have_of(theirs, ring); });
  if (const auto found = closing_.sent.find(id); found != closing_.sent.end()) {
    const Unclaimed unclaimed = hub_.unclaimed();
    for (const SentClaims& one : found->second)
      if (one.number >= have_of(theirs, one.ring)) unclaimed(one.header, one.slot, one.incarnation);
    closing_.sent.erase(found);
  }
  closing_.heard.push_back(id);
}

void Peer::hear_closed(const Prefix& prefix, const char* body) {
  if (closing_.heard.size() >= kMostHeard) throw Violation("it closes segments, and takes no answer");
  CloseHead head;
  std::memcpy(&head, body, sizeof head);
  if (prefix.size != sizeof head + size_t(head.count) * sizeof(CloseEntry)) throw Violation("a message of a wrong size");
  Haves theirs(head.count);
  if (head.count != 0) std::memcpy(theirs.data(), body + sizeof head, theirs.size() * sizeof(CloseEntry));
  Mirror* const mirror = hub_.mirror(prefix.segment);
  if (mirror != nullptr && mirror->is_on(host)) return mirror->closed(host, std::move(theirs));
  reconcile(prefix.segment, theirs);
}

void Peer::put_closed() {
  for (const uint64_t id : closing_.untold) {
    const auto found = closing_.closed.find(id);
    if (found == closing_.closed.end()) continue;
    if (hub_.mirror(id) != nullptr) {  // it is here again
      closing_.closed.erase(found);
      continue;
    }
    const Haves& haves = found->second;
    connection_->put(Prefix{What::kClose, 0, uint32_t(sizeof(CloseHead) + haves.size() * sizeof(CloseEntry)), id});
    connection_->put(CloseHead{uint32_t(haves.size()), 0});
    if (!haves.empty()) connection_->put(haves.data(), haves.size() * sizeof(CloseEntry));
  }
  closing_.untold.clear();
  for (const uint64_t id : closing_.heard) connection_->put(Prefix{What::kClosed, 0, 0, id});
  closing_.heard.clear();
}

Peer::Peer(Hub& hub, uint32_t host, uint64_t window_ns, std::shared_ptr<const Fd> doorbell)
    : host(host), hub_(hub), window_ns_(window_ns), pause_ns_(window_ns / 5), returning_(std::make_shared<Returning>(std::move(doorbell))) {}

PeerCounts Peer::counts() const {
  PeerCounts counts = counts_;
  if (connection_) {
    counts.bytes_sent += connection_->sent;
    counts.bytes_received += connection_->received;
  }
  return counts;
}

void Peer::connect(Fd fd) {
  if (state_ == State::kLost) throw std::system_error(ESHUTDOWN, std::generic_category(), "the host was given up");
  auto connection = std::make_unique<Connection>(std::move(fd));
  if (connection_) drop("another connection has taken its place");
  connection_ = std::move(connection);
  has_handshake_ = false;
  state_ = State::kUp;
  heard_ns_ = said_ns_ = now_ns();
  ++counts_.connections;
  connection_->put(Prefix{What::kHandshake, 0, sizeof(Handshake), 0});
  connection_->put(Handshake{kHandshakeMagic, kWireVersion, hub_.self(), hub_.instance()});
}

void Peer::drop(std::string_view reason) noexcept {
  if (!connection_) return;
  if (into_ != nullptr) into_->cut(piece_ - left_);
  into_ = nullptr;
  left_ = 0;
  counts_ = counts();
  hub_.unwatch(host);
  connection_.reset();
  for (auto& [mirror, ring] : ready_) ring->queued = false;
  ready_.clear();
  clock_questions_.clear();
  clock_requested_ = 0;
  hub_.reconnect(host);
  note_reason(reason);
  if (state_ == State::kUp) {
    state_ = State::kDown;
    // One that has come to nothing gives no more time: a host that has given this one up ends each at once.
    if (has_handshake_ || down_ns_ == 0) down_ns_ = now_ns();
  }
  has_handshake_ = false;
}

void Peer::lose(std::string_view reason, std::string_view more) noexcept {
  if (state_ == State::kLost) return;
  note_reason(reason, more);
  std::string why = std::move(reason_);  // which the end of the connection is not
  drop("it is given up");
  reason_ = std::move(why);
  state_ = State::kLost;
  lent_->end();
  closing_.end();
}

void Peer::say_bye() noexcept {
  if (!connection_ || connection_->has_payload()) return;
  try {
    connection_->put(Prefix{What::kBye, 0, 0, 0});
    connection_->flush();
  } catch (const std::exception&) {  // it hears of the end of the connection
  }
}

void Peer::note_reason(std::string_view what, std::string_view more) noexcept {
  try {
    std::string text(what);
    text += more;
    reason_ = std::move(text);
  } catch (const std::bad_alloc&) {
    reason_ = "no memory left";  // which fits into the string itself
  }
}

void Peer::excuse(uint64_t ns) {
  const uint64_t now = now_ns();  // what has happened since is no longer ago than that
  heard_ns_ = std::min(heard_ns_ + ns, now);
  if (down_ns_ != 0) down_ns_ = std::min(down_ns_ + ns, now);
}

uint64_t Peer::tick(uint64_t now) {
  const uint64_t silent = 3 * pause_ns_;
  // What has happened behind `now` is no time ago.
  const auto since = [now](uint64_t then) { return now > then ? now - then : 0; };
  if (state_ == State::kDown) {
    // In steps, so that it shows where this process has not run meanwhile.
    if (since(down_ns_) < window_ns_) return std::min(down_ns_ + window_ns_, now + pause_ns_);
    lose("there was no connection to it for as long as is waited for one: ", reason_);
  }
  if (!connection_) return 0;
  if (since(heard_ns_) >= silent) {
    drop("nothing has come from it for too long");
    return now + pause_ns_;
  }
  if (since(said_ns_) >= pause_ns_) {
    said_ns_ = now;  // also where what waits to be sent is the word: what is due is never a time that has passed
    if (!connection_->has_payload()) {
      try {
        connection_->put(Prefix{What::kPing, 0, 0, 0});
      } catch (const std::exception& error) {
        drop(error.what());
      }
      send();
    }
    if (!connection_) return now + pause_ns_;
  }
  return std::min(said_ns_ + pause_ns_, heard_ns_ + silent);
}

namespace {

constexpr uint64_t kUnconfirmed = 32;  // of what is returned, before that is confirmed

}  // namespace

void Peer::look_at_returning() {
  Borrowed* one = returning_->take();
  if (state_ == State::kLost) return Returning::drop(one);
  while (one != nullptr) {
    Borrowed* const next = std::exchange(one->next, nullptr);
    (last_ == nullptr ? unheard_ : last_->next) = one;
    last_ = one;
    if (next_told_ == nullptr) next_told_ = one;
    one = next;
  }
}

void Peer::put_returned() {
  for (; next_told_ != nullptr && connection_->waiting() < kBatchBytes; next_told_ = next_told_->next) {
    const FrameKey& frame = next_told_->frame;
    connection_->put(Prefix{What::kReturned, 0, sizeof(Returned), frame.segment});
    connection_->put(Returned{frame.ring, 0, frame.number, ++told_});
  }
  most_told_ = std::max(most_told_, told_);
  if (returned_ - confirmed_ < kUnconfirmed) return;
  confirmed_ = returned_;
  connection_->put(Prefix{What::kHeard, 0, sizeof(Heard), 0});
  connection_->put(Heard{confirmed_});
}

void Peer::hear(const Returned& returned, uint64_t segment) {
  if (returned.count > returned_ + 1) throw Violation("it has returned what it has not told of");
  if (returned.count <= returned_) return;  // again, after a reconnect
  const FrameKey frame{segment, returned.ring, returned.number};
  if (!lent_->returned(frame)) {
    // Of a segment that this host has no more, all that was sent is lent, and so this was nothing.
    const Mirror* const mirror = hub_.mirror(segment);
    if (mirror != nullptr && !mirror->lends(host, frame.ring, frame.number)) throw Violation("it has returned what it has not");
    if (mirror != nullptr) lent_->returned_early(frame);
  }
  ++returned_;
}

void Peer::hear(const Heard& heard) {
  // Over a connection before this one it may have been told more than it was over this one so far.
  if (heard.count > most_told_) throw Violation("it has heard what it was not told");
  for (; heard_by_it_ < heard.count; ++heard_by_it_) {
    Borrowed* const one = unheard_;
    if (one == next_told_) {
      next_told_ = one->next;
      ++told_;
    }
    unheard_ = one->next;
    if (unheard_ == nullptr) last_ = nullptr;
    delete one;
  }
}

}  // namespace conveyor::net
