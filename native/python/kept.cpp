#include "kept.h"

#include "decode.h"
#include "platform.h"
#include "ref.h"

namespace conveyor {

namespace {

struct Kept {
  PyObject* object;
  Kept* next = nullptr;
};

// Never destroyed: arenas may outlive static destructors. A stack without a lock, since a process may be forked
// while a thread is in the middle of it.
std::atomic<Kept*> aside{nullptr};
std::atomic<uint32_t> changes{0};  // futex word
std::atomic<uint32_t> waiting{0};  // threads that sleep on it, or are about to
std::atomic<size_t> not_aside{0};  // kept for somebody
std::atomic<uint64_t> outlives_all{UINT64_MAX};  // a driver's fork generation: what is forked from it is none

// A process that sends one value after the other puts one aside for each: a thread that waits is not woken, and does
// not take the GIL, more often than this.
constexpr uint64_t kPauseNs = 1'000'000;

void put_aside(const Kept* one) noexcept {
  auto* node = const_cast<Kept*>(one);
  if (node->object == nullptr) {  // it was let go of
    not_aside.fetch_sub(1, std::memory_order_seq_cst);
    delete node;
    return;
  }
  Kept* first = aside.load(std::memory_order_relaxed);
  do node->next = first;
  while (!aside.compare_exchange_weak(first, node, std::memory_order_release, std::memory_order_relaxed));
  not_aside.fetch_sub(1, std::memory_order_seq_cst);
  // Sequentially consistent, as the other side: who is about to sleep sees the change, or is seen here.
  changes.fetch_add(1, std::memory_order_seq_cst);
  if (waiting.load(std::memory_order_seq_cst) != 0) futex_wake_all(&changes);
}

std::shared_ptr<Kept> kept_as(nb::object object) {
  auto* made = new Kept{object.release().ptr()};
  not_aside.fetch_add(1, std::memory_order_seq_cst);
  return std::shared_ptr<Kept>(made, put_aside);  // which is called if this has no memory, too
}

struct Waiting {
  Waiting() { waiting.fetch_add(1, std::memory_order_seq_cst); }
  ~Waiting() { waiting.fetch_sub(1, std::memory_order_seq_cst); }
  Waiting(const Waiting&) = delete;
};

}  // namespace

std::shared_ptr<const void> kept(nb::object object) { return kept_as(std::move(object)); }

struct Lingers::Rest {
  explicit Rest(std::shared_ptr<Kept> what) : kept(std::move(what)) {}
  ~Rest() { entry->number.store(0, std::memory_order_release); }
  std::shared_ptr<Kept> kept;
  EntryHold entry;  // of the directory, from when it lingers on
};

Lingers::Lingers(std::shared_ptr<Arena> arena, uint64_t number, uint64_t bytes, const std::string& names, nb::object rest)
    : arena_(std::move(arena)), bytes_(bytes), since_(now_ns()), names_(names) {
  auto made = std::make_shared<Rest>(kept_as(std::move(rest)));
  rest_ = made.get();
  one_.push_back({number, std::move(made)});
}

Lingers::~Lingers() { end(); }

void Lingers::end() {
  if (one_.empty()) return;
  if (arena_->is_read(one_.front().number)) {
    rest_->entry.write(EntryKind::kKept, {bytes_, since_, reinterpret_cast<uintptr_t>(names_.data()), names_.size(), 0}, one_.front().number);
    return arena_->linger(one_);
  }
  const nb::object rest = nb::steal(std::exchange(rest_->kept->object, nullptr));
  one_.clear();
}

void add_numbers_of(nb::handle keeper, std::vector<uint64_t>& numbers) {
  const auto attribute = [&](PyObject* name) {
    nb::object found = nb::steal(PyObject_GetAttr(keeper.ptr(), name));
    if (!found.is_valid()) PyErr_Clear();
    return found;
  };
  static PyObject *const number = PyUnicode_InternFromString("number"), *const whole = PyUnicode_InternFromString("_whole");
  if (PyList_CheckExact(keeper.ptr())) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(keeper.ptr()); ++i) add_numbers_of(nb::borrow(PyList_GET_ITEM(keeper.ptr(), i)), numbers);
  } else if (nb::isinstance<Snapshot>(keeper)) {
    const Numbers more = nb::inst_ptr<Snapshot>(keeper)->frame.keeps();
    numbers.insert(numbers.end(), more.begin(), more.end());
  } else if (is_ref(keeper.ptr())) {
    const RefCore* ref = nb::inst_ptr<RefCore>(keeper);
    if (ref->outcome.is_valid()) return add_numbers_of(nb::object(ref->outcome), numbers);
    // One that gives something of another one's value.
    if (const nb::object other = attribute(whole); other.is_valid() && is_ref(other.ptr())) add_numbers_of(other, numbers);
  } else if (const nb::object found = attribute(number); found.is_valid() && PyLong_CheckExact(found.ptr())) {
    numbers.push_back(PyLong_AsUnsignedLongLongMask(found.ptr()));
  }
}

