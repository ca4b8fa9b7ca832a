// Rings between hosts: order, sizes, several readers, credit, what is refused, limits, doorbells and deaths.
#include "net_two.h"

using namespace conveyor;

namespace {

void carry(Host& from, uint32_t writer, Host& to, uint32_t reader, Sender& sender, Receiver& receiver, uint64_t frames, bool large = true) {
  std::thread sends([&] {
    check::guarded("sends", [&] {
      for (uint64_t n = 0; n < frames; ++n)
        if (!send(from, writer, sender, n, size_of(n, large))) return;
    });
  });
  for (uint64_t n = 0; n < frames; ++n) {
    if (!to.wait(reader, [&] { return !receiver.ring.empty(); })) break;
    if (!CHECK(is_whole(receiver.take(), n, size_of(n, large)))) break;
  }
  sends.join();
}

}  // namespace

TEST(frames_of_every_size_come_in_their_order) {
  Two t({0, 1}, {{0, {1}}});
  join(t.a, t.b);
  const auto sender = t.a.sender(kId, t.rings, 0);
  const auto receiver = t.b.receiver(kId, t.rings, 0, 0);
  carry(t.a, 0, t.b, 1, *sender, *receiver, check::kThreadSanitizer ? 40 : 100);
  // Nothing is kept of what has come.
  CHECK(check::soon([&] {
    t.a.arenas[0]->give_back(0);
    return t.a.arenas[0]->blocks_out() == 0;
  }));
}

// The child's copy of the pump goes when its interpreter lets go of it. What the pump is to send is its parent's.
TEST(frames_come_though_a_forked_child_has_let_go_of_the_pump) {
  install_fork_handlers();
  Two t({0, 1}, {{0, {1}}});
  const auto sender = t.a.sender(kId, t.rings, 0);
  const auto receiver = t.b.receiver(kId, t.rings, 0, 0);
  for (uint64_t n = 0; n < kSlots; ++n) send(t.a, 0, *sender, n, size_of(n));
  const size_t out = t.a.arenas[0]->blocks_out();
  check::Child child([&] {
    t.a.pump.reset();
    t.b.pump.reset();
  });
  CHECK(child.passed());
  t.a.arenas[0]->give_back(0);
  CHECK_EQ(t.a.arenas[0]->blocks_out(), out);
  join(t.a, t.b, socket_pair());
  for (uint64_t n = 0; n < kSlots; ++n) {
    REQUIRE(t.b.wait(1, [&] { return !receiver->ring.empty(); }));
    CHECK(is_whole(receiver->take(), n, size_of(n)));
  }
}

TEST(what_is_sent_before_there_is_a_connection_waits_for_it) {
  Two t({0, 1}, {{0, {1}}});
  const auto sender = t.a.sender(kId, t.rings, 0);
  const auto receiver = t.b.receiver(kId, t.rings, 0, 0);
  for (uint64_t n = 0; n < kSlots; ++n) send(t.a, 0, *sender, n, size_of(n));
  CHECK(!sender->ring.has_room());
  join(t.a, t.b, socket_pair());
  for (uint64_t n = 0; n < kSlots; ++n) {
    REQUIRE(t.b.wait(1, [&] { return !receiver->ring.empty(); }));
    CHECK(is_whole(receiver->take(), n, size_of(n)));
  }
  CHECK(t.a.wait_for_room(0, *sender));
}

TEST(several_readers_of_a_host_are_fed_by_one_transfer) {
  // Readers 1 and 2 on the other host, 3 beside the writer.
  Two t({0, 1, 1, 0}, {{0, {1, 2, 3}}});
  join(t.a, t.b);
  const auto sender = t.a.sender(kId, t.rings, 0);
  const auto one = t.b.receiver(kId, t.rings, 0, 0), two = t.b.receiver(kId, t.rings, 0, 1), beside = t.a.receiver(kId, t.rings, 0, 2);
  std::vector<std::thread> threads;
  const auto read = [&](Host& host, uint32_t slot, Receiver& receiver) {
    threads.emplace_back([&, slot] {
      check::guarded("reads", [&] {
        for (uint64_t n = 0; n < 40; ++n) {
          REQUIRE(host.wait(slot, [&] { return !receiver.ring.empty(); }));
          REQUIRE(is_whole(receiver.take(), n, size_of(n)));
        }
      });
    });
  };
  read(t.b, 1, *one);
  read(t.b, 2, *two);
  read(t.a, 3, *beside);
  uint64_t bytes = 0;
  for (uint64_t n = 0; n < 40; ++n) {
    send(t.a, 0, *sender, n, size_of(n));
    bytes += size_of(n);
  }
  for (auto& thread : threads) thread.join();
  CHECK_EQ(t.a.pump->counts(1).frames_sent, 40u);
  CHECK(t.a.pump->counts(1).bytes_sent < bytes + bytes / 8);
}

