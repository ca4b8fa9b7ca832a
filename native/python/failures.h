// What the executor of a graph knows of executions in which a task has failed. Each actor tells of its
// failures on a ring of its own, one frame at most for each execution, as soon as a task has raised:
// long before the error comes out at the graph's end, where it may have to wait for other inputs.
//
// The rings have a slot for each execution that may be under way. An actor tells of execution n before
// it sends on what n has come to, so whoever has seen all results of n has all that is told of it to
// read; the executor reads it before it submits n + depth. So there is always room.
//
// The first that is told of an execution is its error, but one that only says that another task of it has failed waits
// for what that one tells: which of the two comes first is chance, and between hosts they come on different ways.
#pragma once

#include <algorithm>
#include <deque>

#include "window.h"

namespace conveyor {

class Failures {
 public:
  // `readers`: of the rings. They are there from the beginning, because a ring that has none yet is not
  // left either: what is told on it later would be kept for ever. `together`: an execution fails as one;
  // what it has not come to yet is not waited for.
  Failures(nb::object readers, Limits& limits, bool together);
  // Nothing is heard any more: what is still told is given back to who tells it.
  void leave();

  // Whether there may be something to hear. The number is counted up before the frame is published and
  // its reader rung, so no ring comes without it.
  bool news() const { return limits_.failures() != heard_ || !told_.empty(); }
  // Read what has come; false if nothing has. Whatever fails on the way is read the next time.
  // `close(number, open)` notes in `open` the results that an execution, which has failed now, has not come
  // to, by reader, of `results`; it cannot fail.
  // Of executions below `completed` nothing more comes.
  template <class Close>
  bool hear(size_t results, uint64_t completed, const Close& close) {
    receive();
    bool any = false;
    for (auto told = told_.begin(); told != told_.end();) {
      const uint64_t number = told->frame.tag;
      if (told->follows && awaits_first(number, completed)) {
        ++told;
        continue;
      }
      if (Failed* failed = enter(*told, results)) {
        // Whoever is told can rely on it: what has not begun is skipped. The actor that has told marks it
        // after that, and may not have come to it.
        if (together) limits_.fail(number);
        close(number, failed->open);
        failed->left = size_t(std::count(failed->open.begin(), failed->open.end(), true));
      }
      told = told_.erase(told);
      any = true;
    }
    return any;
  }
  // Whether the first failure of that execution is on its way, so that none of its errors is one to raise yet: it has
  // been marked, which an actor does behind what it tells, or one that follows from it is here.
  bool awaits_news(uint64_t number, uint64_t completed) const {
    if (!awaits_first(number, completed)) return false;
    return limits_.failed(number) || std::ranges::any_of(told_, [&](const Told& told) { return told.frame.tag == number; });
  }
  bool empty() const { return failed_.empty(); }
  // The outcome of a result that is not to come any more, once; an invalid object for all others.
  nb::object take(uint64_t number, size_t reader);
  bool has(uint64_t number, size_t reader) const;
  // The error of an execution that has() one.
  const std::string& error_of(uint64_t number) const { return failed_.find(number)->second.errors->front(); }
  // Nobody wants that result. False if it is none of these.
  bool close(uint64_t number, size_t reader);
  // Of executions below `completed` nothing more will be heard.
  void forget(uint64_t completed);
  // Executions from `first` on, each with what has been told of it.
  nb::list told(uint64_t first) const;

  const bool together;

 private:
  struct Told {
    uint64_t order = 0;
    bool follows = false;  // from another failure of its execution
    Frame frame;
  };
  struct Failed {
    std::shared_ptr<std::vector<std::string>> errors;  // what was told of it, in that order; may grow
    std::vector<bool> open;
    size_t left = 0;
  };
  void receive();
  // Also when nothing more is heard: what has ended that, a death or the end of the graph, says more than what follows.
  bool awaits_first(uint64_t number, uint64_t completed) const { return together && number >= completed && !failed_.contains(number); }
  Failed* enter(const Told& told, size_t results);

  nb::object opened_;  // what keeps the readers
  std::vector<Reader*> readers_;
  Limits& limits_;
  uint32_t heard_ = 0;
  std::deque<Told> told_;  // out of the rings, and not entered yet, in the order of their failures
  std::map<uint64_t, Failed> failed_;
};

inline bool InFlightWindow::hear() { return failures_ && failures_->news() && hear_news(); }

}  // namespace conveyor
