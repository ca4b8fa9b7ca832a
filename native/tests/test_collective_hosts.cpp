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
    for (int i = 0; i < 3; ++i) {
      CHECK(rank.run(call, {{reinterpret_cast<char*>(own.data())}, {reinterpret_cast<char*>(own.data())}}) == Progress::kMismatch);
      for (uint32_t r = 0; r < 3; ++r) CHECK_EQ(rank.group.called(r).count, r == 1 ? 9'999u : 10'000u);
      CHECK(own == before);
      CHECK(rank.barrier() == Progress::kDone);
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
    const CollectiveGroup::Turn turn(rank.group);
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
      rank.fails();
      return;
    }
    CHECK(rank.barrier() == Progress::kBroken);
    broken_by(rank, Cause::kRaised, 1, "has raised");
  });
}

// What has failed at all ranks alike is the same step of all.
TEST(what_fails_on_all_hosts_alike_breaks_nothing) {
  Worlds worlds({0, 1, 1});
  worlds.in_threads([&](Rank& rank) {
    for (int i = 0; i < 50; ++i) {
      rank.begins();
      if (i % 3 == 2) rank.fails();
      if (i % 6 == 5) rank.fails("other");
      rank.begins();
      CHECK(rank.barrier() == Progress::kDone);
    }
  });
}

// What is told of a rank is its last failure, so there may be any number of them: those that were learned of break nothing,
// and the one that nobody has learned of is told in its own words.
TEST(more_failures_than_a_ring_has_slots) {
  for (bool known : {true, false}) {
    Worlds worlds({0, 1, 1});
    std::latch failed(3);
    std::atomic<uint64_t> last = 0;
    worlds.in_threads([&](Rank& rank) {
      const uint32_t me = rank.group.rank();
      rank.begins();
      CHECK(rank.barrier() == Progress::kDone);
      if (me == 1) {
        for (int i = 0; i < 100; ++i) {
          rank.sees(last = rank.fails());
          // All calls are made on the first host, which has heard of it, and says so.
          await_sight(worlds, 0, 2, last);
          Session::await([&] { return rank.board().header()->heard.at(2, last, 0).has_value(); });
        }
        if (!known) rank.fails("step", 9, true, "was the last");
      }
      failed.arrive_and_wait();
      if (known || me != 1) rank.begins();
      if (known) {
        CHECK(rank.run({}, {}, 0, worlds.all[0]->board->sights()) == Progress::kDone);
      } else if (me != 1) {
        CHECK(rank.barrier() == Progress::kBroken);
        broken_by(rank, Cause::kRaised, 1, "was the last");
      }
    });
  }
}

// A rank that another one waits for fails again and again, and says so each time.
TEST(a_rank_that_is_waited_for_fails_more_often_than_a_ring_has_slots) {
  Worlds worlds({0, 1});
  std::latch waits(2);
  worlds.in_threads([&](Rank& rank) {
    rank.begins();
    CHECK(rank.barrier() == Progress::kDone);
    if (rank.group.rank() == 0) {
      const CollectiveGroup::Turn turn(rank.group);
      rank.group.begin({}, {}, 0);
      Progress progress = rank.group.go_on();
      waits.arrive_and_wait();
      for (; progress == Progress::kSleep; progress = rank.group.go_on()) rank.inbox.park(rank.group.seen(), 0);
      CHECK(progress == Progress::kBroken);
      broken_by(rank, Cause::kRaised, 1, "was the last");
      return;
    }
    // All are known to who has called the one that waits, but the last.
    for (int i = 0; i < 100; ++i) {
      const uint64_t number = rank.board().fail(2);
      rank.sees(number);
      if (i == 0) await_sight(worlds, 0, 2, number);
      if (i == 0) waits.arrive_and_wait();
      rank.group.note_failed_call(i < 99 ? "has raised" : "was the last", "step", {9, 1}, true, i < 99 ? number : rank.board().fail(2));
    }
  });
}

