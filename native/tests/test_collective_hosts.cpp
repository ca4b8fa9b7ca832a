// Collective operations of ranks that are on several hosts, which share nothing but a connection.
#include "collective_worlds.h"

using namespace conveyor;

TEST(every_operation_over_hosts) {
  const std::vector<std::vector<uint32_t>> shapes = {{0, 1}, {0, 1, 0, 1}, {0, 0, 0, 1}, {2, 0, 1, 2, 0}};
  for (const auto& shape : shapes) {
    Worlds worlds(shape);
    worlds.in_threads([&](Rank& rank) {
      for (size_t count : {size_t(0), size_t(1), size_t(17), size_t(4096), size_t(8193), size_t(200'001)}) every_operation(rank, rank.group.ranks(), count);
    });
  }
}

// Each host has reduced its own before; of 16-bit floats it does not.
TEST(averages_over_hosts) {
  Worlds worlds({0, 1, 1, 0, 1});
  worlds.in_threads([&](Rank& rank) {
    for (const int root : {-1, 1}) {
      std::vector<float> own(300'001, float(rank.group.rank()));
      CollectiveCall call = call_of(root < 0 ? Collective::kAllReduce : Collective::kReduce, own.size(), root, ReduceOp::kAvg);
      call.type = ElementType::kF32;
      CollectiveData data = {{reinterpret_cast<char*>(own.data())}, {}};
      if (root < 0 || uint32_t(root) == rank.group.rank()) data.out = {reinterpret_cast<char*>(own.data())};
      CHECK(rank.run(call, data) == Progress::kDone);
      const float wanted = data.out.empty() ? float(rank.group.rank()) : 2.0f;
      CHECK(std::ranges::all_of(own, [&](float one) { return one == wanted; }));
    }
    // 1.0, 2.0, 3.0, 4.0 and 5.0 as upper halves of f32.
    const uint16_t bf16[] = {0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0};
    std::vector<uint16_t> own(300'001, bf16[rank.group.rank()]);
    CollectiveCall call = call_of(Collective::kAllReduce, own.size(), -1, ReduceOp::kAvg);
    call.type = ElementType::kBf16;
    CHECK(rank.run(call, {{reinterpret_cast<char*>(own.data())}, {reinterpret_cast<char*>(own.data())}}) == Progress::kDone);
    CHECK(std::ranges::all_of(own, [&](uint16_t one) { return one == bf16[2]; }));
  });
}

TEST(what_ranks_of_other_hosts_have_called_differs) {
  Worlds worlds({0, 1, 1});
  worlds.in_threads([&](Rank& rank) {
    const uint32_t me = rank.group.rank();
    Elements own = numbers(10'000, 1);
    const Elements before = own;
    CollectiveCall call = call_of(Collective::kAllReduce, me == 1 ? 9'999 : 10'000);
    CHECK(rank.barrier() == Progress::kDone);
    CHECK(rank.run(call, {{reinterpret_cast<char*>(own.data())}, {reinterpret_cast<char*>(own.data())}}) == Progress::kMismatch);
    for (int i = 0; i < 2; ++i) {
      for (uint32_t r = 0; r < 3; ++r) CHECK_EQ(rank.group.called(r).count, r == 1 ? 9'999u : 10'000u);
      CHECK(own == before);
      CHECK(rank.barrier() == Progress::kBroken);
      CHECK(rank.group.broken()->cause == Cause::kMismatch);
    }
  });
}

TEST(a_connection_that_breaks_in_an_operation_changes_nothing) {
  Worlds worlds({0, 1, 0, 1});
  std::atomic<bool> over{false};
  std::thread breaker([&] {
    for (int i = 0; i < 10 && !over; ++i) {
      ::usleep(20'000);
      worlds.all[0]->pump->disconnect(1, "a test");
      worlds.all[1]->pump->disconnect(0, "a test");
      join(*worlds.all[0], *worlds.all[1]);
    }
  });
  worlds.in_threads([&](Rank& rank) {
    for (int i = 0; i < 4; ++i) every_operation(rank, 4, 300'001);
  });
  over = true;
  breaker.join();
}

TEST(a_rank_that_leaves_is_known_to_all_hosts) {
  Worlds worlds({0, 1, 2, 1});
  worlds.in_threads([&](Rank& rank) {
    CHECK(rank.barrier() == Progress::kDone);
    // Rank 2 does not come; rank 0 does not wait for it as long as the others.
    if (rank.group.rank() == 2) return;
    CHECK(rank.barrier(rank.group.rank() == 0 ? kSecond / 5 : 0) == Progress::kBroken);
    const auto broken = rank.group.broken();
    CHECK(broken->cause == Cause::kTimedOut);
    CHECK_EQ(broken->rank, 0u);
    CHECK(broken->why.find('2') != std::string::npos);  // others may not have been there either by then
    CHECK(rank.barrier() == Progress::kBroken);
  });
}

// What it had given is there when the other one comes, and so is the word that it waits for nobody any more.
TEST(a_rank_that_has_left_before_the_other_one_comes) {
  Worlds worlds({0, 1});
  std::latch left(2);
  worlds.in_threads([&](Rank& rank) {
    CHECK(rank.barrier() == Progress::kDone);
    if (rank.group.rank() == 0) CHECK(rank.barrier(kSecond / 50) == Progress::kBroken);
    left.arrive_and_wait();
    Host& here = worlds.of(rank.group.rank());
    if (rank.group.rank() != 0) {  // the word has come
      const auto ring = CollectiveGroup::links_at(2) + CollectiveLinks::ring_at(worlds.hosts, 0, 1);
      Session::await([&] { return here.segments[kNumber]->ring(ring).header->head.load() == 3; });
      CHECK(rank.barrier() == Progress::kBroken);
    }
    broken_by(rank, Cause::kTimedOut, 0, "1");
  });
}

// It hears of that together with the other rank's word that it has come to this one.
TEST(what_a_rank_has_left_later_does_not_end_an_operation_that_it_has_finished) {
  Worlds worlds({0, 1});
  std::latch waits(2), left(2);
  worlds.in_threads([&](Rank& rank) {
    if (rank.group.rank() == 0) {
      waits.arrive_and_wait();
      CHECK(rank.barrier() == Progress::kDone);
      CHECK(rank.barrier(kSecond / 50) == Progress::kBroken);
      left.arrive_and_wait();
      return;
    }
    const CollectiveGroup::Entered entered(rank.group);
    rank.group.begin({}, {}, now_ns() + kSoon);
    CHECK(rank.group.go_on() == Progress::kSleep);
    waits.arrive_and_wait();
    left.arrive_and_wait();
    const auto ring = CollectiveGroup::links_at(2) + CollectiveLinks::ring_at(worlds.hosts, 0, 1);
    Session::await([&] { return worlds.of(1).segments[kNumber]->ring(ring).header->head.load() == 3; });
    CHECK(rank.group.go_on() == Progress::kDone);
  });
}

TEST(a_failure_is_told_to_who_waits_on_another_host) {
  Worlds worlds({0, 1, 1});
  worlds.in_threads([&](Rank& rank) {
    rank.begins();
    CHECK(rank.barrier() == Progress::kDone);
    if (rank.group.rank() == 1) {
      rank.group.raised("has raised", {});
      return;
    }
    CHECK(rank.barrier() == Progress::kBroken);
    broken_by(rank, Cause::kRaised, 1, "has raised");
  });
}

TEST(a_rank_that_raises_while_nobody_waits_is_heard_of_by_all_hosts) {
  Worlds worlds({0, 1, 2, 1});
  std::latch raised(4);
  worlds.in_threads([&](Rank& rank) {
    const uint32_t me = rank.group.rank();
    rank.begins_step(3, 7);
    CHECK(rank.barrier() == Progress::kDone);
    if (me == 1) rank.group.raised("has raised", rank.group.execution());
    raised.arrive_and_wait();
    for (int i = 0; i < 2; ++i) {
      CHECK(rank.barrier() == Progress::kBroken);
      broken_by(rank, Cause::kRaised, 1, "has raised");
      CHECK((rank.group.failed_in_execution() == Execution{3, 7}));
    }
    rank.begins();
    CHECK(!rank.group.failed_in_execution());
  });
}

TEST(a_process_of_another_host_that_dies) {
  Worlds worlds({0, 1, 1});
  worlds.in_threads([&](Rank& rank) {
    CHECK(rank.barrier() == Progress::kDone);
    if (rank.group.rank() == 1) {
      worlds.of(1).process_table->announce_death(2);
      return;
    }
    CHECK(rank.barrier() == Progress::kBroken);
    broken_by(rank, Cause::kDied, 1, "");
  });
}

TEST(a_host_that_is_lost) {
  Worlds worlds({0, 1, 0});
  worlds.in_threads([&](Rank& rank) {
    CHECK(rank.barrier() == Progress::kDone);
    if (rank.group.rank() == 1) {
      worlds.all[1]->pump->stop();
      return;
    }
    CHECK(rank.barrier() == Progress::kBroken);
    broken_by(rank, Cause::kDied, 1, "");
  });
}

TEST(nothing_of_an_operation_stays_in_the_arena) {
  Worlds worlds({0, 1, 1});
  worlds.in_threads([&](Rank& rank) {
    for (int i = 0; i < 5; ++i) every_operation(rank, 3, 100'000);
    // Behind the next operation all have read what came before.
    CHECK(rank.barrier() == Progress::kDone);
    CHECK(rank.barrier() == Progress::kDone);
    Arena& arena = *worlds.of(rank.group.rank()).arenas[rank.group.rank() + 1];
    Session::await([&] {
      arena.give_back(0);
      return arena.blocks_out() == 0;
    });
  });
}
