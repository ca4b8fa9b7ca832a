// What is to be done when an object is garbage.
#include "will.h"

#include "bind.h"

namespace conveyor {
namespace {

int will_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  const Will* will = nb::inst_ptr<Will>(self);
  Py_VISIT(will->note.ptr());
  Py_VISIT(will->work.ptr());
  return 0;
}

// In a circle of garbage it is noted before any part of that is cleared: the work would be empty afterwards.
void will_finalize(PyObject* self) {
  if (nb::inst_ready(self)) nb::inst_ptr<Will>(self)->carry_out();
}

// No tp_clear: once it is noted a will refers to nothing but the deque.
PyType_Slot will_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(will_traverse)},
                            {Py_tp_finalize, reinterpret_cast<void*>(will_finalize)},
                            {0, nullptr}};

}  // namespace

void bind_will(nb::module_& m) {
  nb::class_<Waker>(m, "Waker")
      .def("__init__", [](Waker* self) { new (self) Waker(); })
      .def("__init__", [](Waker* self, int eventfd) { new (self) Waker(eventfd); }, "eventfd"_a)
      .def("__init__", [](Waker* self, const Inbox& inbox) { new (self) Waker(inbox); }, "inbox"_a)
      .def("close", &Waker::close);

  nb::class_<Will>(m, "Will", nb::type_slots(will_slots))
      .def("__init__", [](Will* self, nb::object note, nb::object work, std::shared_ptr<Waker> waker) {
             new (self) Will(std::move(note), std::move(work), std::move(waker));
           }, "note"_a, "work"_a, "waker"_a)
      .def("revoke", &Will::revoke);
}

}  // namespace conveyor
