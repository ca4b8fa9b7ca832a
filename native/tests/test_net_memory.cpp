// A pump without memory: it gives its hosts up, and tells it; its process goes on.
#include <new>

#include "net_stranger.h"

using namespace conveyor;
using namespace conveyor::net;

namespace {

// The allocation that fails, counted over all threads but those of the test itself; below: none.
std::atomic<int64_t> left{-1};
thread_local bool spared = false;

bool fails() { return !spared && left.load() >= 0 && left.fetch_sub(1) == 0; }

}  // namespace

void* operator new(size_t size) {
  if (fails()) throw std::bad_alloc();
  if (void* const memory = std::malloc(size == 0 ? 1 : size)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace {

// What a pump meets in a day. The other host says nothing but its handshake, and that a process of it has died.
void day(Stranger& s, bool greets) {
  if (greets) s.handshake();
  s.host.process_table->notify(1, 3);
  s.host.process_table->notify(1, 9);
  s.host.process_table->notify(1, kAttentionBit);
  if (greets) s.say(What::kRing, Rung{0, 1, 9, 0}, 0, 0);
  s.host.process_table->announce_death(2);
  const auto last = [&](const std::function<void()>& what) {
    try {
      what();
    } catch (const std::bad_alloc&) {
    } catch (const std::system_error& error) {
      CHECK_EQ(error.code().value(), ESHUTDOWN);
    }
  };
  const Host::Shape one{0, {1}};
  last([&] { s.host.mirror(kId + 1, {one}); });
  last([&] { s.host.pump->ask_clock(1, 1, 1); });
  last([&] { s.host.pump->due(); });
  last([&] { s.host.pump->unmirror(kId + 1); });
  last([&] { s.host.pump->disconnect(1, "by the test, and with a reason that is long"); });
  s.host.process_table->notify(1, 3);
  last([&] { s.host.pump->give_up(1, "by the test, and with a reason that is long"); });
}

}  // namespace

TEST(a_pump_without_memory_gives_its_hosts_up) {
  spared = true;
  int failed = 0;
  for (const bool greets : {true, false}) {
    for (int64_t k = 0;; ++k) {
      REQUIRE(k < 2'000);
      Stranger s(20 * kSecond, {0, 1, 0});
      s.may_have_hung_up = true;
      left.store(k);
      day(s, greets);
      const bool over = left.exchange(-1) >= 0;
      CHECK(s.lost());
      bool told = false;
      CHECK(check::soon([&] {
        for (const net::Event& e : s.host.pump->events()) told |= e.kind == net::Event::kLost && e.host == 1 && !e.reason.empty();
        return told;
      }));
      // What is taken away is gone; all else says why it cannot be.
      s.host.pump->unmirror(kId);
      s.host.pump->remove_proxy(1);
      try {
        s.host.pump->due();
      } catch (const std::system_error& error) {
        CHECK(std::strstr(error.what(), "no memory left") != nullptr);
        ++failed;
      }
      if (over) break;
    }
  }
  CHECK(failed > 0);
}
