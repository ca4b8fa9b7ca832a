// What a process keeps, as others read it from its memory.
#include <sys/wait.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <set>
#include <thread>

#include "check.h"
#include "directory.h"
#include "frame.h"

using namespace conveyor;

namespace {

DirectoryReading read_own() { return read_directory(::getpid(), directory_address()); }

bool lists(const DirectoryReading& reading, uint64_t number) {
  return std::any_of(reading.kept.begin(), reading.kept.end(), [&](const KeptValue& one) { return one.number == number; });
}

int error_of(pid_t pid, uint64_t address) {
  try {
    read_directory(pid, address);
  } catch (const std::system_error& error) {
    return error.code().value();
  }
  return 0;
}

}  // namespace

TEST(what_is_kept_is_listed_until_it_goes) {
  const std::string& names = lasting("auto");
  CHECK_EQ(&names, &lasting(std::string("auto")));
  {
    const Anchor anchor(7, 100, &names), other(8);
    const DirectoryReading reading = read_own();
    CHECK_EQ(reading.kept.size(), 2u);
    for (const KeptValue& one : reading.kept) {
      CHECK_EQ(one.bytes, one.number == 7 ? 100u : 0u);
      CHECK_EQ(one.names, one.number == 7 ? std::string("auto") : std::string());
      CHECK(one.since != 0 && one.since <= now_ns());
    }
    const Held held({7, 8, 7}, nullptr);
    const Numbers expected{7, 8, 7};
    CHECK(read_own().held == expected);
  }
  const DirectoryReading reading = read_own();
  CHECK(reading.kept.empty() && reading.held.empty() && reading.sent.empty());
}

TEST(another_process_lists_it) {
  std::vector<std::unique_ptr<Anchor>> anchors;
  for (uint64_t i = 1; i <= 3000; ++i) anchors.push_back(std::make_unique<Anchor>(i, i));  // several chunks
  check::Child child([&] {
    const DirectoryReading reading = read_directory(::getppid(), directory_address());
    CHECK_EQ(reading.kept.size(), 3000u);
    std::set<uint64_t> numbers;
    for (const KeptValue& one : reading.kept) {
      CHECK_EQ(one.number, one.bytes);
      numbers.insert(one.number);
    }
    CHECK_EQ(numbers.size(), 3000u);
  });
  CHECK(child.passed());
}

TEST(leases_that_have_ended_are_left_out) {
  BlockHeader header = {};
  const Numbers numbers{5, 6};
  Sent sent(numbers, {{1, 10}, {2, 20}});
  CHECK(read_own().sent.empty());
  header.lease[0] = header.lease[1] = BlockHeader::held(3);
  auto what = std::make_shared<int>(1);
  std::weak_ptr<int> kept = what;
  sent.publish(&header, 3, std::move(what), numbers);
  CHECK(!kept.expired());
  const auto places = [&] {
    std::multiset<std::pair<uint64_t, uint32_t>> found;
    for (const auto& one : read_own().sent) {
      CHECK_EQ(one.reader.incarnation, one.reader.slot * 10);
      found.emplace(one.number, one.reader.slot);
    }
    return found;
  };
  CHECK(places() == (std::multiset<std::pair<uint64_t, uint32_t>>{{5, 1}, {5, 2}, {6, 1}, {6, 2}}));
  header.end(0, 3, nullptr);
  CHECK(places() == (std::multiset<std::pair<uint64_t, uint32_t>>{{5, 2}, {6, 2}}));
  header.lease[1] = BlockHeader::held(4);  // of another value
  CHECK(places().empty());
}

