#include "ref.h"

#include "exit.h"
#include "waiting.h"

namespace conveyor {

nb::object WindowObject::get(const RefCore& ref, uint64_t deadline, int64_t deaths) {
  const uint64_t number = uint64_t(ref.number);
  const size_t reader = ref.reader;
  window->make_hand();
  nb::object value = window->take(number, reader);
  if (value.is_valid()) return value;
  const uint64_t since = window->wait_begins();
  for (bool first = true;; first = false) {
    const uint32_t seen = inbox->count();
    window->make_hand();  // another thread may have used the one before
    value = window->take(number, reader, since);
    if (value.is_valid()) return value;
    // Looked at behind the count: whoever cancels sets the outcome, and notifies afterwards.
    if (closed || ref.outcome.is_valid() || (deaths >= 0 && inbox->process_table()->header()->deaths.load(std::memory_order_seq_cst) != uint32_t(deaths)))
      return nb::object();
    // Results of others may move the doorbell so often that no wait comes to look at the time or for a signal.
    bool over = false;
    if (!first) {
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
      over = deadline != 0 && now_ns() >= deadline;
    }
    if (!over && wait(*inbox, seen, deadline)) continue;
    window->make_hand();
    value = window->take(number, reader, since);
    if (!value.is_valid()) window->wait_ends(number, reader, since);
    return value;
  }
}

void WindowObject::await_ready(const RefCore& ref, uint64_t deadline) {
  for (;;) {
    const uint32_t seen = inbox->count();
    if (window->ready(uint64_t(ref.number), ref.reader) || closed || ref.outcome.is_valid()) return;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (now_ns() >= deadline || !wait(*inbox, seen, deadline)) return;
  }
}

nb::object WindowObject::start(nb::handle self, nb::handle value, nb::handle source, nb::handle type, uint64_t deadline) {
  if (is_ref(value.ptr())) return nb::none();  // perhaps one of ours
  return started(self, source, type, deadline, [&] { return window->submit(value, deadline); });
}

nb::object WindowObject::start_many(nb::handle self, nb::tuple values, nb::handle source, nb::handle type, uint64_t deadline) {
  return started(self, source, type, deadline, [&] { return window->submit_many(values, deadline); });
}

template <class Submit>
nb::object WindowObject::started(nb::handle self, nb::handle source, nb::handle type, uint64_t deadline, const Submit& submit) {
  if (somebody_died()) return nb::none();
  if (deadline != 0) {
    if (!window->has_room()) return nb::none();
    take_words(source);
  }
  nb::object ref = nb::inst_alloc(type);  // before: what is submitted has somebody who owns its result
  const int64_t number = submit();
  if (number < 0) return nb::none();
  new (nb::inst_ptr<RefCore>(ref)) RefCore(nb::borrow(source), nb::borrow(self), number, 0);
  nb::inst_mark_ready(ref);
  return ref;
}

void WindowObject::take_words(nb::handle source) {
  const uint64_t number = window->submitted();
  Timed& place = timed[number % timed.size()];
  // It may be this one: what could not be sent has left its number to the next.
  if (place.source.is_valid() && place.number != number) {
    const nb::object earlier = place.source();
    if (!earlier.is_none()) {
      Calling python;
      earlier.attr("keep_report")(place.number);
    }
  }
  place = {nb::weakref(source), number};
}

WindowObject::~WindowObject() {
  nb::error_scope keep;
  window->leave_leftovers();  // before code runs that could have them swept
  window->note_last();
  window->forget_leftovers();
  try {
    window->discard_all();
  } catch (nb::python_error& error) {
    error.discard_as_unraisable("results that nobody has got");
  } catch (const std::exception& error) {  // a frame with a bad layout
    PyErr_SetString(PyExc_RuntimeError, error.what());
    PyErr_WriteUnraisable(nullptr);
  }
}

RefCore::~RefCore() {
  const bool last = next == this;
  // First: what follows may run Python code, which might look for its siblings.
  previous->next = next;
  next->previous = previous;
  if (window == nullptr || number < 0) return;
  if (outcome.is_valid()) {
    if (last) window->window->abandon(uint64_t(number));
    return;
  }
  // The result is not wanted: its memory comes back when it arrives, or now.
  nb::error_scope keep;  // this may be the unwinding of a Python exception
  try {
    window->window->drop(uint64_t(number), reader);
  } catch (nb::python_error& error) {
    error.discard_as_unraisable("a dropped result");
  } catch (const std::exception& error) {  // a frame with a bad layout
    PyErr_SetString(PyExc_RuntimeError, error.what());
    PyErr_WriteUnraisable(nullptr);
  }
  if (last) window->window->abandon(uint64_t(number));
}

void RefCore::resolve(nb::object value) {
  // It holds the refs from now on: what refers to each other over a snapshot could never be collected.
  if (nb::inst_check(value) && nb::isinstance<Snapshot>(value))
    if (nb::object& refs = nb::inst_ptr<Snapshot>(value)->refs; refs.is_valid()) std::swap(inner, refs);
  // What it replaces may run any code when it goes: last.
  std::swap(outcome, value);
  if (window != nullptr && number >= 0) window->window->resolved(uint64_t(number), reader);
}

void RefCore::join(RefCore& other) {
  CONVEYOR_ASSERT(other.next == &other);
  other.previous = this;
  other.next = next;
  next->previous = &other;
  next = &other;
}

bool RefCore::begin_resolve(const void* by) {
  if (resolver) {
    contended = true;
    return false;
  }
  resolver = by;
  return true;
}

bool RefCore::end_resolve(const void* by) {
  if (resolver != by) return false;
  resolver = nullptr;
  if (!std::exchange(contended, false)) return false;
  if (window == nullptr) return true;
  window->inbox->process_table()->notify(window->inbox->slot(), kAttentionBit);
  return false;
}

nb::list ref_with_siblings(nb::handle self, size_t count) {
  RefCore* last = nb::inst_ptr<RefCore>(self);
  last->self = self.ptr();
  nb::list refs;
  refs.append(self);
  for (size_t reader = 1; reader < count; ++reader) {
    nb::object ref = nb::inst_alloc(self.type());
    RefCore* core = nb::inst_ptr<RefCore>(ref);
    new (core) RefCore(last->source, last->window_object, last->number, reader);
    nb::inst_mark_ready(ref);
    core->self = ref.ptr();
    last->join(*core);
    last = core;
    refs.append(std::move(ref));
  }
  return refs;
}

bool refs_among(nb::handle args, nb::handle kwargs) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args.ptr()); ++i)
    if (is_ref(PyTuple_GET_ITEM(args.ptr(), i))) return true;
  if (!PyDict_Check(kwargs.ptr())) return false;
  PyObject *key, *value;
  Py_ssize_t at = 0;
  while (PyDict_Next(kwargs.ptr(), &at, &key, &value))
    if (is_ref(value)) return true;
  return false;
}

}  // namespace conveyor
