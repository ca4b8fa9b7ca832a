// The set of numbers that finalizers put into: it holds what std::set would, and needs no memory for as many
// as it was made for.
#include <set>

#include "check.h"
#include "number_set.h"

using conveyor::NumberSet;

TEST(it_holds_what_any_set_would) {
  check::Random random(1);
  for (int round = 0; round < 50; ++round) {
    NumberSet numbers(size_t(random.below(20)));
    std::set<uint64_t> model;
    const uint64_t span = 1 + random.below(200), first = random.below(2) != 0 ? UINT64_MAX - span : random.below(1'000);
    for (int i = 0; i < 2'000; ++i) {
      const uint64_t number = first + random.below(span);
      if (random.below(2) != 0) {
        numbers.insert(number);
        model.insert(number);
      } else {
        CHECK_EQ(numbers.erase(number), model.erase(number) != 0);
      }
      CHECK_EQ(numbers.empty(), model.empty());
      const uint64_t requested = first + random.below(span);
      CHECK_EQ(numbers.contains(requested), model.count(requested) != 0);
    }
    for (uint64_t number = first; number != first + span; ++number) CHECK_EQ(numbers.contains(number), model.count(number) != 0);
  }
}

// It stands for a free place. Nothing has that number, but a tag in a ring says what its writer has written.
TEST(the_number_of_nothing_is_never_in_it) {
  NumberSet numbers(4);
  for (int i = 0; i < 3; ++i) {
    numbers.insert(NumberSet::kNone);
    CHECK(!numbers.contains(NumberSet::kNone));
    CHECK(!numbers.erase(NumberSet::kNone));
    CHECK(numbers.empty());
  }
  numbers.insert(7);
  CHECK(!numbers.erase(NumberSet::kNone));
  CHECK(!numbers.empty());
  CHECK(numbers.erase(7));
  CHECK(numbers.empty());
}
