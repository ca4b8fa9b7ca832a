// Blocks that are pinned, under every schedule: their memory goes back once nobody has pinned them, by itself, and
// never before; and whoever asks for it is answered. See explorer.h.
#include "modelled.h"

using namespace conveyor;

namespace {

constexpr size_t kFile = kWindow;

// An arena of slot 0, with the thread that gives memory back, and one block of it on its way to slot 1.
struct Marked : Doorbells {
  Fd file = Arena::create_file(kFile);
  std::unique_ptr<Arena> arena;
  std::shared_ptr<ArenaView> view;
  Block* block = nullptr;
  uint64_t offset = 0, size = 0;
  std::unique_ptr<Lease> lease;
  std::vector<std::unique_ptr<BlockPin>> pins;
  ReaderCursor cursor{};
  Returns& returns() { return process_table->slot(0)->returns; }

  void reset() {
    lease.reset();
    pins.clear();
    arena.reset();
    Doorbells::reset();
    process_table->header()->memory.bytes.store(0);
    view = std::make_shared<ArenaView>(file.get(), kFile, process_table, 0);
    arena = std::make_unique<Arena>(file.get(), kFile, kFile, process_table, 0, 1'000'000);
    block = arena->allocate(64);
    offset = block->offset, size = block->size;
    for (auto& mark : block->header()->pins) mark.store(0);
    block->data()[0] = 1;
    auto readers = std::make_shared<ReaderSet>();
    readers->process_table = process_table;
    readers->add(1, &cursor);
    arena->publish(block, readers, 0, 0);
  }
  std::vector<model::Explorer::Alias> aliases() {
    std::shared_ptr<Mapping> keep;
    return {{block->base - offset, kFile, view->block(0, kGranule, keep)}};
  }
  Scene scene(std::vector<std::function<void()>> bodies, std::function<bool()> judge, std::function<void()> more = {}) {
    bodies.push_back([] { model::started(); });  // the thread, which does not end
    return {this, std::move(bodies), [this, more] { reset(), more ? more() : void(); }, std::move(judge), 1, [this] { return aliases(); }};
  }
  void take() { lease = std::make_unique<Lease>(*view, offset, size, 0); }
  void mark(uint32_t slot) { pins.push_back(std::make_unique<BlockPin>(lease->shared_mapping(), lease->block(), lease->returns(), process_table, slot)); }
  // As the device sees it: zero where a hole was punched.
  void look(const BlockPin& pin) {
    model::step("look", this, true);
    if (pin.address()[kBlockHeader] != 1) throw model::Wrong{"punches a hole under what is pinned"};
  }
  bool is_back() { return arena->bytes_touched() == 0; }
};

}  // namespace

TEST(what_is_pinned_goes_back_after_its_last_mark) {
  Marked m;
  const auto reader = [&](bool marks) {
    return [&m, marks] {
      m.take();
      m.mark(1);
      if (!marks) m.block->header()->pins[0].store(0);
      m.lease.reset();
      m.look(*m.pins[0]);
      m.look(*m.pins[0]);
      m.pins[0]->release();
    };
  };
  const Scene scene = m.scene({reader(true)}, [&] { return m.is_back(); });
  scene.holds(kThorough ? 3 : 1, 10);
  // Without the mark it goes too early.
  const Scene unmarked = m.scene({reader(false)}, [&] { return m.is_back(); });
  CHECK(unmarked.fails(model::Fault::kNone, "", nullptr, 2));
  // Nobody else wakes the thread.
  CHECK(scene.fails(kOmitted, "futex wake", &m.returns().count));
  scene.buffered().holds(1, 10);
}

TEST(the_last_of_two_who_pin_a_block_wakes_the_thread) {
  Marked m;
  const auto before = [&] {
    m.take();
    m.mark(1);
    m.mark(2);
    m.lease.reset();
  };
  const auto give_up = [&](size_t which) {
    return [&m, which] {
      m.look(*m.pins[which]);
      m.pins[which]->release();
    };
  };
  const Scene scene = m.scene({give_up(0), give_up(1)}, [&] { return m.is_back(); }, before);
  scene.holds(kThorough ? 2 : 1, 10);
  // Or dies.
  const Scene dies = m.scene({give_up(0), [&] { m.process_table->announce_death(2); }}, [&] { return m.is_back(); }, before);
  dies.holds(kThorough ? 2 : 1, 10);
  dies.buffered().holds(1, 10);
  // The judge sees one that stays.
  const Scene stays = m.scene({give_up(0)}, [&] { return m.is_back(); }, before);
  CHECK(stays.fails(model::Fault::kNone, "", nullptr, 2));
}

TEST(two_who_find_the_place_of_a_dead_process_do_not_both_get_it) {
  Marked m;
  size_t refused = 0;
  const auto before = [&] {
    m.take();
    m.pins.resize(2);
    // Every place but one is of somebody who lives.
    for (uint32_t i = 0; i < kMaxPins; ++i) m.block->header()->pins[i].store(pinner(i == 5 ? 3 : 0, m.process_table->slot(i == 5 ? 3 : 0)->incarnation.load()));
    m.process_table->announce_death(3);
  };
  const auto mark = [&](uint32_t slot) {
    return [&m, &refused, slot] {
      try {
        m.pins[slot - 1] = std::make_unique<BlockPin>(m.lease->shared_mapping(), m.lease->block(), m.lease->returns(), m.process_table, slot);
      } catch (const std::system_error&) {
        ++refused;
      }
    };
  };
  const Scene scene = m.scene({mark(1), mark(2)}, [&] { return !m.pins[0] != !m.pins[1]; }, before);
  scene.holds(kThorough ? 2 : 1, 5);
  CHECK(refused != 0);
}

TEST(whoever_asks_for_what_is_pinned_is_answered) {
  Marked m;
  std::unique_ptr<PinWords> words;
  model::Atomic<int> released{0};
  const auto before = [&] {
    released.store(0);
    Returns& requested = m.process_table->slot(1)->pins;
    for (auto* word : {&requested.count, &requested.wanted, &requested.requested, &requested.answered}) word->store(0);
    m.process_table->header()->memory.given.store(0);
    m.take();
    m.mark(1);
    m.lease.reset();
    words = std::make_unique<PinWords>(m.process_table, 1);
    words->hold(true);
  };
  // As Arena::wait_for does.
  const auto ask = [&] {
    std::vector<ProcessTable::Requested> requested;
    m.process_table->ask_for_pins(1, requested);
    while (!requested.empty()) {
      const uint32_t given = m.process_table->header()->memory.given.load(std::memory_order_seq_cst);
      m.process_table->still_requested_for_pins(requested);
      if (!requested.empty()) futex_wait(&m.process_table->header()->memory.given, given, nullptr);
    }
    if (released.load() == 0) throw model::Wrong{"answers before it has let go"};
  };
  const auto serve = [&] {
    while (!words->wait(0)) {
    }
    m.pins[0]->release();
    released.store(1);
    words->answer();
  };
  const Scene scene = m.scene({ask, serve}, [&] { return true; }, before);
  scene.holds(kThorough ? 2 : 1, 10);
  CHECK(scene.fails(kOmitted, "futex wake", &m.process_table->header()->memory.given));
}
