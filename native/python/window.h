// What a caller needs to submit work under one number and to find the results again. Guarded by the GIL.
#pragma once

#include <map>
#include <set>
#include <string>
#include <unordered_map>

#include "execution_limits.h"
#include "leftovers.h"
#include "number_set.h"
#include "reader.h"
#include "writer.h"

namespace conveyor {

class Failures;
struct WindowObject;

// A window's place among those that have leftovers.
struct WindowLeftover : Leftover {
  WindowObject* window = nullptr;
};

// A result that is out of its ring, with the refs and the definitions that it refers to.
struct Stashed : Frame {
  nb::object refs{};
  nb::object definitions{};
};

// Submits under consecutive numbers and collects results by number. Every submission yields exactly
// one frame on each of the readers, tagged with its number, in any order.
class InFlightWindow {
 public:
  // Numbers begin with `first`.
  InFlightWindow(std::vector<Writer*> writers, std::vector<Reader*> readers, uint32_t depth, Kind kind, uint64_t first = 0)
      : writers_(std::move(writers)), readers_(std::move(readers)), stashes_(readers_.size()), dropped_(readers_.size(), NumberSet(depth)), abandoned_(depth), cancelled_(depth), depth_(depth), kind_(kind), first_(first), next_(first) {
    for (Writer* w : writers_) w->passes_on = kind == Kind::kCall;
  }

  ~InFlightWindow() { forget_leftovers(); }
  InFlightWindow(const InFlightWindow&) = delete;
  InFlightWindow& operator=(const InFlightWindow&) = delete;

  // Have what is dropped before it comes let go of, on behalf of `window`, whose window this is.
  void set_leftovers(std::shared_ptr<Leftovers> leftovers, WindowObject* window) {
    leftovers_ = std::move(leftovers);
    leftover_.window = window;
  }
  void leave_leftovers() { leftover_.leave(); }
  // No more: nothing comes any more, or nobody is there to look.
  void forget_leftovers() {
    leftover_.leave();
    leftovers_.reset();
  }
  // Let go of what was dropped and has come. What is wanted and lies before it moves to the stash.
  void sweep();
  // That was all for now.
  void swept() {
    if (std::ranges::all_of(dropped_, &NumberSet::empty)) leftover_.leave();
  }

  bool has_room();
  // The number given to `value`, or -1 if there is no room. `deadline`: CLOCK_MONOTONIC in nanoseconds,
  // 0 for none; only with limits.
  int64_t submit(nb::handle value, uint64_t deadline);
  int64_t submit_many(nb::tuple values, uint64_t deadline);
  // Where the deadlines of submissions are written.
  void set_limits(Limits* limits) { limits_ = limits; }
  // Hear of tasks that have failed, on the readers that `open()` gives when there is something to hear.
  // With `together` each execution fails as one: what it has not come to when that is heard comes to the
  // same error, and a result of one of the readers `siblings` is there when those of all of them are, so that it is
  // known by then whether one has failed. After set_limits.
  void set_failures(nb::object readers, bool together, const std::vector<size_t>& siblings);
  // Hear of what has failed. False if there is nothing new.
  bool hear();
  // Executions under way in which tasks have failed: (number, what was told of it).
  nb::list failures();
  uint64_t submitted() const { return next_; }
  uint64_t completed() const;
  // True if the result is here.
  bool ready(uint64_t number, size_t reader);
  // Of a result that is here: whether it is an error. Nothing is decoded for that.
  bool failed(uint64_t number, size_t reader);
  // The result as it is kept (decode.h), or an invalid object if it is not here.
  nb::object take(uint64_t number, size_t reader) { return take(number, reader, 0); }
  // The same by a `get` that has waited since then (`waits_since`).
  nb::object take(uint64_t number, size_t reader, uint64_t since);
  // For a result on its way through Python code: a signal handler may raise there before it is kept
  // anywhere. It can be taken again until it is resolved; `resolved` is false if there was none.
  void hand(uint64_t number, size_t reader, nb::object value);
  bool resolved(uint64_t number, size_t reader);
  // Before a result is taken that is to be handed: `hand` cannot fail then.
  void make_hand() {
    if (!spare_hand_.empty()) return;
    std::map<std::pair<uint64_t, size_t>, nb::object> one;
    one.emplace(std::pair<uint64_t, size_t>{}, nb::object());
    spare_hand_ = one.extract(one.begin());
  }
  // The result is not wanted, and nobody takes it after this. O(1). Throws only what is Python's.
  void drop(uint64_t number, size_t reader);
  // The same, by who has cancelled the submission: an error that comes of it is no news.
  void drop_cancelled(uint64_t number, size_t reader);
  // Nobody has any of the results of that submission any more, each of which was dropped or taken.
  void abandon(uint64_t number) noexcept;
  // Nobody has any result any more: have the errors among them told of.
  void note_last() noexcept;
  // Take what has come out of the rings.
  void drain();
  // Nobody asks for results any more: those that refer to refs let go of them.
  void discard_all();
  // Take what has come, and nothing that comes later.
  void leave();
  // Results that were asked for in vain and are still somebody's.
  size_t requested() const;
  size_t stashed() const;
  size_t stashed_bytes() const;

