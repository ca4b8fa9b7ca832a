// The steps of a program that take what comes to it.
#include "exit.h"
#include "hooks.h"
#include "program.h"

namespace conveyor {

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

}  // namespace conveyor
