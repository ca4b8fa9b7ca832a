// What processes note of their waits: who reads meanwhile reads all of a work's waits or finds out, also
// where the writer dies at any moment.
#include <sys/mman.h>

#include <thread>

#include "process_table.h"
#include "check.h"

using namespace conveyor;

namespace {

constexpr uint64_t kWork = 8, kOther = 12, kCall = 5;

// All of the `version`th notes have its number, and there are as many of each work as it says.
std::vector<WaitNote> notes_of(uint64_t version) {
  std::vector<WaitNote> notes;
  for (uint64_t work : {kOther, kWork})
    for (uint32_t i = 0; i < 1 + version % (kWaitRows / 2); ++i)
      notes.push_back({work, version, uint32_t(version), 1, i, version, "wait " + std::to_string(version)});
  return notes;
}

bool are_whole(const std::vector<WaitNote>& notes) {
  if (notes.empty()) return true;
  const uint64_t version = notes.front().stamp;
  if (notes.size() != 1 + version % (kWaitRows / 2)) return false;
  for (uint32_t i = 0; i < notes.size(); ++i) {
    const WaitNote& note = notes[i];
    if (note.work != kWork || note.stamp != version || note.answered != uint32_t(version) || note.slot != i ||
        note.target != version || note.text != "wait " + std::to_string(version))
      return false;
  }
  return true;
}

struct SharedNotes {
  SharedNotes() : at(static_cast<WaitNotes*>(::mmap(nullptr, sizeof(WaitNotes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {}
  ~SharedNotes() { ::munmap(static_cast<void*>(at), sizeof(WaitNotes)); }
  WaitNotes* operator->() const { return at; }
  WaitNotes* at;
};

}  // namespace

TEST(a_work_waits_where_its_lane_does) {
  SharedNotes notes;
  CHECK(notes->of(kWork)->empty());
  notes->note({{kWork, 1, 0, 1, 2, 3, "own"}, {kCall, 2, 0, 1, 2, 3, "call"}});
  CHECK_EQ(notes->of(kWork)->size(), 1u);
  CHECK_EQ(notes->of(kWork)->front().text, "own");
  CHECK_EQ(notes->of(kCall)->front().text, "call");
  CHECK(notes->of(kOther)->empty());
  CHECK(notes->of(lane_of(kWork))->empty());
  notes->note({{kWork, 1, 0, 1, 2, 3, "own"}, {0, 3, 0, 1, 2, 3, "lane"}});
  for (uint64_t work : {kWork, kOther, uint64_t(0)}) {
    REQUIRE(notes->of(work)->size() == 1);
    CHECK_EQ(notes->of(work)->front().text, "lane");
  }
  CHECK(notes->of(kCall)->empty());
  notes->note({});
  CHECK(notes->of(kWork)->empty());
}

TEST(a_text_is_cut) {
  SharedNotes notes;
  const std::string longest(kWaitWords * 8, 'x');
  notes->note({{kWork, 1, 0, 1, 2, 3, longest + "y"}});
  CHECK_EQ(notes->of(kWork)->front().text, longest);
  notes->note({{kWork, 1, 0, 1, 2, 3, "short"}});
  CHECK_EQ(notes->of(kWork)->front().text, "short");
}

TEST(who_reads_while_they_are_written_reads_them_whole) {
  SharedNotes notes;
  std::atomic<bool> over{false};
  std::vector<std::thread> readers;
  std::atomic<uint64_t> reads{0};
  for (int i = 0; i < 2; ++i)
    readers.emplace_back([&] {
      while (!over.load()) {
        const auto read = notes->of(kWork);
        if (!read) continue;
        CHECK(are_whole(*read));
        if (!read->empty()) reads.fetch_add(1);
      }
    });
  for (uint64_t version = 1; version < 20'000 || reads.load() < 1000; ++version) notes->note(notes_of(version));
  over.store(true);
  for (std::thread& reader : readers) reader.join();
}

TEST(a_writer_that_is_killed_leaves_nothing_that_is_believed) {
  for (int round = 0; round < 40; ++round) {
    SharedNotes notes;
    check::Child child([&] {
      for (uint64_t version = 1;; ++version) notes->note(notes_of(version));
    });
    while (notes->of(kWork).value_or(std::vector<WaitNote>()).empty()) std::this_thread::yield();
    child.kill(SIGKILL);
    child.wait();
    const auto left = notes->of(kWork);
    CHECK(!left || are_whole(*left));
    // The next process of that slot writes where this one did.
    notes->reset();
    REQUIRE(notes->of(kWork).has_value());
    CHECK(notes->of(kWork)->empty());
    notes->note(notes_of(7));
    CHECK_EQ(notes->of(kWork)->size(), 8u);
  }
}

TEST(a_slot_of_the_process_table_begins_without_notes) {
  auto process_table = ProcessTable::create(2);
  process_table->prepare(1, "one");
  WaitNotes& notes = process_table->slot(1)->waits;
  notes.note(notes_of(3));
  CHECK(!notes.of(kWork)->empty());
  process_table->prepare(1, "another");
  CHECK(notes.of(kWork)->empty());
  CHECK(process_table->slot(0)->waits.of(kWork)->empty());
}
