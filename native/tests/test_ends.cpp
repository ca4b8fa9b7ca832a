// The ends of a channel as native threads use them, without Python: sending, receiving, sending on untouched,
// reading parts, in threads and between processes.
#include <algorithm>
#include <atomic>
#include <thread>

#include "check.h"
#include "ends_setup.h"

using namespace conveyor;

namespace {

// Of every size: in the slot, in small blocks, in blocks mapped alone.
size_t size_of(uint64_t n) {
  constexpr size_t sizes[] = {0, 1, 100, kCapacity, kCapacity + 1, 5'000, 100'000, kMiB, 17 * kMiB};
  return sizes[n % std::size(sizes)];
}
char letter(uint64_t n, size_t at) { return char(n * 31 + at / 977); }
void fill(char* to, uint64_t n, size_t size) {
  for (size_t i = 0; i < size; ++i) to[i] = letter(n, i);
}
bool is_whole(const Frame& frame, uint64_t n) {
  if (frame.tag != n || frame.size != size_of(n) || frame.codec != kRaw) return false;
  for (size_t i = 0; i < frame.size; i += frame.size > 10'000 ? 509 : 1)
    if (frame.body[i] != letter(n, i)) return false;
  return frame.size == 0 || frame.body[frame.size - 1] == letter(n, frame.size - 1);
}

void send_all(Process& p, Sender& sender, uint64_t frames) {
  for (uint64_t n = 0; n < frames; ++n) {
    p.wait_for_room(sender);
    Outgoing out;
    out.tag = n;
    out.codec = kRaw;
    out.size = size_of(n);
    sender.reserve(out);
    fill(sender.body_of(out), n, out.size);
    sender.publish(out);
  }
}
void receive_all(Process& p, Receiver& receiver, uint64_t frames) {
  for (uint64_t n = 0; n < frames; ++n) {
    p.wait([&] { return !receiver.ring.empty(); });
    REQUIRE(is_whole(receiver.take(), n));
  }
}
void forward_all(Process& p, Receiver& from, Sender& to, uint64_t frames) {
  for (uint64_t n = 0; n < frames; ++n) {
    p.wait([&] { return !from.ring.empty(); });
    const Frame frame = from.take_unmapped();
    CHECK(frame.lease == nullptr);
    p.wait_for_room(to);
    REQUIRE(to.forward(frame));
  }
}

// A table with one buffer of `size` bytes, which lies in the block beside the body.
std::vector<char> table_beside(size_t size, std::string_view meta) {
  TableLayout layout = lay_out_table(meta.size(), {0});
  layout.entries[0] = {kInBlock | 128, size};
  std::vector<char> body(layout.total);
  const TableHeader head{uint32_t(meta.size()), 1};
  std::memcpy(body.data(), &head, sizeof head);
  std::memcpy(body.data() + sizeof head, layout.entries.data(), sizeof(BufferEntry));
  std::memcpy(body.data() + layout.meta_at, meta.data(), meta.size());
  return body;
}

}  // namespace

TEST(threads_send_and_receive) {
  const Shared shared;
  Process a(shared, 0), b(shared, 1);
  const auto sender = a.sender(0, 1);
  const auto receiver = b.receiver(0, 0);
  std::thread sends([&] { check::guarded("sends", [&] { send_all(a, *sender, 90); }); });
  std::thread receives([&] { check::guarded("receives", [&] { receive_all(b, *receiver, 90); }); });
  sends.join();
  receives.join();
  CHECK_EQ(sender->bytes, receiver->bytes);
  a.arena->give_back(0);
  CHECK_EQ(a.arena->bytes_touched(), 0u);  // no lease is left
}

TEST(many_threads_share_an_arena_and_a_view_of_it) {
  const Shared shared;
  Process a(shared, 0), b(shared, 1);
  const auto view = b.view(0);
  std::vector<std::thread> threads;
  for (uint32_t ring = 0; ring < 4; ++ring) {
    threads.emplace_back([&, ring] { check::guarded("sends", [&] { send_all(a, *a.sender(ring, 1), 36); }); });
    threads.emplace_back([&, ring] { check::guarded("receives", [&] { receive_all(b, *b.receiver(ring, 0, view), 36); }); });
  }
  for (std::thread& thread : threads) thread.join();
  a.arena->give_back(0);
  CHECK_EQ(a.arena->bytes_touched(), 0u);
}

TEST(frames_go_through_a_process_that_maps_none_of_them) {
  const Shared shared;
  constexpr uint64_t kFrames = 45;
  check::Child pump([&] {
    Process p(shared, 1);
    const auto from = p.receiver(0, 0);
    const auto to = p.sender(1, 2);
    forward_all(p, *from, *to, kFrames);
  });
  check::Child end([&] {
    Process p(shared, 2);
    receive_all(p, *p.receiver(1, 1), kFrames);
  });
  Process p(shared, 0);
  const auto sender = p.sender(0, 1);
  send_all(p, *sender, kFrames);
  CHECK(end.passed());
  CHECK(pump.passed());
  p.arena->give_back(0);
  CHECK_EQ(p.arena->bytes_touched(), 0u);
}

TEST(a_buffer_beside_its_body_is_sent_on_behind_it) {
  const Shared shared;
  Process a(shared, 0), b(shared, 1);
  const auto sender = a.sender(0, 1), on = b.sender(1, 0);
  const auto receiver = b.receiver(0, 0), back = a.receiver(1, 1);
  for (const size_t size : {size_t(10), 100'000ul, 20 * kMiB}) {
    for (const bool mapped : {false, true}) {
      const std::vector<char> body = table_beside(size, "what it is");
      Outgoing out;
      out.tag = 7;
      out.codec = kFirstPython;
      out.flags = kExternal;
      out.block = a.arena->allocate(128 + size);
      out.arena = a.arena;
      out.beside = size;
      fill(out.block->data() + 128, 7, size);
      out.size = body.size();
      std::memcpy(sender->body_of(out), body.data(), body.size());
      sender->publish(out);
      CHECK(on->forward(mapped ? receiver->take() : receiver->take_unmapped()));
      const Frame frame = back->take();
      CHECK_EQ(frame.tag, 7u);
      CHECK_EQ(frame.flags & kExternal, 0u);
      const auto table = read_table(frame.body, frame.size, 0);
      REQUIRE(table && table->entries.size() == 1);
      CHECK(std::string_view(table->meta, table->meta_length) == "what it is");
      CHECK_EQ(table->entries[0].length, size);
      CHECK_EQ(table->entries[0].offset % kBufferAlign, 0u);
      const char* data = frame.body + table->entries[0].offset;
      CHECK(data[0] == letter(7, 0) && data[size - 1] == letter(7, size - 1));
    }
  }
}

TEST(parts_of_a_frame_are_read_without_the_rest) {
  const Shared shared;
  Process a(shared, 0), b(shared, 1);
  const auto sender = a.sender(0, 1);
  const auto receiver = b.receiver(0, 0);
  for (const uint64_t n : {2, 6, 8}) {  // in the slot, in a block, in one mapped alone
    std::vector<char> body(size_of(n));
    fill(body.data(), n, body.size());
    CHECK(sender->send(n, Kind::kValue, kRaw, body));
    const Frame frame = receiver->take_unmapped();
    char part[50];
    frame.read(body.size() - 50, part, 50);
    CHECK(std::equal(part, part + 50, body.end() - 50));
    frame.read(body.size(), part, 0);
    CHECK_THROWS(std::system_error, frame.read(body.size() - 49, part, 50));
    CHECK_THROWS(std::system_error, frame.read(SIZE_MAX, part, 1));
    CHECK_THROWS(std::system_error, frame.read_block(frame.block_room(), part, 1));
    CHECK(frame.lease == nullptr);  // nothing was mapped for it
    Frame mapped = frame;
    mapped.map();
    mapped.read(10, part, 50);
    CHECK(std::equal(part, part + 50, body.begin() + 10));
  }
}

TEST(what_is_in_nobodys_ring_is_refused) {
  const Shared shared;
  Process a(shared, 0), b(shared, 1);
  const auto sender = a.sender(0, 1), on = b.sender(1, 0);
  const auto receiver = b.receiver(0, 0);
  Outgoing out;
  out.flags = kDefinitions | kRefs;
  sender->reserve(out);
  sender->publish(out);
  CHECK_THROWS(std::system_error, on->forward(receiver->take()));  // its refs are counted for `b`
  CHECK_EQ(on->ring.head(), 0u);
  for (uint32_t i = 0; i < kSlots; ++i) CHECK(on->send(i, Kind::kValue, kRaw, {}));
  CHECK(!on->send(kSlots, Kind::kValue, kRaw, {}));
  // In a forked child the ring is its parent's.
  check::Child child([&] {
    CHECK_THROWS(std::system_error, sender->send(0, Kind::kValue, kRaw, {}));
    CHECK_EQ(sender->ring.head(), 1u);
  });
  CHECK(child.passed());
}

TEST(an_end_that_closes_gives_back_what_nobody_has_taken) {
  const Shared shared;
  Process a(shared, 0), b(shared, 1);
  const auto sender = a.sender(0, 1);
  auto receiver = b.receiver(0, 0);
  for (const uint64_t n : {6, 7, 8}) {
    const std::vector<char> body(size_of(n));
    CHECK(sender->send(n, Kind::kValue, kRaw, body));
  }
  Frame taken = receiver->take();
  receiver->pass();
  receiver.reset();
  CHECK_EQ(a.arena->blocks_out(), 3u);
  a.arena->give_back(0);
  CHECK_EQ(a.arena->blocks_out(), 1u);
  taken = Frame();
  a.arena->give_back(0);
  CHECK_EQ(a.arena->bytes_touched(), 0u);
}

TEST(threads_wait_while_their_spin_is_limited) {
  const Shared shared;
  Process a(shared, 0), b(shared, 1);
  const auto sender = a.sender(0, 1);
  const auto receiver = b.receiver(0, 0);
  std::thread receives([&] { check::guarded("receives", [&] { receive_all(b, *receiver, 90); }); });
  std::thread sends([&] { check::guarded("sends", [&] { send_all(a, *sender, 90); }); });
  for (uint64_t ns = 0; ns < 200'000; ns += 1'000) b.inbox.set_spin_limit(ns);
  sends.join();
  receives.join();
  CHECK_EQ(b.inbox.spin_limit(), 199'000u);
}
