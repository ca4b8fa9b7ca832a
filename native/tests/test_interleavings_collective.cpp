// Barriers of a collective group under every schedule: who waits for the others goes on when all have come, and a rank
// that dies or breaks the group, at any of its steps, ends the operation at all others alike. See explorer.h.
#define MODELLED_COLLECTIVES
#include "modelled.h"

using namespace conveyor;

// Barriers have no elements.
size_t conveyor::size_of(ElementType) { return 1; }
void conveyor::reduce(ElementType, ReduceOp, char* const*, size_t, const char* const*, size_t, size_t, size_t) { std::abort(); }

namespace {

using Progress = CollectiveGroup::Progress;

struct Words {
  const void *cause, *arrived, *asleep;  // the last two of one rank
};
Words (*words_of)(char* segment, uint32_t rank) = nullptr;

// The group's words are private, but for an explicit instantiation.
template <class Header, class Line>
struct Layout {
  static Words get(char* segment, uint32_t rank) {
    auto* header = reinterpret_cast<Header*>(segment);
    Line& line = reinterpret_cast<Line*>(header + 1)[rank];
    return {&header->cause, &line.arrived, &line.asleep};
  }
  static inline const auto set = words_of = get;
};
template struct Layout<CollectiveGroup::Header, CollectiveGroup::Line>;

// Rank r is the process in slot r.
struct Group : Doorbells {
  std::shared_ptr<Segment> segment;
  std::vector<char> fresh;  // the words, before anybody has come
  std::vector<CollectiveGroup::Member> members;
  Fd event{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  std::deque<Inbox> inboxes;
  std::deque<CollectiveGroup> groups;
  std::array<std::vector<Progress>, kSlots> ends;  // of each rank's operations

  explicit Group(uint32_t ranks) : segment(Segment::create(CollectiveGroup::bytes(ranks))), members(ranks) {
    // As if there were one core, so nobody spins.
    cpu_set_t all, one;
    sched_getaffinity(0, sizeof all, &all);
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    sched_setaffinity(0, sizeof one, &one);
    CollectiveGroup::prepare(*segment, ranks);
    sched_setaffinity(0, sizeof all, &all);
    const size_t size = CollectiveGroup::ring_at(ranks, 0);
    fresh.assign(segment->at(0, size), segment->at(0, size) + size);
  }
  Words words(uint32_t rank) const { return words_of(segment->at(0, fresh.size()), rank); }
  uint64_t arrived(uint32_t rank) const { return CollectiveGroup::waits(*segment)[rank].first; }
  std::string label(const void* word) const override {
    for (uint32_t r = 0; r < members.size(); ++r) {
      if (word == words(r).cause) return "cause";
      if (word == words(r).arrived) return "arrived of rank " + std::to_string(r);
      if (word == words(r).asleep) return "asleep of rank " + std::to_string(r);
    }
    return Doorbells::label(word);
  }

  void reset() {
    Doorbells::reset();
    std::copy(fresh.begin(), fresh.end(), segment->at(0, fresh.size()));
    groups.clear();
    inboxes.clear();
    for (uint32_t r = 0; r < members.size(); ++r) members[r] = {r, process_table->slot(r)->incarnation.load()};
    for (uint32_t r = 0; r < members.size(); ++r) {
      inboxes.emplace_back(process_table, r, event.get(), 0ul);
      inboxes.back().set_spin_limit(0);
      groups.emplace_back(segment, process_table, inboxes.back(), r, members);
      ends[r].clear();
    }
  }

  // One operation of a rank.
  Progress meet(uint32_t rank) {
    CollectiveGroup& group = groups[rank];
    group.begin({}, {}, 0);
    for (;;) {
      const Progress progress = group.go_on();
      if (progress != Progress::kSleep) return ends[rank].push_back(progress), progress;
      inboxes[rank].park(group.seen(), group.wake_at());
    }
  }
  void meet_until_broken(uint32_t rank) {
    while (meet(rank) == Progress::kDone) {
    }
  }
  // Rank `rank` dies, and somebody says so.
  void dies(uint32_t rank) {
    model::explorer->kill(uint64_t(1) << rank);
    process_table->announce_death(rank);
  }
  // So many operations are done at this rank, and the next one is broken.
  bool ended(uint32_t rank, uint64_t done) const {
    std::vector<Progress> wanted(done, Progress::kDone);
    wanted.push_back(Progress::kBroken);
    return ends[rank] == wanted;
  }
  bool broken_by(Cause cause, uint32_t rank) const {
    const auto broken = groups[0].broken();
    return broken && broken->cause == cause && broken->rank == rank;
  }
};

}  // namespace

TEST(all_who_have_come_go_on) {
  Group g(2);
  const auto twice = [&](uint32_t rank) { return [&g, rank] { g.meet(rank), g.meet(rank); }; };
  const auto judge = [&] {
    const std::vector<Progress> both(2, Progress::kDone);
    return g.ends[0] == both && g.ends[1] == both;
  };
  const Scene scene{&g, {twice(0), twice(1)}, [&] { g.reset(); }, judge};
  scene.holds(2, 100);
  CHECK(scene.fails(kOmitted, "store", g.words(0).asleep));
  // With store buffers: that a rank has come, and that it sleeps, is out before it looks at the others.
  const Scene buffered = scene.buffered();
  buffered.holds(2, 100);
  CHECK(buffered.fails(kRelaxed, "store", g.words(0).asleep));
  CHECK(buffered.fails(kRelaxed, "store", g.words(1).arrived));
}

TEST(three_who_have_come_go_on) {
  Group g(3);
  const Scene scene{&g, {[&] { g.meet(0); }, [&] { g.meet(1); }, [&] { g.meet(2); }}, [&] { g.reset(); },
                    [&] { return std::ranges::all_of(g.members, [&](const auto& m) { return g.ends[m.slot] == std::vector{Progress::kDone}; }); }};
  scene.holds(1, 100);
}

// All that the dead rank has come to is done at the others, and nothing after it.
TEST(a_rank_that_dies_at_any_step_ends_it_at_the_other) {
  Group g(2);
  std::array<size_t, 3> died_after{};
  const Scene scene{&g, {[&] { g.meet_until_broken(0); }, [&] { g.meet(1), g.meet(1); }, [&] { g.dies(1); }}, [&] { g.reset(); }, [&] {
                      const uint64_t came = g.arrived(1);
                      ++died_after.at(came);
                      return g.ended(0, came) && g.broken_by(Cause::kDied, 1);
                    }};
  scene.holds(1, 100);
  for (const size_t schedules : died_after) CHECK(schedules != 0);
  CHECK(scene.fails(kOmitted, "exchange", &g.process_table->slot(1)->condition, 1));
  scene.buffered().holds(1, 100);
}

TEST(a_rank_that_dies_at_any_step_ends_it_at_all_others_alike) {
  Group g(3);
  std::array<size_t, 2> died_after{};
  const Scene scene{&g, {[&] { g.meet_until_broken(0); }, [&] { g.meet_until_broken(1); }, [&] { g.meet(2); }, [&] { g.dies(2); }}, [&] { g.reset(); }, [&] {
                      const uint64_t came = g.arrived(2);
                      ++died_after.at(came);
                      return g.ended(0, came) && g.ended(1, came) && g.broken_by(Cause::kDied, 2);
                    }};
  scene.holds(1, 100);
  for (const size_t schedules : died_after) CHECK(schedules != 0);
}

// Whether the others have been rung by it or not.
TEST(a_rank_that_dies_while_it_breaks_the_group_leaves_nobody_asleep) {
  Group g(3);
  std::array<size_t, 2> by{};  // its word, or its death
  const Scene scene{&g, {[&] { g.meet_until_broken(0); }, [&] { g.meet_until_broken(1); }, [&] { g.meet(2), g.groups[2].raised("it has raised", {}); }, [&] { g.dies(2); }},
                    [&] { g.reset(); },
                    [&] {
                      const uint64_t came = g.arrived(2);
                      const bool raised = g.broken_by(Cause::kRaised, 2);
                      ++by.at(raised);
                      return g.ended(0, came) && g.ended(1, came) && (raised || g.broken_by(Cause::kDied, 2));
                    }};
  scene.holds(1, 100);
  CHECK(by[0] != 0 && by[1] != 0);
}
