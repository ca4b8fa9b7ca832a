// When the system refuses: memory where nothing may fail, holes in a file, threads.
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <cstdlib>
#include <functional>
#include <new>

#include "arena/arena.h"
#include "check.h"
#include "death_watch.h"

namespace {

thread_local bool no_memory = false;
int holes_left = INT32_MAX;

}  // namespace

// Not inlined: the compiler would see malloc() where it looks for new, and the other way round.
[[gnu::noinline]] void* operator new(size_t size) {
  void* memory = no_memory ? nullptr : std::malloc(size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void* operator new(size_t size, const std::nothrow_t&) noexcept { return no_memory ? nullptr : std::malloc(size); }
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }

extern "C" int fallocate(int fd, int mode, off_t offset, off_t length) noexcept(false) {
  if (holes_left-- <= 0) return errno = EOPNOTSUPP, -1;
  return int(::syscall(SYS_fallocate, fd, mode, offset, length));
}

using namespace conveyor;

namespace {

constexpr size_t kMiB = size_t(1) << 20;
constexpr size_t kFile = 16 * kWindow;

struct NoMemory {
  NoMemory() { no_memory = true; }
  ~NoMemory() { no_memory = false; }
};

struct Setup {
  std::shared_ptr<ProcessTable> process_table = ProcessTable::create(4);
  Fd file = Arena::create_file(kFile);
  Arena arena;
  std::shared_ptr<ArenaView> view = std::make_shared<ArenaView>(file.get(), kFile);
  ReaderCursor cursor = {};

  Setup() : arena(file.get(), kFile, 512 * kMiB) {
    for (uint32_t i = 0; i < 4; ++i) {
      process_table->prepare(i, "");
      process_table->slot(i)->condition.store(Condition::kAlive);
    }
  }
  std::shared_ptr<ReaderSet> readers() {
    auto set = std::make_shared<ReaderSet>();
    set->process_table = process_table;
    set->add(1, &cursor);
    return set;
  }
  size_t memory() const {
    struct stat s;
    ::fstat(file.get(), &s);
    return size_t(s.st_blocks) * 512;
  }
};

// Threads get stacks that no machine has addresses for.
struct NoThreads {
  pthread_attr_t before;
  NoThreads() {
    CHECK(::pthread_getattr_default_np(&before) == 0);
    pthread_attr_t huge;
    ::pthread_attr_init(&huge);
    ::pthread_attr_setstacksize(&huge, size_t(1) << 47);
    CHECK(::pthread_setattr_default_np(&huge) == 0);
    ::pthread_attr_destroy(&huge);
  }
  ~NoThreads() {
    ::pthread_setattr_default_np(&before);
    ::pthread_attr_destroy(&before);
  }
};

bool signals_are_blocked() {
  sigset_t now;
  ::pthread_sigmask(SIG_SETMASK, nullptr, &now);
  return ::sigismember(&now, SIGTERM) == 1;
}

}  // namespace

TEST(what_cannot_fail_needs_no_memory) {
  Setup s;
  const auto budget = std::make_shared<Budget>(512 * kMiB);
  const auto cannot_fail = [](auto body) {
    NoMemory none;
    body();
  };
  for (int i = 0; i < 1'000; ++i) {
    Block* block = s.arena.allocate(5'000, budget);
    cannot_fail([&] { s.arena.release(block); });
  }
  for (int i = 0; i < 200; ++i) {
    std::vector<Block*> blocks;
    for (int j = 0; j < 20; ++j) {
      blocks.push_back(s.arena.allocate(5'000, budget));
      auto readers = s.readers();
      auto attached = std::make_shared<int>(j);
      cannot_fail([&] { s.arena.publish(blocks.back(), std::move(readers), 0, 0, std::move(attached)); });
    }
    for (Block* block : blocks) {
      auto lease = std::make_unique<Lease>(*s.view, block->offset, block->size, 0);
      cannot_fail([&] { lease.reset(); });
    }
  }
  for (int i = 0; i < 200; ++i) {
    Block* block = s.arena.allocate(5'000);
    s.arena.charge(block, budget);
    cannot_fail([&] { s.arena.uncharge(block), s.arena.release(block); });
  }
  s.arena.give_back(0);
  CHECK_EQ(budget->out.load(), 0u);
  CHECK_EQ(s.arena.bytes_touched(), 0u);
}

TEST(a_child_without_memory_is_as_any_other) {
  install_fork_handlers();
  Setup s;
  Block* block = s.arena.allocate(5'000);
  s.arena.publish(block, s.readers(), 0, 0);
  auto lease = std::make_unique<Lease>(*s.view, block->offset, block->size, 0);
  int ends[2];
  REQUIRE(::pipe2(ends, O_CLOEXEC) == 0);
  check::Child first([&] {
    ::close(ends[1]);
    char c;
    (void)!::read(ends[0], &c, 1);
  });
  lease.reset();  // waits for the first child
  no_memory = true;
  const pid_t second = ::fork();
  if (second == 0) ::_exit(0);
  no_memory = false;
  ::close(ends[0]);
  ::close(ends[1]);
  int status = -1;
  CHECK(::waitpid(second, &status, 0) == second);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(first.passed());
  CHECK(check::soon([&] {
    s.arena.give_back(UINT64_MAX);
    return block->readers == nullptr;
  }));
}

// A file system that punches some holes and then no more: what has lost its memory is not taken for warm.
TEST(blocks_whose_memory_went_before_a_hole_was_refused_are_cold) {
  Setup s;
  std::vector<Block*> blocks, between;
  for (int i = 0; i < 8; ++i) {  // no two of them are neighbours
    blocks.push_back(s.arena.allocate(kMiB));
    between.push_back(s.arena.allocate(kMiB));
  }
  for (Block* block : blocks) s.arena.release(block);
  CHECK_EQ(s.arena.bytes_touched(), s.memory());
  holes_left = 3;
  s.arena.give_back(0);
  holes_left = INT32_MAX;
  CHECK_EQ(s.arena.bytes_touched(), s.memory());
  CHECK(s.memory() >= 13 * kMiB && s.memory() < 14 * kMiB);
  // They serve as before; and what was lost is got again.
  for (int i = 0; i < 8; ++i) {
    blocks[size_t(i)] = s.arena.allocate(kMiB);
    CHECK_EQ(s.arena.bytes_touched(), s.memory());
  }
  for (Block* block : blocks) s.arena.release(block);
  for (Block* block : between) s.arena.release(block);
}

TEST(a_thread_that_cannot_be_started_leaves_signals_as_they_were) {
  Setup s;
  Fd file = Arena::create_file(kFile);
  Arena arena(file.get(), kFile, 64 * kMiB, s.process_table, 0, 20'000'000);
  Returns& returns = s.process_table->slot(0)->returns;
  CHECK(!signals_are_blocked());
  {
    NoThreads none;
    CHECK_THROWS(std::system_error, DeathWatch(s.process_table));
    CHECK(!signals_are_blocked());
    arena.release(arena.allocate(kMiB));
    CHECK(!signals_are_blocked());
    CHECK_EQ(returns.wanted.load(), 0u);
  }
  // The next allocation has it.
  arena.release(arena.allocate(kMiB));
  CHECK(!signals_are_blocked());
  check::soon([&] { return arena.bytes_touched() == 0; });
  CHECK_EQ(arena.bytes_touched(), 0u);
  DeathWatch watch(s.process_table);
  CHECK(!signals_are_blocked());
}
