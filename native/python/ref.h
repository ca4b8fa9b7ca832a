// The part of a ref that every get passes through. Its Python subclass (refs/ref.py) does what is
// slow anyway: waiting for long, errors, asyncio.
#pragma once

#include "window.h"
#include "inbox.h"

namespace conveyor {

class RefCore;

// A window with what its Python face adds: the doorbell to wait on, and who keeps its ends alive.
struct WindowObject {
  std::unique_ptr<InFlightWindow> window;
  nb::object keep;
  Inbox* inbox;
  bool closed = false;
  // The process table's count of deaths when all who take part were known to live; -1: nobody looks. `start` submits
  // nothing when it has moved.
  int64_t deaths = -1;
  nb::object limits = nb::none();
  // Executions with a deadline, by the set of words in `limits` that they use.
  struct Timed {
    nb::object source{};  // a weak reference to it
    uint64_t number = 0;
  };
  std::vector<Timed> timed{};

  ~WindowObject();
  // The result of `ref`, or an invalid object when the deadline (0: none) has passed, when the window is closed or the ref
  // has an outcome otherwise, or when the process table counts other deaths than the caller knows of (-1: it does not ask).
  nb::object get(const RefCore& ref, uint64_t deadline, int64_t deaths);
  // Until the result is here, or what ends get(). It is not taken.
  void await_ready(const RefCore& ref, uint64_t deadline);
  // Submit `value`; the ref of its first result, an instance of `type`. None if there is no room, if somebody has
  // died, or if `value` is a ref, whose value is to be sent. `self`: this window's Python object.
  nb::object start(nb::handle self, nb::handle value, nb::handle source, nb::handle type, uint64_t deadline);
  // The same of one value for each writer, none of them a ref. With a `deadline` the source is of this execution alone:
  // its `keep_report` is called with the execution's number before its words in `limits` are used again.
  nb::object start_many(nb::handle self, nb::tuple values, nb::handle source, nb::handle type, uint64_t deadline);
  template <class Submit>
  nb::object started(nb::handle self, nb::handle source, nb::handle type, uint64_t deadline, const Submit& submit);
  void take_words(nb::handle source);
  bool somebody_died() const { return deaths >= 0 && inbox->process_table()->header()->deaths.load(std::memory_order_relaxed) != uint32_t(deaths); }
};

// An instance of a ref's class, which `set_ref_type` has told.
bool is_ref(PyObject* value);
void set_ref_type(nb::handle type);
// Whether one of the arguments, a tuple and a dict or None, is itself a ref.
bool refs_among(nb::handle args, nb::handle kwargs);

class RefCore {
 public:
  RefCore(nb::object source, nb::object window, int64_t number, size_t reader)
      : source(std::move(source)), window_object(std::move(window)), window(window_object.is_none() ? nullptr : nb::cast<WindowObject*>(window_object)), number(number), reader(reader) {}
  ~RefCore();
  RefCore(const RefCore&) = delete;
  RefCore& operator=(const RefCore&) = delete;

  // Take the right to resolve this ref; false if somebody else has it. Whoever has it ends with `end_resolve`, which wakes
  // those who were refused, and does nothing for others: so it can be called by who does not know whether he has. True
  // if it cannot wake them, as there is no window.
  bool begin_resolve(const void* by);
  bool end_resolve(const void* by);
  // `value` is the outcome, and need not be found again.
  void resolve(nb::object value);
  // `other` is a result of the same execution. They know each other as long as they live, and keep
  // nobody alive: the GIL guards the ring that they form.
  void join(RefCore& other);

  nb::object source;
  nb::object window_object;
  WindowObject* window;
  int64_t number;  // -1: not submitted
  size_t reader;
  nb::object outcome;  // invalid: not resolved
  nb::object inner;    // the refs that the value refers to, held as long as the frame is
  nb::object targets;  // what its value is to be received into; invalid: nothing
  uint64_t looked = 0;  // the last look at several in which it was one
  uint32_t passed = 0;  // to whom it was passed, in words of Python's
  const void* resolver = nullptr;  // who has; only to be compared
  bool contended = false;
  PyObject* self = nullptr;  // where there are siblings
  RefCore* previous = this;
  RefCore* next = this;
};

// The refs of all `count` results of an execution, given that of the first.
nb::list ref_with_siblings(nb::handle self, size_t count);

}  // namespace conveyor
