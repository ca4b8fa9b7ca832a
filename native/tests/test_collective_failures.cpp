// Ranks that fail: that breaks the group at all of them, with the first cause, and for good.
#include "collective_setup.h"

using namespace conveyor;

static void check_broken(Rank& rank, Cause cause, uint32_t at, const std::string& why) {
  CHECK(rank.barrier() == Progress::kBroken);
  const auto broken = rank.group.broken();
  REQUIRE(broken.has_value());
  CHECK(broken->cause == cause);
  CHECK_EQ(broken->rank, at);
  CHECK_EQ(broken->why, why);
}

TEST(a_rank_that_raises_while_it_is_waited_for) {
  World world(3);
  Rank first(world, 0), second(world, 1), third(world, 2);
  std::thread waiter([&] { check_broken(first, Cause::kRaised, 1, "its method has raised"); });
  await_sleep(world, 0);
  second.group.raised("its method has raised", {});
  waiter.join();
  check_broken(second, Cause::kRaised, 1, "its method has raised");
  check_broken(third, Cause::kRaised, 1, "its method has raised");
}

TEST(a_rank_that_raises_while_nobody_waits) {
  World world(2);
  Rank first(world, 0), second(world, 1);
  second.group.raised("its method has raised", {});
  second.begins();
  first.begins();
  check_broken(second, Cause::kRaised, 1, "its method has raised");
  check_broken(first, Cause::kRaised, 1, "its method has raised");
}

TEST(what_has_broken_a_group_first_stays_its_cause) {
  World world(2);
  Rank first(world, 0), second(world, 1);
  second.group.raised("first", {});
  second.group.raised("second", {});
  first.group.raised("third", {});
  check_broken(first, Cause::kRaised, 1, "first");
  world.session.process_table->announce_death(2);
  CollectiveGroup::destroy(*world.segment, *world.session.process_table, world.members);
  check_broken(first, Cause::kRaised, 1, "first");
}

// One that has finished it and then raises takes it from nobody.
TEST(an_operation_that_all_have_come_to_is_finished_by_all) {
  for (int i = 0; i < 200; ++i) {
    World world(2);
    in_threads(world, [](Rank& rank) {
      CHECK(rank.barrier() == Progress::kDone);
      if (rank.group.rank() == 1) rank.group.raised("behind it", {});
    });
  }
}

TEST(words_that_are_too_long_are_cut) {
  World world(2);
  Rank first(world, 0), second(world, 1);
  second.group.raised(std::string(1000, 'x').c_str(), {});
  CHECK(first.barrier() == Progress::kBroken);
  CHECK_EQ(first.group.broken()->why, std::string(255, 'x'));
}

TEST(who_runs_a_step_of_the_same_execution_knows_it_for_the_cause) {
  World world(2);
  Rank first(world, 0), second(world, 1);
  first.begins_step(3, 7);
  second.begins_step(3, 7);
  CHECK(!first.group.failed_in_execution());
  second.group.raised("its step has raised", second.group.execution());
  CHECK(first.barrier() == Progress::kBroken);
  CHECK((first.group.failed_in_execution() == Execution{3, 7}));
  for (const auto& [graph, execution] : {std::pair(3u, 8u), std::pair(4u, 7u), std::pair(0u, 7u)}) {
    first.begins_step(graph, execution);
    CHECK(first.barrier() == Progress::kBroken);
    CHECK(!first.group.failed_in_execution());
  }
}

TEST(what_has_raised_in_no_step_is_of_no_execution) {
  World world(2);
  Rank first(world, 0), second(world, 1);
  second.begins_step(3, 7);
  second.group.raised("its arguments could not be read", {});
  first.begins_step(3, 7);
  CHECK(first.barrier() == Progress::kBroken);
  CHECK(!first.group.failed_in_execution());
}
