// The thread that joins this host's rings to those of others: one for each host. It never takes the GIL, and is never
// waited for by it. It sleeps on the doorbells of the proxies and on its sockets; there is no timer but for connections that
// are silent or gone.
#pragma once

#include <sys/eventfd.h>

#include <algorithm>
#include <bit>
#include <bitset>
#include <condition_variable>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "../arena/arena.h"
#include "peer.h"

namespace conveyor::net {

// The processes of other hosts, as this host's have them: slots of its process table whose doorbells are the pump's. All doorbells of a
// pump share one eventfd. The pump's thread holds the liveness futexes, so where its process dies, all of them have.
struct Proxy {
  uint32_t slot;
  uint32_t incarnation;
  uint32_t host;
  std::shared_ptr<Arena> arena;  // where what the process sends comes to lie here
  Doorbell* doorbell;
  uint32_t seen;
};

class Proxies {
 public:
  explicit Proxies(std::shared_ptr<ProcessTable> process_table) : process_table_(std::move(process_table)), event_(own(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK))) {
    if (event_.get() < 0) throw_errno("eventfd");
  }
  int eventfd() const { return event_.get(); }

  // In the pump's thread, as all that follows.
  void add(uint32_t slot, uint32_t incarnation, uint32_t host, const std::string& name, std::shared_ptr<Arena> arena) {
    if (slot >= process_table_->slots() || find(slot) != nullptr) throw std::system_error(EINVAL, std::generic_category(), "proxy");
    all_.reserve(all_.size() + 1);
    // The host that numbers the processes has prepared the slot before it was known where the process would be, and
    // may have sent to it: that would be lost, and its readers be taken for dead meanwhile.
    const ProcessTableSlot* const s = process_table_->slot(slot);
    if (s->incarnation.load(std::memory_order_relaxed) != incarnation || s->condition.load(std::memory_order_acquire) != Condition::kStarting)
      process_table_->prepare(slot, name, incarnation);
    process_table_->slot(slot)->is_remote.store(host + 1, std::memory_order_relaxed);
    process_table_->set_eventfd(slot, event_.get(), process_table_->slot(slot)->incarnation.load(std::memory_order_relaxed));
    process_table_->live(slot);
    Doorbell* const doorbell = &process_table_->slot(slot)->doorbell;
    all_.push_back({slot, process_table_->slot(slot)->incarnation.load(std::memory_order_relaxed), host, std::move(arena), doorbell, doorbell->count.load()});
  }
  // It is dead, if it was not before.
  void remove(uint32_t slot) {
    Proxy* const proxy = find(slot);
    if (proxy == nullptr) return;
    process_table_->announce_death(slot);
    ::pthread_mutex_unlock(&process_table_->slot(slot)->life);
    process_table_->forget_eventfd(slot);
    *proxy = std::move(all_.back());
    all_.pop_back();
  }
  Proxy* find(uint32_t slot) {
    for (Proxy& p : all_)
      if (p.slot == slot) return &p;
    return nullptr;
  }
  const Proxy* find(uint32_t slot) const { return const_cast<Proxies*>(this)->find(slot); }
  const std::vector<Proxy>& all() const { return all_; }

  bool moved() const {
    for (const Proxy& p : all_)
      if (p.doorbell->count.load(std::memory_order_seq_cst) != p.seen) return true;
    return false;
  }
  // Calls `take(proxy, bit)` for what was rung since. The count is read first: what was rung before it is found.
  template <class Take>
  bool take(const Take& take) {
    bool any = false;
    for (Proxy& p : all_) {
      const uint32_t count = p.doorbell->count.load(std::memory_order_seq_cst);
      if (count == p.seen) continue;
      p.seen = count;
      any = true;
      for (size_t i = 0; i < kDoorbellWords; ++i) {
        if (p.doorbell->ready[i].load(std::memory_order_relaxed) == 0) continue;
        for (uint64_t bits = p.doorbell->ready[i].exchange(0, std::memory_order_acquire); bits != 0; bits &= bits - 1)
          take(std::as_const(p), uint32_t(i * 64) + uint32_t(std::countr_zero(bits)));
      }
    }
    return any;
  }
  // Before the thread sleeps on the eventfd: true if it may. Dekker with ProcessTable::strike, for each doorbell: the flag, then
  // the count. Afterwards disarm(), which takes the event down.
  bool arm() {
    for (Proxy& p : all_) p.doorbell->armed.store(1, std::memory_order_seq_cst);
    return !moved();
  }
  void disarm() {
    for (Proxy& p : all_) p.doorbell->armed.store(0, std::memory_order_relaxed);
  }
  void drain() {
    uint64_t n;
    while (::read(event_.get(), &n, sizeof n) < 0 && errno == EINTR) {
    }
  }

