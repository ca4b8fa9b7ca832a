#include "recorder.h"

namespace conveyor {

namespace {

uint32_t this_thread() {
  thread_local const uint32_t id = uint32_t(::syscall(SYS_gettid));
  return id;
}

}  // namespace

Recorder::Recorder(std::shared_ptr<Segment> segment, const RecorderPlace& place, bool threads, std::string whose)
    : segment_(std::move(segment)), place_(place), threads_(threads), whose_(std::move(whose)) {
  if ((place.capacity & (place.capacity - 1)) != 0 || place.capacity == 0 || (place.slots & (place.slots - 1)) != 0 || place.slots == 0)
    throw std::system_error(EINVAL, std::generic_category(), "recorder");
  control_ = reinterpret_cast<RecordingControl*>(segment_->at(place.control, sizeof(RecordingControl)));
  char* p = segment_->at(place.offset, place.bytes());
  header_ = reinterpret_cast<RecorderHeader*>(p);
  tasks_ = reinterpret_cast<TaskCounters*>(header_ + 1);
  receives_ = reinterpret_cast<ReceiveCounters*>(tasks_ + place.tasks);
  sends_ = reinterpret_cast<SendCounters*>(receives_ + place.receives);
  stamps_ = reinterpret_cast<Word*>(sends_ + place.sends);
  stamp_stride_ = align_up(place.slots * sizeof(Word), kCacheLine) / sizeof(Word);
  ring_ = reinterpret_cast<Event*>(segment_->at(place.events, place.capacity * sizeof(Event)));
}

void Recorder::trace(Event event) {
  if (threads_) event.thread = this_thread();
  const uint64_t head = value_of(header_->head);
  // Acquire: the driver has read the place before we write it again.
  if (head - header_->tail.load(std::memory_order_acquire) >= place_.capacity) {
    bump(header_->dropped, 1);
    return;
  }
  ring_[head & (place_.capacity - 1)] = event;
  header_->head.store(head + 1, std::memory_order_release);  // the event comes before it
}

void Recorder::trace_receive(uint32_t i, uint64_t execution, uint64_t bytes, bool failed) {
  clock_ = now_ns();
  trace({receive_began_, clock_, execution, bytes, i, 0, EventKind::kReceive, uint16_t(failed ? kFailed : 0), 0});
}

void Recorder::trace_send(uint32_t i, uint64_t execution, uint64_t bytes, bool failed) {
  const uint64_t begin = clock();
  clock_ = now_ns();
  trace({begin, clock_, execution, bytes, i, 0, EventKind::kSend, uint16_t(failed ? kFailed : 0), 0});
}

void Recorder::collect(size_t limit) {
  events_ = {};
  limit_ = limit;
  beyond_ = 0;
  dropped_before_ = value_of(header_->dropped);
  header_->tail.store(header_->head.load(std::memory_order_acquire), std::memory_order_release);
}

void Recorder::drain() {
  const uint64_t head = header_->head.load(std::memory_order_acquire);  // the events below it are whole
  const uint64_t tail = value_of(header_->tail);
  if (head - tail > place_.capacity) {
    header_->tail.store(head, std::memory_order_release);
    throw std::system_error(EPROTO, std::generic_category(),
                            "conveyor: the trace of " + (whose_.empty() ? "a process" : whose_) + " is broken: its ring holds " +
                                std::to_string(place_.capacity) + " events, and says that " + std::to_string(head - tail) +
                                " wait in it. A process that shares it has written over it, and should be killed; what follows is traced");
  }
  for (uint64_t i = tail; i != head; ++i) {
    const Event event = ring_[i & (place_.capacity - 1)];
    if (events_.size() < limit_ && can_be(event))
      events_.push_back(event);
    else
      ++beyond_;
  }
  header_->tail.store(head, std::memory_order_release);  // our reads come before it
}

bool Recorder::can_be(const Event& event) const {
  switch (event.kind) {
    case EventKind::kTask: return event.index < place_.tasks;
    case EventKind::kWait:
    case EventKind::kReceive: return event.index < place_.receives;
    case EventKind::kSend: return event.index < place_.sends;
    case EventKind::kExecute:
    case EventKind::kRoom: return event.index == 0;
  }
  return false;
}

void Recorder::free_events() {
  // A step that began while the trace was on may still write an event: into a fresh page then, which
  // the next trace forgets.
  const size_t first = align_up(place_.events, kGranule);
  const size_t end = (place_.events + place_.capacity * sizeof(Event)) / kGranule * kGranule;
  if (end > first && ::madvise(segment_->at(first, end - first), end - first, MADV_REMOVE) != 0) throw_errno("madvise");
}

}  // namespace conveyor