TEST(a_writer_has_room_when_a_reader_elsewhere_has_taken_one) {
  Two t({0, 1}, {{0, {1}}});
  join(t.a, t.b);
  const auto sender = t.a.sender(kId, t.rings, 0);
  const auto receiver = t.b.receiver(kId, t.rings, 0, 0);
  for (uint64_t n = 0; n < kSlots; ++n) send(t.a, 0, *sender, n, 8);
  for (uint64_t n = 0; n < 100; ++n) {
    REQUIRE(t.b.wait(1, [&] { return !receiver->ring.empty(); }));
    CHECK(!sender->ring.has_room());  // nobody takes more than this one
    receiver->take();
    REQUIRE(t.a.wait_for_room(0, *sender));
    send(t.a, 0, *sender, kSlots + n, 8);
  }
  // A reader that leaves holds nobody up.
  receiver->close();
  for (uint64_t n = 0; n < 3 * kSlots; ++n) REQUIRE(send(t.a, 0, *sender, n, 100'000));
  CHECK(check::soon([&] {
    t.a.arenas[0]->give_back(0);
    return t.a.arenas[0]->blocks_out() == 0;
  }));
}

TEST(a_reader_that_takes_nothing_holds_up_no_other_ring) {
  Two t({0, 1, 1}, {{0, {1}}, {0, {2}}});
  join(t.a, t.b);
  const auto full = t.a.sender(kId, t.rings, 0), used = t.a.sender(kId, t.rings, 1);
  const auto idle = t.b.receiver(kId, t.rings, 0, 0), busy = t.b.receiver(kId, t.rings, 1, 0);
  for (uint64_t n = 0; n < kSlots; ++n) send(t.a, 0, *full, n, 100'000);
  for (uint64_t n = 0; n < 100; ++n) {
    REQUIRE(send(t.a, 0, *used, n, size_of(n, false)));
    REQUIRE(t.b.wait(2, [&] { return !busy->ring.empty(); }));
    CHECK(is_whole(busy->take(), n, size_of(n, false)));
  }
  CHECK(!full->ring.has_room());
}

TEST(what_is_not_wanted_and_what_was_lost_comes_back) {
  Two t({0, 1}, {{0, {1}}});
  join(t.a, t.b);
  const auto sender = t.a.sender(kId, t.rings, 0);
  const auto receiver = t.b.receiver(kId, t.rings, 0, 0);
  receiver->ring.want(12);
  CHECK(t.a.wait(0, [&] { return sender->ring.wanted() == 12; }));
  receiver->ring.lose();
  receiver->ring.want(13);
  CHECK(t.a.wait(0, [&] { return sender->ring.wanted() == 13 && sender->ring.lost() == 1; }));
}

// What is no block of its writer's arena, as a broken peer may have written it.
TEST(frames_that_cannot_travel_are_errors_at_their_readers) {
  Two t({0, 1}, {{0, {1}}});
  const auto sender = t.a.sender(kId, t.rings, 0);
  const auto receiver = t.b.receiver(kId, t.rings, 0, 0);
  send(t.a, 0, *sender, 1, 100'000, kDefinitions);
  const Ring ring = t.a.segments[kId]->ring(0);
  reinterpret_cast<SlotHeader*>(ring.slot(0))->block_size = kBlockHeader;
  send(t.a, 0, *sender, 2, 100);
  join(t.a, t.b);
  REQUIRE(t.b.wait(1, [&] { return !receiver->ring.empty(); }));
  const Frame frame = receiver->take();
  CHECK(frame.kind == Kind::kError);
  CHECK_EQ(frame.tag, 1u);
  CHECK_EQ(std::string(frame.body, frame.size), net::kNotBetweenHosts);
  REQUIRE(t.b.wait(1, [&] { return !receiver->ring.empty(); }));
  CHECK(is_whole(receiver->take(), 2, 100));
  receiver->ring.want(1);
  CHECK(t.a.wait(0, [&] { return sender->ring.wanted() == 1; }));
  CHECK_EQ(sender->ring.lost(), 1u);
}

TEST(a_host_without_memory_says_so_in_the_frames_place) {
  Two t({0, 1}, {{0, {1}}}, 20 * kSecond, 8 * kMiB);
  join(t.a, t.b);
  const auto hoard = t.b.arenas[0]->allocate(6 * kMiB);
  const auto sender = t.a.sender(kId, t.rings, 0);
  const auto receiver = t.b.receiver(kId, t.rings, 0, 0);
  send(t.a, 0, *sender, 1, 5 * kMiB);
  send(t.a, 0, *sender, 2, 100);
  REQUIRE(t.b.wait(1, [&] { return !receiver->ring.empty(); }));
  const Frame frame = receiver->take();
  CHECK(frame.kind == Kind::kError);
  CHECK_EQ(std::string(frame.body, frame.size), net::kHostIsFull);
  REQUIRE(t.b.wait(1, [&] { return !receiver->ring.empty(); }));
  CHECK(is_whole(receiver->take(), 2, 100));
  t.b.arenas[0]->release(hoard);
}

TEST(small_frames_are_not_stuck_behind_a_large_one) {
  Two t({0, 1}, {{0, {1}}, {0, {1}}});
  const auto large = t.a.sender(kId, t.rings, 0), small = t.a.sender(kId, t.rings, 1);
  const auto from_large = t.b.receiver(kId, t.rings, 0, 0), from_small = t.b.receiver(kId, t.rings, 1, 0);
  send(t.a, 0, *large, 0, 200 * kMiB);
  send(t.a, 0, *small, 0, 8);
  join(t.a, t.b);
  REQUIRE(t.b.wait(1, [&] { return !from_small->ring.empty(); }));
  CHECK(from_large->ring.empty());
  REQUIRE(t.b.wait(1, [&] { return !from_large->ring.empty(); }));
  CHECK(is_whole(from_large->take(), 0, 200 * kMiB));
}

// A channel's end says that it is closed, and then lets go of what has come.
TEST(what_a_reader_has_said_before_it_took_a_frame_is_known_where_that_is) {
  Two t({0, 1}, {{0, {1}}});
  join(t.a, t.b);
  Limits here = t.a.limits(kId, t.rings), there = t.b.limits(kId, t.rings);
  const auto sender = t.a.sender(kId, t.rings, 0);
  const auto receiver = t.b.receiver(kId, t.rings, 0, 0);
  const ReaderCursor& cursor = t.a.segments[kId]->ring(Host::offset(t.rings, 0)).cursor(0);
  uint64_t unknown = 0;
  for (uint64_t n = 0; n < 3'000; ++n) {
    send(t.a, 0, *sender, n, 8);
    REQUIRE(t.b.wait(1, [&] { return !receiver->ring.empty(); }));
    there.cancel(n);
    receiver->take();
    t.b.process_table->notify(0, 3);
    for (const uint64_t end = now_ns() + 30 * kSecond; cursor.next.load() <= n && now_ns() < end;) {
    }
    unknown += !here.cancelled(n);
  }
  CHECK_EQ(unknown, 0u);
}

TEST(cancellations_deadlines_and_failures_are_seen_on_both_hosts) {
  Two t({0, 1}, {{0, {1}}, {1, {0}}});
  join(t.a, t.b);
  Limits here = t.a.limits(kId, t.rings), there = t.b.limits(kId, t.rings);
  const auto sender = t.a.sender(kId, t.rings, 0), back = t.b.sender(kId, t.rings, 1);
  const auto receiver = t.b.receiver(kId, t.rings, 0, 0), from_back = t.a.receiver(kId, t.rings, 1, 0);
  for (uint64_t n = 0; n < 50; ++n) {
    here.begin(n, n % 3 == 0 ? 0 : now_ns() + (n + 1) * 100 * kSecond);
    send(t.a, 0, *sender, n, 8);
    REQUIRE(t.b.wait(1, [&] { return !receiver->ring.empty(); }));
    receiver->take();
    // Ahead of the frame, as on one host.
    if (n % 3 == 0) {
      CHECK_EQ(there.deadline(n), 0u);
    } else {
      const uint64_t near = there.deadline(n) - here.deadline(n);
      CHECK(near < 30 * kSecond || -near < 30 * kSecond);  // it is told how much time is left, and that takes some
      there.note_ran(n, 66);
      there.note_skipped(n, 67);
    }
    CHECK(!there.cancelled(n));
    if (n % 5 == 0) {
      there.count_failure();
      there.fail(n);
    }
    send(t.b, 1, *back, n, 8);
    REQUIRE(t.a.wait(0, [&] { return !from_back->ring.empty(); }));
    from_back->take();
    CHECK_EQ(here.failed(n), n % 5 == 0);
    CHECK_EQ(here.failures(), uint32_t(n / 5 + 1));
    if (n % 3 != 0) {
      const auto [skipped, ran] = here.report(n);
      CHECK_EQ(skipped, 67);
      CHECK(ran == std::vector<uint32_t>{66});
    }
  }
  // Without a frame: whoever may have to look is rung.
  here.cancel(50);
  here.drop_stream(51, 33);
  t.a.process_table->notify(1, 3);
  CHECK(t.b.wait(1, [&] { return there.cancelled(50) && there.stream_dropped(51, 33) && there.cancellations() == 1; }));
}

// What another host says in between takes no news away.
TEST(a_cancellation_is_told_to_all_hosts_though_one_is_rung) {
  const Homes homes = {0, 1, 2};
  const Shapes rings = {{0, {1, 2}}};
  Host a(0, homes), b(1, homes), c(2, homes);
  for (Host* host : {&a, &b, &c}) host->mirror(kId, rings);
  join(a, b);
  join(a, c);
  Limits here = a.limits(kId, rings), there = b.limits(kId, rings), third = c.limits(kId, rings);
  for (uint64_t n = 0; n < 20; ++n) {
    here.cancel(n);
    there.count_failure();
    b.process_table->notify(0, 3);
    REQUIRE(a.wait(0, [&] { return here.failures() == n + 1; }));
    a.process_table->notify(1, 3);
    REQUIRE(b.wait(1, [&] { return there.cancelled(n); }));
    REQUIRE(c.wait(2, [&] { return third.cancelled(n); }, 5 * kSecond));
  }
}

TEST(doorbells_without_a_ring_are_rung_on_the_other_host) {
  Two t({0, 1}, {{0, {1}}});
  join(t.a, t.b);
  t.a.process_table->notify(1, 200);
  CHECK(t.b.wait(1, [&] { return t.b.process_table->slot(1)->doorbell.ready[3].load() >> (200 - 192) & 1; }));
}

TEST(a_death_is_known_on_the_other_host) {
  Two t({0, 1, 1}, {{0, {1, 2}}});
  join(t.a, t.b);
  t.b.process_table->slot(2)->status.signal.store(11);
  t.b.process_table->announce_death(2);
  CHECK(t.a.wait(0, [&] { return t.a.process_table->gone(2, 1); }));
  CHECK_EQ(t.a.process_table->slot(2)->status.signal.load(), 11u);
  CHECK(!t.a.process_table->gone(1, 1));
  // The writer waits for it no more.
  const auto sender = t.a.sender(kId, t.rings, 0);
  const auto receiver = t.b.receiver(kId, t.rings, 0, 0);
  carry(t.a, 0, t.b, 1, *sender, *receiver, 30, false);
}

// A process ends as soon as it has answered: what it has written last is not lost with it.
TEST(a_death_comes_behind_what_the_process_has_written) {
  for (const size_t size : {size_t(8), 17 * kMiB}) {
    Two t({0, 1}, {{0, {1}, 0}});
    join(t.a, t.b);
    CHECK(check::soon([&] { return t.a.pump->connected(1) && t.b.pump->connected(0); }));
    const auto sender = t.a.sender(kId, t.rings, 0);
    const auto receiver = t.b.receiver(kId, t.rings, 0, 0);
    for (uint64_t n = 0; n < 4; ++n) send(t.a, 0, *sender, n, size);
    t.a.process_table->announce_death(0);
    REQUIRE(t.b.wait(1, [&] { return t.b.process_table->gone(0, 1); }));
    for (uint64_t n = 0; n < 4; ++n) {
      REQUIRE(!receiver->ring.empty());
      CHECK(is_whole(receiver->take(), n, size));
    }
  }
}

TEST(news_of_a_taken_frame_comes_by_way_of_a_third_host) {
  // 0 -> 1 -> 2 -> 0 on three hosts, with no more frames under way than there are slots, and none whose writer waits.
  const Homes homes = {0, 1, 2};
  const Shapes rings = {{0, {1}, 0}, {1, {2}, 0}, {2, {0}, 0}};
  Host hosts[] = {{0, homes}, {1, homes}, {2, homes}};
  for (Host& host : hosts) host.mirror(kId, rings);
  join(hosts[0], hosts[1]);
  join(hosts[1], hosts[2]);
  join(hosts[2], hosts[0]);
  constexpr uint64_t kFrames = check::kThreadSanitizer ? 500 : 3'000;
  std::vector<std::thread> threads;
  for (uint32_t h : {1u, 2u})
    threads.emplace_back([&, h] {
      check::guarded("passes on", [&] {
        const auto from = hosts[h].receiver(kId, rings, h - 1, 0);
        const auto to = hosts[h].sender(kId, rings, h);
        for (uint64_t n = 0; n < kFrames; ++n) {
          REQUIRE(hosts[h].wait(h, [&] { return !from->ring.empty(); }));
          from->take();
          REQUIRE(to->ring.has_room());
          REQUIRE(send(hosts[h], h, *to, n, 8));
        }
      });
    });
  const auto to = hosts[0].sender(kId, rings, 0);
  const auto from = hosts[0].receiver(kId, rings, 2, 0);
  for (uint64_t n = 0; n < kFrames + kSlots; ++n) {
    if (n >= kSlots) {
      if (!hosts[0].wait(0, [&] { return !from->ring.empty(); })) break;
      CHECK_EQ(from->take().tag, n - kSlots);
    }
    if (n < kFrames && (!CHECK(to->ring.has_room()) || !send(hosts[0], 0, *to, n, 8))) break;
  }
  for (auto& thread : threads) thread.join();
}

TEST(what_is_put_where_a_writer_waits_goes_ahead_of_what_it_puts_elsewhere_behind_it) {
  // A generator's end, between items of two.
  const Shapes rings = {{0, {1}}, {0, {1}, 0}, {0, {1}}};
  Two t({0, 1}, rings);
  const auto end = t.a.sender(kId, rings, 1);
  const auto ended = t.b.receiver(kId, rings, 1, 0);
  std::unique_ptr<Sender> to[] = {t.a.sender(kId, rings, 0), t.a.sender(kId, rings, 2)};
  std::unique_ptr<Receiver> from[] = {t.b.receiver(kId, rings, 0, 0), t.b.receiver(kId, rings, 2, 0)};
  constexpr uint64_t kRounds = check::kThreadSanitizer ? 100 : 500;
  for (uint64_t round = 0, sent = 0, came = 0; round < kRounds; ++round) {
    const uint64_t items = kSlots - round % kSlots;
    for (uint64_t n = 0; n < items; ++n, ++sent)
      for (const auto& sender : to) REQUIRE(send(t.a, 0, *sender, sent, size_of(sent, round % 50 == 7)));
    REQUIRE(send(t.a, 0, *end, round, 8));
    if (round == 0) join(t.a, t.b);
    REQUIRE(t.b.wait(1, [&] { return !ended->ring.empty(); }));
    CHECK_EQ(ended->take().tag, round);
    for (uint64_t n = 0; n < items; ++n, ++came)
      for (const auto& receiver : from) {
        REQUIRE(!receiver->ring.empty());
        CHECK(is_whole(receiver->take(), came, size_of(came, round % 50 == 7)));
      }
  }
}
