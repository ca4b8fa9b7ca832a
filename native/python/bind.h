// What the bindings share: casters of arguments, and more. Each file binds one group of classes; module.cpp puts them
// together.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "platform.h"
#include "ring.h"

// Arguments of the standard library's types. nanobind's own casters of them are noexcept: where they find no
// memory they end the process. These throw, which nanobind's dispatcher makes an error of the call.
NAMESPACE_BEGIN(NB_NAMESPACE)
NAMESPACE_BEGIN(detail)

template <>
struct type_caster<std::string> {
  NB_TYPE_CASTER(std::string, const_name("str"))

  bool from_python(handle from, uint32_t, cleanup_list*) {
    if (!PyUnicode_Check(from.ptr())) return false;
    Py_ssize_t size;
    const char* text = PyUnicode_AsUTF8AndSize(from.ptr(), &size);
    if (text == nullptr) throw python_error();
    value.assign(text, size_t(size));
    return true;
  }

  static handle from_cpp(const std::string& text, rv_policy, cleanup_list*) noexcept {
    return PyUnicode_FromStringAndSize(text.data(), Py_ssize_t(text.size()));
  }
};

template <typename T>
struct type_caster<std::vector<T>> {
  using Item = make_caster<T>;
  NB_TYPE_CASTER(std::vector<T>, io_name("collections.abc.Sequence", "list") + const_name("[") + Item::Name + const_name("]"))

  bool from_python(handle from, uint32_t flags, cleanup_list* cleanup) {
    if (!PySequence_Check(from.ptr()) || PyUnicode_Check(from.ptr()) || PyBytes_Check(from.ptr())) return false;
    const object all = steal(PySequence_Fast(from.ptr(), "conveyor: a sequence that cannot be read"));
    if (!all.is_valid()) throw python_error();
    const size_t size = size_t(PySequence_Fast_GET_SIZE(all.ptr()));
    PyObject** items = PySequence_Fast_ITEMS(all.ptr());
    value.reserve(size);
    for (size_t i = 0; i < size; ++i) {
      Item item;
      if (!item.from_python(items[i], flags_for_local_caster<T>(flags), cleanup) || !item.template can_cast<T>()) return false;
      value.push_back(item.operator cast_t<T>());
    }
    return true;
  }
};

template <typename A, typename B>
struct type_caster<std::pair<A, B>> {
  using Value = std::pair<A, B>;
  template <typename T>
  using Cast = Value;
  static constexpr auto Name = const_name("tuple[") + concat(make_caster<A>::Name, make_caster<B>::Name) + const_name("]");

  bool from_python(handle from, uint32_t flags, cleanup_list* cleanup) {
    if (!PyTuple_Check(from.ptr()) || PyTuple_GET_SIZE(from.ptr()) != 2) return false;
    return first.from_python(PyTuple_GET_ITEM(from.ptr(), 0), flags_for_local_caster<A>(flags), cleanup) &&
           second.from_python(PyTuple_GET_ITEM(from.ptr(), 1), flags_for_local_caster<B>(flags), cleanup);
  }

  template <typename T>
  bool can_cast() const noexcept {
    return first.template can_cast<A>() && second.template can_cast<B>();
  }

  explicit operator Value() { return Value(first.operator cast_t<A>(), second.operator cast_t<B>()); }

  make_caster<A> first;
  make_caster<B> second;
};

// Shares an object with Python. Of a class that is Shareable, what C++ holds has nothing to do with Python: any thread
// may let go of it, with the GIL or without. What C++ holds of other classes keeps the Python object.
template <typename T>
struct type_caster<std::shared_ptr<T>> {
  static constexpr bool IsClass = true;
  using Object = make_caster<T>;
  NB_TYPE_CASTER(std::shared_ptr<T>, Object::Name)

  struct LetGo {
    void operator()(void*) noexcept {
      if (cleanup_guard guard{}) Py_DECREF(object);
    }
    PyObject* object;
  };

  bool from_python(handle from, uint32_t flags, cleanup_list* cleanup) {
    Object caster;
    if (!caster.from_python(from, flags & ~uint32_t(cast_flags::convert), cleanup)) return false;
    T* object = caster.operator T*();
    if (object == nullptr) return true;  // None
    if constexpr (std::is_base_of_v<conveyor::Shareable<T>, T>)
      value = object->owner();  // throws if Python has made it in its own memory
    else  // without memory the constructor calls the deleter itself
      value = std::shared_ptr<T>(object, LetGo{from.inc_ref().ptr()});
    return true;
  }

  static handle from_cpp(const std::shared_ptr<T>& shared, rv_policy, cleanup_list*) {
    auto keeper = std::make_unique<std::shared_ptr<T>>(shared);
    if (handle known = find(shared.get()).release()) return known;
    object made = cast(shared.get(), rv_policy::reference);
    keep_alive_cb(made, keeper.release(), [](void* p) noexcept { delete static_cast<std::shared_ptr<T>*>(p); });
    return made.release();
  }
};

NAMESPACE_END(detail)
NAMESPACE_END(NB_NAMESPACE)

namespace conveyor {

namespace nb = nanobind;
using namespace nb::literals;

void bind_process_table(nb::module_& m);
void bind_memory(nb::module_& m);
void bind_channel(nb::module_& m);
void bind_graph(nb::module_& m);
void bind_fast_path(nb::module_& m);
void bind_locks(nb::module_& m);
void bind_finalizers(nb::module_& m);
void bind_collective(nb::module_& m);
void bind_direct(nb::module_& m);
void bind_net(nb::module_& m);

// What stands for "nothing": a value may be None. Never destroyed: it may be asked for while the interpreter ends.
extern nb::object* empty;

// The time of the monotonic clock at which a timeout in seconds is over; 0: never (None).
uint64_t deadline_after(nb::handle timeout);

// A kind of frame that Python has named; throws ValueError if there is none.
Kind kind_of(uint16_t kind);

// Which thread has a lock of Python's, noted by whoever takes it: the lock itself does not know. A type in plain C, as is
// TimedLock (bind_locks.cpp); the GIL guards it.
struct Holder {
  PyObject_HEAD
  PyObject* lock;
  unsigned long thread;  // as PyThread_get_thread_ident() says; 0: nobody has the lock, or who has it said nothing
};

// Throws for anything else.
Holder* as_holder(nb::handle object);

}  // namespace conveyor
