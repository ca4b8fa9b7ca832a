// Finds inputs for LLVMFuzzerTestOneInput where there is no libFuzzer: mutates what it has, keeps what
// reaches something new. Takes the options of libFuzzer that fuzz.sh uses, so either links to a target:
//
//     TARGET [-max_total_time=S] [-runs=N] [-seed=N] [-max_len=N] [-artifact_prefix=P] CORPUS [MORE...]
//     TARGET -merge=1 CORPUS FROM...     adds to CORPUS the inputs of FROM that reach something new
//
// New inputs go to CORPUS; -runs=0 only replays. The target is compiled with gcc's
// -fsanitize-coverage=trace-pc,trace-cmp, this file without any -fsanitize: it is called from
// everywhere in the target. The same seed, corpus and -runs give the same inputs.
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
extern "C" __attribute__((weak)) int LLVMFuzzerInitialize(int* argc, char*** argv);
extern "C" void __sanitizer_set_death_callback(void (*)());

namespace {

using Bytes = std::vector<uint8_t>;

constexpr unsigned kSecondsForOne = 20;  // an input that takes longer is a finding

// What one execution reached: pairs of consecutive basic blocks, with counts. A pair's number depends
// on code addresses, so the program must lie where it lay before for a run to be repeated.
constexpr size_t kMap = 1 << 16;
uint8_t map[kMap];
uint32_t touched[kMap];
size_t touched_count = 0;
uint64_t previous = 0;

// Operands of comparisons that were not equal. An input that contains one gets the other: this is
// what finds magic numbers and exact limits.
struct Operands {
  uint64_t a, b;
  uint8_t width;
};
constexpr size_t kCompares = 512;
Operands compares[kCompares];
size_t compare_count = 0;

inline void compared(uint64_t a, uint64_t b, uint8_t width) {
  if (a != b) compares[compare_count++ % kCompares] = {a, b, width};
}

}  // namespace

extern "C" {
void __sanitizer_cov_trace_pc() {
  const uint64_t here = reinterpret_cast<uintptr_t>(__builtin_return_address(0)) * 0x9e3779b97f4a7c15 >> 32;
  const uint32_t edge = uint32_t((here ^ previous) % kMap);
  previous = here >> 1;
  if (map[edge] == 0) touched[touched_count++] = edge;
  if (map[edge] != 255) ++map[edge];
}
void __sanitizer_cov_trace_cmp1(uint8_t a, uint8_t b) { compared(a, b, 1); }
void __sanitizer_cov_trace_cmp2(uint16_t a, uint16_t b) { compared(a, b, 2); }
void __sanitizer_cov_trace_cmp4(uint32_t a, uint32_t b) { compared(a, b, 4); }
void __sanitizer_cov_trace_cmp8(uint64_t a, uint64_t b) { compared(a, b, 8); }
void __sanitizer_cov_trace_const_cmp1(uint8_t a, uint8_t b) { compared(a, b, 1); }
void __sanitizer_cov_trace_const_cmp2(uint16_t a, uint16_t b) { compared(a, b, 2); }
void __sanitizer_cov_trace_const_cmp4(uint32_t a, uint32_t b) { compared(a, b, 4); }
void __sanitizer_cov_trace_const_cmp8(uint64_t a, uint64_t b) { compared(a, b, 8); }
void __sanitizer_cov_trace_cmpf(float, float) {}
void __sanitizer_cov_trace_cmpd(double, double) {}
// cases: how many, their width in bits, then the values.
void __sanitizer_cov_trace_switch(uint64_t value, uint64_t* cases) {
  for (uint64_t i = 0; i < cases[0]; ++i) compared(cases[2 + i], value, uint8_t(cases[1] / 8));
}
}

