// Blocks that a process has pinned for a device: their memory stays, whatever wants it, until they are given up.
#include <sys/uio.h>

#include <thread>

#include "arena_setup.h"
#include "arena/pins.h"

using namespace conveyor;

namespace {

// An arena of slot 0 whose memory is the session's, and what slots 1 and 2 see of it.
struct Session {
  std::shared_ptr<ProcessTable> process_table = ProcessTable::create(kMaxPins + 4);
  Fd file = Arena::create_file(kFile);
  Arena arena;
  std::shared_ptr<ArenaView> view = std::make_shared<ArenaView>(file.get(), kFile, process_table, 0);
  ReaderCursor cursors[3] = {};

  explicit Session(uint64_t idle_ns = kNever, size_t cap = 64 * kMiB) : arena(file.get(), kFile, cap, with_processes(process_table), 0, idle_ns) {}
  static const std::shared_ptr<ProcessTable>& with_processes(const std::shared_ptr<ProcessTable>& process_table) {
    for (uint32_t i = 0; i < process_table->slots(); ++i) start(*process_table, i);
    return process_table;
  }
  static void start(ProcessTable& process_table, uint32_t slot) {
    process_table.prepare(slot, "");
    process_table.slot(slot)->condition.store(Condition::kAlive);
  }
  std::unique_ptr<Lease> send(size_t size) {
    Block* block = arena.allocate(size);
    std::memset(block->data(), 1, size);
    auto set = std::make_shared<ReaderSet>();
    set->process_table = process_table;
    set->add(1, &cursors[1]);
    arena.publish(block, set, 0, 0);
    return std::make_unique<Lease>(*view, block->offset, block->size, 0);
  }
  std::unique_ptr<BlockPin> pin(const Lease& lease, uint32_t slot = 1) {
    return std::make_unique<BlockPin>(lease.shared_mapping(), lease.block(), lease.returns(), process_table, slot);
  }
  std::unique_ptr<BlockPin> pinned(size_t size, uint32_t slot = 1) { return pin(*send(size), slot); }
  size_t memory() const {
    struct stat s;
    ::fstat(file.get(), &s);
    return size_t(s.st_blocks) * 512;
  }
};

// A page as a device has pinned it: the pipe refers to it, whatever becomes of the file.
struct PinnedPage {
  int ends[2];
  explicit PinnedPage(char* page) {
    REQUIRE(::pipe2(ends, O_CLOEXEC) == 0);
    iovec all{page, kernel_page()};
    CHECK(::vmsplice(ends[1], &all, 1, 0) == ssize_t(kernel_page()));
  }
  ~PinnedPage() { ::close(ends[0]), ::close(ends[1]); }
  char first() {
    char c = 0;
    CHECK(::read(ends[0], &c, 1) == 1);
    return c;
  }
};

}  // namespace

TEST(memory_that_is_pinned_stays) {
  for (const size_t size : {2 * kMiB, 20 * kMiB}) {  // in a window, and in a mapping of its own
    Session s;
    std::unique_ptr<BlockPin> pin = s.pinned(size);
    CHECK_EQ(pin->size(), align_up(size + kBlockHeader, kGranule));
    s.send(kMiB).reset();
    s.arena.give_back(0);
    CHECK(s.memory() >= size);
    CHECK(s.memory() < size + kMiB);  // what lies beside it goes
    CHECK_EQ(s.arena.bytes_touched(), pin->size());
    CHECK_EQ(s.arena.give_back(0), 0u);  // and nothing is due
    pin->release();
    pin->release();
    s.arena.give_back(0);
    CHECK_EQ(s.memory(), 0u);
  }
}

TEST(a_device_sees_what_is_written_later) {
  Session s;
  auto lease = s.send(2 * kMiB);
  char* const page = lease->block() + kMiB;
  const auto written = [&](bool mark) {
    *page = 1;
    PinnedPage device(page);
    std::unique_ptr<BlockPin> pin;
    if (mark) pin = s.pin(*lease);
    lease.reset();
    s.arena.give_back(0);
    lease = s.send(2 * kMiB);
    CHECK(lease->block() + kMiB == page);
    *page = 9;
    return device.first();
  };
  CHECK(written(true) == 9);
  CHECK(written(false) == 1);  // so that is what the mark is for
}

