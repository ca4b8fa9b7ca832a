// What the clocks of two hosts say, as they ask each other.
#include "peer.h"

namespace conveyor::net {

namespace {

constexpr size_t kClockSamples = 64;    // kept
constexpr size_t kClockQuestions = 64;  // that may wait for their answer: who asks, asks once at a time

}  // namespace

uint64_t Peer::ask_clock(uint32_t times) {
  clock_wanted_ = std::max(clock_wanted_, clock_answers_ + times);
  return clock_answers_ + times;
}

void Peer::asked_clock(const Clock& clock) {
  if (clock_questions_.size() == kClockQuestions) throw Violation("it asks for the time, again and again");
  clock_questions_.push_back(clock.asked);
}

void Peer::hear(const Clock& clock) {
  if (clock_asked_ == 0 || clock.asked != clock_asked_) throw Violation("the time, which nobody has asked for");
  clock_samples_.push_back({std::exchange(clock_asked_, 0), clock.says, now_ns()});
  if (clock_samples_.size() > kClockSamples) clock_samples_.pop_front();
  ++clock_answers_;
}

void Peer::put_clock() {
  for (const uint64_t asked : clock_questions_) {
    connection_->put(Prefix{What::kClockIs, 0, sizeof(Clock), 0});
    connection_->put(Clock{asked, now_ns()});
  }
  clock_questions_.clear();
  if (clock_wanted_ > clock_answers_ && clock_asked_ == 0) {
    clock_asked_ = now_ns();
    connection_->put(Prefix{What::kClock, 0, sizeof(Clock), 0});
    connection_->put(Clock{clock_asked_, 0});
  }
}

}  // namespace conveyor::net