bool keeps_surely(const Frame& frame) {
  if (!(frame.flags & kSure)) return false;
  return frame.attached ? frame.attached->any() : frame.lease && outlives_all.load(std::memory_order_relaxed) == fork_generation.load(std::memory_order_relaxed);
}

bool keeps_surely(nb::handle keeper, std::vector<Frame>& frames) {
  if (PyList_CheckExact(keeper.ptr())) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(keeper.ptr()); ++i)
      if (!keeps_surely(nb::borrow(PyList_GET_ITEM(keeper.ptr(), i)), frames)) return false;
    return true;
  }
  if (nb::isinstance<Snapshot>(keeper)) {
    const Frame& frame = nb::inst_ptr<Snapshot>(keeper)->frame;
    if (!keeps_surely(frame)) return false;
    frames.push_back(frame);
    return true;
  }
  if (is_ref(keeper.ptr())) {
    const nb::object outcome = nb::inst_ptr<RefCore>(keeper)->outcome;
    return outcome.is_valid() && nb::isinstance<Snapshot>(outcome) && keeps_surely(outcome, frames);
  }
  static PyObject* const anchor = PyUnicode_InternFromString("anchor");
  nb::object found = nb::steal(PyObject_GetAttr(keeper.ptr(), anchor));
  if (!found.is_valid()) PyErr_Clear();
  return found.is_valid();
}

void outlive_all() { outlives_all.store(fork_generation.load(std::memory_order_relaxed), std::memory_order_relaxed); }

void release_held() {
  Kept* node = aside.exchange(nullptr, std::memory_order_acquire);
  while (node != nullptr) {
    const std::unique_ptr<Kept> one(node);
    node = node->next;
    nb::steal(one->object);
  }
}

bool ReleaseWait::wait() {
  const uint64_t now = now_ns();
  if (now - returned_ns_ < kPauseNs) {
    const timespec pause = to_timespec(returned_ns_ + kPauseNs - now);
    futex_wait(&stopped_, 0, &pause);
  }
  const Waiting waits;
  for (;;) {
    const uint32_t seen = changes.load(std::memory_order_seq_cst);
    const bool stopped = stopped_.load(std::memory_order_seq_cst) != 0;
    if (stopped && !goes_on_.load(std::memory_order_seq_cst)) return false;
    const bool last = not_aside.load(std::memory_order_seq_cst) == 0;
    if (aside.load(std::memory_order_seq_cst) != nullptr) {
      returned_ns_ = now_ns();
      return true;
    }
    if (stopped && last) return false;
    futex_wait(&changes, seen, nullptr);
  }
}

bool ReleaseWait::stop() {
  const bool goes_on = not_aside.load(std::memory_order_seq_cst) != 0;
  goes_on_.store(goes_on, std::memory_order_seq_cst);
  stopped_.store(1, std::memory_order_seq_cst);
  futex_wake_all(&stopped_);
  changes.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(&changes);
  return goes_on;
}

}  // namespace conveyor