TEST(a_block_that_is_pinned_is_used_again) {
  Session s;
  auto lease = s.send(2 * kMiB);
  char* const block = lease->block();
  const auto pin = s.pin(*lease);
  lease.reset();
  for (int i = 0; i < 3; ++i) {
    lease = s.send(2 * kMiB);
    CHECK(lease->block() == block);
    CHECK(pinned(*s.process_table, *reinterpret_cast<BlockHeader*>(block)));
    lease.reset();
    s.arena.give_back(0);
  }
}

TEST(several_processes_pin_a_block_and_the_last_lets_it_go) {
  Session s;
  auto lease = s.send(2 * kMiB);
  std::vector<std::unique_ptr<BlockPin>> pins;
  for (uint32_t i = 0; i < kMaxPins; ++i) pins.push_back(s.pin(*lease, i + 1));
  CHECK_THROWS(std::system_error, s.pin(*lease, kMaxPins + 1));
  // The place of one that has died is another's; what the dead one does late changes nothing.
  s.process_table->announce_death(4);
  auto other = s.pin(*lease, kMaxPins + 1);
  CHECK_THROWS(std::system_error, s.pin(*lease, kMaxPins + 2));
  pins[3].reset();
  CHECK_THROWS(std::system_error, s.pin(*lease, kMaxPins + 2));
  lease.reset();
  for (auto& pin : pins) {
    s.arena.give_back(0);
    CHECK(s.memory() != 0);
    pin.reset();
  }
  s.arena.give_back(0);
  CHECK(s.memory() != 0);
  other.reset();
  s.arena.give_back(0);
  CHECK_EQ(s.memory(), 0u);
}

TEST(one_process_may_pin_a_block_twice) {
  Session s;
  auto lease = s.send(2 * kMiB);
  auto first = s.pin(*lease), second = s.pin(*lease);
  lease.reset();
  first.reset();
  s.arena.give_back(0);
  CHECK(s.memory() != 0);
  second.reset();
  s.arena.give_back(0);
  CHECK_EQ(s.memory(), 0u);
}

TEST(a_death_takes_the_marks) {
  for (const bool succeeded : {false, true}) {
    Session s;
    const auto pin = s.pinned(2 * kMiB, 2);
    s.arena.give_back(0);
    CHECK(s.memory() != 0);
    s.process_table->announce_death(2);
    if (succeeded) Session::start(*s.process_table, 2);  // another process of the same slot
    s.arena.give_back(0);
    CHECK_EQ(s.memory(), 0u);
  }
}

TEST(what_a_broken_peer_marks_is_nobody_s) {
  Session s;
  auto lease = s.send(2 * kMiB);
  auto* header = reinterpret_cast<BlockHeader*>(lease->block());
  check::Random random(3);
  for (int i = 0; i < 10'000; ++i) {
    const uint32_t mark = uint32_t(random.below(size_t(1) << 32));
    header->pins[random.below(kMaxPins)].store(mark);
    const uint32_t slot = (mark >> 16) - 1;
    CHECK_EQ(pins(*s.process_table, mark), mark != 0 && slot < s.process_table->slots() && mark == pinner(slot, s.process_table->slot(slot)->incarnation.load()));
  }
  // Nor does a block reach beyond its mapping.
  header->backed = SIZE_MAX;
  for (auto& mark : header->pins) mark.store(0);
  CHECK(s.pin(*lease)->size() <= kWindow);
}

TEST(memory_goes_back_by_itself_when_it_is_given_up) {
  for (const bool dies : {false, true}) {
    Session s(20'000'000);
    auto pin = s.pinned(2 * kMiB);
    // The thread has looked, found nothing that can go, and sleeps.
    CHECK(check::soon([&] { return s.process_table->slot(0)->returns.wanted.load() == 1 && s.arena.blocks_out() == 0; }));
    CHECK(s.memory() != 0);
    if (dies)
      s.process_table->announce_death(1);
    else
      pin.reset();
    CHECK(check::soon([&] { return s.memory() == 0; }));
  }
}

