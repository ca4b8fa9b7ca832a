// Blocks and leases under every schedule: a block comes back once, when each of its readers is done or
// dead, and never while somebody reads it: not for a late end of an older lease, and not before a forked
// child that still reads it has ended. See explorer.h.
#include "modelled.h"

// What a forked child leaves to its parent is never freed there (holds.cpp); here both are one process.
extern "C" const char* __asan_default_options() { return "detect_leaks=0"; }

using namespace conveyor;

namespace {

constexpr size_t kFile = kWindow;

struct Blocks : Doorbells {
  Fd file = Arena::create_file(kFile);
  std::unique_ptr<Arena> arena;
  std::vector<std::shared_ptr<ArenaView>> views;  // of each reader, and last of a forked child
  Block* block = nullptr;
  model::Atomic<int> published{0};
  int reused = 0;
  uint64_t value = 1;
  ReaderCursor cursors[kSlots] = {};  // of the reader in each slot

  Blocks() {
    for (uint32_t i = 0; i < kSlots; ++i) views.push_back(std::make_shared<ArenaView>(file.get(), kFile));
  }
  std::shared_ptr<ReaderSet> set(std::vector<uint32_t> slots) {
    auto readers = std::make_shared<ReaderSet>();
    readers->process_table = process_table;
    for (uint32_t slot : slots) readers->add(slot, &cursors[slot]);
    return readers;
  }
  static uint64_t& content(char* data) { return *reinterpret_cast<uint64_t*>(data); }

  // The arena is mapped once for its writer and once for each view; the lease words are the same.
  std::vector<model::Explorer::Alias> aliases() {
    std::shared_ptr<Mapping> keep;
    char* first = views[0]->block(0, kGranule, keep);
    std::vector<model::Explorer::Alias> all{{block->base - block->offset, kFile, first}};
    for (size_t i = 1; i < views.size(); ++i) all.push_back({views[i]->block(0, kGranule, keep), kFile, first});
    return all;
  }
  Scene scene(std::vector<std::function<void()>> bodies, std::function<void()> reset, std::function<bool()> judge) {
    return {this, std::move(bodies), std::move(reset), std::move(judge), 0, [this] { return aliases(); }};
  }

  // A value 1 on its way to the readers in `slots`, their leases not yet taken.
  void reset(std::vector<uint32_t> slots) {
    Doorbells::reset();
    published.store(0);
    for (ReaderCursor& cursor : cursors) {
      cursor.next.store(0);
      cursor.end.store(0);
    }
    reused = 0;
    value = 1;
    arena = std::make_unique<Arena>(file.get(), kFile, kFile);
    block = arena->allocate(64);
    content(block->data()) = 1;
    arena->publish(block, set(std::move(slots)), 0, 0);
  }
  std::unique_ptr<Lease> take(uint32_t reader, uint32_t view) {
    return std::make_unique<Lease>(*views[view], block->offset, block->size, reader);
  }
  void look(const Lease& lease, uint64_t expected) {
    model::reads(block->data());
    if (content(lease.data()) != expected) throw model::Wrong{"lets a block be written while it is read"};
  }
  // One reader from the start of its lease to the end.
  void read(uint32_t reader) {
    auto lease = take(reader, reader);
    look(*lease, 1);
    look(*lease, 1);
    lease.reset();
  }
  // The writer: makes further values. Some take the block again, as soon as it is free.
  void write(int values, std::function<void()> after = {}) {
    for (int i = 0; i < values; ++i) {
      arena->give_back(UINT64_MAX);
      Block* fresh = arena->allocate(64);
      if (fresh == block) ++reused;
      model::writes(fresh->data());
      content(fresh->data()) = ++value;  // each its own
      if (fresh == block && after)
        after();
      else
        arena->release(fresh);
    }
  }
  // In the end every block is free, once.
  bool all_are_back() {
    arena->give_back(UINT64_MAX);
    if (arena->blocks_out() != 0) return false;
    std::vector<Block*> all;
    for (int i = 0; i < 6; ++i) all.push_back(arena->allocate(64));
    std::sort(all.begin(), all.end());
    return std::adjacent_find(all.begin(), all.end()) == all.end() && std::find(all.begin(), all.end(), block) != all.end() &&
           live_leases() == 0;
  }
};

}  // namespace

