// Collective operations: ranks in threads and in processes, ranks that differ, and ranks that never come.
#include "collective_setup.h"

using namespace conveyor;

TEST(every_operation_of_threads) {
  for (uint32_t ranks : {1u, 2u, 3u, 5u}) {
    World world(ranks);
    in_threads(world, [&](Rank& rank) {
      // Nothing, one, a part of a line, one shot, pieces of all kinds.
      for (size_t count : {size_t(0), size_t(1), size_t(17), size_t(8192), size_t(8193), size_t(65536), size_t(200'001)}) every_operation(rank, ranks, count);
    });
  }
}

TEST(every_operation_of_processes) {
  World world(3);
  std::vector<check::Child> children;
  for (uint32_t r = 0; r < 3; ++r)
    children.emplace_back([&, r] {
      Rank rank(world, r);
      for (int i = 0; i < 20; ++i) every_operation(rank, 3, 40'000);
    });
  for (check::Child& child : children) CHECK(child.passed());
}

TEST(ranks_that_are_late_are_waited_for_asleep) {
  World world(2);
  in_threads(world, [&](Rank& rank) {
    for (int i = 0; i < 300; ++i) {
      if (int(rank.group.rank()) == i % 2) ::usleep(i % 3 * 100);
      CHECK(rank.barrier() == Progress::kDone);
    }
  });
}

TEST(ranks_that_call_different_things_are_told_and_the_group_is_broken) {
  const auto differ = [](const auto& call_of_rank) {
    World world(3);
    in_threads(world, [&](Rank& rank) {
      const uint32_t me = rank.group.rank();
      Elements own = numbers(10'000, 1);
      const Elements before = own;
      const CollectiveData data = {{reinterpret_cast<char*>(own.data())}, {reinterpret_cast<char*>(own.data())}};
      const CollectiveCall call = call_of_rank(me);
      CHECK(rank.barrier() == Progress::kDone);
      CHECK(rank.run(call, call.operation == Collective::kBarrier ? CollectiveData{} : data) == Progress::kMismatch);
      CHECK(own == before);
      for (int i = 0; i < 2; ++i) {
        for (uint32_t r = 0; r < 3; ++r) CHECK(rank.group.called(r).same(call_of_rank(r)));
        CHECK(rank.barrier() == Progress::kBroken);
        CHECK(rank.group.broken()->cause == Cause::kMismatch);
      }
    });
  };
  const CollectiveCall usual = call_of(Collective::kAllReduce, 10'000);
  CollectiveCall shaped = usual, typed = usual;
  shaped.shape[0] = 100;
  typed.type = ElementType::kF32;
  const CollectiveCall shorter = call_of(Collective::kAllReduce, 9'999), other = call_of(Collective::kAllReduce, 10'000, -1, ReduceOp::kMax);
  for (const CollectiveCall& odd : {shorter, CollectiveCall{}, shaped, other, typed})
    for (const uint32_t who : {0u, 2u}) differ([&](uint32_t rank) { return rank == who ? odd : usual; });
}

TEST(ranks_that_meet_for_different_executions_of_a_graph_are_told_whose_has_failed) {
  for (const uint32_t late : {0u, 2u}) {
    World world(3);
    in_threads(world, [&](Rank& rank) {
      Elements own = numbers(10'000, 1);
      const Elements before = own;
      const auto all_reduce = [&](uint32_t graph, uint64_t execution, uint64_t skipped = 0) {
        CollectiveCall call = call_of(Collective::kAllReduce, 10'000);
        call.graph = graph;
        call.execution = execution;
        call.skipped = skipped;
        return rank.run(call, {{reinterpret_cast<char*>(own.data())}, {reinterpret_cast<char*>(own.data())}});
      };
      const uint32_t me = rank.group.rank();
      CHECK(all_reduce(me == late ? 0 : 7, 3) == Progress::kDone);  // of a call beside steps
      CHECK(all_reduce(1 + me, me) == Progress::kDone);
      CHECK(all_reduce(1, 10 + me, 10) == Progress::kDone);  // they mean to meet: what was skipped is long ago
      own = before;
      CHECK(all_reduce(1, me == late ? 14 : 15, me == late ? 0 : 15) == Progress::kBroken);
      CHECK(own == before);
      CHECK(rank.group.broken()->cause == Cause::kInterrupted && rank.group.broken()->rank == late);
    });
  }
}

TEST(a_rank_that_dies_frees_the_others) {
  for (int late = 0; late < 2; ++late) {
    World world(3);
    uint32_t victim = 3;  // its slot
    world.session.process_table->slot(victim)->condition.store(Condition::kFree);
    check::Child child = world.session.start(victim);
    world.members[2].incarnation = world.session.process_table->slot(victim)->incarnation.load();
    std::vector<std::thread> threads;
    std::atomic<int> asleep{0};
    std::atomic<uint64_t> killed{0}, longest{0};
    for (uint32_t r = 0; r < 2; ++r)
      threads.emplace_back([&, r] {
        Rank rank(world, r);
        if (late) {
          world.session.await_condition(victim, Condition::kDead);
        } else {
          ++asleep;
        }
        CHECK(rank.barrier() == Progress::kBroken);
        const uint64_t took = now_ns() - killed;
        CHECK(took < kSoon);
        longest = std::max(longest.load(), took);
        const auto broken = rank.group.broken();
        REQUIRE(broken.has_value());
        CHECK(broken->cause == Cause::kDied);
        CHECK_EQ(broken->rank, 2u);
        CHECK(rank.barrier() == Progress::kBroken);  // and so it stays
      });
    if (!late) Session::await([&] { return asleep == 2; });
    ::usleep(2'000);
    killed = now_ns();
    child.kill(SIGKILL);
    for (std::thread& thread : threads) thread.join();
    std::printf("[%.2f ms] ", double(longest.load()) / kMs);
  }
}

TEST(a_timeout_and_an_interruption_break_the_group) {
  World world(3);
  Rank first(world, 0), second(world, 1), third(world, 2);
  CHECK(first.barrier(5 * kMs) == Progress::kBroken);
  CHECK(first.group.broken()->cause == Cause::kTimedOut);
  CHECK(second.barrier() == Progress::kBroken);
  CHECK_EQ(second.group.broken()->rank, 0u);

  World other(2);
  Rank one(other, 0), two(other, 1);
  const CollectiveGroup::Entered entered(one.group);
  REQUIRE(bool(entered));
  CHECK(!CollectiveGroup::Entered(one.group));  // not twice at a time
  one.group.begin({}, {}, 0);
  CHECK(one.group.go_on() == Progress::kSleep);
  one.group.leave(Cause::kInterrupted, "KeyboardInterrupt");
  CHECK(two.barrier() == Progress::kBroken);
  CHECK(two.group.broken()->cause == Cause::kInterrupted);
  CHECK_EQ(two.group.broken()->why, std::string("KeyboardInterrupt"));
}

TEST(a_destroyed_group_lets_go_of_who_waits) {
  World world(2);
  Rank first(world, 0);
  std::atomic<bool> waits{false};
  std::thread waiter([&] {
    waits = true;
    CHECK(first.barrier() == Progress::kBroken);
    CHECK(first.group.broken()->cause == Cause::kDestroyed);
  });
  Session::await([&] { return waits.load(); });
  ::usleep(2'000);
  CollectiveGroup::destroy(*world.segment, *world.session.process_table, world.members);
  waiter.join();
}

TEST(who_has_made_a_group_sees_who_waits_for_whom_and_can_end_it_with_the_session) {
  World world(3);
  Rank first(world, 0), third(world, 2);
  const auto waits = [&] { return CollectiveGroup::waits(*world.segment); };
  for (const auto& [barrier, ranks] : waits()) CHECK(barrier == 0 && ranks.empty());
  first.group.begin({}, {}, 0);
  CHECK(first.group.go_on() == Progress::kSleep);
  CHECK(waits()[0] == std::make_pair(uint64_t(1), std::vector<uint32_t>{1, 2}));
  CHECK(waits()[1].second.empty());
  third.group.begin({}, {}, 0);
  CHECK(third.group.go_on() == Progress::kSleep);
  CHECK(waits()[0] == std::make_pair(uint64_t(1), std::vector<uint32_t>{1}));
  CHECK(third.group.absent() == std::vector<uint32_t>{1});
  CollectiveGroup::destroy(*world.segment, *world.session.process_table, world.members, Cause::kEnded);
  CHECK(first.group.go_on() == Progress::kBroken);
  CHECK(first.group.broken()->cause == Cause::kEnded);
  CHECK(waits()[0].second.empty());
}

TEST(what_cannot_be_is_refused) {
  World world(2);
  Rank rank(world, 0);
  Elements own(4);
  char* at = reinterpret_cast<char*>(own.data());
  CHECK_THROWS(std::invalid_argument, rank.group.check(call_of(Collective::kAllReduce, 4), {}));
  CHECK_THROWS(std::invalid_argument, rank.group.check(call_of(Collective::kAllReduce, 4), {{nullptr}, {at}}));
  CHECK_THROWS(std::invalid_argument, rank.group.check(call_of(Collective::kAllReduce, 4, 1), {{at}, {at}}));
  CHECK_THROWS(std::invalid_argument, rank.group.check(call_of(Collective::kAllReduce, 4, -1, ReduceOp::kAvg), {{at}, {at}}));
  CHECK_THROWS(std::invalid_argument, rank.group.check(call_of(Collective::kBroadcast, 4, 2), {{}, {at}}));
  CHECK_THROWS(std::invalid_argument, rank.group.check(call_of(Collective::kAllGather, 4), {{at}, {at}}));
  auto empty = Segment::create(CollectiveGroup::bytes(2));
  CHECK_THROWS(std::system_error, CollectiveGroup(empty, world.session.process_table, rank.inbox, 0, world.members));
  CHECK_THROWS(std::system_error, CollectiveGroup(world.segment, world.session.process_table, rank.inbox, 2, world.members));
  CHECK_THROWS(std::system_error, CollectiveGroup::prepare(*empty, 0));
  CHECK_THROWS(std::system_error, CollectiveGroup::prepare(*empty, kMaxRanks + 1));
}
