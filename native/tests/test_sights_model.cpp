// What hosts tell each other of failed calls, in every order in which it can come: processes that learn of failures and
// say so to each other, pumps that look and tell, connections that break. The clocks and words are the real ones (Board,
// ToldSights); what is modelled is that frames of a connection come behind what was told before them, or not at all.
#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <set>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "check.h"
#include "net/told_sights.h"

using namespace conveyor;
using namespace conveyor::net;

namespace {

// Whose failures they are: a process that is a rank, wherever it is.
constexpr uint32_t kRank = 0;

// The n-th failure, from 1 on, that a host has numbered.
struct Failure {
  uint32_t host, nth;
};
uint64_t number_of(const Failure& failure) {
  FailedCalls calls{};
  uint64_t number = 0;
  for (uint32_t i = 0; i < failure.nth; ++i) number = calls.add(failure.host);
  return number;
}

struct Step {
  enum What { kLearns, kSays, kTakes } what;
  uint32_t which;  // of the failures, or the host that it says something to, or takes it from
};
using Script = std::vector<Step>;  // of the one process that each host has

// What a process says: when that was, which failures it knew of then, and which nobody on its host did.
struct Word {
  Stamp made;
  std::set<uint64_t> known, unknown;
};

struct Item {
  Saw saw;
  std::shared_ptr<const Word> word;  // null: it is the sight
};

// From one host to another.
struct Way {
  ToldSights told;
  std::deque<Item> wire;
  std::deque<std::shared_ptr<const Word>> published, sent;  // not sent yet, and sent and not come
  std::deque<std::shared_ptr<const Word>> come;             // and not taken
  size_t looked = 0;      // so many of those that are published are sent next
  bool between = false;   // the pump has looked, and not told
};

enum class Fault { kNone, kSightsLast, kNothingAnew };

struct Situation {
  std::vector<std::string> boards;  // what of them is told of
  std::vector<std::vector<Way>> ways;
  std::vector<size_t> done;  // of each script
  std::vector<std::set<uint64_t>> known;
  int breaks;
};

class Explorer {
 public:
  Explorer(std::vector<Script> scripts, const std::vector<Failure>& failures, int breaks, Fault fault = Fault::kNone)
      : scripts_(std::move(scripts)), hosts_(uint32_t(scripts_.size())), fault_(fault) {
    for (const Failure& failure : failures) numbers_.push_back(number_of(failure));
    now_.ways.resize(hosts_);
    for (auto& ways : now_.ways) ways.resize(hosts_);
    now_.done.resize(hosts_);
    now_.known.resize(hosts_);
    now_.boards.resize(hosts_);
    now_.breaks = breaks;
    for (uint32_t h = 0; h < hosts_; ++h) {
      boards_.push_back(Board::create(1));
      boards_[h]->prepare(kRank, "a rank");
      boards_[h]->become_rank(kRank);
      boards_[h]->header()->host.store(h);
      boards_[h]->header()->has_pump.store(1);
      uint32_t made = 0;
      for (const Failure& failure : failures)
        for (; failure.host == h && made < failure.nth; ++made) boards_[h]->fail(kRank);
    }
  }
  // What is wrong in some order; empty: nothing is in any.
  std::string explore() {
    save();
    go_on();
    return wrong_;
  }
  size_t situations() const { return seen_.size(); }

 private:
  void go_on() {
    if (!wrong_.empty() || !seen_.insert(print()).second) return;
    const Situation here = now_;
    bool any = false, elsewhere = false;
    const auto attempt = [&](const auto& step) {
      if (!wrong_.empty()) return;
      if (std::exchange(elsewhere, false)) {
        now_ = here;
        restore();
      }
      if (!step()) return;  // it has done nothing
      any = elsewhere = true;
      save();
      go_on();
    };
    for (uint32_t h = 0; h < hosts_; ++h) {
      attempt([&] { return act(h); });
      for (uint32_t to = 0; to < hosts_; ++to) {
        if (!linked(h, to)) continue;
        attempt([&] { return look(h, to); });
        attempt([&] { return tell(h, to); });
        attempt([&] { return deliver(h, to); });
        if (h < to && here.breaks > 0) attempt([&] { return break_off(h, to); });
      }
    }
    if (any || !wrong_.empty()) return;
    for (uint32_t h = 0; h < hosts_; ++h)
      if (here.done[h] != scripts_[h].size()) wrong_ = "something that was said never comes";
  }