TEST(a_block_comes_back_when_all_its_readers_are_done) {
  Blocks b;
  const Scene scene = b.scene({[&] { b.write(2); }, [&] { b.read(0); }, [&] { b.read(1); }}, [&] { b.reset({1, 2}); }, [&] { return b.all_are_back(); });
  scene.holds(kThorough ? model::kAll : 1, 10);
  scene.buffered().holds(1, 10);
}

TEST(a_block_comes_back_when_its_reader_is_done) {
  Blocks b;
  size_t reused = 0;
  const Scene scene = b.scene({[&] { b.write(2); }, [&] { b.read(0); }}, [&] { b.reset({1}); }, [&] { return reused += size_t(b.reused), b.all_are_back(); });
  scene.holds(model::kAll, 5);
  CHECK(reused != 0);  // there were schedules in which it was
  // The judge sees a block that stays away.
  std::unique_ptr<Lease> held;
  const Scene kept = b.scene({[&] { b.write(1); }, [&] { held = b.take(0, 0); }}, [&] { held.reset(), b.reset({1}); }, [&] { return b.all_are_back(); });
  CHECK(kept.fails(model::Fault::kNone, "", nullptr, model::kAll));
}

TEST(a_dead_reader_s_block_comes_back_and_a_live_one_s_does_not) {
  Blocks b;
  const Scene scene = b.scene({[&] { b.write(2); }, [&] { b.read(0); }, [&] { b.process_table->announce_death(2); }}, [&] { b.reset({1, 2}); },
                    [&] { return b.all_are_back(); });
  scene.holds(kThorough ? model::kAll : 1, 10);
  CHECK(scene.fails(kOmitted, "exchange", &b.process_table->slot(2)->condition));
}

// A reader that leaves, with frames in the ring that it has not taken, and others still to come: all of
// their blocks come back, and what it has taken stays until it is let go of.
TEST(what_a_reader_leaves_behind_comes_back) {
  Blocks b;
  auto segment = Segment::create(kGranule);
  RingHeader* header = segment->make_ring(0, 4, 64, 1, 0);
  std::unique_ptr<RingWriter> writer;
  std::unique_ptr<RingReader> reader;
  size_t taken = 0, late = 0;
  const auto send = [&](uint64_t content) {
    b.arena->give_back(UINT64_MAX);
    Block* block = b.arena->allocate(64);
    model::writes(block->data());
    Blocks::content(block->data()) = content;
    CHECK(writer->has_room());
    SlotHeader* slot = writer->next_slot();
    model::writes(slot);
    slot->block = block->offset + 1;
    slot->block_size = block->size;
    b.arena->publish(block, writer->readers(), 0, writer->head());
    if (header->cursors()[0].closed()) ++late;
    writer->publish();
    b.block = block;
  };
  const auto read = [&](std::function<void()> leave) {
    std::unique_ptr<Lease> lease;
    if (!reader->empty()) {
      const SlotHeader* slot = reader->front();
      model::reads(slot);
      lease = std::make_unique<Lease>(*b.views[0], slot->block - 1, slot->block_size, 0);
      reader->advance();
      ++taken;
    }
    leave();
    if (lease) b.look(*lease, 2);
    lease.reset();
  };
  const auto reset = [&] {
    b.reset({1});
    b.take(0, 0).reset();
    header->head.store(0);
    header->cursors()[0].next.store(0);
    header->cursors()[0].end.store(0);
    writer = std::make_unique<RingWriter>(segment, 0, b.process_table, std::vector<Target>{{1, 1}});
    reader = std::make_unique<RingReader>(segment, 0, 0, b.process_table, Target{0, 1});
    send(2);
  };
  const auto judge = [&] { return b.all_are_back(); };
  const Scene scene = b.scene({[&] { send(3), send(4); }, [&] {
                                 read([&] {
                                   reader->close();
                                   if (!reader->empty()) throw model::Wrong{"shows frames to a reader that has left"};
                                 });
                               }},
                              reset, judge);
  scene.holds(kThorough ? model::kAll : 2, 10);
  CHECK(taken != 0);
  CHECK(late != 0);  // some were published after it had left
  // One that leaves without a word keeps them; and so does one that says so only of what it sees in the ring.
  const Scene silent = b.scene({scene.bodies[0], [&] { read([&] { while (!reader->empty()) reader->advance(); }); }}, reset, judge);
  CHECK(silent.fails(model::Fault::kNone, "", nullptr, model::kAll));
  const Scene draining = b.scene({scene.bodies[0], [&] {
                                    read([&] {
                                      for (; !reader->empty(); reader->advance()) {
                                        const SlotHeader* slot = reader->front();
                                        model::reads(slot);
                                        Lease(*b.views[0], slot->block - 1, slot->block_size, 0);
                                      }
                                    });
                                  }},
                                 reset, judge);
  CHECK(draining.fails(model::Fault::kNone, "", nullptr, model::kAll));
  // What was taken is the reader's still: were it not, it would be written under it.
  const Scene early = b.scene({scene.bodies[0], [&] { read([&] { header->cursors()[0].next.store(0), reader->close(); }); }}, reset, judge);
  CHECK(early.fails(model::Fault::kNone, "", nullptr, model::kAll));
}

