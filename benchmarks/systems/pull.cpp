// The floor of a fetch: the least with which one process gets bytes that lie in another one's private memory.
//
// A Pull is made before a fork; the child serves what it has, the parent asks for it. Three ways:
//   staged  the child copies all of it to shared memory, where the parent uses it
//   into    the child does so piece by piece, while the parent copies the pieces to memory of its own
//   read    the child is not asked: the parent reads where it had said its bytes are (process_vm_readv)
// As in ring.cpp, who waits spins for a fixed budget, and then sleeps. There are no leases, errors or
// checks for dead peers.

#include <Python.h>

#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t kSpinNanoseconds = 50'000;
constexpr size_t kPage = 4096;
constexpr size_t kPiece = 256 << 10;
constexpr uint32_t kPieces = 4;          // that lie in shared memory at a time
constexpr size_t kPastCaches = 256 << 10;  // from here on copies go past the caches

enum class Order : uint32_t { stage, pieces, fill, pause };

// A count that one side raises and the other waits for.
struct Count {
  alignas(128) std::atomic<uint32_t> value;
  std::atomic<uint32_t> sleeping;
};

struct Shared {
  Count orders, replies, filled, emptied;
  Order order;
  int fill;
  pid_t pid;
};

struct Pull {
  PyObject_HEAD
  Shared* shared;
  uint64_t* addresses;  // of the child's tensors
  char* room;
  size_t bytes, count, mapped;
};

int64_t now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

void futex(std::atomic<uint32_t>& word, int operation, uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, nullptr, nullptr, 0);
}

void wait_until(Count& count, uint32_t least) {
  const auto there = [&] { return int32_t(count.value.load(std::memory_order_seq_cst) - least) >= 0; };
  const int64_t give_up = now() + kSpinNanoseconds;
  while (!there()) {
    sched_yield();
    if (now() < give_up) continue;
    // Announce, then look again, as in ring.cpp.
    count.sleeping.store(1, std::memory_order_seq_cst);
    const uint32_t seen = count.value.load(std::memory_order_seq_cst);
    if (int32_t(seen - least) < 0) futex(count.value, FUTEX_WAIT, seen);
    count.sleeping.store(0, std::memory_order_relaxed);
  }
}

uint32_t raise(Count& count) {
  const uint32_t raised = count.value.fetch_add(1, std::memory_order_seq_cst) + 1;
  if (count.sleeping.load(std::memory_order_seq_cst)) futex(count.value, FUTEX_WAKE, 1);
  return raised;
}

// What is large has left the caches before it is used; and a line that is dirty in another core's costs more
// than one in memory.
void copy(char* to, const char* from, size_t bytes, size_t whole) {
#if defined(__SSE2__)
  if (whole >= kPastCaches) {
    const size_t head = std::min(bytes, size_t(-reinterpret_cast<uintptr_t>(to) & 15));
    std::memcpy(to, from, head);
    to += head, from += head, bytes -= head;
    for (; bytes >= 64; to += 64, from += 64, bytes -= 64) {
      for (int i = 0; i < 4; ++i) {
        const __m128i part = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + i);
        _mm_stream_si128(reinterpret_cast<__m128i*>(to) + i, part);
      }
    }
    _mm_sfence();
  }
#endif
  std::memcpy(to, from, bytes);
}

template <class Do>
void each_piece(const Pull& pull, Do todo) {
  for (size_t i = 0; i < pull.count; ++i)
    for (size_t at = 0; at < pull.bytes; at += kPiece) todo(i, at, std::min(kPiece, pull.bytes - at));
}

char* slot(const Pull& pull, uint32_t piece) { return pull.room + piece % kPieces * kPiece; }

void serve_orders(const Pull& pull) {
  Shared& shared = *pull.shared;
  const auto tensor = [&](size_t i) { return reinterpret_cast<char*>(pull.addresses[i]); };
  const size_t whole = pull.bytes * pull.count;
  for (;;) {
    wait_until(shared.orders, shared.replies.value.load(std::memory_order_relaxed) + 1);
    const Order order = shared.order;
    switch (order) {
      case Order::stage:
        for (size_t i = 0; i < pull.count; ++i)
          copy(pull.room + i * pull.bytes, tensor(i), pull.bytes, whole);
        break;
      case Order::pieces:
        each_piece(pull, [&](size_t i, size_t at, size_t bytes) {
          const uint32_t piece = shared.filled.value.load(std::memory_order_relaxed);
          wait_until(shared.emptied, piece + 1 - kPieces);
          copy(slot(pull, piece), tensor(i) + at, bytes, whole);
          raise(shared.filled);
        });
        break;
      case Order::fill:
        for (size_t i = 0; i < pull.count; ++i) std::memset(tensor(i), shared.fill, pull.bytes);
        break;
      case Order::pause: break;
    }
    raise(shared.replies);
    if (order == Order::pause) return;
  }
}

uint32_t ask(Pull& pull, Order order, int fill = 0) {
  pull.shared->order = order;
  pull.shared->fill = fill;
  return raise(pull.shared->orders);
}

