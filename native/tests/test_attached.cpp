// What is attached to blocks: it goes with the last of their readers, at once and whatever has become of the arena.
#include <unistd.h>

#include <atomic>
#include <cstring>

#include "check.h"
#include "ends_setup.h"

using namespace conveyor;

TEST(what_is_attached_to_a_block_goes_with_its_last_reader) {
  const Shared shared;
  Process a(shared, 0), b(shared, 1);
  const auto sender = a.sender(0, 1);
  const auto receiver = b.receiver(0, 0);
  std::atomic<int> freed{0};
  const auto send = [&] {
    Outgoing out;
    out.size = 50'000;
    out.attached = std::shared_ptr<const void>(&freed, [](const std::atomic<int>* freed) { const_cast<std::atomic<int>*>(freed)->fetch_add(1); });
    sender->reserve(out);
    std::memset(sender->body_of(out), 0, out.size);
    sender->publish(out);
  };
  send();
  Frame frame = receiver->take();
  a.arena->give_back_soon();
  CHECK_EQ(freed.load(), 0);
  frame = Frame();
  // The thread that gives memory back hears of the end of the lease, and looks.
  CHECK(check::soon([&] { return freed.load() == 1; }));
  send();
  receiver->pass();
  a.arena->give_back_soon();
  CHECK_EQ(freed.load(), 2);
  {
    Outgoing out;  // never published
    out.attached = std::shared_ptr<const void>(&freed, [](const std::atomic<int>* freed) { const_cast<std::atomic<int>*>(freed)->fetch_add(1); });
    out.size = 50'000;
    sender->reserve(out);
  }
  CHECK_EQ(freed.load(), 3);
}

// Whatever else the arena has, which nobody looks at for a long time.
TEST(what_is_attached_goes_at_once) {
  const Shared shared;
  Process a(shared, 0, 256 * kMiB, 1'000'000'000'000), b(shared, 1);
  const auto sender = a.sender(0, 1);
  auto receiver = b.receiver(0, 0);
  std::atomic<int> freed{0};
  const auto send = [&](bool keeps) {
    Outgoing out;
    if (keeps) {
      out.flags = kKeeps;
      out.attached = std::shared_ptr<const void>(&freed, [](const std::atomic<int>* freed) { const_cast<std::atomic<int>*>(freed)->fetch_add(1); });
    }
    out.size = keeps ? 8 : 50'000;
    sender->reserve(out);
    CHECK(out.block != nullptr);
    std::memset(sender->body_of(out), 0, out.size);
    sender->publish(out);
  };
  send(false);
  receiver->pass();
  a.arena->give_back_soon();  // so it is free, and its time is far
  send(true);
  send(true);
  Frame frame = receiver->take();
  receiver->pass();
  CHECK(check::soon([&] { return freed.load() == 1; }));
  // What is sent on keeps what it was sent on for.
  const auto on = b.sender(1, 2);
  Process c(shared, 2);
  auto last = c.receiver(1, 1);
  CHECK(on->forward(frame));
  frame = Frame();
  Frame forwarded = last->take();
  CHECK_EQ(forwarded.size, 8u);
  CHECK_EQ(freed.load(), 1);
  forwarded = Frame();
  CHECK(check::soon([&] { return freed.load() == 2; }));
  // Nor is anything left of a reader that leaves, or dies.
  send(true);
  receiver->close();
  CHECK(check::soon([&] { return freed.load() == 3; }));
  auto third = a.sender(2, 1);
  Outgoing out;
  out.flags = kKeeps;
  out.attached = std::shared_ptr<const void>(&freed, [](const std::atomic<int>* freed) { const_cast<std::atomic<int>*>(freed)->fetch_add(1); });
  third->reserve(out);
  third->publish(out);
  CHECK_EQ(freed.load(), 3);
  CHECK(shared.process_table->announce_death(1));
  CHECK(check::soon([&] { return freed.load() == 4; }));
}