namespace {

const Bytes* running = nullptr;
const char* artifact_prefix = "";
uint64_t executions = 0;

std::string name_of(const Bytes& input) {
  uint64_t hash = 0xcbf29ce484222325;
  for (uint8_t byte : input) hash = (hash ^ byte) * 0x100000001b3;
  char name[17];
  std::snprintf(name, sizeof name, "%016" PRIx64, hash);
  return name;
}

bool write_file(const std::string& path, const Bytes& bytes) {
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
  const bool whole = fd >= 0 && ::write(fd, bytes.data(), bytes.size()) == ssize_t(bytes.size());
  if (fd >= 0) ::close(fd);
  if (!whole) std::perror(path.c_str());
  return whole;
}

// Called by the sanitizers when they have reported and are about to end the process.
void leave_the_input() {
  if (running == nullptr) return;
  const std::string path = artifact_prefix + ("crash-" + name_of(*running));
  write_file(path, *running);
  std::fprintf(stderr, "fuzz: the input is in %s (execution %" PRIu64 ")\n", path.c_str(), executions);
}

void too_slow(int) {
  std::fprintf(stderr, "fuzz: one input takes over %u s\n", kSecondsForOne);
  leave_the_input();
  ::_exit(1);
}

struct Random {
  uint64_t state;
  uint64_t next() {  // splitmix64
    uint64_t z = state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
  }
  size_t below(size_t n) { return n == 0 ? 0 : size_t(next() % n); }
};

struct Feature {
  uint32_t edge;
  uint8_t counts;  // one bit for each range of counts
};

uint8_t range_of(uint8_t n) {
  return n == 1 ? 1 : n == 2 ? 2 : n == 3 ? 4 : n < 8 ? 8 : n < 16 ? 16 : n < 32 ? 32 : n < 128 ? 64 : 128;
}
// For the kept corpus: that it was reached, not how often. Keeps it small.
uint8_t coarse_range_of(uint8_t) { return 1; }

// Runs one input, from a copy of exactly its size, and says what it reached.
std::vector<Feature> reach(const Bytes& input, bool coarse) {
  for (size_t i = 0; i < touched_count; ++i) map[touched[i]] = 0;
  touched_count = 0;
  previous = 0;
  running = &input;
  ++executions;
  if (executions % 1024 == 1) ::alarm(kSecondsForOne);  // 1024 of them may take this long: they are fast
  uint8_t* copy = static_cast<uint8_t*>(std::malloc(input.size()));
  if (!input.empty()) std::memcpy(copy, input.data(), input.size());
  LLVMFuzzerTestOneInput(copy, input.size());
  std::free(copy);
  running = nullptr;
  std::vector<Feature> features;
  features.reserve(touched_count);
  for (size_t i = 0; i < touched_count; ++i)
    features.push_back({touched[i], coarse ? coarse_range_of(map[touched[i]]) : range_of(map[touched[i]])});
  return features;
}

uint8_t seen[kMap];

bool anything_new(const std::vector<Feature>& features) {
  return std::any_of(features.begin(), features.end(), [](Feature f) { return f.counts & ~seen[f.edge]; });
}
void note(const std::vector<Feature>& features) {
  for (Feature f : features) seen[f.edge] |= f.counts;
}
size_t edges() { return size_t(std::count_if(seen, seen + kMap, [](uint8_t s) { return s != 0; })); }

std::vector<Bytes> read_directory(const std::string& path, size_t max_length) {
  std::vector<std::string> names;
  if (DIR* directory = ::opendir(path.c_str())) {
    while (dirent* entry = ::readdir(directory))
      if (entry->d_name[0] != '.') names.push_back(entry->d_name);
    ::closedir(directory);
  } else {
    std::perror(path.c_str());
    std::exit(2);
  }
  std::sort(names.begin(), names.end());
  std::vector<Bytes> all;
  for (const std::string& name : names) {
    Bytes bytes(max_length);
    const int fd = ::open((path + "/" + name).c_str(), O_RDONLY);
    const ssize_t length = fd < 0 ? -1 : ::read(fd, bytes.data(), max_length);
    if (fd >= 0) ::close(fd);
    if (length < 0) continue;
    bytes.resize(size_t(length));
    all.push_back(std::move(bytes));
  }
  return all;
}

void put(Bytes& b, size_t at, uint64_t value, size_t width) { std::memcpy(b.data() + at, &value, width); }

// The other side of a comparison, or its neighbour, in place of one side found in the input.
void replace_compared(Bytes& b, Random& random) {
  if (compare_count == 0) return;
  Operands o = compares[random.below(std::min(compare_count, kCompares))];
  if (random.below(2)) std::swap(o.a, o.b);
  // A value compared as 8 bytes often was 4 or 2 in the input.
  size_t width = o.width;
  while (width > 1 && random.below(3) == 0) width /= 2;
  const uint64_t to = o.b + random.below(3) - 1;
  if (b.size() < width) return;
  const size_t start = random.below(b.size() - width + 1);
  for (size_t i = 0; i + width <= b.size(); ++i) {
    const size_t at = (start + i) % (b.size() - width + 1);
    if (std::memcmp(b.data() + at, &o.a, width) == 0) return put(b, at, to, width);
  }
  if (random.below(4) == 0) put(b, start, to, width);
}

void mutate_once(Bytes& b, const Bytes& other, size_t max_length, Random& random) {
  static const uint64_t kInteresting[] = {0, 1, 2, 7, 8, 63, 64, 65, 127, 128, 255, 256, 511, 512, 513, 4095, 4096, 65535, 65536,
                                          0x7fffffff, 0x80000000, 0xffffffff, 0x100000000, 0x7fffffffffffffff,
                                          0x8000000000000000, 0x8000000000000001, 0xffffffffffffffff, 0xfffffffffffff000};
  const size_t at = random.below(b.size());
  const size_t width = std::min(size_t(1) << random.below(4), b.size() - at);
  switch (random.below(10)) {
    case 0:
      if (!b.empty()) b[at] ^= uint8_t(1u << random.below(8));
      break;
    case 1:
      if (!b.empty()) b[at] = uint8_t(random.next());
      break;
    case 2: {
      uint64_t value = kInteresting[random.below(std::size(kInteresting))];
      put(b, at, random.below(4) == 0 ? ~value + 1 : value, width);
      break;
    }
    case 3: {
      uint64_t value = 0;
      if (width != 0) std::memcpy(&value, b.data() + at, width);
      put(b, at, value + random.below(65) - 32, width);
      break;
    }
    case 4: {  // insert
      const size_t length = std::min(random.below(4) == 0 ? random.below(128) : 1 + random.below(16), max_length - b.size());
      b.insert(b.begin() + ptrdiff_t(at), length, uint8_t(random.below(2) ? 0 : random.next()));
      break;
    }
    case 5: {  // erase
      const size_t length = std::min(1 + random.below(random.below(4) == 0 ? 128 : 16), b.size() - at);
      b.erase(b.begin() + ptrdiff_t(at), b.begin() + ptrdiff_t(at + length));
      break;
    }
    case 6: {  // copy within
      if (b.empty()) break;
      const size_t from = random.below(b.size());
      const size_t length = std::min(1 + random.below(32), b.size() - std::max(at, from));
      std::memmove(b.data() + at, b.data() + from, length);
      break;
    }
    case 7: {  // a piece of another input
      if (other.empty()) break;
      const size_t from = random.below(other.size());
      const size_t length = std::min({1 + random.below(64), other.size() - from, max_length - b.size()});
      b.insert(b.begin() + ptrdiff_t(at), other.begin() + ptrdiff_t(from), other.begin() + ptrdiff_t(from + length));
      break;
    }
    default:
      replace_compared(b, random);
  }
}

// Leaves out what is not needed to reach what only this input reaches.
Bytes shrink(Bytes input, const std::vector<Feature>& features, size_t attempts) {
  std::vector<Feature> needed;
  for (Feature f : features)
    if (f.counts & ~seen[f.edge]) needed.push_back(f);
  auto enough = [&](const Bytes& candidate) {
    const auto reached = reach(candidate, true);
    return std::all_of(needed.begin(), needed.end(), [&](Feature f) {
      return std::any_of(reached.begin(), reached.end(), [&](Feature g) { return g.edge == f.edge && g.counts == f.counts; });
    });
  };
  for (size_t length = input.size() / 2; length != 0; length /= 2)
    for (size_t at = 0; at + length <= input.size() && attempts != 0; --attempts) {
      Bytes candidate = input;
      candidate.erase(candidate.begin() + ptrdiff_t(at), candidate.begin() + ptrdiff_t(at + length));
      if (enough(candidate))
        input = std::move(candidate);
      else
        at += length;
    }
  return input;
}

int merge(const std::string& to, const std::vector<std::string>& from, size_t max_length) {
  for (const Bytes& input : read_directory(to, max_length)) note(reach(input, true));
  std::vector<Bytes> candidates;
  for (const std::string& path : from)
    for (Bytes& input : read_directory(path, max_length)) candidates.push_back(std::move(input));
  std::stable_sort(candidates.begin(), candidates.end(), [](const Bytes& a, const Bytes& b) { return a.size() < b.size(); });
  size_t added = 0;
  for (const Bytes& input : candidates) {
    const auto features = reach(input, true);
    if (!anything_new(features)) continue;
    const Bytes small = shrink(input, features, 2000);
    note(reach(small, true));
    if (!write_file(to + "/" + name_of(small), small)) return 2;
    ++added;
  }
  std::printf("fuzz: %zu of %zu inputs added, %zu edges\n", added, candidates.size(), edges());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  uint64_t runs = UINT64_MAX, seed = 1, max_length = 4096, seconds = 0;
  bool merging = false;
  std::vector<std::string> directories;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const size_t equals = argument.find('=');
    if (argument[0] != '-') {
      directories.push_back(argument);
      continue;
    }
    const std::string option = argument.substr(0, equals);
    const char* value = equals == std::string::npos ? "" : argv[i] + equals + 1;
    if (option == "-max_total_time") seconds = std::strtoull(value, nullptr, 10);
    else if (option == "-runs") runs = std::strtoull(value, nullptr, 10);
    else if (option == "-seed") seed = std::strtoull(value, nullptr, 10);
    else if (option == "-max_len") max_length = std::strtoull(value, nullptr, 10);
    else if (option == "-merge") merging = *value == '1';
    else if (option == "-artifact_prefix") artifact_prefix = value;
    else return std::fprintf(stderr, "fuzz: unknown option %s\n", argv[i]), 2;
  }
  if (directories.empty()) return std::fprintf(stderr, "fuzz: no corpus directory\n"), 2;
  __sanitizer_set_death_callback(leave_the_input);
  ::signal(SIGALRM, too_slow);
  if (LLVMFuzzerInitialize != nullptr) LLVMFuzzerInitialize(&argc, &argv);
  if (merging) return merge(directories[0], {directories.begin() + 1, directories.end()}, max_length);

