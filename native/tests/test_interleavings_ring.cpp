// The ring under every schedule: frames arrive whole, once and in order; a writer that waits for room is
// woken by a reader that takes a frame, closes or dies. See explorer.h.
#include "modelled.h"

using namespace conveyor;

namespace {

struct Pipe : Bells {
  std::shared_ptr<Segment> segment = Segment::create(1 << 16);
  RingHeader* header;
  std::unique_ptr<RingWriter> writer;
  std::vector<std::unique_ptr<RingReader>> readers;
  std::vector<uint64_t> received;

  Pipe(uint32_t slots, uint32_t count) : header(segment->make_ring(0, slots, 64, count, kWriterMayWait)), received(count) {}
  void reset() {
    Bells::reset();
    header->head.store(0);
    header->writer_waits.store(0);
    std::vector<Target> targets;
    readers.clear();
    for (uint32_t r = 0; r < header->readers; ++r) {
      header->cursors()[r].next.store(0);
      header->cursors()[r].closed.store(0);
      readers.push_back(std::make_unique<RingReader>(segment, 0, r, board, Target{0, 1}));
      targets.push_back({r + 1, 1});
      received[r] = 0;
    }
    writer = std::make_unique<RingWriter>(segment, 0, board, targets);
  }

  void write(uint64_t frames) {
    Waiter waiter(&bell(0));
    for (uint64_t n = 0; n < frames; ++n) {
      for (;;) {
        if (writer->has_room()) break;
        const uint32_t seen = waiter.count();
        writer->wants_room();
        if (writer->has_room()) break;
        waiter.park(seen, 0);
      }
      SlotHeader* slot = writer->next_slot();
      model::writes(slot);
      slot->tag = n;
      writer->publish();
    }
  }
  // Up to `frames`, then closes if told to.
  void read(uint32_t r, uint64_t frames, bool close = false) {
    Waiter waiter(&bell(r + 1));
    while (received[r] < frames) {
      const uint32_t seen = waiter.count();
      if (readers[r]->empty()) {
        waiter.park(seen, 0);
        continue;
      }
      const SlotHeader* slot = readers[r]->front();
      model::reads(slot);
      if (slot->tag != received[r]) throw model::Wrong{"shows a frame that was overwritten, or not yet whole"};
      ++received[r];
      readers[r]->advance();
    }
    if (close) readers[r]->close();
  }
  Scene scene(std::vector<std::function<void()>> bodies, std::vector<uint64_t> expected) {
    return {this, std::move(bodies), [this] { reset(); },
            [this, expected] { return std::equal(expected.begin(), expected.end(), received.begin()); }};
  }
};

}  // namespace

TEST(a_full_ring_wakes_its_writer) {
  Pipe p(1, 1);
  const Scene two = p.scene({[&] { p.write(2); }, [&] { p.read(0, 2); }}, {2});
  two.holds(model::kAll, 100);
  CHECK(two.fails(kOmitted, "store", &p.header->writer_waits));
  CHECK(two.fails(kOmitted, "store", &p.header->head));
  CHECK(two.fails(kOmitted, "store", &p.header->cursors()[0].next));
  // The two sides of the writer's sleep (Dekker): neither may be late.
  CHECK(two.fails(kLate, "store", &p.header->cursors()[0].next, 3));
  CHECK(two.fails(kLate, "store", &p.header->writer_waits, 3));
  const Scene three = p.scene({[&] { p.write(3); }, [&] { p.read(0, 3); }}, {3});
  three.holds(2, 100);
}

TEST(a_writer_asleep_that_was_asked_for_is_rung_once_more) {
  Pipe p(1, 1);
  const Scene scene = p.scene({[&] { p.write(3); }, [&] { p.read(0, 3); }}, {3});
  CHECK(scene.fails(kOmitted, "fetch_add", &p.bell(0).count));
  CHECK(scene.fails(kOmitted, "futex wake", &p.bell(0).count));
}

TEST(a_ring_of_two_slots) {
  Pipe p(2, 1);
  const Scene scene = p.scene({[&] { p.write(3); }, [&] { p.read(0, 3); }}, {3});
  scene.holds(kThorough ? 3 : 2, 100);
}

TEST(the_slower_of_two_readers_holds_the_writer) {
  Pipe p(1, 2);
  const Scene scene = p.scene({[&] { p.write(2); }, [&] { p.read(0, 2); }, [&] { p.read(1, 2); }}, {2, 2});
  scene.holds(1, 100);
  CHECK(scene.fails(kOmitted, "store", &p.header->cursors()[1].next));
  CHECK(scene.fails(kLate, "store", &p.header->cursors()[1].next, 3));
}

TEST(two_readers_each_get_a_frame) {
  Pipe p(1, 2);
  const Scene scene = p.scene({[&] { p.write(1); }, [&] { p.read(0, 1); }, [&] { p.read(1, 1); }}, {1, 1});
  scene.holds(kThorough ? model::kAll : 2, 100);
}

TEST(a_reader_that_closes_frees_its_writer) {
  Pipe p(1, 1);
  const Scene scene = p.scene({[&] { p.write(2); }, [&] { p.readers[0]->close(); }}, {});
  scene.holds(model::kAll, 5);
  CHECK(scene.fails(kOmitted, "store", &p.header->cursors()[0].closed));
  const Scene later = p.scene({[&] { p.write(3); }, [&] { p.read(0, 1, true); }}, {1});
  later.holds(kThorough ? 3 : 2, 50);
  CHECK(later.fails(kOmitted, "store", &p.header->cursors()[0].closed));
}

TEST(a_reader_that_closes_leaves_the_other_one_its_frames) {
  Pipe p(1, 2);
  const Scene scene = p.scene({[&] { p.write(2); }, [&] { p.read(0, 2); }, [&] { p.readers[1]->close(); }}, {2});
  scene.holds(kThorough ? 2 : 1, 50);
  CHECK(scene.fails(kOmitted, "store", &p.header->cursors()[1].closed));
}

// Whoever announces the death may do so at any moment of what the reader did before.
TEST(a_reader_that_dies_frees_its_writer) {
  Pipe p(1, 1);
  const Scene scene = p.scene({[&] { p.write(2); }, [&] { p.board->announce_death(1); }}, {});
  scene.holds(model::kAll, 10);
  CHECK(scene.fails(kOmitted, "exchange", &p.board->slot(1)->condition));
  const Scene later = p.scene({[&] { p.write(3); }, [&] { p.read(0, 1), p.board->announce_death(1); }}, {1});
  later.holds(2, 50);
}

TEST(a_reader_that_dies_leaves_the_other_one_its_frames) {
  Pipe p(1, 2);
  const Scene scene = p.scene({[&] { p.write(2); }, [&] { p.read(0, 2); }, [&] { p.board->announce_death(2); }}, {2});
  scene.holds(1, 50);
  CHECK(scene.fails(kOmitted, "exchange", &p.board->slot(2)->condition));
}