// A reader taken for dead ends its lease when its block is another reader's already.
TEST(a_late_end_ends_no_newer_lease) {
  Blocks b;
  std::unique_ptr<Lease> late;
  const Scene scene = b.scene({[&] {
                           b.process_table->announce_death(1);
                           // The block's second life, for a reader in another slot at the same place of its set.
                           b.write(1, [&] { b.arena->publish(b.block, b.set({2}), 0, 0), b.published.store(1); });
                           b.write(1);
                         },
                         [&] { late.reset(); },
                         [&] {
                           if (b.published.load() == 0) return;
                           auto lease = std::make_unique<Lease>(*b.views[2], b.block->offset, b.block->size, 0);
                           b.look(*lease, 2);
                           b.look(*lease, 2);
                         }},
                    [&] {
                      late.reset();
                      b.reset({1});
                      late = b.take(0, 0);
                    },
                    [&] {
                      late.reset();
                      // A value that nobody took is held by its reader still: that one dies now.
                      b.process_table->announce_death(2);
                      return b.all_are_back();
                    });
  scene.holds(kThorough ? model::kAll : 1, 10);
  // An end that did not know its own generation would be the newer lease's.
  Scene ignorant = scene;
  ignorant.bodies[1] = [&] { late.reset(), b.take(0, 0).reset(); };
  CHECK(ignorant.fails(model::Fault::kNone, "", nullptr, model::kAll));
}

// The parent gives the value up while its child reads it; the child's own copy of the lease does nothing.
TEST(a_forked_child_keeps_the_block_and_ends_nothing) {
  Blocks b;
  std::unique_ptr<Lease> of_parent, of_child;
  int child_lives = -1;
  auto reset = [&] {
    of_parent.reset();
    of_child.reset();
    b.views[3] = std::make_shared<ArenaView>(b.file.get(), kFile);  // whose pages the child made private
    b.reset({1});
    // Both sides of the fork are played here, one after the other: first what the child is left with.
    of_child = b.take(0, 3);
    Holds::before_fork();
    child_lives = ::dup(Holds::get().pipe_ends[1]);
    ::close(Holds::get().pipe_ends[1]);
    Holds::after_fork_in_child();
    ::close(child_lives);
    of_parent = b.take(0, 0);
    Holds::before_fork();
    child_lives = ::dup(Holds::get().pipe_ends[1]);
    Holds::after_fork_in_parent();
  };
  const Scene scene = b.scene({[&] { b.write(2); },
                         [&] {  // the child
                           b.look(*of_child, 1);
                           of_child.reset();
                           model::reads(b.block->data());
                           model::close_now(std::exchange(child_lives, -1));
                         },
                         [&] {  // the parent
                           of_parent.reset();
                           release_unpinned();
                         }},
                    reset, [&] {
                      release_unpinned();
                      return b.all_are_back();
                    });
  scene.holds(kThorough ? model::kAll : 1, 10);
  // Without the child's hold, the block is written while the child reads it.
  const Scene unpinned = b.scene(scene.bodies, [&] {
                         reset();
                         if (child_lives >= 0) ::close(std::exchange(child_lives, ::open("/dev/null", O_RDONLY | O_CLOEXEC)));
                       },
                       scene.judge);
  CHECK(unpinned.fails(model::Fault::kNone, "", nullptr, model::kAll));
}

// --- The thread that gives memory back, and what the session counts ---

namespace {

// An arena of the process in slot 0 of the process table, with its thread.
struct Counted : Blocks {
  std::shared_ptr<ReaderSet> readers;
  Returns& returns() { return process_table->slot(0)->returns; }
  uint64_t in_session() { return process_table->header()->memory.bytes.load(); }
  uint64_t in_process() { return process_table->slot(0)->memory.load(); }