TEST(at_the_cap_who_has_pinned_memory_is_requested_for_it) {
  Session s(kNever, 8 * kMiB);
  std::vector<std::unique_ptr<BlockPin>> pins;
  for (int i = 0; i < 3; ++i) pins.push_back(s.pin(*s.send((size_t(1) + i) * kMiB)));
  CHECK_THROWS(ArenaFull, s.arena.allocate(7 * kMiB));  // nobody listens
  PinWords words(s.process_table, 1);
  words.hold(true);
  std::atomic<bool> stop{false};
  std::thread thread([&] {
    while (!stop.load()) {
      if (!words.wait(0)) continue;
      pins.clear();
      words.hold(false);
      words.answer();
    }
  });
  s.arena.release(s.arena.allocate(7 * kMiB));
  stop.store(true);
  words.wake();
  thread.join();
  CHECK(pins.empty());
}

TEST(a_budget_that_is_used_up_has_those_requested_who_read) {
  Session s;
  const auto budget = std::make_shared<Budget>(3 * kMiB);
  auto set = std::make_shared<ReaderSet>();
  set->process_table = s.process_table;
  set->budget = budget;
  set->add(1, &s.cursors[1]);
  Block* block = s.arena.allocate(2 * kMiB, budget);
  s.arena.publish(block, set, 0, 0);
  // On its way to a device.
  auto lease = std::make_unique<Lease>(*s.view, block->offset, block->size, 0);
  PinWords words(s.process_table, 1);
  words.hold(true);
  std::thread thread([&] {
    while (!words.wait(0)) {
    }
    lease.reset();
    words.answer();
  });
  s.arena.release(s.arena.allocate(2 * kMiB, budget));
  thread.join();
}

TEST(a_thread_that_waits_is_woken_once_for_what_came_before) {
  Session s;
  PinWords words(s.process_table, 1);
  words.wake();
  CHECK(!words.wait(0));
  CHECK(!words.wait(1'000'000));  // its time is over
  s.process_table->slot(1)->pins.ask();
  CHECK(words.wait(0));
  CHECK(words.wait(0));  // until it is answered
  words.answer();
  CHECK(!words.wait(1'000'000));
}

TEST(a_forked_child_gives_nothing_up) {
  Session s;
  auto pin = s.pinned(2 * kMiB);
  check::Child child([&] {
    CHECK(pin->inherited());
    pin.reset();
  });
  CHECK(child.passed());
  CHECK(!pin->inherited());
  s.arena.give_back(0);
  CHECK(s.memory() != 0);
  pin.reset();
  s.arena.give_back(0);
  CHECK_EQ(s.memory(), 0u);
}

TEST(a_closed_arena_keeps_what_is_pinned) {
  Session s;
  Block* made = s.arena.allocate(2 * kMiB);
  auto pin = s.pinned(2 * kMiB);
  s.arena.close();
  CHECK(s.memory() >= 2 * kMiB);
  s.arena.release(made);
  CHECK(s.memory() >= 2 * kMiB);
  CHECK(s.memory() < 3 * kMiB);
  CHECK_EQ(pin->address()[kBlockHeader], char(1));
}

TEST(marks_and_their_ends_race_with_the_thread_that_gives_back) {
  Session s(100'000);
  std::vector<std::thread> threads;
  for (uint32_t slot : {1u, 2u})
    threads.emplace_back([&, slot] {
      for (int i = 0; i < 300; ++i) {
        auto lease = s.send(64 * 1'024 + slot);
        auto pin = s.pin(*lease, slot);
        lease.reset();
        s.arena.give_back(0);
        CHECK_EQ(pin->address()[kBlockHeader + 1], char(1));  // zero, if a hole was punched
        pin.reset();
      }
    });
  for (auto& thread : threads) thread.join();
  CHECK(check::soon([&] { return s.memory() == 0; }));
}
