#include "program.h"

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
  if (suspended_ && !closed_ && !cancel_asked_ && limits_ != nullptr && limits_->cancelled(execution_)) {
    cancel_asked_ = true;  // once: it may take its time to clean up
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
  inbox_->board()->ring(inbox_->slot(), bit_);
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

}  // namespace conveyor
