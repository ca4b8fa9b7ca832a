// A small test harness. Every test_*.cpp is one program: include this, write tests, and main is
// here.
//
//     TEST(ring_wraps) {
//         CHECK(ring.head() == 3);      // notes a failure and goes on
//         CHECK_EQ(ring.head(), 3u);    // the same, and shows both values
//         REQUIRE(segment != nullptr);  // notes a failure and leaves this test
//     }
//
// A program's argument selects the tests whose names contain it. It closes with "N passed, M
// failed". Failures may be noted from any thread, and in processes made with `check::Child`. A test
// that takes longer than `limit_seconds()` is ended by its alarm, and the program with it: the test is the
// one whose name was printed last.
#pragma once

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace check {

#if defined(__SANITIZE_THREAD__)
constexpr bool kThreadSanitizer = true;
#else
constexpr bool kThreadSanitizer = false;
#endif

// By the clock, since a test that hangs may use no CPU; so whoever runs tests beside something else, which may
// leave them little, sets another one.
inline unsigned limit_seconds() {
  const char* said = std::getenv("CONVEYOR_TEST_LIMIT");
  return said ? unsigned(std::atoi(said)) : 60;
}

struct Test {
  const char* name;
  void (*body)();
};

struct Abandon {};  // thrown by REQUIRE

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

inline std::atomic<int>& failure_count() {
  static std::atomic<int> count{0};
  return count;
}

inline int failures() { return failure_count().load(); }

struct Registration {
  Registration(const char* name, void (*body)()) { tests().push_back({name, body}); }
};

inline bool note(bool ok, const char* file, int line, const std::string& what) {
  if (!ok) {
    failure_count().fetch_add(1);
    std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
  }
  return ok;
}

template <class A, class B>
bool note_equal(const A& a, const B& b, const char* file, int line, const char* what) {
  if (a == b) return true;
  std::ostringstream text;
  text << what << ": " << a << " is not " << b;
  return note(false, file, line, text.str());
}

template <class Body>
void guarded(const char* name, Body&& body) {
  try {
    body();
  } catch (const Abandon&) {
  } catch (const std::exception& error) {
    note(false, name, 0, std::string("threw: ") + error.what());
  } catch (...) {
    note(false, name, 0, "threw something that is no std::exception");
  }
}

// Waits until `condition` holds; false after a minute, since others may have the cores.
template <class Condition>
bool soon(Condition&& condition) {
  for (int i = 0; i < 60'000; ++i) {
    if (condition()) return true;
    ::usleep(1'000);
  }
  return false;
}

// A forked process that runs `body` and ends; ended with this one.
class Child {
 public:
  template <class Body>
  explicit Child(Body&& body) {
    std::fflush(nullptr);
    const pid_t parent = ::getpid();
    pid_ = ::fork();
    if (pid_ != 0) {
      note(pid_ > 0, __FILE__, __LINE__, "fork");
      return;
    }
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(1);
    ::alarm(limit_seconds());
    failure_count().store(0);
    guarded("child", body);
    ::_exit(failures() != 0);
  }
  Child(Child&& other) noexcept : pid_(std::exchange(other.pid_, -1)) {}
  ~Child() {
    if (pid_ > 0) {
      kill(SIGKILL);
      wait();
    }
  }
  pid_t pid() const { return pid_; }
  void kill(int signal) const { ::kill(pid_, signal); }
  // How it ended, as waitpid tells.
  int wait() {
    int status = -1;
    while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
    }
    pid_ = -1;
    return status;
  }
  // True if it ended by itself and noted no failure.
  bool passed() {
    const int status = wait();
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }

 private:
  pid_t pid_;
};

// The same numbers in every run (splitmix64).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  uint64_t below(uint64_t n) { return next() % n; }

 private:
  uint64_t state_;
};

inline int run(const char* filter) {
  int passed = 0, failed = 0;
  for (const Test& test : tests()) {
    if (filter && !std::strstr(test.name, filter)) continue;
    const int before = failures();
    std::printf("%-60s ", test.name);
    std::fflush(stdout);
    ::alarm(limit_seconds());
    guarded(test.name, test.body);
    ::alarm(0);
    const bool ok = failures() == before;
    (ok ? passed : failed)++;
    std::printf("%s\n", ok ? "ok" : "FAILED");
    std::fflush(stdout);  // nothing may be left for a forked child to print again
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed != 0 || (passed == 0 && !filter);
}

}  // namespace check

#define TEST(name)                                                            \
  static void test_##name();                                                  \
  static const ::check::Registration registration_##name(#name, test_##name); \
  static void test_##name()

#define CHECK(...) \
  ::check::note(static_cast<bool>(__VA_ARGS__), __FILE__, __LINE__, "CHECK(" #__VA_ARGS__ ")")
#define CHECK_EQ(a, b) ::check::note_equal((a), (b), __FILE__, __LINE__, "CHECK_EQ(" #a ", " #b ")")
#define REQUIRE(...)                                                       \
  do {                                                                     \
    if (!::check::note(static_cast<bool>(__VA_ARGS__), __FILE__, __LINE__, \
                       "REQUIRE(" #__VA_ARGS__ ")"))                       \
      throw ::check::Abandon{};                                            \
  } while (false)
#define CHECK_THROWS(type, ...)                                                      \
  do {                                                                               \
    bool thrown = false;                                                             \
    try {                                                                            \
      static_cast<void>(__VA_ARGS__);                                                \
    } catch (const type&) {                                                          \
      thrown = true;                                                                 \
    }                                                                                \
    ::check::note(thrown, __FILE__, __LINE__, #__VA_ARGS__ " did not throw " #type); \
  } while (false)

int main(int argc, char** argv) { return ::check::run(argc > 1 ? argv[1] : nullptr); }
