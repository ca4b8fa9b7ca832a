// A process that did not run for a while loses no host by that: it could not have heard of any.
#include <pthread.h>

#include "net_stranger.h"

using namespace conveyor;

namespace {

// Registered before those of the locks, and so run while a fork holds all of these: whoever needs one then stands still.
std::function<void()>& while_all_is_held() {
  static std::function<void()> what;
  return what;
}
void hold() {
  if (while_all_is_held()) while_all_is_held()();
}
const int registered = ::pthread_atfork(hold, nullptr, nullptr);

}  // namespace

// The pump's thread notes that the connection has ended, for which it needs a lock, and goes on when the window is over.
TEST(a_process_that_is_stopped_right_after_a_connection_broke_waits_for_another_one_as_long_as_any) {
  REQUIRE(registered == 0);
  const uint64_t window = kSecond;
  Stranger s(window);
  s.handshake();
  CHECK(check::soon([&] { return s.host.pump->connected(1); }));
  ::usleep(50'000);  // the pump sleeps, and so needs no lock before it has heard of the end
  uint64_t goes_on = 0;
  while_all_is_held() = [&] {
    s.own.reset();
    ::usleep(useconds_t(window / 1000 * 3 / 2));
    goes_on = now_ns();
  };
  check::Child child([] {});
  while_all_is_held() = nullptr;
  CHECK(child.passed());
  // Who asks why others have given this process up hears that it did not run.
  CHECK(s.host.pump->overslept(60 * kSecond) >= window);
  CHECK(s.lost());
  CHECK(now_ns() - goes_on > window * 9 / 10);
}