  // Keep counters in `own`: sends and receives in the order of the writers and readers, and as its task 0
  // whole executions. `outputs`: for each reader, who writes it and as which output. While the graph is
  // traced, the events of `all` are taken before there is no room for more.
  void record(std::shared_ptr<Recorder> own, std::vector<std::pair<std::shared_ptr<Recorder>, uint32_t>> outputs,
              std::vector<std::shared_ptr<Recorder>> all);
  // Count the executions that have been completed since.
  void count_completed();
  // The time, if waits are recorded; else 0.
  uint64_t wait_begins() const { return recorder_ ? now_ns() : 0; }
  // The wait has ended without the result, which may be asked for again.
  void wait_ends(uint64_t number, size_t reader, uint64_t since);

 private:
  uint64_t submission_begins();
  void submitting(uint64_t number, uint64_t began);
  void submission_ends(uint64_t number, uint64_t began);
  uint64_t taking(uint64_t number, size_t reader, uint64_t since);
  void taken(uint64_t number, size_t reader, uint64_t began, uint64_t bytes, bool failed);
  // The invariant of a result on this side: from when its frame comes until its ref is resolved it is in the
  // ring, in the stash or handed. So whoever could not read it may ask again, also where others had to get by.
  void stash_front(size_t reader);
  void stash_broken(size_t reader);
  nb::object take_stashed(uint64_t number, size_t reader);
  void note_dropped(uint64_t number, size_t reader) {
    dropped_[reader].insert(number);
    if (leftovers_) leftovers_->enter(leftover_, [&] { return readers_[reader]->ring.has_some(); });
  }
  bool hear_news();
  bool too_early(uint64_t number, Kind kind) const;
  nb::object find(uint64_t number, size_t reader, uint64_t since);
  void note_unseen(uint64_t number, std::string_view error) noexcept;
  void note_told(uint64_t number) noexcept;
  void forget_dropped(uint64_t number, size_t reader) noexcept;
  void forget_unless_dropped(uint64_t number) noexcept;
  bool awaits_siblings(uint64_t number, size_t reader);
  void discard_stashed(uint64_t number, size_t reader);
  void hear_before_submission();
  void note_open(uint64_t number, std::vector<bool>& open) noexcept;
  std::vector<Writer*> writers_;
  std::vector<Reader*> readers_;
  std::vector<std::unordered_map<uint64_t, Stashed>> stashes_;
  // No more than `depth_` each: their frames are all still to be taken out of the ring.
  std::vector<NumberSet> dropped_;
  std::shared_ptr<Leftovers> leftovers_;
  // Of executions, where an error may come more than once: those of which somebody has got one, or the log (the last
  // ones), and an error that has come to nobody, while others may get one. As long as something of them is dropped_:
  // those of which nobody has a result any more, and those that were cancelled.
  std::set<uint64_t> told_;
  std::map<uint64_t, std::string> unseen_;
  NumberSet abandoned_;
  NumberSet cancelled_;
  WindowLeftover leftover_;
  std::map<std::pair<uint64_t, size_t>, nb::object> handed_;
  decltype(handed_)::node_type spare_hand_;
  uint32_t depth_;
  Kind kind_;
  const uint64_t first_;
  uint64_t next_;
  Limits* limits_ = nullptr;
  std::shared_ptr<Failures> failures_;
  uint64_t all_came_ = 0;         // so many executions' results are there of all siblings
  std::vector<size_t> siblings_;  // readers, if there are several whose results fail as one
  std::vector<bool> is_sibling_;
  std::shared_ptr<Recorder> recorder_;
  std::vector<std::pair<std::shared_ptr<Recorder>, uint32_t>> outputs_;
  std::vector<std::shared_ptr<Recorder>> all_;
  std::vector<uint64_t> submitted_at_;  // of the last executions, by number
  std::vector<std::unordered_map<uint64_t, uint64_t>> requested_since_;  // results that were asked for in vain
  uint64_t counted_ = first_;           // executions whose time has been counted
  uint64_t turn_ = 1;                   // executions for whose events there is room
  uint64_t drain_at_ = 0;
  const uint64_t fork_ = fork_generation.load();
};

}  // namespace conveyor