TEST(a_block_that_is_not_mapped_has_no_leases) {
  BlockHeader header = {};
  header.lease[0] = BlockHeader::held(1);
  const Numbers numbers{5};
  Sent gone(numbers, {{1, 1}}), there(numbers, {{2, 1}}), also_gone(numbers, {{3, 1}});
  gone.publish(reinterpret_cast<void*>(size_t(4096)), 1, nullptr, numbers);
  there.publish(&header, 1, nullptr, numbers);
  also_gone.publish(reinterpret_cast<void*>(size_t(8192)), 1, nullptr, numbers);
  const DirectoryReading reading = read_own();
  CHECK_EQ(reading.sent.size(), 1u);
  CHECK_EQ(reading.sent[0].reader.slot, 2u);
}

TEST(what_is_no_directory_is_told) {
  std::vector<uint64_t> zero(100);
  CHECK_EQ(error_of(::getpid(), reinterpret_cast<uintptr_t>(zero.data())), EPROTO);
  CHECK_EQ(error_of(::getpid(), 8), EFAULT);
  const pid_t ended = ::fork();
  if (ended == 0) ::_exit(0);
  ::waitpid(ended, nullptr, 0);
  CHECK_EQ(error_of(ended, directory_address()), ESRCH);
  // One that says what cannot be is not followed.
  std::vector<uint64_t> wrong(100);
  std::memcpy(wrong.data(), reinterpret_cast<void*>(directory_address()), sizeof(uint64_t));
  wrong[1] = ~uint64_t(0);
  CHECK_EQ(error_of(::getpid(), reinterpret_cast<uintptr_t>(wrong.data())), EPROTO);
  wrong[1] = 5;
  CHECK_EQ(error_of(::getpid(), reinterpret_cast<uintptr_t>(wrong.data())), EFAULT);
}

// What was there all the time is listed, and no entry is of two values.
TEST(a_listing_while_values_come_and_go) {
  const Anchor first(1, 1);
  std::vector<std::unique_ptr<Anchor>> some;
  for (uint64_t i = 0; i < 700; ++i) some.push_back(std::make_unique<Anchor>(1000 + i, 1000 + i));
  some.resize(20);  // there are entries to be used again, between others
  const Anchor last(2, 2);
  std::atomic<bool> over{false};
  std::vector<std::thread> threads;
  for (uint64_t t = 1; t <= 2; ++t)
    threads.emplace_back([&, t] {
      std::vector<std::unique_ptr<Anchor>> mine;
      for (uint64_t i = 1; !over.load(std::memory_order_relaxed); ++i) {
        const uint64_t number = t << 32 | i;
        mine.push_back(std::make_unique<Anchor>(number, number));
        const Held held({number}, nullptr);
        if (mine.size() > i % 50) mine.clear();
      }
    });
  size_t seen = 0;
  for (int i = 0; i < 300; ++i) {
    const DirectoryReading reading = read_own();
    std::set<uint64_t> numbers;
    for (const KeptValue& one : reading.kept) {
      CHECK_EQ(one.number, one.bytes);
      numbers.insert(one.number);
    }
    CHECK(numbers.count(1) && numbers.count(2));
    for (uint64_t k = 0; k < 20; ++k) CHECK(numbers.count(1000 + k));
    CHECK(reading.held.size() <= 2);
    seen += reading.kept.size() > 22;
  }
  over = true;
  for (std::thread& thread : threads) thread.join();
  CHECK(seen != 0);
  CHECK(lists(read_own(), 1));
}

TEST(a_trailer_that_is_none_says_nothing) {
  alignas(8) char data[256] = {};
  const Numbers numbers{1, 2, 3};
  write_trailer(data, 13, numbers);
  CHECK(read_trailer(data, 13, 256) == numbers);
  CHECK(read_trailer(data, 13, trailer_at(13) + trailer_size(numbers)) == numbers);
  CHECK(read_trailer(data, 13, trailer_at(13) + trailer_size(numbers) - 1).empty());
  CHECK(read_trailer(data, 21, 256).empty());
  for (size_t capacity = 0; capacity < 32; ++capacity) CHECK(read_trailer(data, 13, capacity).empty());
  CHECK(read_trailer(data, 300, 256).empty());
  CHECK(read_trailer(data, 255, 256).empty());
}
