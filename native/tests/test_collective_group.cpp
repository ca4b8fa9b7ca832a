// Collective operations: ranks in threads and in processes, ranks that differ, and ranks that never come.
#include <numeric>
#include <thread>

#include "collective_group.h"
#include "death_setup.h"

using namespace conveyor;
using Progress = CollectiveGroup::Progress;

namespace {

// A board with a slot for each rank, from slot 1 on, and the group's segment.
struct World {
  explicit World(uint32_t ranks) : session(64), segment(Segment::create(CollectiveGroup::bytes(ranks))) {
    CollectiveGroup::prepare(*segment, ranks);
    for (uint32_t r = 0; r < ranks; ++r) {
      session.board->prepare(r + 1, "rank");
      session.board->slot(r + 1)->condition.store(Condition::kAlive);
      members.push_back({r + 1, session.board->slot(r + 1)->incarnation.load()});
    }
  }
  Session session;
  std::shared_ptr<Segment> segment;
  std::vector<CollectiveGroup::Member> members;
};

struct Rank {
  Rank(World& world, uint32_t rank) : inbox(world.session.board, rank + 1, event.get(), 0), group(world.segment, world.session.board, inbox, rank, world.members) {}

  Progress run(const CollectiveCall& call, CollectiveData data, uint64_t timeout = 0, uint64_t made = CollectiveGroup::kNow) {
    group.check(call, data);
    const uint64_t deadline = timeout == 0 ? now_ns() + 20 * kSoon : now_ns() + timeout;
    const CollectiveGroup::Turn turn(group);
    if (!CHECK(bool(turn))) throw check::Abandon{};
    group.begin(call, std::move(data), deadline, made);
    for (;;) {
      const Progress progress = group.go_on();
      if (progress != Progress::kSleep) return progress;
      if (now_ns() >= deadline) {
        CHECK(timeout != 0);
        group.leave(Cause::kTimedOut, "");
        return Progress::kBroken;
      }
      ++sleeps;
      inbox.park(group.seen(), group.wake_at());
    }
  }
  Progress barrier(uint64_t timeout = 0) { return run({}, {}, timeout); }

  // A call of `method` begins.
  void begins() { status().since_ns.store(now_ns()); }
  Status& status() { return board().slot(group.rank() + 1)->status; }
  Board& board() { return *inbox.board(); }
  // It has raised; the failure's number.
  uint64_t fails(const char* method = "step", uint32_t caller = 9, bool ran = true) {
    const uint64_t number = board().fail(group.rank() + 1);
    group.note_failed_call("has raised", method, {caller, 1}, ran, number);
    return number;
  }
  void sees(uint64_t number) { board().see(group.rank() + 1, number); }

