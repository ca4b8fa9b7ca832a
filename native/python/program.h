// One actor's program of one graph: the steps of an execution, run as far as input is there. Native
// because it is the worker's whole cost of a hop; what is rare (containers, keyword arguments,
// coroutines, errors) is asked of Python (worker/program.py).
#pragma once

#include <variant>

#include "execution_limits.h"
#include "inbox.h"
#include "reader.h"
#include "writer.h"

namespace conveyor {

// Above it by one: the last execution of a graph in which this process has skipped a step. 0: none.
uint64_t last_skipped(uint32_t graph);

// Has that known as long as there is a program of the graph.
class SkipsNoted {
 public:
  explicit SkipsNoted(uint32_t graph);
  ~SkipsNoted();
  SkipsNoted(const SkipsNoted&) = delete;
  void note(uint64_t execution);

 private:
  const uint32_t graph_;
};

class Program {
 public:
  // `encode_error(exception, label, execution)` gives the meta bytes of an error frame;
  // `check_elements(value, count, label)` the elements of a result that has several.
  // What it does is noted in `recorder`: tasks, receives and sends in the order in which they are added.
  Program(nb::object inbox, uint32_t graph, uint32_t bit, size_t registers, nb::object encode_error,
          nb::object check_elements, std::shared_ptr<Recorder> recorder);

  // One frame of `reader` to register `reg`, or if `spread` is not empty its elements to those
  // registers (-1: not used here).
  // `label` names what came or goes, for errors. With `arrived`, the frame is only the head of a value whose
  // tensors come by another way: what `arrived(head, execution)` returns stands in the register, and the frame
  // in the ring, until `add_await` for the same edge has its value.
  void add_receive(nb::object reader, int reg, std::vector<int> spread, std::string label, nb::object arrived);
  // From here on, until its own place comes, take the frame of receive `receive` (counted from 0), which is
  // added later and has `arrived`, as soon as it is there and the program looks. Here it is waited for, at most
  // `most` seconds, and at most the share `patience` of what the calls up to there took last, less what others
  // that are open have waited. After `vain` waits
  // in a row that were in vain one is left out, then two, and twice as many up to `most_left_out`.
  void add_try(uint32_t receive, double patience, double most, uint32_t vain, uint32_t most_left_out);
  // Wait until the tensors for the head in register `reg`, which receive `receive` (counted from 0) has filled,
  // are there: `take(register)` gives the value, or NotImplemented; then it is asked again when the bit is rung.
  void add_await(uint32_t receive, nb::object take);
  // Call `method` with `args`, each a register (>= 0) or the constant at -1 - arg. With `invoke`, call
  // that with the register list instead; with `start`, call that with the register list and this
  // program, which is then suspended until `resume`. `uses`: registers whose errors are passed on.
  void add_call(nb::object method, uint32_t node, std::string label, std::vector<int> args, nb::list constants,
                std::vector<int> uses, nb::object invoke, nb::object start, int out, std::vector<int> outs, int num_returns);
  // Publish register `reg`; `last`: nothing later in this execution needs it; `only_done`: not the
  // value, only None (or the error) to say that it has come to be; `output`: the driver reads it. With `pack`
  // and `posted`, its tensors go by another way: `pack(value)` is sent in its place, and then `posted()` called,
  // which raises nothing.
  void add_send(nb::object writer, int reg, bool last, bool only_done, std::string label, bool output, nb::object pack, nb::object posted);
  // Have `wait(error, before)` called where what is sent has no memory, for `error`. It returns what is passed as `before`
  // next time, when it is to be tried again; or None, and then the program goes on when it is rung and `before.ready()`,
  // calls `before.tries()` first, and sends what `before.take(value)` returns. It raises if it is not to be tried again. `before.end()` is called in the end.
  void set_shortage(nb::object wait) { shortage_ = std::move(wait); }
  // Have `progress()` called whenever the program has been rung: what is under way beside its frames may go on.
  size_t given() const { return given_; }
  void set_progress(nb::object progress) { progress_ = std::move(progress); }
  // Have inputs of which something may have stayed elsewhere fetched without a wait: `begin(snapshot)` is called for
  // such a frame, and then `take()`, which gives its value, or NotImplemented; then it is asked again when the bit is rung.
  void set_fetching(nb::object begin, nb::object take) {
    begin_fetch_ = std::move(begin);
    take_fetched_ = std::move(take);
  }

  // Look at `limits` before every call; `cancel()` is called when the running coroutine's execution has
  // been cancelled.
  void set_limits(nb::object limits, nb::object cancel);

  // Run until input is missing or for a turn; then ask for another turn by ringing the own doorbell.
  void advance() { advance(false); }
  // The coroutine of the suspended call has ended with `value`, or with the exception `error`.
  void resume(nb::object value, nb::object error);
  // From now on `resume` only sends what the call has made: whoever drives the program, one call after the
  // other, says when the next one is prepared.
  void pause_after_tasks() { pausing_ = true; }
  // The number of the first execution, for a graph that has been restarted; before the first step.
  void start_at(uint64_t execution) { execution_ = execution; }
  // The graph is taken down; called between steps, or while suspended.
  void close();
  uint64_t execution() const { return execution_; }
  uint32_t bit() const { return bit_; }

