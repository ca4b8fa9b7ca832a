// A mutex that a fork finds free. A child that is forked while another thread of its parent holds a
// mutex would wait for ever: it has the mutex, and not the thread.
#pragma once

#include <pthread.h>

#include <mutex>
#include <system_error>

#include "platform.h"

namespace conveyor {

// All of them are held across fork(), the newest first: who holds one may take an older one, and never a
// newer one.
class ForkMutex {
 public:
  ForkMutex() {
    install_fork_handlers();  // first, so that its lock is taken after these: who has one of them may take it
    static const int rc = ::pthread_atfork(take_all, give_all_back, give_all_back);
    if (rc != 0) throw std::system_error(rc, std::generic_category(), "pthread_atfork");
    std::lock_guard lock(list());
    next_ = first_;
    if (next_ != nullptr) next_->previous_ = this;
    first_ = this;
  }
  ~ForkMutex() {
    std::lock_guard lock(list());
    if (previous_ != nullptr) previous_->next_ = next_;
    if (next_ != nullptr) next_->previous_ = previous_;
    if (first_ == this) first_ = next_;
  }
  ForkMutex(const ForkMutex&) = delete;
  ForkMutex& operator=(const ForkMutex&) = delete;

  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  static std::mutex& list() {
    // Never destroyed: objects that have such a mutex may outlive static destructors.
    static std::mutex* mutex = new std::mutex;
    return *mutex;
  }
  static void take_all() {
    list().lock();
    for (ForkMutex* m = first_; m != nullptr; m = m->next_) m->lock();
  }
  static void give_all_back() {
    for (ForkMutex* m = first_; m != nullptr; m = m->next_) m->unlock();
    list().unlock();
  }

  static inline ForkMutex* first_ = nullptr;
  ForkMutex* next_ = nullptr;
  ForkMutex* previous_ = nullptr;
  std::mutex mutex_;
};

}  // namespace conveyor