// Nobody ends a lease on it any more, so nobody but its writer can tell.
TEST(what_is_attached_for_a_reader_that_has_died_or_left_goes_at_once) {
  for (const bool dies : {false, true}) {
    const Shared shared;
    Process a(shared, 0, 256 * kMiB, 1'000'000'000'000), b(shared, 1);
    const auto sender = a.sender(0, 1);
    b.receiver(0, 0)->close();
    if (dies) CHECK(shared.process_table->announce_death(1));
    std::atomic<int> freed{0};
    Outgoing out;
    out.flags = kKeeps;
    out.attached = std::shared_ptr<const void>(&freed, [](const std::atomic<int>* freed) { const_cast<std::atomic<int>*>(freed)->fetch_add(1); });
    sender->reserve(out);
    ::usleep(100'000);  // the thread is there, and sleeps until a lease has ended: nothing is free
    sender->publish(out);
    CHECK(check::soon([&] { return freed.load() == 1; }));
  }
}

// Nor does it stay where the session has ended meanwhile, and the arena's thread with it: of what a reader has, and of
// what was kept by something that went with the arena's end.
TEST(what_is_attached_goes_with_its_last_reader_though_the_arena_is_closed) {
  const Shared shared;
  Process a(shared, 0), b(shared, 1);
  const auto sender = a.sender(0, 1);
  const auto receiver = b.receiver(0, 0);
  std::atomic<int> freed{0};
  const auto send = [&](std::shared_ptr<const void> attached) {
    Outgoing out;
    out.flags = kKeeps;
    out.size = 8;
    out.attached = std::move(attached);
    sender->reserve(out);
    std::memset(sender->body_of(out), 0, out.size);
    sender->publish(out);
  };
  const auto counted = [&] { return std::shared_ptr<const void>(&freed, [](const std::atomic<int>* freed) { const_cast<std::atomic<int>*>(freed)->fetch_add(1); }); };
  send(counted());
  Frame held = receiver->take();
  send(counted());
  // One keeps the other: what is attached to the third block is a lease on the second.
  send(std::make_shared<const Frame>(receiver->take()));
  Frame last = receiver->take();
  const long owners = a.arena.use_count();
  a.arena->close();
  CHECK_EQ(freed.load(), 0);
  last = Frame();
  CHECK(check::soon([&] { return freed.load() == 1; }));
  held = Frame();
  CHECK(check::soon([&] { return freed.load() == 2; }));
  // The thread that has looked is gone with the last of them, and leaves the arena to its owners.
  CHECK(check::soon([&] { return a.arena.use_count() == owners; }));
}

// Nor what is published when the arena has just been closed: whoever submits just then was faster at the block, and slower
// at the ring.
TEST(what_is_attached_to_a_block_that_is_published_behind_the_arenas_end_goes_with_its_last_reader) {
  const Shared shared;
  Process a(shared, 0), b(shared, 1);
  const auto sender = a.sender(0, 1);
  const auto receiver = b.receiver(0, 0);
  std::atomic<int> freed{0};
  Outgoing out[2];
  for (Outgoing& o : out) {
    o.flags = kKeeps;
    o.size = 8;
    o.attached = std::shared_ptr<const void>(&freed, [](const std::atomic<int>* freed) { const_cast<std::atomic<int>*>(freed)->fetch_add(1); });
    sender->reserve(o);
    std::memset(sender->body_of(o), 0, o.size);
  }
  a.arena->close();
  const long owners = a.arena.use_count() - 2;  // each of the two has it until it is published
  for (int i : {0, 1}) {
    sender->publish(out[i]);
    out[i].arena.reset();
    Frame held = receiver->take();
    ::usleep(20'000);  // whoever looks after the arena has found that something is kept, and sleeps
    CHECK_EQ(freed.load(), i);
    held = Frame();
    CHECK(check::soon([&] { return freed.load() == i + 1; }));
  }
  CHECK(check::soon([&] { return a.arena.use_count() == owners; }));
}