 private:
  // `sending`: up to the next step that is no send.
  void advance(bool sending);
  // Asked several times in each hop: nobody derives from the type, so it is enough to compare it.
  static bool is_error(const nb::object& value) {
    static const nb::handle type = nb::type<ErrorFrame>();
    return value.is_valid() && Py_TYPE(value.ptr()) == reinterpret_cast<PyTypeObject*>(type.ptr());
  }
  // No C++ exception leaves a step, and none of Python's but those that end the actor (SystemExit, and
  // what is no Exception): whatever goes wrong is that step's error, in its registers or on its channel.
  struct Receive {
    Reader* reader;
    int reg;
    std::vector<int> spread;
    std::string label;
    uint32_t index;
    nb::object arrived;
    bool held = false;  // the frame is in the ring until its tensors are here
    uint64_t waited = 0;
    bool taken = false;  // before its place has come
    bool coming = false;  // out of the ring, and not all of its value is here
  };
  struct Try {
    uint32_t index;  // of the receive
    double patience;
    uint64_t most;
    uint32_t vain;
    uint32_t most_left_out;
    size_t receive = 0;      // the step's place
    uint64_t ahead = 0;      // what the calls have taken since
    uint64_t last = 0;       // the same of the execution before
    uint64_t spent = 0;      // for how long it was waited for
    uint32_t in_vain = 0;    // waits in a row
    uint32_t left_out = 0;   // waits that are to be left out
  };
  struct Await {
    size_t receive;  // the step's place
    nb::object take;
  };
  struct Call {
    nb::object method;
    uint32_t node;
    std::string label;
    std::vector<int> args;
    std::vector<nb::object> constants;
    std::vector<int> uses;
    nb::object invoke;
    nb::object start;
    int out;
    std::vector<int> outs;
    int num_returns;
    uint32_t index;
  };
  struct Send {
    Writer* writer;
    int reg;
    bool last;
    bool only_done;
    std::string label;
    nb::object pack;
    nb::object posted;
  };

  bool run(Receive& step);
  bool run(Try& step);
  bool run(Await& step);
  bool run(Call& step);
  bool run(Send& step);
  // Take the frame that is there.
  void take(Receive& step);
  // Its value, which has stayed elsewhere. False: it has not come yet.
  bool fetch(Receive& step);
  static void check_spread(const Receive& step, const nb::object& value);
  void fill(const Receive& step, nb::object value);
  // The same of all that are tried.
  void look();
  void wait_a_little(Try& step, Reader& reader);
  // False if the value is an error, or not what the step must give.
  bool store(Call& step, nb::object value);
  // The call has come to `value`, unless that is too late.
  void ended(Call& step, nb::object value);
  void finish(Call& step, nb::object value);
  // writer.prepare(e), as soon as there is memory. False: not now.
  bool prepare(Writer& writer, Encoded& e);
  void end_memory_wait();
  nb::object why_not_run(Call& step, Limits::Verdict verdict);
  // The error frame of `exception`. Throws only SystemExit and the like, which end the actor.
  nb::object failed(nb::handle exception, const std::string& label);
  // In a catch block: the same of what is being handled.
  nb::object failed_with(const std::string& label);
  // The same, of a frame; if it ends the actor, the status page says which call these were the arguments of.
  nb::object not_received(const std::string& label);
  bool call(Call& step, bool& begun);
  // The status page says that it runs the step.
  void running(const Call& step, uint64_t since_ns);
  void skipped(const Call& step);
  // What a step has called returns, with its result or an exception: not in a forked child.
  void came_back(const Call& step, const nb::object& result) const;
  nb::list registers() const;

  nb::object inbox_object_;
  Inbox* inbox_;
  uint32_t graph_;
  SkipsNoted skips_{graph_};
  uint32_t bit_;
  nb::object encode_error_;
  nb::object check_elements_;
  std::shared_ptr<Recorder> recorder_;
  uint32_t tasks_ = 0;
  uint32_t receives_ = 0;
  uint32_t sends_ = 0;
  int outputs_ = 0;
  std::vector<nb::object> keep_;
  std::vector<std::variant<Receive, Try, Await, Call, Send>> steps_;
  std::vector<Try*> tried_;  // whose receives have not had their turn
  std::vector<nb::object> regs_;
  size_t pc_ = 0;
  uint64_t execution_ = 0;
  size_t given_ = 0;  // bytes of the blocks that its inputs lie in
  nb::object limits_object_;
  Limits* limits_ = nullptr;
  nb::object cancel_;
  nb::object progress_;
  nb::object shortage_;
  nb::object memory_wait_;  // of the send whose turn it is
  nb::object pending_;      // what that sends, packed, where it waits
  nb::object begin_fetch_;
  nb::object take_fetched_;
  // Made beforehand: there may be no memory when they are needed.
  nb::object cancelled_;
  nb::object overdue_;
  nb::object unsaid_;
  bool pausing_ = false;
  bool suspended_ = false;
  // While a coroutine is being started: it may end before that returns, and what it gave waits here.
  bool starting_ = false;
  std::optional<std::pair<nb::object, nb::object>> early_;  // value and error
  bool cancel_requested_ = false;  // of the running coroutine
  bool closed_ = false;
};

}  // namespace conveyor
