// What tests of collective operations share: ranks in threads or processes, and what every operation gives.
#pragma once

#include <numeric>
#include <thread>

#include "collective/group.h"
#include "death_setup.h"

namespace conveyor {

using Progress = CollectiveGroup::Progress;

// A process table with a slot for each rank, from slot 1 on, and the group's segment.
struct World {
  explicit World(uint32_t ranks) : session(64), segment(Segment::create(CollectiveGroup::bytes(ranks))) {
    CollectiveGroup::prepare(*segment, ranks);
    for (uint32_t r = 0; r < ranks; ++r) {
      session.process_table->prepare(r + 1, "rank");
      session.process_table->slot(r + 1)->condition.store(Condition::kAlive);
      members.push_back({r + 1, session.process_table->slot(r + 1)->incarnation.load()});
    }
  }
  Session session;
  std::shared_ptr<Segment> segment;
  std::vector<CollectiveGroup::Member> members;
};

struct Rank {
  Rank(World& world, uint32_t rank) : inbox(world.session.process_table, rank + 1, event.get(), 0), group(world.segment, world.session.process_table, inbox, rank, world.members) {}
  Rank(const std::shared_ptr<ProcessTable>& process_table, const std::shared_ptr<Segment>& segment, uint32_t rank, const std::vector<CollectiveGroup::Member>& members,
       std::unique_ptr<CollectiveLinks> links)
      : inbox(process_table, rank + 1, event.get(), 0), group(segment, process_table, inbox, rank, members, std::move(links)) {}

  Progress run(const CollectiveCall& call, CollectiveData data, uint64_t timeout = 0) {
    group.check(call, data);
    const uint64_t deadline = timeout == 0 ? now_ns() + 2 * kSoon : now_ns() + timeout;
    const CollectiveGroup::Entered entered(group);
    if (!CHECK(bool(entered))) throw check::Abandon{};
    group.begin(call, std::move(data), deadline);
    for (;;) {
      const Progress progress = group.go_on();
      if (progress != Progress::kSleep) return progress;
      if (now_ns() >= deadline) {
        CHECK(timeout != 0);
        std::string absent;
        for (const uint32_t rank : group.absent()) absent += (absent.empty() ? "" : " ") + std::to_string(rank);
        group.leave(Cause::kTimedOut, absent.c_str());
        return Progress::kBroken;
      }
      ++sleeps;
      inbox.park(group.seen(), group.wake_at());
    }
  }
  Progress barrier(uint64_t timeout = 0) { return run({}, {}, timeout); }

  // A call begins, and a step of a graph.
  void begins() { begins_step(0, 0); }
  void begins_step(uint32_t graph, uint64_t execution) {
    status().graph.store(graph);
    status().execution.store(execution);
    inbox.begins(now_ns());
  }
  Status& status() { return process_table().slot(group.rank() + 1)->status; }
  ProcessTable& process_table() { return *inbox.process_table(); }
  Fd event{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  Inbox inbox;
  CollectiveGroup group;
  std::atomic<int> sleeps{0};
};

// Wait until rank `rank` sleeps in an operation.
inline void await_sleep(World& world, uint32_t rank) {
  Session::await([&] { return !CollectiveGroup::waits(*world.segment)[rank].second.empty(); });
}

inline CollectiveCall call_of(Collective operation, uint64_t count, int root = -1, ReduceOp op = ReduceOp::kSum) {
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

using Elements = std::vector<int32_t>;

inline Elements numbers(size_t count, int32_t first) {
  Elements made(count);
  std::iota(made.begin(), made.end(), first);
  return made;
}

inline std::vector<const char*> sources(const std::vector<Elements>& all) {
  std::vector<const char*> made;
  for (const Elements& one : all) made.push_back(reinterpret_cast<const char*>(one.data()));
  return made;
}

inline std::vector<char*> destinations(std::vector<Elements>& all) {
  std::vector<char*> made;
  for (Elements& one : all) made.push_back(reinterpret_cast<char*>(one.data()));
  return made;
}

// What rank `from` has for rank `to`.
inline int32_t first_of(uint32_t from, uint32_t to) { return int32_t(from * 1000 + to * 7); }

// Every operation once, as rank `me` of `ranks`.
inline void every_operation(Rank& rank, uint32_t ranks, size_t count) {
  const uint32_t me = rank.group.rank(), root = ranks - 1;
  int32_t sum = 0, here = 0;
  for (uint32_t r = 0; r < ranks; ++r) sum += first_of(r, 0), here += first_of(r, me);
  const int32_t n = int32_t(ranks);
  const auto is = [&](const Elements& got, int32_t first, int32_t step = 1) {
    for (size_t i = 0; i < got.size(); ++i)
      if (got[i] != first + step * int32_t(i)) return check::note_equal(got[i], first + step * int32_t(i), __FILE__, __LINE__, "an element");
    return got.size() == count;
  };
  std::vector<Elements> own = {numbers(count, first_of(me, 0))}, result(1, Elements(count)), many(ranks, Elements(count)), lists;
  for (uint32_t r = 0; r < ranks; ++r) lists.push_back(numbers(count, first_of(me, r)));
  const auto done = [&](CollectiveCall call, CollectiveData data) { CHECK(rank.run(call, std::move(data)) == Progress::kDone); };

  done({}, {});
  done(call_of(Collective::kAllReduce, count), {sources(own), destinations(result)});
  CHECK(is(result[0], sum, n));
  std::vector<Elements> in_place = own;
  done(call_of(Collective::kAllReduce, count, -1, ReduceOp::kMax), {sources(in_place), destinations(in_place)});
  CHECK(is(in_place[0], first_of(ranks - 1, 0)));
  in_place = own;
  done(call_of(Collective::kReduce, count, int(root)), {sources(in_place), me == root ? destinations(in_place) : std::vector<char*>{}});
  CHECK(is(in_place[0], me == root ? sum : first_of(me, 0), me == root ? n : 1));
  done(call_of(Collective::kReduceScatter, count), {sources(lists), destinations(result)});
  CHECK(is(result[0], here, n));
  done(call_of(Collective::kAllGather, count), {sources(own), destinations(many)});
  for (uint32_t r = 0; r < ranks; ++r) CHECK(is(many[r], first_of(r, 0)));
  many.assign(ranks, Elements(count));
  done(call_of(Collective::kGather, count, int(root)), {sources(own), me == root ? destinations(many) : std::vector<char*>{}});
  for (uint32_t r = 0; r < ranks && me == root; ++r) CHECK(is(many[r], first_of(r, 0)));
  result[0] = me == root ? own[0] : Elements(count);
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

}  // namespace conveyor
