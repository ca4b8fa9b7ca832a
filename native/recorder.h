// What one process of a graph notes about its own steps, in the graph's segment: counters that are
// always kept, and a ring of events while the graph is traced. The process writes, the driver reads,
// also when the process is busy, stopped or dead. Every word has one writer: plain loads and stores.
#pragma once

#include <bit>
#include <memory>
#include <utility>
#include <vector>

#include "ring.h"

namespace conveyor {

using Word = std::atomic<uint64_t>;

inline uint64_t value_of(const Word& word) { return word.load(std::memory_order_relaxed); }
// Only by the word's one writer.
inline void bump(Word& word, uint64_t n) { word.store(word.load(std::memory_order_relaxed) + n, std::memory_order_relaxed); }

// Counts by size: eight buckets for each power of two, so that the middle of a bucket is no further
// from any value in it than a sixteenth of that value.
struct Histogram {
  static constexpr unsigned kPart = 3;       // log2 of the buckets in a power of two
  static constexpr unsigned kLargest = 43;   // values from 2^43 ns (2.4 hours) share the last bucket
  static constexpr size_t kBuckets = size_t(kLargest - kPart + 1) << kPart;

  static size_t bucket(uint64_t value) {
    if (value < (1u << kPart)) return size_t(value);
    const unsigned exponent = 63 - unsigned(std::countl_zero(value));
    if (exponent >= kLargest) return kBuckets - 1;
    return (size_t(exponent - kPart + 1) << kPart) | ((value >> (exponent - kPart)) & ((1u << kPart) - 1));
  }
  // The least value in a bucket.
  static uint64_t lowest(size_t bucket) {
    if (bucket < (2u << kPart)) return bucket;
    const unsigned exponent = unsigned(bucket >> kPart) + kPart - 1;
    return ((uint64_t(1) << kPart) | (bucket & ((1u << kPart) - 1))) << (exponent - kPart);
  }

  Word total;
  Word largest;
  Word buckets[kBuckets];

  void note(uint64_t value) {
    bump(buckets[bucket(value)], 1);
    if (value == 0) return;
    bump(total, value);
    if (value > value_of(largest)) largest.store(value, std::memory_order_relaxed);
  }
  // The value that was noted last was larger by this: it moves to another bucket.
  void note_more(uint64_t last, uint64_t more) {
    Word& before = buckets[bucket(last)];
    before.store(value_of(before) - 1, std::memory_order_relaxed);
    if (last != 0) total.store(value_of(total) - last, std::memory_order_relaxed);
    note(last + more);
  }
};

struct alignas(kCacheLine) TaskCounters {
  Word errors;   // runs that raised
  Word skipped;  // an argument was an error, which was passed on
  Histogram running;
};

struct alignas(kCacheLine) ReceiveCounters {
  Histogram waiting;  // 0 for a frame that was there
};

struct alignas(kCacheLine) SendCounters {
  Word frames;
  Word errors;  // frames that carry an error
  Word bytes;
};

enum class EventKind : uint16_t { kTask = 1, kWait = 2, kReceive = 3, kSend = 4, kExecute = 5, kRoom = 6 };
enum EventFlags : uint16_t { kFailed = 1, kSkipped = 2 };

// One slice of the trace. `index` counts the tasks, receives or sends of this process.
struct Event {
  uint64_t begin;
  uint64_t end;
  uint64_t execution;
  uint64_t bytes;
  uint32_t index;
  uint32_t thread;  // 0: the process has one track
  EventKind kind;
  uint16_t flags;
  uint32_t reserved;
};
static_assert(sizeof(Event) == 48);

// One for each graph, written by the driver, read at every step.
struct alignas(kCacheLine) RecordingControl {
  std::atomic<uint32_t> tracing;
};

struct alignas(kCacheLine) RecorderHeader {
  Word head;     // events written
  Word dropped;  // events for which there was no room
  Word running;  // the task that runs, + 1; 0: none
  Word running_execution;
  Word running_since;
  alignas(kCacheLine) Word tail;  // events read; the driver's
};

// Where a process notes what: offsets in the segment, and how many tasks, receives and sends it has.
// `outputs` of its sends, the first ones it is asked for, go to the driver; the time of each is kept
// for the last `slots` executions (a power of two).
struct RecorderPlace {
  size_t control;
  size_t offset;
  size_t events;
  uint32_t capacity;  // of the ring of events, a power of two
  uint32_t tasks;
  uint32_t receives;
  uint32_t sends;
  uint32_t outputs;
  uint32_t slots;

