// The floor: the least machinery with which two Python processes hand each other small messages.
//
// A Link is one direction between one sender and one receiver: a ring of cells in anonymous shared
// memory that fork() passes on. A receiver that finds nothing spins, giving its core away in every
// turn, for a fixed budget, and then sleeps on a futex. There are no leases, errors, closing or
// checks for dead peers here, and payloads have a fixed limit: a bound to compare with, no design.

#include <Python.h>

#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>

namespace {

constexpr uint32_t kCells = 16;
constexpr size_t kRoom = 4088;
constexpr int64_t kSpinNanoseconds = 50'000;

struct Cell {
  uint64_t size;
  char bytes[kRoom];
};

struct Shared {
  alignas(64) std::atomic<uint32_t> sent;
  alignas(64) std::atomic<uint32_t> taken;
  alignas(64) std::atomic<uint32_t> sleeping;
  alignas(64) Cell cells[kCells];
};

struct Link {
  PyObject_HEAD
  Shared* shared;
};

int64_t now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

void futex(std::atomic<uint32_t>& word, int operation, uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, nullptr, nullptr, 0);
}

void wait_beyond(Shared& shared, uint32_t taken) {
  const int64_t give_up = now() + kSpinNanoseconds;
  while (shared.sent.load(std::memory_order_acquire) == taken) {
    sched_yield();
    if (now() < give_up) continue;
    // Announce, then look again: send() stores `sent` before it loads `sleeping`, so with both
    // sides sequentially consistent either we see the message or the sender sees us asleep.
    shared.sleeping.store(1, std::memory_order_seq_cst);
    if (shared.sent.load(std::memory_order_seq_cst) == taken) {
      futex(shared.sent, FUTEX_WAIT, taken);
    }
    shared.sleeping.store(0, std::memory_order_relaxed);
  }
}

PyObject* send(PyObject* self, PyObject* message) {
  Shared& shared = *reinterpret_cast<Link*>(self)->shared;
  char* bytes;
  Py_ssize_t size;
  if (PyBytes_AsStringAndSize(message, &bytes, &size) < 0) return nullptr;
  if (size_t(size) > kRoom) {
    PyErr_SetString(PyExc_ValueError, "message larger than a cell");
    return nullptr;
  }
  const uint32_t sent = shared.sent.load(std::memory_order_relaxed);
  if (sent - shared.taken.load(std::memory_order_acquire) == kCells) {
    PyErr_SetString(PyExc_RuntimeError, "no free cell");
    return nullptr;
  }
  Cell& cell = shared.cells[sent % kCells];
  cell.size = uint64_t(size);
  std::memcpy(cell.bytes, bytes, size_t(size));
  shared.sent.store(sent + 1, std::memory_order_seq_cst);
  if (shared.sleeping.load(std::memory_order_seq_cst)) futex(shared.sent, FUTEX_WAKE, 1);
  Py_RETURN_NONE;
}

PyObject* receive(PyObject* self, PyObject*) {
  Shared& shared = *reinterpret_cast<Link*>(self)->shared;
  const uint32_t taken = shared.taken.load(std::memory_order_relaxed);
  if (shared.sent.load(std::memory_order_acquire) == taken) {
    Py_BEGIN_ALLOW_THREADS;
    wait_beyond(shared, taken);
    Py_END_ALLOW_THREADS;
  }
  const Cell& cell = shared.cells[taken % kCells];
  PyObject* message = PyBytes_FromStringAndSize(cell.bytes, Py_ssize_t(cell.size));
  shared.taken.store(taken + 1, std::memory_order_release);
  return message;
}

PyObject* make(PyTypeObject* type, PyObject*, PyObject*) {
  void* memory =
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return PyErr_SetFromErrno(PyExc_OSError);
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) {
    munmap(memory, sizeof(Shared));
    return nullptr;
  }
  reinterpret_cast<Link*>(self)->shared = static_cast<Shared*>(memory);
  return self;
}

void unmake(PyObject* self) {
  munmap(reinterpret_cast<Link*>(self)->shared, sizeof(Shared));
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyMethodDef methods[] = {
    {"send", send, METH_O, "Put one bytes object into the ring."},
    {"receive", receive, METH_NOARGS, "Take the next bytes object, waiting for it."},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(unmake)},
    {Py_tp_methods, methods},
    {0, nullptr},
};

PyType_Spec spec = {"ring.Link", sizeof(Link), 0, Py_TPFLAGS_DEFAULT, slots};

PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "ring", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit_ring() {
  PyObject* self = PyModule_Create(&module);
  if (self == nullptr) return nullptr;
  PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr || PyModule_AddObject(self, "Link", type) < 0) {
    Py_XDECREF(type);
    Py_DECREF(self);
    return nullptr;
  }
  return self;
}
