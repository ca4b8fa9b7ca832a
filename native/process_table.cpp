#include "process_table.h"

#include <signal.h>
#include <string.h>

#include <algorithm>

namespace conveyor {

namespace {

// For the fatal-signal handler, which may use nothing but these and plain system calls.
std::atomic<ProcessTableSlot*> guarded_slot{nullptr};
std::atomic<ProcessTableHeader*> guarded_header{nullptr};
constexpr int kFatal[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT};
struct sigaction previous_action[NSIG];

void on_fatal_signal(int number, siginfo_t*, void*) {
  ProcessTableSlot* slot = guarded_slot.load(std::memory_order_relaxed);
  // In a forked child the pid differs: its end is not the actor's end.
  if (slot != nullptr && slot->pid.load(std::memory_order_relaxed) == uint32_t(::getpid())) {
    slot->status.signal.store(uint32_t(number), std::memory_order_relaxed);
    slot->condition.store(Condition::kDying, std::memory_order_release);
    ProcessTableHeader* header = guarded_header.load(std::memory_order_relaxed);
    if (header != nullptr) {  // or another thread leaves the session just now
      header->alarm.fetch_add(1, std::memory_order_seq_cst);
      futex_wake_all(&header->alarm);
    }
  }
  // Put back what was there and return: the fault happens again, now with its own consequence (a
  // core dump, or a handler that was there before us). abort() and kill() do not recur, so raise.
  ::sigaction(number, &previous_action[number], nullptr);
  ::raise(number);
}

}  // namespace

ProcessTable::ProcessTable(Fd fd, uint32_t slots, Use use) : fd_(std::move(fd)), count_(slots) {
  size_ = sizeof(ProcessTableHeader) + size_t(slots) * sizeof(ProcessTableSlot);
  char* base = use == Use::kLook ? map_to_look(fd_.get(), size_) : map_shared(fd_.get(), 0, size_);
  header_ = reinterpret_cast<ProcessTableHeader*>(base);
  slots_ = reinterpret_cast<ProcessTableSlot*>(base + sizeof(ProcessTableHeader));
  if (use == Use::kCreate) {
    header_->version = kProcessTableVersion;
    header_->slots = slots;
    header_->session = now_ns();
    header_->magic = kProcessTableMagic;
  }
  eventfds_.resize(slots);
}

ProcessTable::~ProcessTable() {
  for (uint32_t i = 0; i < slots(); ++i) forget_eventfd(i);
  // The mapping stays: the kernel writes the liveness futex when the thread that holds it ends.
  if (guarded_header.load(std::memory_order_relaxed) != header_) ::munmap(header_, size_);
}

std::shared_ptr<ProcessTable> ProcessTable::create(uint32_t slots) {
  Fd fd = make_memfd("conveyor-process-table", sizeof(ProcessTableHeader) + size_t(slots) * sizeof(ProcessTableSlot));
  return std::shared_ptr<ProcessTable>(new ProcessTable(std::move(fd), slots, Use::kCreate));
}

std::shared_ptr<ProcessTable> ProcessTable::attach(int fd) { return open(fd, Use::kAttach); }

std::shared_ptr<ProcessTable> ProcessTable::look(int fd) { return open(fd, Use::kLook); }

std::shared_ptr<ProcessTable> ProcessTable::open(int fd, Use use) {
  Fd own = dup_cloexec(fd);
  // Memory of another user may be looked at: memory that can shrink would be read to this process's death.
  if (const int seals = ::fcntl(own.get(), F_GET_SEALS); seals < 0 || (seals & F_SEAL_SHRINK) == 0)
    throw std::system_error(EPROTO, std::generic_category(), "a process table whose memory is not sealed");
  ProcessTableHeader head;
  if (::pread(own.get(), &head, sizeof head, 0) != ssize_t(sizeof head)) throw_errno("read process table");
  if (head.magic != kProcessTableMagic || head.version != kProcessTableVersion)
    throw std::system_error(EPROTO, std::generic_category(), "not a process table of this version of conveyor");
  if (head.slots > kMostSlots) throw std::system_error(EPROTO, std::generic_category(), "a process table of too many slots");
  if (::lseek(own.get(), 0, SEEK_END) != off_t(sizeof(ProcessTableHeader) + size_t(head.slots) * sizeof(ProcessTableSlot)))
    throw std::system_error(EPROTO, std::generic_category(), "a process table of another size than it says");
  return std::shared_ptr<ProcessTable>(new ProcessTable(std::move(own), head.slots, use));
}

void ProcessTable::set_eventfd(uint32_t index, int fd, uint32_t incarnation) {
  Fd copy = dup_cloexec(fd);
  std::lock_guard lock(eventfds_mutex_);
  Eventfd& known = eventfds_[index];
  if (known.fd >= 0) {
    if (known.incarnation > incarnation) return;
    ::close(known.fd);
  }
  known = {copy.release(), incarnation};
}

int ProcessTable::eventfd(uint32_t index) {
  std::lock_guard lock(eventfds_mutex_);
  return eventfds_[index].fd;
}

void ProcessTable::forget_eventfd(uint32_t index) {
  std::lock_guard lock(eventfds_mutex_);
  if (eventfds_[index].fd >= 0) ::close(eventfds_[index].fd);
  eventfds_[index].fd = -1;
}

bool ProcessTable::write_eventfd(uint32_t index) {
  std::lock_guard lock(eventfds_mutex_);
  const Eventfd& known = eventfds_[index];
  // We have seen the flag of a sleeper, which was written after its incarnation: this is its own, or that
  // of a later process, for which ours is as wrong. A former process's eventfd would wake nobody.
  if (known.fd < 0 || known.incarnation != slot(index)->incarnation.load(std::memory_order_relaxed)) return false;
  write_event(known.fd);
  return true;
}

void ProcessTable::notify_sleeper_in_poll(uint32_t index) {
  if (write_eventfd(index)) return;
  // Not a peer of ours, or not as we know it, so we cannot wake it ourselves: the driver's death watch
  // can. Should the driver be stopped, only those wait longer who are rung by a process that they have not
  // been introduced to.
  slot(index)->nudge.store(1, std::memory_order_seq_cst);
  header_->alarm.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(&header_->alarm);
}

void ProcessTable::close_fds() {
  for (uint32_t i = 0; i < used(); ++i) forget_eventfd(i);
  fd_.reset();
}

void ProcessTable::prepare(uint32_t index, const std::string& name, uint32_t incarnation) {
  ProcessTableSlot* s = slot(index);
  if (incarnation == 0) incarnation = s->incarnation.load(std::memory_order_relaxed) + 1;
  // What its former process has announced. The slot is nobody's until its condition says otherwise.
  for (uint32_t i = 0, n = std::min(s->hazards_used.load(std::memory_order_relaxed), kHazards); i < n; ++i) s->hazards[i].store(0, std::memory_order_relaxed);
  ::memset(static_cast<void*>(s), 0, offsetof(ProcessTableSlot, waits));
  s->waits.reset();
  s->incarnation.store(incarnation, std::memory_order_relaxed);
  if (header_->used.load(std::memory_order_relaxed) <= index) header_->used.store(index + 1, std::memory_order_release);
  ::strncpy(s->name, name.c_str(), sizeof s->name - 1);
  pthread_mutexattr_t attr;
  pthread_mutexattr_init(&attr);
  pthread_mutexattr_setpshared(&attr, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attr, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(&s->life, &attr);
  pthread_mutexattr_destroy(&attr);
  s->condition.store(Condition::kStarting, std::memory_order_release);
}

void ProcessTable::live(uint32_t index) {
  ProcessTableSlot* s = slot(index);
  s->pid.store(uint32_t(::getpid()), std::memory_order_relaxed);
  const int rc = pthread_mutex_lock(&s->life);
  if (rc != 0) throw std::system_error(rc, std::generic_category(), "liveness futex");
  // The death watch looks at the liveness futex from now on. First this, then the condition: whoever sees
  // this process alive may kill it at once, and must be able to rely on the watch.
  header_->alarm.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(&header_->alarm);
  // Not if it has been announced dead meanwhile: then the signal that ends it is on its way.
  Condition starting = Condition::kStarting;
  s->condition.compare_exchange_strong(starting, Condition::kAlive, std::memory_order_release, std::memory_order_relaxed);
}

void ProcessTable::guard_signals(uint32_t index) {
  guarded_header.store(header_, std::memory_order_relaxed);
  guarded_slot.store(slot(index), std::memory_order_release);
  // A stack overflow leaves no room for the handler on the stack it happened on.
  stack_t current;
  if (::sigaltstack(nullptr, &current) == 0 && (current.ss_flags & SS_DISABLE)) {
    static char alternate[16 * 1024];
    stack_t stack = {};
    stack.ss_sp = alternate;
    stack.ss_size = sizeof alternate;
    ::sigaltstack(&stack, nullptr);
  }
  struct sigaction action = {};
  action.sa_sigaction = on_fatal_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  for (int number : kFatal) {
    struct sigaction current;
    ::sigaction(number, nullptr, &current);
    if ((current.sa_flags & SA_SIGINFO) && current.sa_sigaction == on_fatal_signal) continue;  // not to be put back
    previous_action[number] = current;
    ::sigaction(number, &action, nullptr);
  }
}

void ProcessTable::retire(uint32_t index) {
  announce_death(index);
  ProcessTableSlot* expected = slot(index);
  // Its fatal signals are nobody's concern here any more; the mapping may go.
  if (guarded_slot.compare_exchange_strong(expected, nullptr, std::memory_order_acq_rel)) guarded_header.store(nullptr, std::memory_order_release);
  const int rc = pthread_mutex_unlock(&slot(index)->life);
  if (rc != 0) throw std::system_error(rc, std::generic_category(), "liveness futex");
}

void ProcessTable::nudge(uint32_t index) {
  // Without a descriptor (the process is being started or buried) there is nobody left to ask.
  if (strike(&slot(index)->doorbell, kAttentionBit)) write_eventfd(index);
}

bool ProcessTable::find_starving() const {
  for (uint32_t i = 0, n = used(); i < n; ++i)
    if (starving(i) != 0) return true;
  return false;
}

// Dekker with Arena::run and Leftovers::wait, which look at the header's flag behind their futex words. The flag goes
// down when nobody starves; who has begun to meanwhile is found by the second look, since its own flag is up before.
void ProcessTable::starve(uint32_t index, uint32_t what) {
  const uint32_t before = slot(index)->starving.exchange(what, std::memory_order_seq_cst);
  // Whoever raises it again for another looks whether that one is still there.
  while (what == 0) {
    if (find_starving()) return;
    header_->starving.store(0, std::memory_order_seq_cst);
    if (!find_starving()) return;
    header_->starving.store(1, std::memory_order_seq_cst);
    wake_starved();
  }
  header_->starving.store(1, std::memory_order_seq_cst);
  wake_starved();
  if (before != what) notify_starving();  // who hopes for this process may hope in vain
}

// Who has memory, or results that were dropped, looks at the flag.
void ProcessTable::wake_starved() {
  for (uint32_t i = 0, n = used(); i < n; ++i) {
    ProcessTableSlot* s = slot(i);
    if (s->memory.load(std::memory_order_relaxed) != 0) s->returns.wake();
    if (s->leftovers.wanted.load(std::memory_order_seq_cst) != 0) s->leftovers.wake();
  }
}

void ProcessTable::notify_starving() {
  if (!any_starving()) return;
  for (uint32_t i = 0, n = used(); i < n; ++i)
    if (starving(i) != 0) notify(i, kAttentionBit);
}

std::vector<ProcessTable::Requested> ProcessTable::ask_for_memory(uint32_t index) {
  std::vector<Requested> requested;
  for (uint32_t i = 0, n = used(); i < n; ++i) {
    if (i == index || slot(i)->memory.load(std::memory_order_relaxed) == 0) continue;
    requested.push_back({i, slot(i)->returns.ask()});
  }
  return requested;
}

void ProcessTable::still_requested(std::vector<Requested>& who) const {
  std::erase_if(who, [this](const Requested& one) {
    return !slot(one.slot)->returns.pending(one.request_id) || slot(one.slot)->memory.load(std::memory_order_seq_cst) == 0;
  });
}

void ProcessTable::ask_for_leftovers(uint32_t index, std::vector<Requested>& requested) {
  ProcessTableSlot* s = slot(index);
  if (s->leftovers.wanted.load(std::memory_order_seq_cst) == 0 || s->condition.load(std::memory_order_seq_cst) != Condition::kAlive) return;
  requested.push_back({index, s->leftovers.ask()});
  stir(s->doorbell);  // it may watch that
}

void ProcessTable::still_requested_for_leftovers(std::vector<Requested>& who) const {
  std::erase_if(who, [this](const Requested& one) {
    const ProcessTableSlot* s = slot(one.slot);
    return !s->leftovers.pending(one.request_id) || s->leftovers.wanted.load(std::memory_order_seq_cst) == 0 ||
           s->condition.load(std::memory_order_seq_cst) != Condition::kAlive;
  });
}

void ProcessTable::ask_for_pins(uint32_t index, std::vector<Requested>& requested) {
  ProcessTableSlot* s = slot(index);
  if (s->pins.wanted.load(std::memory_order_seq_cst) == 0 || s->condition.load(std::memory_order_seq_cst) != Condition::kAlive) return;
  requested.push_back({index, s->pins.ask()});
}

void ProcessTable::still_requested_for_pins(std::vector<Requested>& who) const {
  std::erase_if(who, [this](const Requested& one) {
    const ProcessTableSlot* s = slot(one.slot);
    return !s->pins.pending(one.request_id) || s->pins.wanted.load(std::memory_order_seq_cst) == 0 ||
           s->condition.load(std::memory_order_seq_cst) != Condition::kAlive;
  });
}

bool ProcessTable::announce_death(uint32_t index) {
  ProcessTableSlot* s = slot(index);
  if (s->condition.exchange(Condition::kDead, std::memory_order_seq_cst) == Condition::kDead) return false;
  s->died.store(header_->deaths.fetch_add(1, std::memory_order_seq_cst) + 1, std::memory_order_release);
  for (uint32_t i = 0, n = used(); i < n; ++i) {
    const Condition c = slot(i)->condition.load(std::memory_order_acquire);
    // Also for what the dead has published, if it died before it could wake anybody.
    if (c != Condition::kAlive && c != Condition::kStarting) continue;
    notify(i, kAttentionBit);
    slot(i)->returns.note_any();  // the dead one's leases have ended
  }
  if (s->starving.load(std::memory_order_seq_cst) != 0) starve(index, 0);
  return true;
}

}  // namespace conveyor