  void reset() {
    arena.reset();
    Doorbells::reset();
    process_table->header()->memory.bytes.store(0);
    for (ReaderCursor& cursor : cursors) {
      cursor.next.store(0);
      cursor.end.store(0);
    }
    arena = std::make_unique<Arena>(file.get(), kFile, kFile, process_table, 0, 1'000'000);
    block = arena->allocate(64);
    readers = set({1});
  }
  Scene scene(std::vector<std::function<void()>> bodies, std::function<bool()> judge, size_t daemons) {
    return {this, std::move(bodies), [this] { reset(); }, std::move(judge), daemons};
  }
};

}  // namespace

// Whoever leaves wakes the thread, and so does who publishes for one that has left.
TEST(what_is_published_while_its_reader_leaves_goes_back) {
  Counted b;
  const auto publish = [&] { b.arena->publish(b.block, b.readers, 0, 0); };
  const auto leave = [&] {
    b.cursors[1].end.store(1);
    b.returns().note();
  };
  const auto thread = [&] { model::started(); };
  const auto judge = [&] { return b.arena->bytes_touched() == 0; };
  const Scene scene = b.scene({publish, leave, thread}, judge, 1);
  scene.holds(kThorough ? 2 : 1, 10);
  CHECK(scene.fails(kOmitted, "futex wake", &b.returns().count));
  // With store buffers: who leaves has left before it looks whether the thread wants to know.
  const Scene buffered = scene.buffered();
  buffered.holds(1, 10);
  CHECK(buffered.fails(kRelaxed, "store", &b.cursors[1].end));
  const Scene died = b.scene({publish, [&] { b.process_table->announce_death(1); }, thread}, judge, 1);
  died.holds(kThorough ? 2 : 1, 10);
}

// A process may be killed between any two of its steps, and then its part is taken off the session's.
TEST(what_a_process_has_is_never_more_than_the_session_counts) {
  Counted b;
  size_t more = 0;
  const Scene scene = b.scene({[&] {
                                 b.arena->release(b.arena->allocate(64, {}, true));
                                 b.arena->release(b.arena->allocate(kGranule));
                                 b.arena->release(b.block);
                                 b.arena->give_back(0);
                               },
                               [&] {
                                 model::step("look", &b, true);
                                 // Both in one step, as if the process had ended there.
                                 model::Explorer* const explorer = std::exchange(model::explorer, nullptr);
                                 const uint64_t session = b.in_session(), process = b.in_process();
                                 model::explorer = explorer;
                                 if (session < process) throw model::Wrong{"counts less than a process has"};
                                 more += session > process;
                               }},
                              [&] { return b.in_session() == 0 && b.in_process() == 0; }, 0);
  scene.holds(2, 5);
  CHECK(more != 0);  // there were moments between the two
}

// A process is killed at any of its steps, and another one cleans up. A death between the two counts leaves in the
// session's what was on its way from one to the other: the others may get less for it, and never more than there is.
TEST(what_a_killed_process_had_is_the_session_s_again) {
  Counted b;
  const uint64_t others = 5 * kGranule;
  uint64_t most = 0;
  size_t exact = 0;
  const Scene scene{&b, {[&] {
                           b.arena->release(b.arena->allocate(64, {}, true));
                           b.arena->release(b.arena->allocate(kGranule));
                           b.arena->release(b.block);
                           b.arena->give_back(0);
                         },
                         [&] {
                           model::explorer->kill(1);
                           b.process_table->announce_death(0);
                           b.process_table->forget_memory(0);
                         }},
                    [&] {
                      b.reset();
                      b.process_table->header()->memory.bytes.fetch_add(others);
                    },
                    [&] {
                      if (b.in_process() != 0 || b.in_session() < others) return false;
                      const uint64_t more = b.in_session() - others;
                      exact += more == 0;
                      most = std::max(most, more);
                      return more <= 2 * kGranule;  // what the largest of the blocks has
                    }};
  scene.holds(2, 20);
  CHECK(exact > 20 && most != 0);
  CHECK(scene.fails(kOmitted, "exchange", &b.process_table->slot(0)->memory));
  CHECK(scene.fails(kOmitted, "fetch_sub", &b.process_table->header()->memory.bytes));
}
