// Who has learned of a failed call is known on other hosts before what was done behind that.
#include "net_setup.h"

using namespace conveyor;

namespace {

constexpr uint64_t kNumber = 3;

// What a process says: what its host's clock of sights says, and which failure it has learned of.
struct Said {
  Stamp made;
  uint64_t number;
};

void say(Host& host, uint32_t slot, Sender& sender, uint64_t number) {
  const Said word = {host.board->sights(), number};
  CHECK(host.wait_for_room(slot, sender));
  Outgoing out;
  out.size = sizeof word;
  out.codec = kBytes;
  sender.reserve(out);
  std::memcpy(sender.body_of(out), &word, sizeof word);
  sender.publish(out);
}

Said hear(Host& host, uint32_t slot, Receiver& receiver) {
  CHECK(host.wait(slot, [&] { return !receiver.ring.empty(); }));
  const Frame frame = receiver.take();
  Said word = {};
  if (CHECK_EQ(frame.size, sizeof word)) std::memcpy(&word, frame.body, sizeof word);
  return word;
}

bool knew(Host& host, uint32_t slot, const Said& word) {
  const auto seen = host.board->seen_at(slot, word.number, word.made);
  return seen && *seen <= word.made;
}

}  // namespace

// The words are published by another thread than the pump's, at any time of its turns.
TEST(a_sight_is_there_before_a_frame_that_was_published_behind_it) {
  const Homes homes = {0, 1};
  const std::vector<Host::Shape> rings = {{0, {1}}};
  Host first(0, homes), second(1, homes);
  for (Host* host : {&first, &second}) host->mirror(kNumber, rings);
  join(first, second);
  std::atomic<bool> over{false};
  // Its connection breaks now and then, and what was told is told again.
  std::thread breaker([&] {
    while (!over) {
      ::usleep(10'000);
      first.pump->disconnect(1, "a test");
      second.pump->disconnect(0, "a test");
      join(first, second);
    }
  });
  std::vector<uint64_t> numbers;
  for (int i = 0; i < 2000; ++i) numbers.push_back(second.board->fail(1));
  // Of the last ones alone anything is known.
  const size_t from = numbers.size() - FailedCalls::kKept;
  std::thread writer([&] {
    const auto sender = first.sender(kNumber, rings, 0);
    for (size_t i = 0; i < numbers.size(); ++i) {
      first.board->see(1, numbers[i]);
      say(first, 0, *sender, numbers[i]);
    }
  });
  const auto receiver = second.receiver(kNumber, rings, 0, 0);
  for (size_t i = 0; i < numbers.size(); ++i) {
    const Said word = hear(second, 1, *receiver);
    CHECK_EQ(word.number, numbers[i]);
    CHECK(knew(second, 1, word));
    // What was told counts as learned here.
    if (i >= from) CHECK(second.board->seen_at(1, word.number).has_value());
  }
  writer.join();
  over = true;
  breaker.join();
}

TEST(who_has_not_learned_of_a_failure_makes_calls_that_do_not_know_it) {
  const Homes homes = {0, 1};
  const std::vector<Host::Shape> rings = {{0, {1}}};
  Host first(0, homes), second(1, homes);
  for (Host* host : {&first, &second}) host->mirror(kNumber, rings);
  join(first, second);
  const auto sender = first.sender(kNumber, rings, 0);
  const auto receiver = second.receiver(kNumber, rings, 0, 0);
  for (int i = 0; i < 20; ++i) {
    const uint64_t number = second.board->fail(1);
    if (i % 2 == 0) second.board->see(1, number);  // another host's clock is not that of who has made the call
    Said word = {first.board->sights(), number};
    say(first, 0, *sender, number);
    first.board->see(1, number);
    say(first, 0, *sender, number);
    CHECK_EQ(hear(second, 1, *receiver).made, word.made);
    const Said later = hear(second, 1, *receiver);
    CHECK(knew(second, 1, later));
    // The first of each pair of words was said before, whatever is known by now; but where the other host has told of it.
    if (i % 2 != 0) CHECK(!knew(second, 1, word));
  }
}

// A word that was passed on by a third host is behind what the first one has told, though that has not told the last.
TEST(sights_go_on_with_what_was_done_behind_them) {
  const Homes homes = {0, 1, 2};
  const std::vector<Host::Shape> there = {{0, {1}}}, on = {{1, {2}}};
  Host first(0, homes), second(1, homes), third(2, homes);
  for (Host* host : {&first, &second}) host->mirror(kNumber, there);
  for (Host* host : {&second, &third}) host->mirror(kNumber + 1, on);
  join(first, second);
  join(second, third);
  const auto sender = first.sender(kNumber, there, 0), passes = second.sender(kNumber + 1, on, 0);
  const auto takes = second.receiver(kNumber, there, 0, 0), receiver = third.receiver(kNumber + 1, on, 0, 0);
  for (int i = 0; i < 300; ++i) {
    const uint64_t number = i % 3 == 0 ? first.board->fail(2) : third.board->fail(2);  // of a call that was not sent, too
    first.board->see(2, number);
    say(first, 0, *sender, number);
    CHECK(knew(second, 2, hear(second, 1, *takes)));
    say(second, 1, *passes, number);
    CHECK(knew(third, 2, hear(third, 2, *receiver)));
  }
}

TEST(a_cancellation_is_behind_what_its_clock_said) {
  const Homes homes = {0, 1};
  const std::vector<Host::Shape> rings = {{0, {1}}};
  Host first(0, homes), second(1, homes);
  for (Host* host : {&first, &second}) host->mirror(kNumber, rings);
  join(first, second);
  Limits cancels = first.limits(kNumber, rings), sees = second.limits(kNumber, rings);
  for (uint64_t number = 0; number < 4; ++number) {
    first.board->note_sight();
    const Stamp at = first.board->sights();
    cancels.cancel(number);
    first.board->ring(1, 3);
    CHECK(second.wait(1, [&] { return sees.cancelled(number); }));
    CHECK(second.board->sights_of(0) >= at);
    CHECK_EQ(host_of(second.board->sights_of(0)), 0u);
  }
}

// The pump looks at limits and tells of them; what is cancelled between the two has to wait for the sight before it. With
// many cursors to be told of that takes long.
TEST(a_cancellation_is_never_told_ahead_of_what_its_clock_said) {
  const Homes homes = {0, 1, 2};
  std::vector<Host::Shape> rings = {{0, {1}}};
  for (int i = 0; i < 4000; ++i) rings.push_back({2, {0, 1}});
  Host first(0, homes), second(1, homes);
  for (Host* host : {&first, &second}) host->mirror(kNumber, rings);
  join(first, second);
  std::atomic<bool> over{false};
  // Have it look at all of this again and again.
  std::thread ringer([&] {
    while (!over) {
      first.board->ring(1, 3);
      ::sched_yield();
    }
  });
  Limits cancels = first.limits(kNumber, rings), sees = second.limits(kNumber, rings);
  for (uint64_t number = 0; number < 1500; ++number) {
    first.board->note_sight();
    const Stamp at = first.board->sights();
    cancels.cancel(number);
    if (number % 8 == 0) first.board->ring(1, 3);
    while (!sees.cancelled(number)) ::sched_yield();
    CHECK(second.board->sights_of(0) >= at);
  }
  over = true;
  ringer.join();
}

// Sights are told by the slots of their processes, and their clocks say anything up to what is told first.
TEST(a_clock_of_another_host_does_not_go_back) {
  const Homes homes = {0, 1};
  Host first(0, homes), second(1, homes);
  const uint64_t number = first.board->fail(1);
  first.board->see(1, number);
  first.board->note_sight();
  const Stamp at = first.board->sights();
  join(first, second);
  while (!second.board->header()->heard.at(1, number, 0)) ::sched_yield();  // nobody is rung for it
  CHECK_EQ(second.board->sights_of(0), at);
}

TEST(of_a_host_that_is_not_counted_nobody_has_known) {
  const uint32_t host = FailedCalls::kHosts;
  HeardSights& heard = *new HeardSights();
  heard.note(stamp_of(host, 7));
  CHECK_EQ(host_of(heard.last(host)), host);
  CHECK(heard.last(host) > stamp_of(host, 1'000'000'000'000));
  heard.note(stamp_of(host - 1, 7));
  CHECK_EQ(heard.last(host - 1), stamp_of(host - 1, 7));
  delete &heard;
}

TEST(failures_that_two_hosts_have_numbered_are_two) {
  const Homes homes = {0, 1};
  Host first(0, homes), second(1, homes);
  const uint64_t one = first.board->fail(1), other = second.board->fail(1);
  CHECK(one != other);
  second.board->see(1, one);
  CHECK(second.board->seen_at(1, one).has_value());
  CHECK(!second.board->seen_at(1, other));
  second.board->see(1, other);
  CHECK(*second.board->seen_at(1, one) < *second.board->seen_at(1, other));
}

// All that a host knows of is told again then, also what is forgotten by the other one.
TEST(what_was_told_again_takes_no_sight_of_another_host_away) {
  constexpr uint32_t kRanks = 40, kEach = 50;
  static_assert(kRanks * kEach > HeardSights::kKept + kEach && kEach < FailedCalls::kKept);
  Homes homes = {0, 1, 2};
  homes.resize(3 + kRanks, 1);
  const std::vector<Host::Shape> from_first = {{0, {1}}}, from_third = {{2, {1}}};
  Host first(0, homes), second(1, homes), third(2, homes);
  for (Host* host : {&first, &second}) host->mirror(kNumber, from_first);
  for (Host* host : {&third, &second}) host->mirror(kNumber + 1, from_third);
  join(first, second);
  join(third, second);
  const auto sender = first.sender(kNumber, from_first, 0), other = third.sender(kNumber + 1, from_third, 0);
  const auto receiver = second.receiver(kNumber, from_first, 0, 0), others = second.receiver(kNumber + 1, from_third, 0, 0);
  uint64_t last = 0;
  // Some slots come first in what is told, and their failures last.
  for (uint32_t i = 0; i < kEach; ++i)
    for (uint32_t rank = kRanks; rank-- > 0;) first.board->see(3 + rank, last = first.board->fail(3 + rank));
  say(first, 0, *sender, last);
  CHECK(knew(second, 3, hear(second, 1, *receiver)));
  const uint64_t number = third.board->fail(3);
  third.board->see(3, number);
  say(third, 2, *other, number);
  const Said word = hear(second, 1, *others);
  CHECK(knew(second, 3, word));
  const uint64_t connections = second.pump->counts(0).connections;
  first.pump->disconnect(1, "a test");
  second.pump->disconnect(0, "a test");
  join(first, second);
  say(first, 0, *sender, last);
  CHECK(knew(second, 3, hear(second, 1, *receiver)));
  CHECK(second.pump->counts(0).connections > connections);
  CHECK(knew(second, 3, word));
}

// The same of what fails in the process of a rank, and of its going on, also where it is heard of by way of a third host.
TEST(a_failure_of_a_rank_is_there_before_a_frame_that_was_published_behind_it) {
  const Homes homes = {0, 1, 2};
  const std::vector<Host::Shape> rings = {{0, {1}}, {1, {2}}};
  Host first(0, homes), second(1, homes), third(2, homes);
  for (Host* host : {&first, &second, &third}) host->mirror(kNumber, rings);
  join(first, second);
  join(second, third);
  std::atomic<bool> over{false};
  std::thread breaker([&] {
    while (!over) {
      ::usleep(10'000);
      first.pump->disconnect(1, "a test");
      second.pump->disconnect(0, "a test");
      join(first, second);
    }
  });
  const auto one = first.sender(kNumber, rings, 0), other = second.sender(kNumber, rings, 1);
  const auto from_one = second.receiver(kNumber, rings, 0, 0), from_other = third.receiver(kNumber, rings, 1, 0);
  for (uint64_t i = 1; i <= 500; ++i) {
    RankFailure failure;
    failure.number = i;
    failure.noted_ns = 1;
    std::snprintf(failure.why, sizeof failure.why, "%d", int(i));
    const uint64_t now = now_ns();
    first.board->note_rank_failure(0, failure);
    if (i % 2 == 0) first.board->note_began(0);
    say(first, 0, *one, i);
    CHECK_EQ(hear(second, 1, *from_one).number, i);
    say(second, 1, *other, i);
    CHECK_EQ(hear(third, 2, *from_other).number, i);
    for (Host* host : {&second, &third}) {
      const RankFailures& heard = host->board->slot(0)->rank_failures;
      const auto last = heard.last();
      if (!CHECK(last.has_value())) break;
      CHECK_EQ(last->count, i);
      CHECK_EQ(last->number, i);
      CHECK(last->noted_ns >= now && last->noted_ns <= now_ns());  // by the clock there
      CHECK(last->why == std::to_string(i));
      CHECK_EQ(heard.went_on(), i - i % 2);
    }
  }
  over = true;
  breaker.join();
}

// Whoever wakes looks at what has failed, and so that is there before the bell rings.
TEST(a_failure_of_a_rank_is_there_before_a_bell_that_was_rung_behind_it) {
  const Homes homes = {0, 1};
  const std::vector<Host::Shape> rings = {{0, {1}}};
  Host first(0, homes), second(1, homes);
  for (Host* host : {&first, &second}) host->mirror(kNumber, rings);
  join(first, second);
  Bell& bell = second.board->slot(1)->bell;
  for (uint64_t i = 1; i <= 300; ++i) {
    const uint32_t before = bell.count;
    first.board->note_rank_failure(0, {});
    first.board->ring(1, kAttentionBit);
    if (!second.wait(1, [&] { return bell.count != before; })) break;
    CHECK_EQ(second.board->slot(0)->rank_failures.count(), i);
  }
}

// Another process that has the slot later has failed in nothing.
TEST(failures_of_a_former_process_are_not_those_of_the_next) {
  auto board = Board::create(1);
  board->prepare(0, "first");
  board->note_rank_failure(0, {});
  CHECK(board->slot(0)->rank_failures.any());
  board->prepare(0, "second");
  CHECK(!board->slot(0)->rank_failures.any());
  CHECK(!board->slot(0)->rank_failures.last());
}

// Some are read while others are written.
TEST(a_failure_of_a_rank_is_read_whole) {
  auto board = Board::create(1);
  board->prepare(0, "rank");
  std::atomic<bool> over{false};
  std::thread writer([&] {
    RankFailure failure;
    for (uint64_t i = 1; i <= 20'000; ++i) {
      failure.number = i;
      std::ranges::fill(failure.why, char('a' + i % 20));
      board->note_rank_failure(0, failure);
    }
    over = true;
  });
  uint64_t before = 0;
  while (!over) {
    const auto last = board->slot(0)->rank_failures.last();
    if (!last) continue;
    const char letter = char('a' + last->number % 20);
    CHECK(last->count == last->number && last->count >= before);
    CHECK(std::string(last->why) == std::string(sizeof last->why - 1, letter));
    before = last->count;
  }
  writer.join();
}
