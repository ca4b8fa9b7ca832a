// A host that a test speaks for itself.
#pragma once

#include "net_setup.h"

namespace conveyor {

constexpr uint64_t kId = 7;

// A socket that this test speaks itself, to a pump whose other host it is.
struct Stranger {
  Host host;
  Fd own;
  explicit Stranger(uint64_t window_ns = 20 * kSecond, const Homes& homes = {0, 1}) : host(0, homes, window_ns) {
    host.mirror(kId, {{1, {0}}, {0, {1}}});
    auto [ours, theirs] = socket_pair();
    own = std::move(ours);
    host.pump->connect(std::move(theirs), 1);
  }
  bool may_have_hung_up = false;  // the pump, before it has heard everything
  void say(const void* data, size_t size) {
    const ssize_t n = ::send(own.get(), data, size, MSG_NOSIGNAL);
    if (!may_have_hung_up || n >= 0) CHECK_EQ(n, ssize_t(size));
  }
  template <class T>
  void say(net::What what, const T& value, uint16_t flags = 0, uint64_t segment = kId) {
    // At once: it may hang up on the first of these words already.
    char message[sizeof(net::Prefix) + sizeof value];
    const net::Prefix prefix{what, flags, sizeof value, segment};
    std::memcpy(message, &prefix, sizeof prefix);
    std::memcpy(message + sizeof prefix, &value, sizeof value);
    say(message, sizeof message);
  }
  void handshake(uint64_t instance = 5) { say(net::What::kHandshake, net::Handshake{net::kHandshakeMagic, net::kWireVersion, 1, instance}); }
  bool lost() {
    return host.wait(0, [&] { return host.process_table->gone(1, 1); }, 60 * kSecond);
  }
};

}  // namespace conveyor