  // Hosts that say nothing to each other have no connection.
  bool linked(uint32_t a, uint32_t b) const {
    const auto says = [&](uint32_t from, uint32_t to) {
      return std::ranges::any_of(scripts_[from], [&](const Step& step) { return step.what == Step::kSays && step.which == to; });
    };
    return a != b && (says(a, b) || says(b, a));
  }
  bool act(uint32_t h) {
    if (now_.done[h] == scripts_[h].size()) return false;
    const Step step = scripts_[h][now_.done[h]];
    Board& board = *boards_[h];
    if (step.what == Step::kLearns) {
      board.see(kRank, numbers_[step.which]);
      now_.known[h].insert(numbers_[step.which]);
    } else if (step.what == Step::kSays) {
      Word word{board.sights(), now_.known[h], {}};
      for (const uint64_t n : numbers_)
        if (!board.seen_at(kRank, n)) word.unknown.insert(n);
      now_.ways[h][step.which].published.push_back(std::make_shared<const Word>(std::move(word)));
    } else {
      auto& come = now_.ways[step.which][h].come;
      if (come.empty()) return false;
      check(h, *come.front());
      now_.known[h].insert(come.front()->known.begin(), come.front()->known.end());
      come.pop_front();
    }
    ++now_.done[h];
    return true;
  }
  void check(uint32_t h, const Word& word) {
    const auto knew = [&](uint64_t n) {
      const auto at = boards_[h]->seen_at(kRank, n, word.made);
      return at && *at <= word.made;
    };
    for (const uint64_t n : word.known)
      if (!knew(n)) wrong_ = "who is said something does not know what its sayer knew";
    for (const uint64_t n : word.unknown)
      if (knew(n)) wrong_ = "who is said something takes its sayer to have known what it did not";
  }

  // One thread does all of this on a host: nothing of it comes between a look and what it is told of then.
  bool is_busy(uint32_t h) const {
    for (const Way& way : now_.ways[h])
      if (way.between) return true;
    return false;
  }
  bool look(uint32_t h, uint32_t to) {
    Way& way = now_.ways[h][to];
    if (is_busy(h) || (way.published.empty() && way.told.marks == boards_[h]->header()->sight_marks.load())) return false;
    way.looked = way.published.size();
    way.between = true;
    return true;
  }
  bool tell(uint32_t h, uint32_t to) {
    Way& way = now_.ways[h][to];
    if (!way.between) return false;
    const auto sights = [&] { way.told.look(*boards_[h], [&](const Saw& saw) { way.wire.push_back({saw, nullptr}); }); };
    if (fault_ != Fault::kSightsLast) sights();
    for (; way.looked > 0; --way.looked) {
      way.wire.push_back({{}, way.published.front()});
      way.sent.push_back(way.published.front());
      way.published.pop_front();
    }
    if (fault_ == Fault::kSightsLast) sights();
    way.between = false;
    return true;
  }
  bool deliver(uint32_t h, uint32_t to) {
    Way& way = now_.ways[h][to];
    if (way.wire.empty() || is_busy(to)) return false;
    const Item item = way.wire.front();
    way.wire.pop_front();
    if (item.word) {
      way.sent.pop_front();
      way.come.push_back(item.word);
      return true;
    }
    boards_[to]->hear({item.saw.slot == Saw::kClockAlone ? ~uint32_t(0) : item.saw.slot, item.saw.number, stamp_of(h, item.saw.clock)});
    // Each host learns of each failure once, and is told by each other one of what may have taken its word.
    if (clock_of(boards_[to]->sights()) > numbers_.size() * hosts_) wrong_ = "hosts tell each other without end";
    return true;
  }
  // What has not come is sent once more.
  bool break_off(uint32_t h, uint32_t to) {
    if (is_busy(h) || is_busy(to)) return false;
    --now_.breaks;
    for (Way* way : {&now_.ways[h][to], &now_.ways[to][h]}) {
      way->wire.clear();
      way->published.insert(way->published.begin(), way->sent.begin(), way->sent.end());
      way->sent.clear();
      if (fault_ != Fault::kNothingAnew) way->told = {};
    }
    return true;
  }