  size_t bytes() const {
    return sizeof(RecorderHeader) + tasks * sizeof(TaskCounters) + receives * sizeof(ReceiveCounters) +
           sends * sizeof(SendCounters) + outputs * align_up(slots * sizeof(Word), kCacheLine);
  }
};

// The same class writes in the process that it is about and reads in the driver. Not thread-safe: its
// callers hold the GIL (or are a single-threaded test).
class Recorder : public Shareable<Recorder> {
 public:
  // `whose` it is, for errors.
  Recorder(std::shared_ptr<Segment> segment, const RecorderPlace& place, bool threads, std::string whose = {});

  TaskCounters& task(uint32_t i) const { return tasks_[i]; }
  ReceiveCounters& received(uint32_t i) const { return receives_[i]; }
  SendCounters& sent(uint32_t i) const { return sends_[i]; }
  RecorderHeader& header() const { return *header_; }
  const RecorderPlace& place() const { return place_; }
  // When execution `number` was sent on output `i`, for the last `slots` of them.
  Word& sent_at(uint32_t i, uint64_t number) const { return stamps_[i * stamp_stride_ + (number & (place_.slots - 1))]; }

  bool tracing() const { return control_->tracing.load(std::memory_order_relaxed) != 0; }

  // Steps of a program, in order. A clock is read once where one thing ends and the next begins.

  // There is no frame where one is needed; may be called again until there is.
  void wait_begins() {
    if (since_ == 0) since_ = clock();
    clock_ = 0;
  }
  // There is one. `quick`: decoding it takes no time to speak of. Returns for how long it was waited for.
  uint64_t receive_begins(uint32_t i, uint64_t execution, bool quick) {
    const bool traced = tracing();
    if (since_ != 0 || traced) clock_ = now_ns();
    const uint64_t waited = since_ == 0 ? 0 : clock_ - since_;
    receives_[i].waiting.note(waited);
    receive_began_ = traced ? clock_ : 0;
    if (traced && since_ != 0) trace({since_, clock_, execution, 0, i, 0, EventKind::kWait, 0, 0});
    since_ = 0;
    if (!quick && !traced) clock_ = 0;
    return waited;
  }
  // What comes beside a frame is there, which was received after a wait of `waited`. This wait is for it, too.
  void wait_ends(uint32_t i, uint64_t execution, uint64_t waited) {
    if (since_ == 0) return;
    clock_ = now_ns();
    receives_[i].waiting.note_more(waited, clock_ - since_);
    if (tracing()) trace({since_, clock_, execution, 0, i, 0, EventKind::kWait, 0, 0});
    since_ = 0;
  }
  void receive_ends(uint32_t i, uint64_t execution, uint64_t bytes, bool failed) {
    if (receive_began_ != 0) trace_receive(i, execution, bytes, failed);
  }
  // What is waited for is not noted as such until `take_wait_up` has what this returns; or never.
  uint64_t set_wait_aside() { return std::exchange(since_, 0); }
  void take_wait_up(uint64_t since) {
    since_ = since;
    clock_ = 0;
  }
  // The time, as good as at the last step.
  uint64_t now() { return clock(); }
  // The time.
  uint64_t task_begins(uint32_t i, uint64_t execution) {
    task_began_ = clock();
    header_->running_since.store(task_began_, std::memory_order_relaxed);
    header_->running_execution.store(execution, std::memory_order_relaxed);
    header_->running.store(i + 1, std::memory_order_release);
    return task_began_;
  }
  void task_returns() { task_ended_ = clock_ = now_ns(); }
  void task_ends(uint32_t i, uint64_t execution, bool failed) {
    note_task(i, execution, task_began_, task_ended_, failed);
    header_->running.store(0, std::memory_order_release);  // after the event: who sees this sees that
  }
  void note_task(uint32_t i, uint64_t execution, uint64_t begin, uint64_t end, bool failed) {
    tasks_[i].running.note(end - begin);
    if (failed) bump(tasks_[i].errors, 1);
    if (tracing()) trace({begin, end, execution, 0, i, 0, EventKind::kTask, uint16_t(failed ? kFailed : 0), 0});
  }
  // Bytes that go beside the frames of a send.
  void count_out_of_band(uint32_t i, uint64_t bytes) { bump(sends_[i].bytes, bytes); }
  void task_skipped(uint32_t i) { bump(tasks_[i].skipped, 1); }
  void send_begins() {
    if (tracing()) clock_ = clock();
  }
  // Before the frame is published, so that who sees the frame sees this. `quick`: making it has taken no
  // time to speak of. `output`: -1, or which of the outputs it is.
  void sending(uint32_t i, int output, uint64_t execution, uint64_t bytes, bool failed, bool quick) {
    count_sent(i, bytes, failed);
    if (output >= 0) sent_at(uint32_t(output), execution).store(quick ? clock() : now_ns(), std::memory_order_relaxed);
    if (tracing()) trace_send(i, execution, bytes, failed);
  }
  void note_send(uint32_t i, uint64_t execution, uint64_t begin, uint64_t end, uint64_t bytes, bool failed) {
    count_sent(i, bytes, failed);
    if (tracing()) trace({begin, end, execution, bytes, i, 0, EventKind::kSend, uint16_t(failed ? kFailed : 0), 0});
  }
  // Something of unknown length has happened since the clock was read.
  void stale() { clock_ = 0; }
  void set_clock(uint64_t now) { clock_ = now; }