  Fd event{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  Inbox inbox;
  CollectiveGroup group;
  int sleeps = 0;
};

CollectiveCall call_of(Collective operation, uint64_t count, int root = -1, ReduceOp op = ReduceOp::kSum) {
  CollectiveCall call;
  call.operation = operation;
  call.type = ElementType::kI32;
  call.op = op;
  call.count = count;
  call.root = root;
  call.dims = 1;
  call.shape[0] = int64_t(count);
  return call;
}

using Numbers = std::vector<int32_t>;

Numbers numbers(size_t count, int32_t first) {
  Numbers made(count);
  std::iota(made.begin(), made.end(), first);
  return made;
}

std::vector<const char*> sources(const std::vector<Numbers>& all) {
  std::vector<const char*> made;
  for (const Numbers& one : all) made.push_back(reinterpret_cast<const char*>(one.data()));
  return made;
}

std::vector<char*> destinations(std::vector<Numbers>& all) {
  std::vector<char*> made;
  for (Numbers& one : all) made.push_back(reinterpret_cast<char*>(one.data()));
  return made;
}

// What rank `from` has for rank `to`.
int32_t first_of(uint32_t from, uint32_t to) { return int32_t(from * 1000 + to * 7); }

// Every operation once, as rank `me` of `ranks`.
void every_operation(Rank& rank, uint32_t ranks, size_t count) {
  const uint32_t me = rank.group.rank(), root = ranks - 1;
  int32_t sum = 0, here = 0;
  for (uint32_t r = 0; r < ranks; ++r) sum += first_of(r, 0), here += first_of(r, me);
  const int32_t n = int32_t(ranks);
  const auto is = [&](const Numbers& got, int32_t first, int32_t step = 1) {
    for (size_t i = 0; i < got.size(); ++i)
      if (got[i] != first + step * int32_t(i)) return check::note_equal(got[i], first + step * int32_t(i), __FILE__, __LINE__, "an element");
    return got.size() == count;
  };
  std::vector<Numbers> own = {numbers(count, first_of(me, 0))}, result(1, Numbers(count)), many(ranks, Numbers(count)), lists;
  for (uint32_t r = 0; r < ranks; ++r) lists.push_back(numbers(count, first_of(me, r)));
  const auto done = [&](CollectiveCall call, CollectiveData data) { CHECK(rank.run(call, std::move(data)) == Progress::kDone); };

  done({}, {});
  done(call_of(Collective::kAllReduce, count), {sources(own), destinations(result)});
  CHECK(is(result[0], sum, n));
  std::vector<Numbers> in_place = own;
  done(call_of(Collective::kAllReduce, count, -1, ReduceOp::kMax), {sources(in_place), destinations(in_place)});
  CHECK(is(in_place[0], first_of(ranks - 1, 0)));
  in_place = own;
  done(call_of(Collective::kReduce, count, int(root)), {sources(in_place), me == root ? destinations(in_place) : std::vector<char*>{}});
  CHECK(is(in_place[0], me == root ? sum : first_of(me, 0), me == root ? n : 1));
  done(call_of(Collective::kReduceScatter, count), {sources(lists), destinations(result)});
  CHECK(is(result[0], here, n));
  done(call_of(Collective::kAllGather, count), {sources(own), destinations(many)});
  for (uint32_t r = 0; r < ranks; ++r) CHECK(is(many[r], first_of(r, 0)));
  many.assign(ranks, Numbers(count));
  done(call_of(Collective::kGather, count, int(root)), {sources(own), me == root ? destinations(many) : std::vector<char*>{}});
  for (uint32_t r = 0; r < ranks && me == root; ++r) CHECK(is(many[r], first_of(r, 0)));
  result[0] = me == root ? own[0] : Numbers(count);
  done(call_of(Collective::kBroadcast, count, int(root)), {me == root ? sources(own) : std::vector<const char*>{}, me == root ? std::vector<char*>{} : destinations(result)});
  CHECK(is(result[0], first_of(root, 0)));
  done(call_of(Collective::kScatter, count, int(root)), {me == root ? sources(lists) : std::vector<const char*>{}, destinations(result)});
  CHECK(is(result[0], first_of(root, me)));
  done(call_of(Collective::kAllToAll, count), {sources(lists), destinations(many)});
  for (uint32_t r = 0; r < ranks; ++r) CHECK(is(many[r], first_of(r, me)));
}

template <class Body>
void in_threads(World& world, Body body) {
  std::vector<std::thread> threads;
  for (uint32_t r = 0; r < world.members.size(); ++r)
    threads.emplace_back([&world, &body, r] {
      check::guarded("rank", [&] {
        Rank rank(world, r);
        body(rank);
      });
    });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

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

TEST(ranks_that_call_different_things_are_told_and_go_on) {
  World world(3);
  in_threads(world, [&](Rank& rank) {
    const uint32_t me = rank.group.rank();
    Numbers own = numbers(10'000, 1);
    const Numbers before = own;
    const CollectiveData data = {{reinterpret_cast<char*>(own.data())}, {reinterpret_cast<char*>(own.data())}};
    const auto differ = [&](CollectiveCall call) {
      CHECK(rank.run(call, call.operation == Collective::kBarrier ? CollectiveData{} : data) == Progress::kMismatch);
      CHECK(rank.group.called(me).same(call));
      CHECK(own == before);
      CHECK(rank.barrier() == Progress::kDone);
    };
    differ(call_of(Collective::kAllReduce, me == 1 ? 9'999 : 10'000));
    differ(me == 2 ? CollectiveCall{} : call_of(Collective::kAllReduce, 10'000));
    CollectiveCall shaped = call_of(Collective::kAllReduce, 10'000);
    shaped.shape[0] = me == 0 ? 100 : 10'000;
    differ(shaped);
    differ(call_of(Collective::kAllReduce, 10'000, -1, me == 0 ? ReduceOp::kMin : ReduceOp::kMax));
    CollectiveCall typed = call_of(Collective::kAllReduce, 10'000);
    typed.type = me == 0 ? ElementType::kF32 : ElementType::kI32;
    differ(typed);
  });
}

TEST(a_rank_that_dies_frees_the_others) {
  for (int late = 0; late < 2; ++late) {
    World world(3);
    uint32_t victim = 3;  // its slot
    world.session.board->slot(victim)->condition.store(Condition::kFree);
    check::Child child = world.session.start(victim);
    world.members[2].incarnation = world.session.board->slot(victim)->incarnation.load();
    std::vector<std::thread> threads;
    std::atomic<int> asleep{0};
    std::atomic<uint64_t> killed{0};
    for (uint32_t r = 0; r < 2; ++r)
      threads.emplace_back([&, r] {
        Rank rank(world, r);
        if (late) {
          world.session.await_condition(victim, Condition::kDead);
        } else {
          ++asleep;
        }
        CHECK(rank.barrier() == Progress::kBroken);
        CHECK(now_ns() - killed < kSoon);
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
  }
}

enum class Fails { kWhileAwaited, kBefore, kBeforeTheOtherHasBegun, kLongBefore };

TEST(a_rank_that_fails_frees_those_who_wait_for_it) {
  for (auto when : {Fails::kWhileAwaited, Fails::kBefore, Fails::kBeforeTheOtherHasBegun, Fails::kLongBefore}) {
    const bool before = when != Fails::kWhileAwaited;
    World world(2);
    Rank first(world, 0), second(world, 1);
    const uint64_t now = now_ns();
    // Both run something, and the second began before it fails.
    for (uint32_t slot : {1u, 2u}) world.session.board->slot(slot)->status.since_ns.store(now);
    std::atomic<bool> waits{false};
    if (before) second.group.note_failure("has raised");
    if (when == Fails::kLongBefore) ::usleep(60'000);
    if (before && when != Fails::kBefore) world.session.board->slot(1)->status.since_ns.store(now_ns());
    std::thread waiter([&] {
      waits = true;
      CHECK(first.barrier() == Progress::kBroken);
    });
    Session::await([&] { return waits.load(); });
    const uint64_t begin = now_ns();
    if (!before) {
      ::usleep(3'000);
      second.group.note_failure("has raised");
    }
    waiter.join();
    CHECK(now_ns() - begin < (when == Fails::kLongBefore ? 5 : 1) * kSoon);
    const auto broken = first.group.broken();
    REQUIRE(broken.has_value());
    CHECK(broken->cause == Cause::kRaised);
    CHECK_EQ(broken->rank, 1u);
    CHECK_EQ(broken->why, std::string("has raised"));
  }
}

TEST(what_failed_long_before_is_no_reason_at_once) {
  World world(2);
  Rank first(world, 0), second(world, 1);
  second.group.note_failure("something else");
  ::usleep(60'000);  // longer than who fails just before is thought to have meant it
  for (uint32_t slot : {1u}) world.session.board->slot(slot)->status.since_ns.store(now_ns());
  std::thread waiter([&] { CHECK(first.barrier() == Progress::kDone); });
  ::usleep(70'000);
  CHECK(second.barrier() == Progress::kDone);
  waiter.join();
}

TEST(who_runs_something_else_after_a_failure_is_waited_for) {
  World world(2);
  Rank first(world, 0), second(world, 1);
  second.group.note_failure("something else");
  for (uint32_t slot : {1u, 2u}) world.session.board->slot(slot)->status.since_ns.store(now_ns() + 1);
  std::thread waiter([&] { CHECK(first.barrier() == Progress::kDone); });
  ::usleep(70'000);
  CHECK(second.barrier() == Progress::kDone);
  waiter.join();
}

// All ranks come to a barrier, by calls that were made when the clock of sights said so.
void meet(std::vector<Rank*> ranks, std::vector<uint64_t> made, Progress want) {
  std::vector<std::thread> others;
  for (size_t i = 1; i < ranks.size(); ++i)
    others.emplace_back([=] { CHECK(ranks[i]->run({}, {}, 0, made[i]) == want); });
  CHECK(ranks[0]->run({}, {}, 0, made[0]) == want);
  for (std::thread& other : others) other.join();
}

// Two of them, after the second has failed.
struct Pair {
  Pair() : world(2), first(world, 0), second(world, 1) {
    first.begins();
    second.begins();
    meet({&first, &second}, {0, 0}, Progress::kDone);
  }
  void meet_if(bool together, uint64_t one, uint64_t other) {
    first.begins();
    second.begins();
    meet({&first, &second}, {one, other}, together ? Progress::kDone : Progress::kBroken);
    REQUIRE(first.group.broken().has_value() != together);
    if (together) return meet({&first, &second}, {0, 0}, Progress::kDone);
    CHECK(first.group.broken()->cause == Cause::kShifted);
    CHECK_EQ(second.group.broken()->why, std::string("has raised"));
  }
  World world;
  Rank first, second;
};

TEST(calls_that_were_made_after_a_failure_was_learned_of_meet) {
  for (uint64_t one : {0, 1, 2})
    for (uint64_t other : {0, 1, 2}) {
      Pair pair;
      pair.first.sees(pair.first.fails());  // the clock says 1
      pair.first.begins();
      pair.second.begins();
      meet({&pair.first, &pair.second}, {1, 1}, Progress::kDone);
      pair.second.sees(pair.second.fails());  // and now 2
      pair.meet_if(one == 2 && other == 2, one, other);
    }
}

TEST(of_a_failure_that_nobody_has_learned_of_no_call_can_know) {
  Pair pair;
  pair.second.fails();
  const uint64_t later = pair.second.fails("another");
  pair.second.sees(later);
  pair.meet_if(false, 1, 1);
  CHECK_EQ(pair.first.group.broken()->rank, 1u);
}

TEST(a_call_that_is_made_by_the_operation_itself_knows_of_what_is_known) {
  for (bool seen : {true, false}) {
    Pair pair;
    const uint64_t number = pair.second.fails();
    if (seen) pair.second.sees(number);
    pair.meet_if(seen, CollectiveGroup::kNow, CollectiveGroup::kNow);
  }
}

TEST(who_cancels_a_call_knows_when) {
  for (uint64_t made : {2, 3}) {
    Pair pair;
    for (int i = 0; i < 3; ++i) pair.second.board().note_sight();
    pair.second.group.note_failed_call("has raised", "step", {9, 1}, false, 0, 3);
    pair.meet_if(made == 3, made, 3);
  }
}

TEST(ranks_whose_same_calls_have_failed_meet) {
  const char* method[] = {"step", "another"};
  // By the method, by the caller, by whether the call had done the operation before, by their number.
  for (int differ = 0; differ < 5; ++differ) {
    Pair pair;
    if (differ != 3) pair.first.begins();
    pair.second.begins();
    pair.first.fails();
    pair.second.fails(method[differ == 1], differ == 2 ? 8 : 9);
    if (differ == 4) pair.second.fails();
    pair.meet_if(differ == 0, 0, 0);
  }
}

TEST(a_call_that_did_not_run_has_done_no_operation) {
  Pair pair;
  pair.first.fails("step", 9, false);  // what it seems to run is what was before
  pair.second.begins();
  pair.second.fails();
  pair.meet_if(true, 0, 0);
}

TEST(a_rank_that_has_failed_unlike_two_others_meets_neither) {
  World world(3);
  Rank first(world, 0), second(world, 1), third(world, 2);
  for (Rank* rank : {&first, &second, &third}) rank->begins();
  first.fails();
  third.fails();
  for (Rank* rank : {&first, &second, &third}) rank->begins();
  meet({&first, &second, &third}, {0, 0, 0}, Progress::kBroken);
  CHECK(second.group.broken()->cause == Cause::kShifted);
}

TEST(more_failures_than_the_board_keeps_were_not_learned_of) {
  for (bool late : {false, true}) {
    Pair pair;
    std::vector<uint64_t> numbers;
    for (uint32_t i = 0; i < 3 * FailedCalls::kKept; ++i) {
      numbers.push_back(pair.second.fails());
      if (!late) pair.second.sees(numbers.back());
    }
    for (uint64_t number : numbers) pair.second.sees(number);
    const uint64_t now = pair.second.board().sights();
    pair.meet_if(!late, now, now);
  }
}

TEST(a_failure_while_another_rank_is_in_its_method_is_final) {
  World world(2);
  Rank first(world, 0), second(world, 1);
  world.session.board->slot(1)->status.since_ns.store(now_ns());
  second.group.note_failure("has raised");
  world.session.board->slot(2)->status.since_ns.store(now_ns() + 1);  // its next one has begun, and nothing else tells
  CHECK(first.barrier() == Progress::kBroken);
  CHECK(first.group.broken()->cause == Cause::kRaised);
}

TEST(ranks_that_fail_while_another_waits_have_failed_alike) {
  World world(2);
  Rank first(world, 0), second(world, 1);
  first.begins();
  second.begins();
  first.fails();
  first.begins();
  second.fails();  // later than what the first runs now has begun
  second.begins();
  meet({&first, &second}, {0, 0}, Progress::kDone);
  meet({&first, &second}, {0, 0}, Progress::kDone);
}

TEST(steps_of_one_graph_meet_in_one_execution) {
  for (uint64_t execution : {7, 8}) {
    World world(2);
    Rank first(world, 0), second(world, 1);
    second.group.note_failure("has raised");
    for (uint32_t slot : {1u, 2u}) {
      Status& status = world.session.board->slot(slot)->status;
      status.since_ns.store(now_ns() + 1);
      status.graph.store(3);
      status.execution.store(slot == 1 ? 7 : execution);
    }
    meet({&first, &second}, {0, 0}, execution == 7 ? Progress::kDone : Progress::kBroken);
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
  const CollectiveGroup::Turn turn(one.group);
  REQUIRE(bool(turn));
  CHECK(!CollectiveGroup::Turn(one.group));  // not twice at a time
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
  CollectiveGroup::destroy(*world.segment, *world.session.board, world.members);
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
  CollectiveGroup::destroy(*world.segment, *world.session.board, world.members, Cause::kEnded);
  CHECK(first.group.go_on() == Progress::kBroken);
  CHECK(first.group.broken()->cause == Cause::kEnded);
  CHECK(waits()[0].second.empty());
}

TEST(what_cannot_be_is_refused) {
  World world(2);
  Rank rank(world, 0);
  Numbers own(4);
  char* at = reinterpret_cast<char*>(own.data());
  CHECK_THROWS(std::invalid_argument, rank.group.check(call_of(Collective::kAllReduce, 4), {}));
  CHECK_THROWS(std::invalid_argument, rank.group.check(call_of(Collective::kAllReduce, 4), {{nullptr}, {at}}));
  CHECK_THROWS(std::invalid_argument, rank.group.check(call_of(Collective::kAllReduce, 4, 1), {{at}, {at}}));
  CHECK_THROWS(std::invalid_argument, rank.group.check(call_of(Collective::kAllReduce, 4, -1, ReduceOp::kAvg), {{at}, {at}}));
  CHECK_THROWS(std::invalid_argument, rank.group.check(call_of(Collective::kBroadcast, 4, 2), {{}, {at}}));
  CHECK_THROWS(std::invalid_argument, rank.group.check(call_of(Collective::kAllGather, 4), {{at}, {at}}));
  auto empty = Segment::create(CollectiveGroup::bytes(2));
  CHECK_THROWS(std::system_error, CollectiveGroup(empty, world.session.board, rank.inbox, 0, world.members));
  CHECK_THROWS(std::system_error, CollectiveGroup(world.segment, world.session.board, rank.inbox, 2, world.members));
  CHECK_THROWS(std::system_error, CollectiveGroup::prepare(*empty, 0));
  CHECK_THROWS(std::system_error, CollectiveGroup::prepare(*empty, kMaxRanks + 1));
}
