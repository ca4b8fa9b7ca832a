// Memory that is read in another process, and how it is known that it was still there.
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include <cstring>
#include <numeric>

#include "check.h"
#include "directory.h"
#include "peer_memory.h"
#include "platform.h"

using namespace conveyor;

namespace {

// As another process lays them out: many parts of different lengths.
struct Parts {
  explicit Parts(size_t count) {
    for (size_t i = 0; i < count; ++i) {
      all.emplace_back(i % 7 * 100 + (i == 5 ? 3'000'000 : 0));
      std::iota(all.back().begin(), all.back().end(), char(i));
    }
  }
  std::vector<iovec> ranges() {
    std::vector<iovec> found;
    for (auto& part : all) found.push_back({part.data(), part.size()});
    return found;
  }
  std::vector<std::vector<char>> all;
};

int error_of(pid_t pid, void* address, size_t size, uint64_t anchor, uint64_t number) {
  std::vector<char> to(size);
  try {
    read_peer(pid, {{address, size}}, {{to.data(), size}}, anchor, number);
  } catch (const std::system_error& error) {
    return error.code().value();
  }
  return 0;
}

}  // namespace

TEST(any_number_of_parts_is_read) {
  for (const size_t count : {0, 1, 2, 1023, 1024, 1025, 5000}) {
    Parts from(count), to(count);
    for (auto& part : to.all) std::fill(part.begin(), part.end(), char(99));
    const Anchor anchor(count + 1);
    read_peer(::getpid(), from.ranges(), to.ranges(), anchor.address(), count + 1);
    CHECK(from.all == to.all);
  }
}

TEST(another_process_is_read) {
  Parts parts(9), copy(9);
  const Anchor anchor(42);
  check::Child child([&] {
    for (auto& part : copy.all) std::fill(part.begin(), part.end(), char(99));
    read_peer(::getppid(), parts.ranges(), copy.ranges(), anchor.address(), 42);
    CHECK(parts.all == copy.all);
    CHECK_EQ(error_of(::getppid(), parts.all[1].data(), 100, anchor.address(), 43), ESTALE);
  });
  CHECK(child.passed());
}

TEST(what_is_large_is_read_whole) {
  std::vector<std::vector<char>> from;
  for (const size_t size : {3'000'001, 0, 77, 17'000'000, 5'000'000, 1}) {
    from.emplace_back(size);
    for (size_t i = 0; i < size; ++i) from.back()[i] = char(i * 31 ^ i >> 12 ^ size);
  }
  std::vector<iovec> ranges;
  std::vector<char> expected;
  for (auto& part : from) {
    ranges.push_back({part.data(), part.size()});
    expected.insert(expected.end(), part.begin(), part.end());
  }
  const Anchor anchor(11);
  check::Child child([&] {
    std::vector<char> to(expected.size());
    // The parts there are others than here.
    read_peer(::getppid(), ranges, {{to.data(), 10'000'000}, {to.data() + 10'000'000, to.size() - 10'000'000}}, anchor.address(), 11);
    CHECK(to == expected);
    CHECK_EQ(error_of(::getppid(), from[3].data(), from[3].size(), anchor.address(), 12), ESTALE);
  });
  CHECK(child.passed());
}

TEST(what_is_large_and_not_all_there_is_told) {
  constexpr size_t kSize = 32 << 20;
  char* const memory = static_cast<char*>(::mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  ::munmap(memory + kSize / 2, kPage);
  const Anchor anchor(3);
  CHECK_EQ(error_of(::getpid(), memory, kSize, anchor.address(), 3), EFAULT);
  ::munmap(memory, kSize);
}

TEST(what_is_gone_is_told) {
  char there[8] = "here";
  uint64_t address;
  {
    const Anchor anchor(7);
    address = anchor.address();
    CHECK_EQ(error_of(::getpid(), there, sizeof there, address, 7), 0);
    CHECK_EQ(error_of(::getpid(), nullptr, 8, address, 7), EFAULT);
    CHECK_EQ(error_of(::getpid(), there, sizeof there, 8, 7), EFAULT);
  }
  CHECK_EQ(error_of(::getpid(), there, sizeof there, address, 7), ESTALE);
  const Anchor next(8);
  CHECK_EQ(error_of(::getpid(), there, sizeof there, address, 7), ESTALE);
  const pid_t ended = ::fork();
  if (ended == 0) ::_exit(0);
  ::waitpid(ended, nullptr, 0);
  CHECK_EQ(error_of(ended, there, sizeof there, address, 7), ESRCH);
}

TEST(it_is_known_beforehand_who_may_be_read) {
  CHECK(may_read(::getpid()));
  let_read(::getpid());
  check::Child child([] { CHECK(may_read(::getppid())); });
  CHECK(child.passed());
  CHECK(!may_read(child.pid()));  // it has ended
}

TEST(it_is_known_beforehand_what_may_be_read) {
  std::vector<char> there(100);
  std::vector<Range> ranges(150, {reinterpret_cast<uint64_t>(there.data()), there.size()});
  CHECK(readable({}));
  CHECK(readable(ranges));
  ranges[3].length = 0;
  ranges[7] = {0, 0};
  CHECK(readable(ranges));
  for (const size_t at : {size_t(0), size_t(80), ranges.size() - 1}) {
    std::vector<Range> some = ranges;
    some[at] = {4096, 8};  // nothing is mapped there
    CHECK(!readable(some));
  }
  check::Child child([&] {
    ::prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    CHECK(!readable(ranges));
    CHECK(!readable({}));
  });
  CHECK(child.passed());
}

TEST(words_are_used_again) {
  std::vector<std::unique_ptr<Anchor>> anchors;
  for (uint64_t i = 1; i < 2000; ++i) anchors.push_back(std::make_unique<Anchor>(i));
  for (uint64_t i = 1; i < 2000; ++i) CHECK_EQ(*reinterpret_cast<uint64_t*>(anchors[i - 1]->address()), i);
  anchors.clear();
  const Anchor one(5);
  CHECK_EQ(*reinterpret_cast<uint64_t*>(one.address()), 5u);
}
