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
// failed". Failures may be noted from any thread. A forked child ends with `_exit(check::failures()
// != 0)`.
#pragma once

#include <atomic>
#include <cstdio>
#include <cstring>
#include <exception>
#include <sstream>
#include <string>
#include <vector>

namespace check {

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

inline int run(const char* filter) {
  int passed = 0, failed = 0;
  for (const Test& test : tests()) {
    if (filter && !std::strstr(test.name, filter)) continue;
    const int before = failures();
    try {
      test.body();
    } catch (const Abandon&) {
    } catch (const std::exception& error) {
      note(false, test.name, 0, std::string("threw: ") + error.what());
    } catch (...) {
      note(false, test.name, 0, "threw something that is no std::exception");
    }
    const bool ok = failures() == before;
    (ok ? passed : failed)++;
    std::printf("%s %s\n", ok ? "ok    " : "FAILED", test.name);
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
