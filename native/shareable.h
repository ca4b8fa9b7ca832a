// Objects that have several owners, in C++ and in Python.
#pragma once

#include <memory>

namespace conveyor {

// Made by std::make_shared, here and for Python: so whoever has a reference can be an owner of its own, and any
// thread may be the last. Not by the names that std::enable_shared_from_this gives: nanobind looks for them, and
// keeps such objects alive in a way that ends the process where there is no memory.
template <class T>
class Shareable : public std::enable_shared_from_this<T> {
 public:
  std::shared_ptr<T> owner() { return std::enable_shared_from_this<T>::shared_from_this(); }

 private:
  using std::enable_shared_from_this<T>::shared_from_this;
  using std::enable_shared_from_this<T>::weak_from_this;
};

}  // namespace conveyor
