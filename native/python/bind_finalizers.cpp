// What is to be done when an object is garbage, noted where no bytecode runs. A finalizer in Python is a place
// where a signal's handler may raise, and what it raises there is printed and lost: Ctrl-C, most often.
#include <unistd.h>

#include <cerrno>
#include <memory>

#include "bind.h"
#include "inbox.h"
#include "platform.h"

namespace conveyor {

// Wakes whoever carries finalizers out, until it is closed: by an eventfd of its own, by the doorbell of an inbox, or not
// at all. A forked child wakes nobody.
class Waker {
 public:
  Waker() = default;
  explicit Waker(int eventfd) : fd_(dup_cloexec(eventfd)) {}
  explicit Waker(const Inbox& inbox) : process_table_(inbox.process_table()), slot_(inbox.slot()) {}
  bool open() const { return open_ && fork_ == fork_generation.load(std::memory_order_relaxed); }
  void wake() const {
    if (process_table_ != nullptr) process_table_->notify(slot_, kAttentionBit);
    if (fd_.get() >= 0) write_event(fd_.get());
  }
  void close() {
    open_ = false;
    fd_.reset();
    process_table_.reset();
  }

 private:
  Fd fd_;
  std::shared_ptr<ProcessTable> process_table_;
  uint32_t slot_ = 0;
  bool open_ = true;
  const uint64_t fork_ = fork_generation.load(std::memory_order_relaxed);
};

// Held by the object: with it, it notes `work` by calling `note`, a function in C (the append of a deque).
struct Finalizer {
  nb::object note, work;
  std::shared_ptr<Waker> waker;

  Finalizer(nb::object note, nb::object work, std::shared_ptr<Waker> waker) : note(std::move(note)), work(std::move(work)), waker(std::move(waker)) {}
  Finalizer(const Finalizer&) = delete;
  // Nothing is to be done any more.
  void revoke() { const nb::object dropped = std::move(work); }
  ~Finalizer() { carry_out(); }
  void carry_out() noexcept {
    const nb::object left = std::move(work);
    if (!left.is_valid() || !waker->open()) return;
    nb::error_scope keep;  // this may be the unwinding of a Python exception
    const nb::object noted = nb::steal(PyObject_CallFunctionObjArgs(note.ptr(), left.ptr(), nullptr));
    if (noted.is_valid())
      waker->wake();
    else
      PyErr_WriteUnraisable(note.ptr());  // no memory
  }
};

namespace {

int finalizer_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  const Finalizer* finalizer = nb::inst_ptr<Finalizer>(self);
  Py_VISIT(finalizer->note.ptr());
  Py_VISIT(finalizer->work.ptr());
  return 0;
}

// In a circle of garbage it is noted before any part of that is cleared: the work would be empty afterwards.
void finalizer_finalize(PyObject* self) {
  if (nb::inst_ready(self)) nb::inst_ptr<Finalizer>(self)->carry_out();
}

// No tp_clear: once it is noted a finalizer refers to nothing but the deque.
PyType_Slot finalizer_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(finalizer_traverse)},
                            {Py_tp_finalize, reinterpret_cast<void*>(finalizer_finalize)},
                            {0, nullptr}};

// The dictionary of a collection that keeps nothing alive (weak.py). Who is called back at an object's end does not keep it:
// a collection would be in a circle with what it has.
struct WeakTable {
  nb::object known = nb::dict();
  const std::shared_ptr<PyObject*> there = std::make_shared<PyObject*>(known.ptr());  // null: it is gone

  WeakTable() = default;
  WeakTable(const WeakTable&) = delete;
  ~WeakTable() { clear(); }
  void clear() {
    *there = nullptr;
    const nb::object dropped = std::move(known);
  }
};

// Take `key` out, if it is that of the object which has ended: another may have taken its place since.
void forget(PyObject* known, nb::handle key, nb::handle ref) {
  const nb::object kept = nb::borrow(known);  // what is taken out may be the last that keeps it
  PyObject* const found = PyDict_GetItemWithError(known, key.ptr());
  if (found == nullptr) {
    if (PyErr_Occurred()) throw nb::python_error();
    return;
  }
  const bool same = found == ref.ptr() || (PyTuple_CheckExact(found) && PyTuple_GET_ITEM(found, 0) == ref.ptr());
  if (same && PyDict_DelItem(known, key.ptr()) != 0) throw nb::python_error();
}

int table_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (nb::inst_ready(self)) Py_VISIT(nb::inst_ptr<WeakTable>(self)->known.ptr());
  return 0;
}

int table_clear(PyObject* self) {
  if (nb::inst_ready(self)) nb::inst_ptr<WeakTable>(self)->clear();
  return 0;
}

PyType_Slot table_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(table_traverse)}, {Py_tp_clear, reinterpret_cast<void*>(table_clear)}, {0, nullptr}};

}  // namespace

void bind_finalizers(nb::module_& m) {
  nb::class_<WeakTable>(m, "WeakTable", nb::type_slots(table_slots),
      "The dictionary of a collection that keeps nothing alive. No code in Python hears of an object's end.")
      .def(nb::init<>())
      .def_prop_ro("known", [](WeakTable& t) { return t.known; }, nb::sig("def known(self) -> dict[Any, Any]"))
      .def("ref", [](WeakTable& t, nb::handle object, nb::handle key) {
             const nb::object forgets = nb::cpp_function([there = t.there, key = nb::borrow(key)](nb::handle ref) {
               if (*there != nullptr) forget(*there, key, ref);
             });
             nb::object ref = nb::steal(PyWeakref_NewRef(object.ptr(), forgets.ptr()));
             if (!ref.is_valid()) throw nb::python_error();
             return ref;
           }, "object"_a, "key"_a, nb::sig("def ref(self, object: object, key: object) -> weakref.ref[Any]"),
           "A weak reference, with whose end ``key`` is taken out of ``known`` if it, or a tuple that begins with it, is the value there.");

  nb::class_<Waker>(m, "Waker", "Wakes whoever carries finalizers out, until it is closed; in a forked child it is.")
      .def("__init__", [](Waker* self) { new (self) Waker(); }, "Wakes nobody: they are carried out at some other occasion.")
      .def("__init__", [](Waker* self, int eventfd) { new (self) Waker(eventfd); }, "eventfd"_a, "By a duplicate of it.")
      .def("__init__", [](Waker* self, const Inbox& inbox) { new (self) Waker(inbox); }, "inbox"_a, "By the bell of that process.")
      .def("close", &Waker::close, "Finalizers that end from now on are without effect.");

  nb::class_<Finalizer>(m, "Finalizer", nb::type_slots(finalizer_slots),
      "What is to be done when the object that holds this is garbage, noted where no bytecode runs.")
      .def("__init__", [](Finalizer* self, nb::object note, nb::object work, std::shared_ptr<Waker> waker) {
             new (self) Finalizer(std::move(note), std::move(work), std::move(waker));
           }, "note"_a, "work"_a, "waker"_a, nb::sig("def __init__(self, note: Callable[[Any], object], work: Any, waker: Waker) -> None"),
           "At its end it calls ``note(work)``, which is to be a function in C (the ``append`` of a deque), and wakes.")
      .def("revoke", &Finalizer::revoke, "Nothing is to be done any more.");
}

}  // namespace conveyor
