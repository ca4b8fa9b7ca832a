#include "peer.h"

#include <algorithm>

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
  if (connection_ && greeted_) look_.insert(&mirror);
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
    if (!greeted_ && prefix.what != What::kHello) throw Violation("no greeting");
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
  if (prefix.what == What::kHello) return greeting(read<Hello>(body));
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
  if (prefix.what == What::kClock) return asked_clock(read<Clock>(body));
  if (prefix.what == What::kClockIs) return hear(read<Clock>(body));
  if (prefix.what == What::kRing) {
    const auto rung = read<Rung>(body);
    if (rung.slot >= hub_.board()->slots() || rung.bit >= kBellBits) throw Violation("a bell that is none");
    // Another host's process may have the slot by now.
    if (hub_.host_of(rung.slot) == hub_.self() && !hub_.board()->gone(rung.slot, rung.incarnation)) hub_.board()->ring(rung.slot, rung.bit);
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
  for (const Target& t : mirror.members()) hub_.board()->ring(t.slot, t.bit);
}

void Peer::greeting(const Hello& hello) {
  if (greeted_) throw Violation("a second greeting");
  if (hello.magic != kHelloMagic || hello.version != kWireVersion) throw Violation("it speaks another protocol");
  if (hello.host != host) throw Violation("it is another host than it was");
  if (instance_ != 0 && instance_ != hello.instance) throw Violation("it is another process than it was");
  instance_ = hello.instance;
  greeted_ = true;
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
    for (const Mirror::Bell& bell : mirror->bells())
      if (bell.host == host) ring(bell.target.slot, hub_.board()->slot(bell.target.slot)->incarnation.load(), bell.target.bit);
  }
}

// --- out ---

void Peer::tell_death(const Death& death) {
  if (!greeted_) return;
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
      if (!greeted_) break;
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

}  // namespace conveyor::net
