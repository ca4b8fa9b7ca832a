#include "program.h"

#include <mutex>
#include <unordered_map>

#include "exit.h"
#include "hooks.h"

namespace conveyor {

namespace {

// Executions after which a program lets others on the same actor have a turn.
constexpr int kTurn = 16;

// What the steps are given is not for what the thread does afterwards.
class Given {
 public:
  Given() = default;
  ~Given() { Arena::given = before_; }
  Given(const Given&) = delete;
  Given& operator=(const Given&) = delete;

 private:
  const size_t before_ = Arena::given;
};

nb::object error_frame(const char* meta) { return nb::cast(ErrorFrame{nb::bytes(meta)}, nb::rv_policy::move); }

}  // namespace

Program::Program(nb::object inbox, uint32_t graph, uint32_t bit, size_t registers,
                 nb::object encode_error, nb::object check_elements, std::shared_ptr<Recorder> recorder)
    : inbox_object_(inbox), inbox_(nb::cast<Inbox*>(inbox)), graph_(graph), bit_(bit), encode_error_(std::move(encode_error)), check_elements_(std::move(check_elements)), recorder_(std::move(recorder)), regs_(registers), cancelled_(error_frame(kCancelledMeta)), overdue_(error_frame(kOverdueMeta)), unsaid_(error_frame(kUnsaidMeta)) {}

void Program::add_receive(nb::object reader, int reg, std::vector<int> spread, std::string label, nb::object arrived) {
  if (!arrived.is_none() && !spread.empty()) throw nb::value_error("a value whose tensors come by another way is alone in its frame");
  for (auto& step : steps_)
    if (auto* tried = std::get_if<Try>(&step); tried != nullptr && tried->index == receives_) tried->receive = steps_.size();
  steps_.push_back(Receive{nb::cast<Reader*>(reader), reg, std::move(spread), std::move(label), receives_++, std::move(arrived)});
  keep_.push_back(std::move(reader));
}

void Program::add_try(uint32_t receive, double patience, double most, uint32_t vain, uint32_t most_left_out) {
  if (receive < receives_) throw nb::value_error("the receive stands before this step");
  steps_.push_back(Try{receive, patience, uint64_t(most * 1e9), vain, most_left_out});
  tried_.reserve(steps_.size());
}

void Program::add_await(uint32_t receive, nb::object take) {
  for (size_t i = 0; i < steps_.size(); ++i)
    if (const auto* step = std::get_if<Receive>(&steps_[i]); step != nullptr && step->index == receive && !step->arrived.is_none()) {
      steps_.push_back(Await{i, std::move(take)});
      return;
    }
  throw nb::value_error("there is no such receive of tensors before this step");
}

void Program::add_call(nb::object method, uint32_t node, std::string label, std::vector<int> args, nb::list constants,
                       std::vector<int> uses, nb::object invoke, nb::object start, int out, std::vector<int> outs,
                       int num_returns) {
  Call call{std::move(method), node, std::move(label), std::move(args), {}, std::move(uses), std::move(invoke),
            std::move(start), out, std::move(outs), num_returns, tasks_++};
  for (nb::handle constant : constants) call.constants.push_back(nb::borrow(constant));
  steps_.push_back(std::move(call));
}

void Program::add_send(nb::object writer, int reg, bool last, bool only_done, std::string label, bool output, nb::object pack, nb::object posted) {
  nb::cast<Writer*>(writer)->record(recorder_, sends_++, output ? outputs_++ : -1);
  steps_.push_back(Send{nb::cast<Writer*>(writer), reg, last, only_done, std::move(label), std::move(pack), std::move(posted)});
  keep_.push_back(std::move(writer));
}

void Program::set_limits(nb::object limits, nb::object cancel) {
  limits_ = nb::cast<Limits*>(limits);
  limits_object_ = std::move(limits);
  cancel_ = std::move(cancel);
}

void Program::advance(bool sending) {
  inbox_->came_back();
  const Given given;
  if (suspended_ && !closed_ && !cancel_requested_ && limits_ != nullptr && limits_->cancelled(execution_)) {
    cancel_requested_ = true;  // once: it may take its time to clean up
    cancel_();
  }
  if (progress_.is_valid() && !closed_) {
    const nb::object done = nb::steal(PyObject_CallNoArgs(progress_.ptr()));
    if (!done.is_valid()) throw nb::python_error();
  }
  if (suspended_) look();  // a coroutine runs meanwhile
  if (suspended_ || closed_) return;
  for (int turn = 0; turn < kTurn; ++turn) {
    while (pc_ < steps_.size()) {
      if (sending && !std::holds_alternative<Send>(steps_[pc_])) return;
      const bool tries = !tried_.empty();
      if (tries) look();
      if (tries && closed_) return;
      const bool timed = tries && std::holds_alternative<Call>(steps_[pc_]);
      const uint64_t begun = timed ? now_ns() : 0;
      if (!std::visit([this](auto& step) { return run(step); }, steps_[pc_])) return;
      ++pc_;
      if (suspended_ || closed_) return;
      if (timed)
        for (Try* step : tried_) step->ahead += now_ns() - begun;
    }
    pc_ = 0;
    // Values live no longer than their execution. Taken out first: dropping them may run any code.
    for (nb::object& reg : regs_)
      if (reg.is_valid()) nb::object dropped = std::move(reg);
    recorder_->stale();
    given_ = 0;
    ++execution_;
  }
  inbox_->process_table()->notify(inbox_->slot(), bit_);
}

void Program::close() {
  closed_ = true;
  // What was sent to this program and not taken, or still comes, is given back to its writers.
  for (auto& step : steps_)
    if (auto* receive = std::get_if<Receive>(&step)) {
      try {
        receive->reader->close();
      } catch (nb::python_error& error) {
        error.discard_as_unraisable("inputs of a graph that is taken down");
      }
    }
  // Steps refer to Python functions that refer to this program: nobody else breaks that circle.
  tried_.clear();
  auto steps = std::move(steps_);
  auto regs = std::move(regs_);
  steps_.clear();
  regs_.clear();
  cancel_ = nb::object();
  progress_ = nb::object();
  shortage_ = nb::object();
  nb::object pending = std::move(pending_);
  try {
    end_memory_wait();
  } catch (nb::python_error& error) {
    error.discard_as_unraisable("a graph that is taken down");
  }
  begin_fetch_ = nb::object();
  take_fetched_ = nb::object();
}

void Program::resume(nb::object value, nb::object error) {
  if (closed_) return;
  if (starting_) {
    early_.emplace(std::move(value), std::move(error));
    return;
  }
  Call& step = std::get<Call>(steps_[pc_ - 1]);
  inbox_->came_back(step.label.c_str());
  recorder_->task_returns();
  ended(step, error.is_none() ? std::move(value) : failed(error, step.label));
  suspended_ = false;
  advance(pausing_);
}

bool Program::run(Receive& step) {
  if (!tried_.empty())
    std::erase_if(tried_, [&](Try* tried) {
      if (&std::get<Receive>(steps_[tried->receive]) != &step) return false;
      tried->last = tried->ahead;
      return true;
    });
  if (std::exchange(step.taken, false)) return true;
  if (!step.coming && step.reader->ring.empty()) {
    recorder_->wait_begins();
    return false;
  }
  if (!step.coming) take(step);
  return !step.coming || fetch(step);
}

bool Program::run(Try& step) {
  Receive& receive = std::get<Receive>(steps_[step.receive]);
  step.ahead = step.spent = 0;
  if (receive.reader->ring.empty()) wait_a_little(step, *receive.reader);
  tried_.push_back(&step);
  if (receive.reader->ring.empty()) return true;
  receive.taken = true;
  take(receive);
  return true;
}

void Program::wait_a_little(Try& step, Reader& reader) {
  if (step.left_out > 0) {
    --step.left_out;
    return;
  }
  uint64_t patience = std::min(uint64_t(double(step.last) * step.patience), step.most);
  for (const Try* other : tried_) patience -= std::min(patience, other->spent);
  if (patience == 0) return;
  recorder_->wait_begins();
  const uint64_t begun = now_ns();
  {
    const Unlocked unlocked;
    // Nobody is called, and no other program of this actor is to run: a sleep will do.
    const timespec pause{0, 20'000};
    while (reader.ring.empty() && now_ns() - begun < patience) ::nanosleep(&pause, nullptr);
  }
  step.spent = now_ns() - begun;
  if (!reader.ring.empty()) {
    step.in_vain = 0;
    return;
  }
  recorder_->set_wait_aside();
  if (++step.in_vain >= step.vain) step.left_out = std::min(uint32_t(1) << std::min(step.in_vain - step.vain, 31u), step.most_left_out);
}

void Program::look() {
  for (size_t i = 0; i < tried_.size(); ++i) {
    Receive& step = std::get<Receive>(steps_[tried_[i]->receive]);
    if (step.taken || step.reader->ring.empty()) continue;
    step.taken = true;
    // What else is waited for still is afterwards.
    const uint64_t since = recorder_->set_wait_aside();
    take(step);
    recorder_->take_wait_up(since);
  }
}

void Program::take(Receive& step) {
  const bool quick = step.reader->decodes_natively();
  if (!quick && !begin_fetch_.is_valid()) note_idle();  // on an event loop other steps may run
  step.waited = recorder_->receive_begins(step.index, execution_, quick);
  const uint64_t before = step.reader->bytes;
  nb::object value;
  try {
    if (step.arrived.is_none() && begin_fetch_.is_valid() && step.reader->front_keeps()) {
      step.reader->receive_undecoded(begin_fetch_);
      given_ += step.reader->given;
      step.coming = true;
      recorder_->receive_ends(step.index, execution_, step.reader->bytes - before, false);
      return;
    }
    if (step.arrived.is_none()) {
      value = step.reader->receive();
      given_ += step.reader->given;
    } else if (value = step.reader->receive_head(); value.is_valid()) {
      step.held = true;
      value = nb::steal(PyObject_CallFunction(step.arrived.ptr(), "OK", value.ptr(), (unsigned long long)(execution_)));
      if (!value.is_valid()) throw nb::python_error();
    } else {
      value = step.reader->receive();  // an error, in the value's place
    }
    check_spread(step, value);
  } catch (...) {
    value = not_received(step.label);
    if (std::exchange(step.held, false)) step.reader->skip_head();
  }
  recorder_->receive_ends(step.index, execution_, step.reader->bytes - before, is_error(value));
  fill(step, std::move(value));
}

bool Program::fetch(Receive& step) {
  nb::object value;
  try {
    value = nb::steal(PyObject_CallNoArgs(take_fetched_.ptr()));
    if (!value.is_valid()) throw nb::python_error();
    if (value.ptr() != Py_NotImplemented) check_spread(step, value);
  } catch (...) {
    value = not_received(step.label);
  }
  if (closed_) return true;  // meanwhile
  if (value.ptr() == Py_NotImplemented) {
    recorder_->wait_begins();
    return false;
  }
  recorder_->wait_ends(step.index, execution_, step.waited);
  step.coming = false;
  fill(step, std::move(value));
  recorder_->stale();
  return true;
}

void Program::check_spread(const Receive& step, const nb::object& value) {
  if (!step.spread.empty() && !is_error(value) && !(PyTuple_CheckExact(value.ptr()) && size_t(PyTuple_GET_SIZE(value.ptr())) == step.spread.size()))
    throw std::system_error(EPROTO, std::generic_category(), "a frame does not hold what it should");
}

void Program::fill(const Receive& step, nb::object value) {
  if (step.spread.empty()) {
    regs_[size_t(step.reg)] = std::move(value);
    return;
  }
  const bool error = is_error(value);
  for (size_t i = 0; i < step.spread.size(); ++i)
    if (step.spread[i] >= 0) regs_[size_t(step.spread[i])] = error ? value : nb::object(nb::borrow<nb::tuple>(value)[i]);
}

bool Program::run(Await& step) {
  Receive& receive = std::get<Receive>(steps_[step.receive]);
  if (!receive.held) return true;  // an error has come, in the value's place
  nb::object& reg = regs_[size_t(receive.reg)];
  nb::object value;
  try {
    value = nb::steal(PyObject_CallFunctionObjArgs(step.take.ptr(), reg.ptr(), nullptr));
    if (!value.is_valid()) throw nb::python_error();
  } catch (...) {
    value = not_received(receive.label);
  }
  if (closed_) return true;  // meanwhile
  if (value.ptr() == Py_NotImplemented) {
    recorder_->wait_begins();
    return false;
  }
  recorder_->wait_ends(receive.index, execution_, receive.waited);
  receive.held = false;
  receive.reader->skip_head();
  regs_[size_t(receive.reg)] = std::move(value);
  recorder_->stale();
  return true;
}

nb::list Program::registers() const {
  nb::list list;
  for (const nb::object& reg : regs_) list.append(reg.is_valid() ? reg : nb::none());
  return list;
}

bool Program::run(Call& step) {
  bool begun = false;
  try {
    return call(step, begun);
  } catch (...) {
    nb::object error = failed_with(step.label);
    suspended_ = false;
    if (begun) {
      recorder_->task_returns();
      finish(step, std::move(error));
    } else {
      store(step, std::move(error));
      skipped(step);
    }
    return true;
  }
}

namespace {

struct Skips {
  uint64_t last = 0;
  int programs = 0;
};
std::mutex skips_mutex;
std::unordered_map<uint32_t, Skips> skips;  // by graph

}  // namespace

uint64_t last_skipped(uint32_t graph) {
  std::lock_guard lock(skips_mutex);
  const auto found = skips.find(graph);
  return found == skips.end() ? 0 : found->second.last;
}

SkipsNoted::SkipsNoted(uint32_t graph) : graph_(graph) {
  std::lock_guard lock(skips_mutex);
  ++skips[graph].programs;
}

SkipsNoted::~SkipsNoted() {
  std::lock_guard lock(skips_mutex);
  if (const auto found = skips.find(graph_); --found->second.programs == 0) skips.erase(found);
}

void SkipsNoted::note(uint64_t execution) {
  std::lock_guard lock(skips_mutex);
  skips.find(graph_)->second.last = execution + 1;
}

void Program::skipped(const Call& step) {
  recorder_->task_skipped(step.index);
  skips_.note(execution_);
}

void Program::running(const Call& step, uint64_t since_ns) {
  Status& status = inbox_->status();
  status.graph.store(graph_, std::memory_order_relaxed);
  status.node.store(step.node, std::memory_order_relaxed);
  status.execution.store(execution_, std::memory_order_relaxed);
  Arena::given = given_;
  inbox_->begins(since_ns);
}

bool Program::call(Call& step, bool& begun) {
  for (int reg : step.uses)
    if (is_error(regs_[size_t(reg)])) {
      store(step, regs_[size_t(reg)]);
      skipped(step);
      return true;
    }
  if (limits_ != nullptr) {
    const Limits::Verdict verdict = limits_->look(execution_, recorder_->now());
    if (verdict != Limits::Verdict::kGoOn) {
      store(step, why_not_run(step, verdict));
      skipped(step);
      return true;
    }
  }
  running(step, recorder_->task_begins(step.index, execution_));
  begun = true;
  nb::object result;
  if (!step.start.is_none()) {
    const nb::list regs = registers();
    suspended_ = true;  // before: a cancellation finds it
    cancel_requested_ = false;
    early_.reset();
    starting_ = true;
    result = nb::steal(PyObject_CallFunctionObjArgs(step.start.ptr(), regs.ptr(), nullptr));
    starting_ = false;
    came_back(step, result);
    if (result.is_valid() && !early_) {
      recorder_->stale();
      return true;
    }
    suspended_ = false;
    if (result.is_valid()) {
      auto [value, error] = *std::exchange(early_, std::nullopt);
      recorder_->task_returns();
      ended(step, error.is_none() ? std::move(value) : failed(error, step.label));
      return true;
    }
  } else if (!step.invoke.is_none()) {
    result = nb::steal(PyObject_CallFunctionObjArgs(step.invoke.ptr(), registers().ptr(), nullptr));
  } else {
    constexpr size_t kInline = 8;
    PyObject* few[kInline + 1];
    std::vector<PyObject*> many;
    PyObject** argv = few;
    if (step.args.size() > kInline) {
      many.resize(step.args.size() + 1);
      argv = many.data();
    }
    for (size_t i = 0; i < step.args.size(); ++i) {
      const int arg = step.args[i];
      argv[i + 1] = arg >= 0 ? regs_[size_t(arg)].ptr() : step.constants[size_t(-1 - arg)].ptr();
    }
    // The slot before the arguments is the callee's to use: a bound method puts `self` there.
    result = nb::steal(PyObject_Vectorcall(step.method.ptr(), argv + 1, step.args.size() | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
  }
  came_back(step, result);
  recorder_->task_returns();
  if (result.is_valid()) {
    ended(step, std::move(result));
  } else {
    if (PyErr_ExceptionMatches(PyExc_SystemExit)) throw nb::python_error();  // the actor ends
    nb::python_error error;
    ended(step, failed(error.value(), step.label));
  }
  return true;
}

void Program::came_back(const Call& step, const nb::object& result) const {
  // A child that leaves by sys.exit ends by itself.
  if (inbox_->inherited() && (result.is_valid() || !PyErr_ExceptionMatches(PyExc_SystemExit))) inbox_->came_back(step.label.c_str());
}

bool Program::run(Send& step) {
  recorder_->send_begins();
  nb::object value = std::move(pending_);
  const bool again = value.is_valid();
  if (!again) {
    nb::object& reg = regs_[size_t(step.reg)];
    value = step.last ? std::move(reg) : reg;
    if (step.last) reg = nb::object();
    if (step.only_done && !is_error(value)) value = nb::none();
  }
  Writer& writer = *step.writer;
  // Depth was granted when the execution was submitted, so there is room.
  CONVEYOR_ASSERT(writer.ring.has_room());
  (void)writer.ring.has_room();
  try {
    if (!is_error(value)) {
      if (again) {
        if (!nb::cast<bool>(memory_wait_.attr("ready")())) {
          pending_ = std::move(value);
          return false;
        }
        memory_wait_.attr("tries")();
      } else if (!step.pack.is_none() && !step.only_done) {
        value = nb::steal(PyObject_CallFunctionObjArgs(step.pack.ptr(), value.ptr(), nullptr));
        if (!value.is_valid()) throw nb::python_error();
      }
      bool prepared;
      {
        Encoded e;
        // The only reference is `value`: its maker has let go, and a value made in place can move.
        writer.encode_value(e, value, step.last ? 1 : 0);
        prepared = prepare(writer, e);
        if (prepared) writer.commit(e, execution_, Kind::kValue);
      }
      if (!prepared) {
        // Others run meanwhile, and may change it.
        pending_ = again || !step.pack.is_none() ? std::move(value) : nb::object(memory_wait_.attr("take")(value));
        return false;
      }
      recorder_->stale();
      if (!step.posted.is_none()) {
        const nb::object posted = nb::steal(PyObject_CallNoArgs(step.posted.ptr()));
        if (!posted.is_valid()) {  // only Ctrl-C and the like; the frame is published
          nb::python_error error;
          error.discard_as_unraisable(step.posted);
        }
      }
      return true;
    }
  } catch (...) {
    value = failed_with(step.label);
    try {
      end_memory_wait();
    } catch (...) {
      value = failed_with(step.label);
    }
  }
  const nb::bytes& meta = nb::inst_ptr<ErrorFrame>(value)->meta;
  writer.send_error(meta.c_str(), meta.size(), execution_);
  recorder_->stale();
  return true;
}

bool Program::prepare(Writer& writer, Encoded& e) {
  Arena::given = given_;
  const struct Crosses {
    ~Crosses() { Arena::first_may_cross = false; }
  } no_longer;
  try {
    for (;;) {
      Arena::first_may_cross = memory_wait_.is_valid() && nb::cast<bool>(memory_wait_.attr("crossing"));
      try {
        writer.prepare(e);
        break;
      } catch (const ArenaFull&) {
        if (!shortage_.is_valid()) throw;
        set_python_error();
      }
      const nb::python_error error;
      const nb::object wait = nb::steal(PyObject_CallFunctionObjArgs(shortage_.ptr(), error.value().ptr(), memory_wait_.is_valid() ? memory_wait_.ptr() : Py_None, nullptr));
      if (!wait.is_valid()) throw nb::python_error();
      if (wait.is_none()) return false;
      memory_wait_ = wait;
    }
  } catch (...) {
    end_memory_wait();
    throw;
  }
  if (memory_wait_.is_valid()) end_memory_wait();
  return true;
}

void Program::end_memory_wait() {
  const nb::object wait = std::move(memory_wait_);
  if (wait.is_valid()) wait.attr("end")();
}

void Program::finish(Call& step, nb::object value) {
  const bool good = store(step, std::move(value));
  recorder_->task_ends(step.index, execution_, !good);
}

bool Program::store(Call& step, nb::object value) {
  bool error = is_error(value);
  if (step.num_returns >= 0) {
    nb::object elements = value;
    if (!error) {
      // A tuple of the right length as it is; anything else is Python's to judge.
      if (!(PyTuple_CheckExact(value.ptr()) && PyTuple_GET_SIZE(value.ptr()) == step.num_returns)) {
        elements = nb::steal(PyObject_CallFunction(check_elements_.ptr(), "Ois", value.ptr(), step.num_returns, step.label.c_str()));
        if (!elements.is_valid()) {
          nb::python_error error;
          value = elements = failed(error.value(), step.label);
        }
      }
    }
    error = is_error(elements);
    for (size_t i = 0; i < step.outs.size(); ++i)
      if (step.outs[i] >= 0)
        regs_[size_t(step.outs[i])] = error ? elements : nb::borrow(PyTuple_GET_ITEM(elements.ptr(), Py_ssize_t(i)));
  }
  if (step.out >= 0) regs_[size_t(step.out)] = std::move(value);
  return !error;
}

void Program::ended(Call& step, nb::object value) {
  if (limits_ != nullptr) {
    const uint64_t deadline = limits_->deadline(execution_);
    if (deadline != 0) {
      // What came too late is no result, whether somebody was waiting for it at the deadline or not.
      if (now_ns() >= deadline)
        value = why_not_run(step, Limits::Verdict::kOverdue);
      else
        limits_->note_ran(execution_, step.node);
    }
  }
  finish(step, std::move(value));
}

nb::object Program::why_not_run(Call& step, Limits::Verdict verdict) {
  limits_->note_skipped(execution_, step.node);
  return verdict == Limits::Verdict::kCancelled ? cancelled_ : overdue_;
}

nb::object Program::failed(nb::handle exception, const std::string& label) {
  inbox_->came_back(label.c_str());  // its errors are no answers: one forked while a value was encoded has such
  recorder_->stale();
  nb::object meta = nb::steal(PyObject_CallFunction(encode_error_.ptr(), "OsK", exception.ptr(), label.c_str(), (unsigned long long)(execution_)));
  try {
    if (meta.is_valid()) return nb::cast(ErrorFrame{nb::borrow<nb::bytes>(meta)}, nb::rv_policy::move);
  } catch (...) {  // no memory
    return unsaid_;
  }
  if (!PyErr_ExceptionMatches(PyExc_Exception)) throw nb::python_error();
  PyErr_Clear();
  return unsaid_;
}

nb::object Program::not_received(const std::string& label) {
  try {
    return failed_with(label);
  } catch (...) {
    for (size_t i = pc_; i < steps_.size(); ++i)
      if (const auto* call = std::get_if<Call>(&steps_[i])) {
        running(*call, now_ns());
        break;
      }
    throw;
  }
}

nb::object Program::failed_with(const std::string& label) {
  set_python_error();
  if (PyErr_ExceptionMatches(PyExc_SystemExit)) throw nb::python_error();
  const nb::python_error error;
  return failed(error.value(), label);
}

}  // namespace conveyor
