// Values that others read where they lie, and announce that.
#include <atomic>
#include <thread>

#include "arena_setup.h"
#include "arena/view.h"
#include "hazards.h"

using namespace conveyor;

namespace {

constexpr uint64_t kNumber = 0x00ab'cdef'0123'4567;

// An arena of slot 0, and values in it whose memory is used again as soon as it is free.
struct Session {
  std::shared_ptr<ProcessTable> process_table = ProcessTable::create(4);
  Fd file = Arena::create_file(kFile);
  std::shared_ptr<Arena> owned = std::make_shared<Arena>(file.get(), kFile, 64 * kMiB, with_processes(process_table), 0, kNever);
  Arena& arena = *owned;
  std::shared_ptr<ArenaView> view = std::make_shared<ArenaView>(file.get(), kFile, process_table, 0);

  static const std::shared_ptr<ProcessTable>& with_processes(const std::shared_ptr<ProcessTable>& process_table) {
    for (uint32_t i = 0; i < process_table->slots(); ++i) start(*process_table, i);
    return process_table;
  }
  static void start(ProcessTable& process_table, uint32_t slot) {
    process_table.prepare(slot, "");
    process_table.slot(slot)->condition.store(Condition::kAlive);
  }
  std::shared_ptr<Hazard> announce(uint64_t number = kNumber, uint32_t slot = 1) { return Hazard::announce(process_table, slot, number, view->returns()); }
};

// One that is kept, with its anchor, as native/python/kept.h has it.
struct Value {
  Session& s;
  const uint64_t number;
  Block* const block;
  std::atomic<uint64_t> anchor;
  std::shared_ptr<std::atomic<bool>> gone = std::make_shared<std::atomic<bool>>(false);
  std::list<Lingering> one;

  explicit Value(Session& s, uint64_t number = kNumber, size_t size = 100'000) : s(s), number(number), block(s.arena.allocate(size)), anchor(number) {
    std::memset(block->data(), 7, size);
    one.push_back({number, std::shared_ptr<const void>(block, [&s, block = block, size, gone = gone](const void*) {
                     std::memset(block->data(), 9, size);
                     *gone = true;
                     s.arena.release(block);
                   })});
  }
  void let_go() {
    anchor.store(0);
    if (s.arena.is_read(number)) return s.arena.linger(one);
    one.clear();
  }
  // Its thread lets go of it by itself.
  bool goes() const {
    for (int i = 0; i < 2'000 && !*gone; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    return *gone;
  }
};

}  // namespace

TEST(what_nobody_has_announced_goes_at_once) {
  Session s;
  Value value(s);
  const auto other = s.announce(kNumber + 1);
  value.let_go();
  CHECK(*value.gone);
}

TEST(it_stays_as_long_as_it_is_read_and_goes_by_itself) {
  Session s;
  Value value(s);
  auto hazard = s.announce();
  REQUIRE(hazard != nullptr);
  auto borrowed = std::make_unique<Borrowed>(std::move(hazard), *s.view, value.block->offset, value.block->size);
  value.let_go();
  s.arena.give_back(0);
  CHECK(!*value.gone);
  CHECK_EQ(borrowed->block()[kBlockHeader], char(7));
  borrowed.reset();
  CHECK(value.goes());
  CHECK_EQ(s.process_table->slot(0)->returns.lingering.load(), 0u);
}

TEST(each_of_several_holds_it) {
  Session s;
  Value value(s);
  auto one = s.announce(kNumber, 1), again = s.announce(kNumber, 1), other = s.announce(kNumber, 2);
  value.let_go();
  one.reset();
  again.reset();
  s.arena.give_back(0);
  CHECK(!*value.gone);
  other.reset();
  CHECK(value.goes());
}

TEST(the_death_of_a_reader_is_its_end) {
  Session s;
  Value value(s);
  const auto hazard = s.announce();
  value.let_go();
  s.arena.give_back(0);
  CHECK(!*value.gone);
  s.process_table->announce_death(1);
  CHECK(value.goes());
}

// A process that has left the session lets go later than its slot has become another one's.
TEST(who_has_left_takes_nothing_from_who_comes_after) {
  Session s;
  Value value(s);
  auto former = s.announce();
  s.process_table->announce_death(1);
  Session::start(*s.process_table, 1);
  CHECK(!is_announced(*s.process_table, kNumber));
  auto later = s.announce();
  former.reset();
  CHECK(is_announced(*s.process_table, kNumber));
  CHECK(announced_by(*s.process_table, 1) == std::vector<uint64_t>{kNumber});
  later.reset();
  CHECK(!is_announced(*s.process_table, kNumber));
}

TEST(as_many_as_there_are_places) {
  Session s;
  std::vector<std::shared_ptr<Hazard>> all;
  for (uint32_t i = 0; i < kHazards; ++i) all.push_back(s.announce(kNumber + i));
  CHECK(std::all_of(all.begin(), all.end(), [](const auto& one) { return one != nullptr; }));
  CHECK(s.announce(kNumber) == nullptr);
  CHECK(is_announced(*s.process_table, kNumber + kHazards - 1));
  all[17].reset();
  CHECK(!is_announced(*s.process_table, kNumber + 17));
  CHECK(s.announce(kNumber) != nullptr);
  CHECK(s.announce(kNumber, 2) != nullptr);
}

// What a peer writes to its words delays at most.
TEST(words_of_a_broken_peer_are_only_read) {
  Session s;
  Value value(s);
  s.process_table->slot(2)->hazards_used.store(UINT32_MAX);
  for (auto& word : s.process_table->slot(2)->hazards) word.store(UINT64_MAX);
  CHECK(!s.arena.is_read(kNumber));
  CHECK_EQ(announced_by(*s.process_table, 2).size(), size_t(kHazards));
  value.let_go();
  CHECK(*value.gone);
}

TEST(a_forked_child_takes_nothing_back) {
  install_fork_handlers();
  Session s;
  auto hazard = s.announce();
  check::Child child([&] {
    hazard.reset();
    CHECK(is_announced(*s.process_table, kNumber));
  });
  CHECK(child.passed());
  CHECK(is_announced(*s.process_table, kNumber));
}

// What it holds at the session's end stays readable until it lets go.
TEST(a_closed_arena_keeps_it) {
  Session s;
  Value value(s);
  auto hazard = s.announce();
  auto borrowed = std::make_unique<Borrowed>(std::move(hazard), *s.view, value.block->offset, value.block->size);
  value.let_go();
  s.arena.close();
  CHECK(!*value.gone);
  CHECK_EQ(borrowed->block()[kBlockHeader + 99'999], char(7));
  borrowed.reset();
  CHECK(value.goes());
}

// Readers that come by broken chains at any time, while values come and go: each reads its own value or finds it gone.
TEST(threads_read_while_values_go) {
  Session s;
  constexpr int kRounds = 300;
  for (int round = 0; round < kRounds; ++round) {
    Value value(s, kNumber + uint64_t(round));
    std::atomic<bool> right{true};
    const auto read = [&](uint32_t slot) {
      auto hazard = s.announce(value.number, slot);
      // As the fence and the system call of a reader in another process, which ThreadSanitizer does not know.
      if (value.anchor.load(std::memory_order_seq_cst) != value.number) return;
      Borrowed borrowed(std::move(hazard), *s.view, value.block->offset, value.block->size);
      for (size_t i = 0; i < 100'000; i += 997)
        if (borrowed.block()[kBlockHeader + i] != 7) right = false;
    };
    std::thread one(read, 1), two(read, 2);
    value.let_go();
    one.join();
    two.join();
    CHECK(right);
    REQUIRE(value.goes());
  }
}