// Steps of graphs have no stamps: whether a failure was before is what the hosts of those who have begun since had heard.
TEST(who_begins_a_step_behind_a_failure_that_was_heard_of) {
  enum class Then { kSteps, kCalls, kMixed };
  for (const bool step_fails : {true, false})
    for (const Then then : {Then::kSteps, Then::kCalls, Then::kMixed}) {
      if (!step_fails && then == Then::kCalls) continue;  // that is for sights
      for (const bool heard : {true, false}) {
        Worlds worlds({0, 1, 0});
        std::latch failed(3), begun(3);
        worlds.in_threads([&](Rank& rank) {
          const uint32_t me = rank.group.rank();
          rank.begins();
          CHECK(rank.barrier() == Progress::kDone);
          const auto begins = [&] {
            if (then == Then::kSteps || (then == Then::kMixed && me != 1)) rank.begins_step(me + 1, 7);
            else rank.begins();
          };
          if (!heard && me != 1) begins();
          begun.arrive_and_wait();
          if (me == 1) step_fails ? rank.group.note_failure("has raised") : (void)rank.fails();
          failed.arrive_and_wait();
          if (heard && me != 1) await_failures(worlds, me, 1, 1);
          if (heard || me == 1) begins();
          if (!heard && me == 1) return;  // it does not come: the others have begun what it has missed
          CHECK(rank.barrier() == (heard ? Progress::kDone : Progress::kBroken));
          if (heard) CHECK(rank.barrier() == Progress::kDone);
          else broken_by(rank, Cause::kRaised, 1, "has raised");
        });
      }
    }
}

// It has failed in the execution that the other one begins behind that, and goes on elsewhere. Does it not come to an
// operation there, it is waited for as one that begins nothing.
TEST(an_execution_in_which_a_rank_of_another_host_has_failed_is_not_met_by_what_that_runs_later) {
  for (const bool comes : {true, false}) {
    Worlds worlds({0, 1});
    std::latch failed(2);
    worlds.in_threads([&](Rank& rank) {
      const uint32_t me = rank.group.rank();
      if (me == 1) {
        rank.begins_step(3, 7);
        rank.group.note_failure("has raised");
      }
      failed.arrive_and_wait();
      if (me == 0) await_failures(worlds, 0, 1, 1);
      rank.begins_step(me == 0 ? 3 : 4, 7);
      if (me == 1 && !comes) return;
      CHECK(rank.barrier() == Progress::kBroken);
      broken_by(rank, comes ? Cause::kShifted : Cause::kRaised, 1, "has raised");
    });
  }
}

TEST(a_rank_of_another_host_that_has_failed_in_an_execution_goes_on_with_it) {
  Worlds worlds({0, 1});
  std::latch failed(2);
  worlds.in_threads([&](Rank& rank) {
    const uint32_t me = rank.group.rank();
    if (me == 1) {
      rank.begins_step(3, 7);
      rank.group.note_failure("has raised");
    }
    failed.arrive_and_wait();
    if (me == 0) {
      await_failures(worlds, 0, 1, 1);
      ::usleep(60'000);
    }
    rank.begins_step(3, 7);
    CHECK(rank.barrier() == Progress::kDone);
  });
}

// It fails, as who has called the others knew, and begins nothing: they do not wait without end.
TEST(a_rank_of_another_host_that_begins_nothing_after_a_failure) {
  Worlds worlds({0, 1});
  std::latch failed(2);
  worlds.in_threads([&](Rank& rank) {
    rank.begins();
    CHECK(rank.barrier() == Progress::kDone);
    if (rank.group.rank() == 1) rank.group.note_failure("has raised");
    failed.arrive_and_wait();
    if (rank.group.rank() == 1) return;
    await_failures(worlds, 0, 1, 1);
    rank.begins();
    CHECK(rank.barrier() == Progress::kBroken);
    broken_by(rank, Cause::kRaised, 1, "has raised");
    CHECK(rank.longest_sleep > 500 * kMs);
  });
}

TEST(a_process_of_another_host_that_dies) {
  Worlds worlds({0, 1, 1});
  worlds.in_threads([&](Rank& rank) {
    CHECK(rank.barrier() == Progress::kDone);
    if (rank.group.rank() == 1) {
      worlds.of(1).board->announce_death(2);
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
