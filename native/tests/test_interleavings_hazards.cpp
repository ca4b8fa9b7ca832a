// Values that are read where they lie though nobody else holds them for the reader, under every schedule: their memory
// goes once nobody reads it, by itself, and never before; who comes too late sees that. See explorer.h.
#include "modelled.h"

using namespace conveyor;

namespace {

constexpr size_t kFile = kWindow;
constexpr uint64_t kNumber = 77;

// An arena of slot 0, with the thread that gives memory back, and a value in it. Slots 1 and 2 may read it.
struct Kept : Doorbells {
  Fd file = Arena::create_file(kFile);
  std::unique_ptr<Arena> arena;
  std::shared_ptr<ArenaView> view;
  std::list<Lingering> one;
  std::shared_ptr<Hazard> hazards[3];
  model::Atomic<uint64_t> anchor{0};
  bool gone = false;
  bool over = false;  // of a schedule that was given up the arena is destroyed with what lingers in it
  size_t looks = 0;
  Returns& returns() { return process_table->slot(0)->returns; }
  ~Kept() { over = true; }

  void reset() {
    for (auto& hazard : hazards) hazard.reset();
    over = true;
    one.clear();
    arena.reset();
    over = false;
    Doorbells::reset();
    process_table->header()->memory.bytes.store(0);
    view = std::make_shared<ArenaView>(file.get(), kFile, process_table, 0);
    arena = std::make_unique<Arena>(file.get(), kFile, kFile, process_table, 0, 1'000'000);
    Block* block = arena->allocate(64);
    anchor.store(kNumber);
    gone = false;
    one.push_back({kNumber, std::shared_ptr<const void>(block, [this, block](const void*) {
                     model::writes(&gone);
                     gone = true;
                     if (!over) arena->release(block);
                   })});
  }
  Scene scene(std::vector<std::function<void()>> bodies, std::function<void()> more = {}, uint64_t may_stop = 0) {
    bodies.push_back([] { model::started(); });  // the thread, which does not end
    return {this, std::move(bodies), [this, more] { reset(), more ? more() : void(); }, [this] { return gone; }, 1, {}, may_stop};
  }
  // Its keeper lets go of it.
  void let_go() {
    anchor.store(0);
    if (arena->is_read(kNumber)) return arena->linger(one);
    one.clear();
  }
  void announce(uint32_t slot) { hazards[slot] = Hazard::announce(process_table, slot, kNumber, view->returns()); }
  void look() {
    model::reads(&gone);
    ++looks;
    if (gone) throw model::Wrong{"reads what has gone"};
  }
  void read(uint32_t slot) {
    announce(slot);
    if (anchor.load() == kNumber) look(), look();
    hazards[slot].reset();
  }
};

}  // namespace

TEST(what_is_read_stays_and_then_goes) {
  Kept k;
  const Scene scene = k.scene({[&] { k.read(1); }, [&] { k.let_go(); }});
  scene.holds(kThorough ? 2 : 1, 10);
  CHECK(k.looks != 0);
  // With store buffers: the anchor is down before the keeper looks who reads.
  const Scene buffered = scene.buffered();
  buffered.holds(1, 10);
  CHECK(buffered.fails(kRelaxed, "store", &k.anchor, 1));
  // Who looks first, and announces then, reads what has gone.
  const Scene late = k.scene({[&] {
                                const bool there = k.anchor.load() == kNumber;
                                k.announce(1);
                                if (there) k.look();
                                k.hazards[1].reset();
                              },
                              [&] { k.let_go(); }});
  CHECK(late.fails(model::Fault::kNone, "", nullptr));
  // And so he does where the keeper looks before it takes the anchor down.
  const Scene early = k.scene({[&] { k.read(1); }, [&] {
                                 const bool read = k.arena->is_read(kNumber);
                                 k.anchor.store(0);
                                 read ? k.arena->linger(k.one) : k.one.clear();
                               }});
  CHECK(early.fails(model::Fault::kNone, "", nullptr));
}

TEST(the_thread_hears_of_the_last_reader) {
  Kept k;
  const auto before = [&] { k.announce(1); };
  const Scene scene = k.scene({[&] { k.look(), k.hazards[1].reset(); }, [&] { k.let_go(); }}, before);
  scene.holds(kThorough ? 2 : 1, 10);
  // It counts the value before it looks, and nobody else wakes it.
  CHECK(scene.fails(kOmitted, "fetch_add", &k.returns().lingering));
  CHECK(scene.fails(kOmitted, "futex wake", &k.returns().count));
  const Scene buffered = scene.buffered();
  buffered.holds(1, 10);
  CHECK(buffered.fails(kRelaxed, "store", &k.returns().kept_wanted, 1));
  // The judge sees one that stays.
  const Scene stays = k.scene({[&] { k.let_go(); }}, before);
  CHECK(stays.fails(model::Fault::kNone, "", nullptr));
}

TEST(of_two_readers_the_second_may_come_late_or_die) {
  Kept k;
  const Scene two = k.scene({[&] { k.read(1); }, [&] { k.read(2); }, [&] { k.let_go(); }});
  two.holds(1, 10);
  const auto before = [&] { k.announce(2); };
  const auto dies = [&] { k.process_table->announce_death(2); };
  const Scene killed = k.scene({[&] { k.read(1); }, dies, [&] { k.let_go(); }}, before);
  killed.holds(1, 10);
  CHECK(killed.fails(kOmitted, "exchange", &k.process_table->slot(2)->condition));
}

// Two threads of one process, which look for a place at the same time.
TEST(two_threads_do_not_get_the_same_place) {
  Kept k;
  const auto read = [&](size_t which) {
    return [&k, which] {
      k.hazards[which] = Hazard::announce(k.process_table, 1, kNumber, k.view->returns());
      if (k.anchor.load() == kNumber) k.look();
      k.hazards[which].reset();
    };
  };
  const Scene scene = k.scene({read(1), read(2), [&] { k.let_go(); }});
  scene.holds(1, 10);
}