bool read_all(const Pull& pull, char* to) {
  const size_t total = pull.bytes * pull.count;
  for (size_t done = 0; done < total;) {  // a call moves at most 2 GiB, of IOV_MAX parts
    iovec local{to + done, total - done}, remote[IOV_MAX];
    size_t parts = 0;
    size_t skip = done % pull.bytes;
    for (size_t i = done / pull.bytes; i < pull.count && parts < IOV_MAX; ++i, skip = 0)
      remote[parts++] = {reinterpret_cast<char*>(pull.addresses[i]) + skip, pull.bytes - skip};
    const ssize_t got = process_vm_readv(pull.shared->pid, &local, 1, remote, parts, 0);
    if (got <= 0) return false;
    done += size_t(got);
  }
  return true;
}

// --- Python ---

Pull& of(PyObject* self) { return *reinterpret_cast<Pull*>(self); }

PyObject* serve(PyObject* self, PyObject* addresses) {
  Pull& pull = of(self);
  for (size_t i = 0; i < pull.count; ++i) {
    PyObject* address = PyList_GetItem(addresses, Py_ssize_t(i));
    if (address == nullptr) return nullptr;
    pull.addresses[i] = PyLong_AsUnsignedLongLong(address);
    if (PyErr_Occurred()) return nullptr;
  }
  pull.shared->pid = getpid();
  Py_BEGIN_ALLOW_THREADS;
  serve_orders(pull);
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

PyObject* order(Pull& pull, Order order, int fill = 0) {
  Py_BEGIN_ALLOW_THREADS;
  wait_until(pull.shared->replies, ask(pull, order, fill));
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

PyObject* stage(PyObject* self, PyObject*) { return order(of(self), Order::stage); }

PyObject* pause(PyObject* self, PyObject*) { return order(of(self), Order::pause); }

PyObject* fill(PyObject* self, PyObject* number) {
  const long value = PyLong_AsLong(number);
  if (value == -1 && PyErr_Occurred()) return nullptr;
  return order(of(self), Order::fill, int(value));
}

PyObject* into(PyObject* self, PyObject* address) {
  Pull& pull = of(self);
  char* to = static_cast<char*>(PyLong_AsVoidPtr(address));
  if (to == nullptr) return nullptr;
  Py_BEGIN_ALLOW_THREADS;
  Shared& shared = *pull.shared;
  const uint32_t reply = ask(pull, Order::pieces);
  each_piece(pull, [&](size_t, size_t, size_t bytes) {
    const uint32_t piece = shared.emptied.value.load(std::memory_order_relaxed);
    wait_until(shared.filled, piece + 1);
    copy(to, slot(pull, piece), bytes, pull.bytes * pull.count);
    to += bytes;
    raise(shared.emptied);
  });
  wait_until(shared.replies, reply);
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

PyObject* read(PyObject* self, PyObject* address) {
  char* to = static_cast<char*>(PyLong_AsVoidPtr(address));
  if (to == nullptr) return nullptr;
  bool good;
  Py_BEGIN_ALLOW_THREADS;
  good = read_all(of(self), to);
  Py_END_ALLOW_THREADS;
  if (!good) return PyErr_SetFromErrno(PyExc_OSError);
  Py_RETURN_NONE;
}

PyObject* staged(PyObject* self, PyObject*) {
  const Pull& pull = of(self);
  return PyMemoryView_FromMemory(pull.room, Py_ssize_t(pull.bytes * pull.count), PyBUF_WRITE);
}

PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
  Py_ssize_t bytes, count;
  if (!PyArg_ParseTuple(args, "nn", &bytes, &count)) return nullptr;
  const auto pages = [](size_t n) { return (n + kPage - 1) / kPage * kPage; };
  const size_t head = pages(sizeof(Shared)), places = pages(size_t(count) * sizeof(uint64_t));
  const size_t mapped = head + places + std::max(size_t(bytes) * size_t(count), kPieces * kPiece);
  void* memory = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return PyErr_SetFromErrno(PyExc_OSError);
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) {
    munmap(memory, mapped);
    return nullptr;
  }
  char* start = static_cast<char*>(memory);
  Pull& pull = of(self);
  pull.shared = reinterpret_cast<Shared*>(start);
  pull.addresses = reinterpret_cast<uint64_t*>(start + head);
  pull.room = start + head + places;
  pull.bytes = size_t(bytes);
  pull.count = size_t(count);
  pull.mapped = mapped;
  return self;
}

void unmake(PyObject* self) {
  munmap(of(self).shared, of(self).mapped);
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyMethodDef methods[] = {
    {"serve", serve, METH_O, "In the child: serve tensors at these addresses until told to pause."},
    {"fill", fill, METH_O, "Have the child write all of its tensors anew, with that byte."},
    {"stage", stage, METH_NOARGS, "Have them copied to shared memory."},
    {"staged", staged, METH_NOARGS, "That memory. It must not be used longer than this."},
    {"into", into, METH_O, "Have them copied, one behind the other, to that address."},
    {"read", read, METH_O, "Read them to that address, without the child."},
    {"pause", pause, METH_NOARGS, "Have the child's serve() return."},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(unmake)},
    {Py_tp_methods, methods},
    {0, nullptr},
};

PyType_Spec spec = {"pull.Pull", sizeof(Pull), 0, Py_TPFLAGS_DEFAULT, slots};

PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "pull", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit_pull() {
  PyObject* self = PyModule_Create(&module);
  if (self == nullptr) return nullptr;
  PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr || PyModule_AddObject(self, "Pull", type) < 0) {
    Py_XDECREF(type);
    Py_DECREF(self);
    return nullptr;
  }
  return self;
}
