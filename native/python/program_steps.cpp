// The steps of a program, each in its turn.
#include "exit.h"
#include "hooks.h"
#include "program.h"

#include <mutex>
#include <unordered_map>

namespace conveyor {

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
      store(step, stopped(step, verdict));
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
    cancel_asked_ = false;
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
  try {
    for (;;) {
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
        value = stopped(step, Limits::Verdict::kOverdue);
      else
        limits_->note_ran(execution_, step.node);
    }
  }
  finish(step, std::move(value));
}

nb::object Program::stopped(Call& step, Limits::Verdict verdict) {
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