 private:
  const std::shared_ptr<ProcessTable> process_table_;
  const Fd event_;
  std::vector<Proxy> all_;
};

struct Event {
  enum Kind { kConnected = 1, kDisconnected = 2, kLost = 3 } kind;
  uint32_t host;
  std::string reason;
};

// Somebody has to give up what a frame claims for a process: see claims.h.
struct Left {
  std::string header;
  uint32_t slot, incarnation;
};

// So many frames of a ring are to be on a host.
struct Due {
  uint32_t host;
  uint64_t segment;
  uint32_t ring;
  uint64_t frames;
};

uint64_t random_number();  // that nobody can guess

class HostPump final : private Hub {
 public:
  static constexpr uint64_t kWindowNs = 1'000'000'000;
  HostPump(std::shared_ptr<ProcessTable> process_table, uint32_t host, uint64_t window_ns = kWindowNs, uint64_t spin_ns = 100'000);
  ~HostPump();
  HostPump(const HostPump&) = delete;
  HostPump& operator=(const HostPump&) = delete;

  // Any thread may call these; each returns when the pump has done it, and throws what it met. After stop() all but
  // stop() throw ESHUTDOWN, and in a forked child EPERM. A pump whose thread has no memory to go on with gives all hosts
  // up, and tells it (events()); afterwards they throw ESHUTDOWN, but those that take something away, which is gone.
  void add_proxy(uint32_t slot, uint32_t incarnation, uint32_t host, const std::string& name, std::shared_ptr<Arena> arena);
  void remove_proxy(uint32_t slot);
  void mirror(uint64_t id, std::shared_ptr<Segment> segment, std::vector<RingSpec> rings, std::vector<LimitsSpec> limits);
  void unmirror(uint64_t id);
  void connect(Fd fd, uint32_t host);
  // As if the connection had broken; for tests, and where it is known from elsewhere.
  void disconnect(uint32_t host, const std::string& reason);
  void give_up(uint32_t host, const std::string& reason);
  PeerCounts counts(uint32_t host);
  bool connected(uint32_t host);
  // For how long this process has not run, though it was to: now, or the last time within these last nanoseconds.
  uint64_t overslept(uint64_t within_ns);
  // Ask that host's clock so often; what has come of it when the time is over, at most.
  std::vector<ClockSample> ask_clock(uint32_t host, uint32_t times, uint64_t timeout_ns);
  // What other hosts are to have of all that was published here until now; and whether this one has that of another.
  std::vector<Due> due();
  bool has(uint32_t host, const std::vector<Due>& frames);
  // Have `number` be among come(), once, when this host has these frames of another one, or nothing of that one comes here
  // any more. It is told nowhere where all hosts are given up, or the pump is stopped.
  void tell_when_come(uint32_t host, std::vector<Due> frames, uint64_t number);
  void stop();

  // Of all doorbells of proxies: every process that rings one needs it (ProcessTable::set_eventfd).
  int eventfd() const { return proxies_.eventfd(); }
  // Becomes readable when there are events, or there is something of the others.
  int notice_fd() const { return notice_.get(); }
  std::list<Event> events();
  // To be asked behind events(): what comes later makes notice_fd() readable again.
  std::list<Left> left();
  std::list<uint64_t> come();
  // These could not be told: they come first the next time. Needs no memory.
  void untold(std::list<Event>&& events) noexcept;
  void untold(std::list<Left>&& left) noexcept;
  void untold(std::list<uint64_t>&& come) noexcept;

 private:
  uint32_t host_of(uint32_t slot) const override;
  std::shared_ptr<Arena> arena_of(uint32_t slot) const override;
  Unclaimed unclaimed() override;
  std::shared_ptr<Lent> lent(uint32_t host) override { return peer(host).lent(); }
  std::shared_ptr<Returning> returning(uint32_t host) override { return peer(host).returning(); }
  const std::shared_ptr<ProcessTable>& process_table() const override { return process_table_; }
  uint32_t self() const override { return self_; }
  uint64_t instance() const override { return instance_; }
  Mirror* mirror(uint64_t id) override;
  std::vector<Mirror*> mirrors_of(uint32_t host) override;
  void reconnect(uint32_t host) noexcept override;
  void tell_all(Mirror& mirror) override;
  const std::vector<Death>& deaths() const override { return deaths_; }
  void died(uint32_t host, const Death& death) override;
  void unwatch(uint32_t host) noexcept override;

  void call(const std::function<void()>& what);
  // The same of what there is no more where the pump has failed.
  void take_away(const std::function<void()>& what);
  // With the lock: throws ESHUTDOWN.
  void check_there() const;
  Peer& peer(uint32_t host);
  // This host has that segment no more.
  void leave(Mirror& mirror) noexcept;
  void run() noexcept;
  void work();
  // What the thread has met it cannot go on with. This needs no memory.
  void fail(const char* why) noexcept;
  bool turn();
  bool obey();
  void rung(const Proxy& proxy, uint32_t bit);
  void see_deaths();
  void see_awaited() noexcept;
  void note(Event::Kind kind, uint32_t host, const std::string& reason = {});
  // At the latest. What was due before stays so: by that the pump sees that it is late itself.
  void tick_by(uint64_t ns) { next_tick_ = next_tick_ == 0 ? ns : std::min(next_tick_, ns); }
  void watch(Peer& peer);
  void bury(Peer& peer);
  void sleep();

  const std::shared_ptr<ProcessTable> process_table_;
  const uint32_t self_;
  const uint64_t window_ns_, spin_ns_, instance_;
  const Fd notice_, wake_, epoll_;
  const std::shared_ptr<const Fd> returned_;  // what was lent to this host is needed no more
  const uint64_t fork_ = fork_generation.load();

  // The thread's own.
  Proxies proxies_;
  std::map<uint64_t, std::unique_ptr<Mirror>> mirrors_;
  std::map<std::pair<uint32_t, uint32_t>, std::set<Mirror*>> by_doorbell_;
  struct Known {
    std::unique_ptr<Peer> peer;
    int watched = -1;
    bool for_room = false;
    Peer::State state = Peer::State::kNew;
    bool has_handshake = false;
    uint64_t clock_answers = 0, connections = 0;
  };
  std::map<uint32_t, Known> peers_;
  // What is to be told when it has come: frames that may still be missing, and under which number.
  struct Awaited {
    uint32_t host;
    std::vector<Due> frames;
    std::list<uint64_t> number;  // a list of one, which is told without a need of memory
  };
  std::list<Awaited> awaited_;
  std::vector<Death> deaths_;
  uint32_t deaths_seen_;
  uint64_t next_tick_ = 0;  // when it is due to look at the clock for the peers; 0: never
  uint64_t late_ns_ = 0, late_at_ = 0;  // it looked so much too late last, and when that was

  ForkMutex mutex_;
  std::condition_variable_any done_;
  std::vector<std::function<void()>> orders_;
  std::atomic<bool> ordered_{false};
  std::list<Event> events_;
  std::list<Left> left_;
  std::list<uint64_t> come_;
  std::map<uint32_t, uint64_t> clock_answers_;  // by host, for who waits for some
  bool stop_ = false, stopped_ = false;
  char failed_[128] = {};              // why the thread has given all hosts up
  std::bitset<kMostHosts> given_up_;   // of these it has not been told yet
  std::thread thread_;
};

}  // namespace conveyor::net