  // What is in shared memory. Of what was heard the first: there is no more.
  static constexpr size_t kHeard = sizeof(HeardSights) / 4;
  struct Part {
    void* at;
    size_t size;
  };
  std::vector<Part> parts(uint32_t h) const {
    BoardHeader* header = boards_[h]->header();
    return {{&header->sights, sizeof header->sights}, {&header->sight_marks, sizeof header->sight_marks}, {&header->heard, kHeard},
            {&boards_[h]->slot(kRank)->failed_calls, sizeof(FailedCalls)}};
  }
  void save() {
    for (uint32_t h = 0; h < hosts_; ++h) {
      now_.boards[h].clear();
      for (const Part& part : parts(h)) now_.boards[h].append(static_cast<const char*>(part.at), part.size);
    }
  }
  void restore() {
    for (uint32_t h = 0; h < hosts_; ++h) {
      const char* from = now_.boards[h].data();
      for (const Part& part : parts(h)) {
        std::memcpy(part.at, from, part.size);
        from += part.size;
      }
    }
  }
  std::string print() const {
    std::string all;
    const auto put = [&](const auto& value) { all.append(reinterpret_cast<const char*>(&value), sizeof value); };
    const auto say = [&](const Word& word) {
      put(word.made);
      for (const auto* numbers : {&word.known, &word.unknown}) {
        put(numbers->size());
        for (const uint64_t n : *numbers) put(n);
      }
    };
    const auto words = [&](const auto& list) {
      put(list.size());
      for (const auto& word : list) say(*word);
    };
    for (const std::string& board : now_.boards) put(std::hash<std::string>()(board));
    for (const auto& ways : now_.ways)
      for (const Way& way : ways) {
        put(way.told.marks);
        for (const auto& [place, number] : way.told.numbers) put(place), put(number);
        put(way.wire.size());
        for (const Item& item : way.wire) {
          put(item.saw);
          put(item.word != nullptr);
          if (item.word) say(*item.word);
        }
        words(way.published);
        words(way.come);
        put(way.looked);
        put(way.between);
      }
    for (const size_t done : now_.done) put(done);
    put(now_.breaks);
    return all;
  }

  const std::vector<Script> scripts_;
  std::vector<uint64_t> numbers_;
  const uint32_t hosts_;
  const Fault fault_;
  std::vector<std::shared_ptr<Board>> boards_;
  Situation now_;
  std::unordered_set<std::string> seen_;
  std::string wrong_;
};

bool all_is_well(std::vector<Script> scripts, const std::vector<Failure>& failures, int breaks) {
  Explorer explorer(std::move(scripts), failures, breaks);
  const std::string wrong = explorer.explore();
  std::fprintf(stderr, "%zu situations\n", explorer.situations());
  if (!wrong.empty()) check::note(false, __FILE__, __LINE__, wrong);
  return wrong.empty();
}

constexpr Failure kOne = {2, 1}, kOther = {1, 2};
// It has the word of kOne.
constexpr Failure kLater = {2, 1 + FailedCalls::kKept};
constexpr auto kLearns = Step::kLearns, kSays = Step::kSays, kTakes = Step::kTakes;

const std::vector<Script> kThere = {{{kSays, 1}, {kLearns, 0}, {kSays, 1}}, {{kLearns, 1}, {kTakes, 0}, {kTakes, 0}}};
// By way of another host, while the first one is connected itself.
const std::vector<Script> kRound = {{{kLearns, 0}, {kSays, 1}}, {{kTakes, 0}, {kSays, 2}}, {{kTakes, 1}, {kSays, 0}}};

}  // namespace

TEST(whoever_hears_something_knows_what_its_sayer_knew_and_no_more) { CHECK(all_is_well(kThere, {kOne, kOther}, 1)); }

TEST(what_goes_by_way_of_a_third_host_does_so_as_well) {
  if (!check::kThreadSanitizer) CHECK(all_is_well(kRound, {kOne}, 0));  // which has no threads to look at
  CHECK(all_is_well({{{kLearns, 0}, {kSays, 1}}, {{kTakes, 0}, {kSays, 2}}, {{kTakes, 1}}}, {kOne}, 1));
}

TEST(hosts_end_to_tell_of_two_failures_that_have_one_word) {
  CHECK(all_is_well({{{kSays, 1}, {kLearns, 0}}, {{kTakes, 0}, {kLearns, 1}}}, {kOne, kLater}, 1));
}

// The properties can fail.
TEST(sights_behind_what_was_said_are_too_late) { CHECK(!Explorer(kThere, {kOne, kOther}, 0, Fault::kSightsLast).explore().empty()); }
TEST(sights_that_are_not_told_anew_are_lost) { CHECK(!Explorer(kThere, {kOne, kOther}, 1, Fault::kNothingAnew).explore().empty()); }
