// Segments that hosts have no more: see closing.h.
#include <cstring>

#include "peer.h"

namespace conveyor::net {

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
    if (const Haves* theirs = mirror.closed_with(host)) settle(mirror.id, *theirs);
  } catch (const Violation& error) {
    lose("it has said what makes no sense: ", error.what());
  } catch (const std::exception&) {  // whether what was sent has come would never be known
    lose("there is no memory left for what of a segment was on its way to it");
  }
}

void Peer::settle(uint64_t id, const Haves& theirs) {
  lent_->settle(id, [&](uint32_t ring) { return have_of(theirs, ring); });
  if (const auto found = closing_.sent.find(id); found != closing_.sent.end()) {
    const Unclaimed unclaimed = hub_.unclaimed();
    for (const SentClaims& one : found->second)
      if (one.number >= have_of(theirs, one.ring)) unclaimed(one.header, one.slot, one.incarnation);
    closing_.sent.erase(found);
  }
  if (closing_.heard.size() == kMostHeard) throw Violation("it closes segments, and takes no answer");
  closing_.heard.push_back(id);
}

void Peer::hear_closed(const Prefix& prefix, const char* body) {
  CloseHead head;
  std::memcpy(&head, body, sizeof head);
  if (prefix.size != sizeof head + size_t(head.count) * sizeof(CloseEntry)) throw Violation("a message of a wrong size");
  Haves theirs(head.count);
  if (head.count != 0) std::memcpy(theirs.data(), body + sizeof head, theirs.size() * sizeof(CloseEntry));
  Mirror* const mirror = hub_.mirror(prefix.segment);
  if (mirror != nullptr && mirror->is_on(host)) return mirror->closed(host, std::move(theirs));
  settle(prefix.segment, theirs);
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

}  // namespace conveyor::net