  // While the graph is traced.
  void trace(Event event);

  // The driver's side of the events.

  // Forget what is there, and keep at most `limit` from now on.
  void collect(size_t limit);
  // Take what is in the ring, so that there is room. Events that cannot be count with those that were
  // dropped. Throws, once, where the head cannot be: somebody has written over it.
  void drain();
  std::vector<Event> take_events() { return std::exchange(events_, {}); }
  uint64_t dropped() const { return value_of(header_->dropped) - dropped_before_ + beyond_; }
  void set_tracing(bool on) { control_->tracing.store(on ? 1 : 0, std::memory_order_relaxed); }
  // Give the memory of the ring back.
  void free_events();

 private:
  uint64_t clock() { return clock_ != 0 ? clock_ : clock_ = now_ns(); }
  void count_sent(uint32_t i, uint64_t bytes, bool failed) {
    SendCounters& counters = sends_[i];
    bump(counters.frames, 1);
    bump(counters.bytes, bytes);
    if (failed) bump(counters.errors, 1);
  }
  void trace_receive(uint32_t i, uint64_t execution, uint64_t bytes, bool failed);
  void trace_send(uint32_t i, uint64_t execution, uint64_t bytes, bool failed);

  bool can_be(const Event& event) const;

  std::shared_ptr<Segment> segment_;
  RecorderPlace place_;
  bool threads_;
  std::string whose_;
  RecordingControl* control_;
  RecorderHeader* header_;
  TaskCounters* tasks_;
  ReceiveCounters* receives_;
  SendCounters* sends_;
  Word* stamps_;
  size_t stamp_stride_;
  Event* ring_;
  uint64_t clock_ = 0;  // now, or 0: it must be read
  uint64_t since_ = 0;  // when the wait began; 0: there is none
  uint64_t receive_began_ = 0;  // 0: it is not traced
  uint64_t task_began_ = 0;
  uint64_t task_ended_ = 0;
  std::vector<Event> events_;
  size_t limit_ = 0;
  uint64_t beyond_ = 0;  // taken out of the ring and not kept
  uint64_t dropped_before_ = 0;
};

}  // namespace conveyor
