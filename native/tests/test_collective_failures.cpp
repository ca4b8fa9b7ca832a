// Ranks that fail: who waits for them is freed, and calls that do not belong together do not meet.
#include "collective_setup.h"

using namespace conveyor;

constexpr uint64_t kGrace = 50 * kMs;  // what one waits for a rank that failed just before, and not for one that is most likely to come

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
    const bool just_before = before && when != Fails::kLongBefore && now_ns() - now < kGrace;  // else it was kept from running
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
    CHECK(now_ns() - begin < kSoon);
    if (just_before) CHECK(first.longest_sleep <= kGrace);
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
  await_sleep(world, 0);
  CHECK(second.barrier() == Progress::kDone);
  waiter.join();
  CHECK(first.longest_sleep > kGrace);
}

TEST(who_runs_something_else_after_a_failure_is_waited_for) {
  World world(2);
  Rank first(world, 0), second(world, 1);
  second.group.note_failure("something else");
  for (uint32_t slot : {1u, 2u}) world.session.board->slot(slot)->status.since_ns.store(now_ns() + 1);
  std::thread waiter([&] { CHECK(first.barrier() == Progress::kDone); });
  await_sleep(world, 0);
  CHECK(second.barrier() == Progress::kDone);
  waiter.join();
  CHECK(first.longest_sleep > kGrace);
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

// A rank hears late of a call of its that was not sent: whoever waits for it was called by who knew of that already.
TEST(who_was_known_to_have_failed_is_waited_for_when_it_hears_of_that_late) {
  for (bool cancelled : {false, true}) {
    Pair pair;
    const uint64_t number = cancelled ? 0 : pair.second.board().fail(2);
    if (cancelled)
      pair.second.board().note_sight();
    else
      pair.second.sees(number);  // the clock says 1
    pair.first.begins();
    std::thread waiter([&] { CHECK(pair.first.run({}, {}, 0, 1) == Progress::kDone); });
    await_sleep(pair.world, 0);
    const int before = pair.first.sleeps;
    pair.second.group.note_failed_call("has not come", "step", {9, 1}, false, number, cancelled);
    Session::await([&] { return pair.first.sleeps > before || pair.first.group.broken(); });  // it has looked
    pair.second.begins();
    CHECK(pair.second.run({}, {}, 0, 1) == Progress::kDone);
    waiter.join();
  }
}

TEST(who_fails_while_it_is_awaited_by_a_call_that_did_not_know_is_not_coming) {
  for (bool cancelled : {false, true}) {
    Pair pair;
    pair.first.begins();
    std::thread waiter([&] { CHECK(pair.first.run({}, {}, 0, 0) == Progress::kBroken); });
    await_sleep(pair.world, 0);
    if (cancelled) pair.second.board().note_sight();
    const uint64_t number = cancelled ? 0 : pair.second.board().fail(2);
    pair.second.group.note_failed_call("has not come", "step", {9, 1}, false, number, cancelled);
    waiter.join();
    CHECK(pair.first.group.broken()->cause == Cause::kRaised);
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

// It has failed before the other one begins that step: what it comes by is a later one. Does it come to none, it is
// waited for no longer than one that begins nothing.
TEST(an_execution_in_which_a_rank_has_failed_is_not_met_by_what_that_runs_later) {
  for (const bool comes : {true, false})
    for (const uint32_t graph : {0u, 4u}) {
      World world(2);
      Rank first(world, 0), second(world, 1);
      second.begins_step(3, 7);
      second.group.note_failure("has raised");
      if (comes) ::usleep(60'000);  // so that the other one gives it time
      first.begins_step(3, 7);
      second.begins_step(graph, 1);
      if (comes)
        meet({&first, &second}, {0, 0}, Progress::kBroken);
      else
        CHECK(first.barrier() == Progress::kBroken);
      CHECK(first.group.broken()->cause == (comes ? Cause::kShifted : Cause::kRaised));
      CHECK_EQ(first.group.broken()->rank, 1u);
      CHECK_EQ(first.group.broken()->why, std::string("has raised"));
    }
}

TEST(an_execution_in_which_a_rank_has_failed_is_not_met_behind_other_failures) {
  World world(2);
  Rank first(world, 0), second(world, 1);
  second.begins_step(3, 7);
  second.group.note_failure("has raised");
  second.begins_step(4, 1);
  second.group.note_failure("has raised again");
  first.begins_step(3, 7);
  second.begins();
  meet({&first, &second}, {0, 0}, Progress::kBroken);
  CHECK(first.group.broken()->cause == Cause::kShifted);
}

TEST(a_rank_that_has_failed_in_an_execution_goes_on_with_it_after_something_else) {
  World world(2);
  Rank first(world, 0), second(world, 1);
  second.begins_step(3, 7);
  second.group.note_failure("has raised");
  ::usleep(60'000);
  first.begins_step(3, 7);
  second.begins();
  std::thread waiter([&] { CHECK(first.barrier() == Progress::kDone); });
  await_sleep(world, 0);
  second.begins_step(3, 7);
  CHECK(second.barrier() == Progress::kDone);
  waiter.join();
}

TEST(a_later_execution_than_that_in_which_a_rank_has_failed_is_met_by_another_graph) {
  World world(2);
  Rank first(world, 0), second(world, 1);
  second.begins_step(3, 7);
  second.group.note_failure("has raised");
  first.begins_step(3, 8);
  second.begins_step(4, 1);
  meet({&first, &second}, {0, 0}, Progress::kDone);
}

TEST(who_is_called_by_who_knows_of_a_failure_waits_longer) {
  Pair pair;
  pair.second.sees(pair.second.fails());  // the clock says 1
  pair.first.begins();
  std::thread waiter([&] { CHECK(pair.first.run({}, {}, 0, 1) == Progress::kDone); });
  await_sleep(pair.world, 0);
  pair.second.begins();
  CHECK(pair.second.run({}, {}, 0, 1) == Progress::kDone);
  waiter.join();
  CHECK(pair.first.longest_sleep > kGrace);
}
