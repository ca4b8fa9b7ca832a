// The ring under every schedule: frames arrive whole, once and in order; a writer that waits for room is
// woken by a reader that takes a frame, closes or dies. See explorer.h.
#include "modelled.h"

using namespace conveyor;

namespace {

struct Pipe : Doorbells {
  std::shared_ptr<Segment> segment = Segment::create(1 << 16);
  RingHeader* header;
  std::unique_ptr<RingWriter> writer;
  std::vector<std::unique_ptr<RingReader>> readers;
  std::vector<uint64_t> received;

  Pipe(uint32_t slots, uint32_t count) : header(segment->make_ring(0, slots, 64, count, kWriterMayWait)), received(count) {}
  void reset() {
    Doorbells::reset();
    header->head.store(0);
    header->room_at.store(0);
    std::vector<Target> targets;
    readers.clear();
    for (uint32_t r = 0; r < header->readers; ++r) {
      header->cursors()[r].next.store(0);
      header->cursors()[r].end.store(0);
      readers.push_back(std::make_unique<RingReader>(segment, 0, r, process_table, Target{0, 1}));
      targets.push_back({r + 1, 1});
      received[r] = 0;
    }
    writer = std::make_unique<RingWriter>(segment, 0, process_table, targets);
  }

  void write(uint64_t frames) {
    Waiter waiter(&doorbell(0));
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
    Waiter waiter(&doorbell(r + 1));
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
  CHECK(two.fails(kOmitted, "store", &p.header->room_at));
  CHECK(two.fails(kOmitted, "store", &p.header->head));
  CHECK(two.fails(kOmitted, "store", &p.header->cursors()[0].next));
  // The two sides of the writer's sleep (Dekker): neither may be late.
  CHECK(two.fails(kLate, "store", &p.header->cursors()[0].next, 3));
  CHECK(two.fails(kLate, "store", &p.header->room_at, 3));
  const Scene buffered = two.buffered();
  buffered.holds(2, 100);
  CHECK(buffered.fails(kRelaxed, "store", &p.header->cursors()[0].next));
  CHECK(buffered.fails(kRelaxed, "store", &p.header->room_at));
  const Scene three = p.scene({[&] { p.write(3); }, [&] { p.read(0, 3); }}, {3});
  three.holds(2, 100);
}

TEST(a_writer_asleep_that_was_requested_for_is_rung_once_more) {
  Pipe p(1, 1);
  const Scene scene = p.scene({[&] { p.write(3); }, [&] { p.read(0, 3); }}, {3});
  CHECK(scene.fails(kOmitted, "fetch_add", &p.doorbell(0).count));
  CHECK(scene.fails(kOmitted, "futex wake", &p.doorbell(0).count));
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
  CHECK(scene.fails(kOmitted, "store", &p.header->cursors()[0].end));
  const Scene later = p.scene({[&] { p.write(3); }, [&] { p.read(0, 1, true); }}, {1});
  later.holds(kThorough ? 3 : 2, 50);
  CHECK(later.fails(kOmitted, "store", &p.header->cursors()[0].end));
}

TEST(a_reader_that_closes_leaves_the_other_one_its_frames) {
  Pipe p(1, 2);
  const Scene scene = p.scene({[&] { p.write(2); }, [&] { p.read(0, 2); }, [&] { p.readers[1]->close(); }}, {2});
  scene.holds(kThorough ? 2 : 1, 50);
  CHECK(scene.fails(kOmitted, "store", &p.header->cursors()[1].end));
}

namespace {

// Threads of one process send on one ring, one after the other under a lock (the GIL; a channel's end). Each
// looks for room, asks to be rung, looks again, and sleeps without the lock; or gives up at once (a timeout).
struct Shared : Pipe {
  model::Mutex lock;

  using Pipe::Pipe;
  void reset() {  // it is full, with the frames that are numbered first
    Pipe::reset();
    while (writer->has_room()) put();
  }
  void put() {
    SlotHeader* slot = writer->next_slot();
    model::writes(slot);
    slot->tag = writer->head();
    writer->publish();
  }
  bool offer() {
    lock.lock();
    bool room = writer->has_room();
    if (!room) {
      writer->wants_room();
      room = writer->has_room();
    }
    if (room) put();
    lock.unlock();
    return room;
  }
  void send() {
    Waiter waiter(&doorbell(0));
    for (;;) {
      const uint32_t seen = waiter.count();
      if (offer()) return;
      waiter.park(seen, 0);
    }
  }
  Scene scene(std::vector<std::function<void()>> bodies, std::vector<uint64_t> expected) {
    Scene made = Pipe::scene(std::move(bodies), std::move(expected));
    made.reset = [this] { reset(); };
    return made;
  }
};

}  // namespace

TEST(threads_that_share_a_writer_take_no_ring_from_each_other) {
  Shared p(1, 1);
  const Scene two = p.scene({[&] { p.send(); }, [&] { p.send(); }, [&] { p.read(0, 3); }}, {3});
  two.holds(2, 1000);
  CHECK(two.fails(kOmitted, "store", &p.header->room_at));
  // One of them asks and does not wait for the answer.
  const Scene impatient = p.scene({[&] { p.send(); }, [&] { p.offer(); }, [&] { p.read(0, 2); }}, {2});
  impatient.holds(2, 100);
}

TEST(threads_that_share_a_writer_of_two_slots) {
  Shared p(2, 1);
  const Scene scene = p.scene({[&] { p.send(); }, [&] { p.send(); }, [&] { p.read(0, 4); }}, {4});
  scene.holds(1, 100);
}

TEST(threads_that_share_a_writer_with_two_readers) {
  Shared p(1, 2);
  const Scene scene = p.scene({[&] { p.send(); }, [&] { p.offer(); }, [&] { p.read(0, 2); }, [&] { p.read(1, 2); }}, {2, 2});
  scene.holds(kThorough ? 1 : 0, 100);
}

namespace {

// Frames that bring something for each reader once (kRefs): how often that one, and how often the writer for
// it, has seen to it, by reader and frame.
struct Parcels : Pipe {
  static constexpr uint64_t kFrames = 2;
  std::vector<std::array<int, kFrames>> by_reader, by_writer;

