// What a gate notes of its submissions and of the results that are taken.
#include "gate.h"

namespace conveyor {

void Gate::record(std::shared_ptr<Recorder> own, std::vector<std::pair<std::shared_ptr<Recorder>, uint32_t>> outputs,
                  std::vector<std::shared_ptr<Recorder>> all) {
  if (outputs.size() != readers_.size()) throw std::system_error(EINVAL, std::generic_category(), "gate outputs");
  outputs_ = std::move(outputs);
  all_ = std::move(all);
  submitted_at_.resize(own->place().slots);
  asked_since_.resize(readers_.size());
  uint64_t turn = UINT64_MAX;
  for (auto& member : all_) {
    const RecorderPlace& place = member->place();
    // A receive may be waited for in several pieces.
    const uint64_t events = 1 + place.tasks + 4 * place.receives + place.sends;
    turn = std::min(turn, place.capacity / events);
  }
  turn_ = turn > 2 * depth_ ? turn - depth_ : 1;
  recorder_ = std::move(own);
  for (size_t i = 0; i < writers_.size(); ++i) writers_[i]->record(recorder_, uint32_t(i), -1);
}

void Gate::count_completed() {
  if (!recorder_ || readers_.empty() || fork_ != fork_generation.load(std::memory_order_relaxed)) return;
  const size_t mask = submitted_at_.size() - 1;
  // The heads are acquired: the times were written before them.
  for (const uint64_t done = completed(); counted_ < done; ++counted_) {
    const uint64_t began = submitted_at_[counted_ & mask];
    uint64_t end = began;
    for (auto& [writer, output] : outputs_) end = std::max(end, value_of(writer->sent_at(output, counted_)));
    recorder_->task(0).running.note(end - began);
  }
}

uint64_t Gate::submission_begins() {
  if (!recorder_) return 0;
  // Before the places of those times are used again. There is room, so that execution is complete.
  if (next_ - counted_ >= submitted_at_.size()) count_completed();
  if (recorder_->tracing() && next_ >= drain_at_) {
    for (auto& member : all_) member->drain();
    drain_at_ = next_ + turn_;
  }
  return now_ns();
}

void Gate::submitting(uint64_t number, uint64_t began) {
  if (!recorder_) return;
  submitted_at_[number & (submitted_at_.size() - 1)] = began;
  recorder_->set_clock(began);
}

void Gate::submission_ends(uint64_t number, uint64_t began) {
  if (!recorder_) return;
  recorder_->stale();
  if (recorder_->tracing()) recorder_->trace({began, now_ns(), number, 0, 0, 0, EventKind::kExecute, 0, 0});
}

uint64_t Gate::taking(uint64_t number, size_t i, uint64_t since) {
  if (!recorder_) return 0;
  uint64_t asked = since;
  if (!asked_since_[i].empty()) {
    auto found = asked_since_[i].find(number);
    if (found != asked_since_[i].end()) {
      asked = found->second;
      asked_since_[i].erase(found);
    }
  }
  const bool traced = recorder_->tracing();
  const uint64_t now = asked != 0 || traced ? now_ns() : 0;
  recorder_->received(uint32_t(i)).waiting.note(asked != 0 ? now - asked : 0);
  if (!traced) return 0;
  if (since != 0) recorder_->trace({since, now, number, 0, uint32_t(i), 0, EventKind::kWait, 0, 0});
  return now;
}

void Gate::taken(uint64_t number, size_t i, uint64_t began, uint64_t bytes, bool failed) {
  if (began != 0) recorder_->trace({began, now_ns(), number, bytes, uint32_t(i), 0, EventKind::kReceive, uint16_t(failed ? kFailed : 0), 0});
}

void Gate::wait_ends(uint64_t number, size_t i, uint64_t since) {
  if (!recorder_) return;
  asked_since_[i].emplace(number, since);
  if (recorder_->tracing()) recorder_->trace({since, now_ns(), number, 0, uint32_t(i), 0, EventKind::kWait, kSkipped, 0});
}

}  // namespace conveyor