  std::vector<Bytes> corpus;
  for (const std::string& path : directories)
    for (Bytes& input : read_directory(path, max_length)) {
      note(reach(input, false));
      corpus.push_back(std::move(input));
    }
  const size_t replayed = corpus.size();
  if (corpus.empty()) corpus.emplace_back();
  Random random{seed};
  const auto start = std::chrono::steady_clock::now();
  auto elapsed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  uint64_t done = 0;
  for (; done < runs; ++done) {
    if (seconds != 0 && done % 256 == 0 && elapsed() >= double(seconds)) break;
    // What was found last is where new things are near.
    const size_t recent = std::min<size_t>(corpus.size(), 1 + corpus.size() / 8);
    const size_t pick = random.below(3) == 0 ? corpus.size() - 1 - random.below(recent) : random.below(corpus.size());
    Bytes input = corpus[pick];
    for (size_t n = size_t(1) << random.below(5); n != 0; --n)
      mutate_once(input, corpus[random.below(corpus.size())], max_length, random);
    const auto features = reach(input, false);
    if (!anything_new(features)) continue;
    note(features);
    if (!write_file(directories[0] + "/" + name_of(input), input)) return 2;
    corpus.push_back(std::move(input));
  }
  ::alarm(0);
  const double took = std::max(elapsed(), 1e-9);
  std::printf("fuzz: %zu replayed, %" PRIu64 " executions in %.1f s (%.0f/s), %zu edges, corpus of %zu\n", replayed, done, took,
              double(done) / took, edges(), replayed == 0 && corpus[0].empty() ? corpus.size() - 1 : corpus.size());
  return 0;
}