  explicit Parcels(uint32_t count) : Pipe(2, count), by_reader(count), by_writer(count) {}
  void reset() {
    Pipe::reset();
    for (auto& of : by_reader) of = {};
    for (auto& of : by_writer) of = {};
  }
  void send() {
    for (uint64_t n = 0; n < kFrames; ++n) {
      if (!writer->has_room()) throw model::Wrong{"has no room for two frames"};
      writer->publish();
      const auto behind = writer->left_behind(n);
      for (uint32_t r = 0; r < by_writer.size(); ++r) by_writer[r][n] += behind[r];
    }
  }
  void take_all(uint32_t r) {
    for (RingReader& reader = *readers[r]; !reader.empty(); reader.advance()) ++by_reader[r][reader.next()];
  }
  void leave(uint32_t r) {
    readers[r]->leave();
    take_all(r);
    readers[r]->close();
  }
  bool each_once() const {
    for (uint64_t n = 0; n < kFrames; ++n) {
      for (uint32_t r = 0; r < by_reader.size(); ++r)
        if (by_reader[r][n] + by_writer[r][n] != 1) return false;
    }
    return std::ranges::all_of(writer->readers()->cursors, [](const ReaderCursor* cursor) { return cursor->closed(); });
  }
  Scene scene(std::vector<std::function<void()>> bodies) {
    return {this, std::move(bodies), [this] { reset(); }, [this] { return each_once(); }};
  }
};

}  // namespace

TEST(what_a_frame_brings_is_seen_to_once_while_its_reader_leaves) {
  Parcels p(1);
  size_t by_reader = 0, by_writer = 0;
  Scene scene = p.scene({[&] { p.send(); }, [&] { p.leave(0); }});
  scene.judge = [&] {
    by_reader += size_t(p.by_reader[0][1]), by_writer += size_t(p.by_writer[0][1]);
    return p.each_once();
  };
  scene.holds(model::kAll, 20);
  CHECK(by_reader != 0 && by_writer != 0);
  const Scene later = p.scene({scene.bodies[0], [&] { p.take_all(0), p.leave(0); }});
  later.holds(kThorough ? model::kAll : 3, 20);
  // Were the limit not settled once, both would have the frame, or neither.
  CHECK(scene.fails(kOmitted, "compare_exchange", &p.header->cursors()[0].end, 3));
  // One that looks, and leaves then, keeps what comes between.
  const Scene hasty = p.scene({scene.bodies[0], [&] { p.take_all(0), p.readers[0]->close(); }});
  CHECK(hasty.fails(model::Fault::kNone, "", nullptr));
}

TEST(what_a_frame_brings_is_seen_to_once_for_each_reader) {
  Parcels p(2);
  const Scene one = p.scene({[&] { p.send(); }, [&] { p.leave(0); }, [&] { p.take_all(1), p.leave(1); }});
  one.holds(kThorough ? 2 : 1, 50);
}

// Whoever announces the death may do so at any moment of what the reader did before.
TEST(a_reader_that_dies_frees_its_writer) {
  Pipe p(1, 1);
  const Scene scene = p.scene({[&] { p.write(2); }, [&] { p.process_table->announce_death(1); }}, {});
  scene.holds(model::kAll, 10);
  CHECK(scene.fails(kOmitted, "exchange", &p.process_table->slot(1)->condition));
  const Scene later = p.scene({[&] { p.write(3); }, [&] { p.read(0, 1), p.process_table->announce_death(1); }}, {1});
  later.holds(2, 50);
}

TEST(a_reader_that_dies_leaves_the_other_one_its_frames) {
  Pipe p(1, 2);
  const Scene scene = p.scene({[&] { p.write(2); }, [&] { p.read(0, 2); }, [&] { p.process_table->announce_death(2); }}, {2});
  scene.holds(1, 50);
  CHECK(scene.fails(kOmitted, "exchange", &p.process_table->slot(2)->condition));
}
