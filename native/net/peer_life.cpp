// How connections to another host come and go, and when the host is given up.
#include "peer.h"

namespace conveyor::net {

Peer::Peer(Hub& hub, uint32_t host, uint64_t window_ns, std::shared_ptr<const Fd> bell)
    : host(host), hub_(hub), window_ns_(window_ns), pause_ns_(window_ns / 5), returning_(std::make_shared<Returning>(std::move(bell))) {}

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
  greeted_ = false;
  state_ = State::kUp;
  heard_ns_ = said_ns_ = now_ns();
  ++counts_.connections;
  connection_->put(Prefix{What::kHello, 0, sizeof(Hello), 0});
  connection_->put(Hello{kHelloMagic, kWireVersion, hub_.self(), hub_.instance()});
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
  clock_asked_ = 0;
  hub_.reconnect(host);
  note_reason(reason);
  if (state_ == State::kUp) {
    state_ = State::kDown;
    // One that has come to nothing gives no more time: a host that has given this one up ends each at once.
    if (greeted_ || down_ns_ == 0) down_ns_ = now_ns();
  }
  greeted_ = false;
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

}  // namespace conveyor::net
