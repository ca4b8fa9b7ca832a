// What is to be done when an object is garbage, noted where no bytecode runs. A finalizer in Python is a place
// where a signal's handler may raise, and what it raises there is printed and lost: Ctrl-C, most often.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

#include <cerrno>
#include <memory>

#include "inbox.h"
#include "platform.h"

namespace conveyor {

namespace nb = nanobind;

// Wakes whoever carries wills out, until it is closed: by an eventfd of its own, by the doorbell of an inbox, or not
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
struct Will {
  nb::object note, work;
  std::shared_ptr<Waker> waker;

  Will(nb::object note, nb::object work, std::shared_ptr<Waker> waker) : note(std::move(note)), work(std::move(work)), waker(std::move(waker)) {}
  Will(const Will&) = delete;
  // Nothing is to be done any more.
  void revoke() { const nb::object dropped = std::move(work); }
  ~Will() { carry_out(); }
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

}  // namespace conveyor
