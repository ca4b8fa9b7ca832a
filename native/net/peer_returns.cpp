// What hosts have lent each other, and need no more: see lent.h.
#include <algorithm>

#include "peer.h"

namespace conveyor::net {

namespace {

constexpr uint64_t kUnconfirmed = 32;      // of what is returned, before that is confirmed
constexpr size_t kBatchBytes = 64 << 10;  // in one turn

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
