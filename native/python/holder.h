// Which thread has a lock of Python's, noted by whoever takes it.
#pragma once

#include "bind.h"

namespace conveyor {

// The lock itself does not know. A type in plain C, as is Turn (bind_turn.cpp); the GIL guards it.
struct Holder {
  PyObject_HEAD
  PyObject* lock;
  unsigned long thread;  // as PyThread_get_thread_ident() says; 0: nobody has the lock, or who has it said nothing
};

// Throws for anything else.
Holder* as_holder(nb::handle object);

}  // namespace conveyor
