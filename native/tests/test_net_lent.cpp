// Frames that keep something where they were made, on other hosts: it is kept until the last of their readers there has
// let go of them, whatever becomes of connections and rings, or until their host is lost.
#include "net_two.h"

using namespace conveyor;

namespace {

// What is kept, which says when it has gone.
std::shared_ptr<const void> told(std::atomic<int>& gone) {
  return {&gone, [](const std::atomic<int>* one) { const_cast<std::atomic<int>*>(one)->fetch_add(1); }};
}

void send_keeping(Host& from, uint32_t slot, Sender& sender, uint64_t n, size_t size, const Numbers& numbers, std::shared_ptr<const void> what) {
  REQUIRE(from.wait_for_room(slot, sender));
  Outgoing out;
  out.tag = n;
  out.codec = kBytes;
  out.flags = kKeeps | kSure;
  out.size = size;
  out.keeps = numbers;
  out.attached = std::move(what);
  sender.reserve(out);
  for (size_t i = 0; i < size; ++i) sender.body_of(out)[i] = letter(n, i);
  sender.publish(out);
}

Frame taken(Host& at, uint32_t slot, Receiver& receiver) {
  REQUIRE(at.wait(slot, [&] { return !receiver.ring.empty(); }));
  return receiver.take();
}

// Arenas look by themselves, once in a while: here at once.
bool soon_gone(Two& t, const std::atomic<int>& gone, int expected = 1) {
  return check::soon([&] {
    for (Host* host : {&t.b, &t.a})
      for (const auto& arena : host->arenas) arena->give_back_soon();
    return gone.load() == expected;
  });
}

bool still_kept(Two& t, const std::atomic<int>& gone, int before = 0) {
  for (int i = 0; i < 20; ++i) {
    for (Host* host : {&t.b, &t.a})
      for (const auto& arena : host->arenas) arena->give_back_soon();
    ::usleep(2'000);
  }
  return gone.load() == before;
}

// One ring between two hosts, over which frames go that keep something. `gone` counts what is kept no longer.
struct Lending : Two {
  std::unique_ptr<Sender> sender;
  std::unique_ptr<Receiver> receiver;
  std::atomic<int> gone{0};

  Lending() : Two({0, 1}, {{0, {1}}}) {
    join(a, b);
    sender = a.sender(kId, rings, 0);
    receiver = b.receiver(kId, rings, 0, 0);
  }

  void send(uint64_t n, size_t size, const Numbers& numbers) { send_keeping(a, 0, *sender, n, size, numbers, told(gone)); }
};

}  // namespace

TEST(what_a_frame_keeps_is_kept_for_its_readers_on_another_host) {
  Two t({0, 1, 1}, {{0, {1, 2}}});
  join(t.a, t.b);
  const auto sender = t.a.sender(kId, t.rings, 0);
  const auto one = t.b.receiver(kId, t.rings, 0, 0), two = t.b.receiver(kId, t.rings, 0, 1);
  std::atomic<int> gone{0};
  uint64_t n = 0;
  for (const size_t size : {size_t(10), size_t(5'000), size_t(2'000'000)}) {
    send_keeping(t.a, 0, *sender, n, size, {5, 77}, told(gone));
    auto first = std::make_unique<Frame>(taken(t.b, 1, *one)), second = std::make_unique<Frame>(taken(t.b, 2, *two));
    CHECK(is_whole(*first, n, size));
    CHECK(is_whole(*second, n, size));
    CHECK(first->keeps() == Numbers({5, 77}));
    CHECK((first->flags & kKeeps) != 0);
    CHECK((first->flags & kSure) == 0);
    first.reset();
    CHECK(still_kept(t, gone, int(n)));
    second.reset();
    CHECK(soon_gone(t, gone, int(++n)));
  }
}

TEST(what_is_let_go_of_without_a_connection_goes_when_there_is_one_again) {
  Lending t;
  constexpr uint64_t kFrames = 200;  // more than are confirmed one by one
  for (uint64_t n = 0; n < kFrames; ++n) {
    t.send(n, 1'000, {n});
    auto frame = std::make_unique<Frame>(taken(t.b, 1, *t.receiver));
    const bool breaks = n % 20 == 7;
    if (breaks) {
      t.a.pump->disconnect(1, "by the test");
      t.b.pump->disconnect(0, "by the test");
    }
    frame.reset();
    if (!breaks) continue;
    for (const auto& arena : t.b.arenas) arena->give_back_soon();
    join(t.a, t.b);
  }
  CHECK(soon_gone(t, t.gone, kFrames));
}

TEST(what_a_frame_keeps_outlives_its_ring) {
  Lending t;
  t.send(3, 100'000, {5});
  auto frame = std::make_unique<Frame>(taken(t.b, 1, *t.receiver));
  t.receiver.reset();
  t.a.pump->unmirror(kId);
  t.b.pump->unmirror(kId);
  CHECK(still_kept(t, t.gone));
  CHECK(is_whole(*frame, 3, 100'000));
  frame.reset();
  CHECK(soon_gone(t, t.gone));
}

TEST(what_a_reader_never_takes_is_not_kept_for_it) {
  Lending t;
  t.send(0, 1'000, {5});
  REQUIRE(t.b.wait(1, [&] { return !t.receiver->ring.empty(); }));
  t.receiver->close();
  CHECK(soon_gone(t, t.gone));
}

TEST(what_a_process_of_another_host_had_goes_with_it) {
  Lending t;
  t.send(0, 1'000, {5});
  const Frame frame = taken(t.b, 1, *t.receiver);
  CHECK(still_kept(t, t.gone));
  t.b.process_table->announce_death(1);
  CHECK(soon_gone(t, t.gone));
}

TEST(what_a_lost_host_had_goes_with_it) {
  Lending t;
  t.send(0, 1'000, {5});
  const Frame frame = taken(t.b, 1, *t.receiver);
  CHECK(still_kept(t, t.gone));
  t.a.pump->give_up(1, "by the test");
  CHECK(soon_gone(t, t.gone));
}

TEST(a_frame_that_keeps_something_and_for_which_there_is_no_memory_keeps_nothing) {
  Shapes rings{{0, {1}}};
  Host a(0, {0, 1}), b(1, {0, 1}, 20 * kSecond, kMiB);
  a.mirror(kId, rings);
  b.mirror(kId, rings);
  join(a, b);
  const auto sender = a.sender(kId, rings, 0);
  const auto receiver = b.receiver(kId, rings, 0, 0);
  std::atomic<int> gone{0};
  send_keeping(a, 0, *sender, 0, 8 * kMiB, {5}, told(gone));
  const Frame frame = taken(b, 1, *receiver);
  CHECK(frame.kind == Kind::kError);
  CHECK(check::soon([&] {
    a.arenas[0]->give_back_soon();
    return gone.load() == 1;
  }));
}
