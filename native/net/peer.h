// Another host, as this one's pump knows it: the connection to it, if there is one, and what is to go over it. The pump's
// thread alone uses it.
#pragma once

#include <deque>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <tuple>

#include "mirror.h"
#include "wire.h"

namespace conveyor::net {

// What a peer needs of its pump.
class Hub : public Whereabouts {
 public:
  virtual const std::shared_ptr<ProcessTable>& process_table() const = 0;
  virtual uint32_t self() const = 0;
  virtual uint64_t instance() const = 0;
  virtual Mirror* mirror(uint64_t id) = 0;
  virtual std::vector<Mirror*> mirrors_of(uint32_t host) = 0;
  // All of these begin anew there: what was told over the last connection may not have come.
  virtual void reconnect(uint32_t host) noexcept = 0;
  // All hosts of a mirror are to be told what is new.
  virtual void tell_all(Mirror& mirror) = 0;
  // Processes of this host that have died, with the slots as they are now.
  virtual const std::vector<Death>& deaths() const = 0;
  virtual void died(uint32_t host, const Death& death) = 0;
  // A socket that belongs to a connection to `host` is closed next.
  virtual void unwatch(uint32_t host) noexcept = 0;
};

struct PeerCounts {
  uint64_t bytes_sent = 0, bytes_received = 0, frames_sent = 0, frames_received = 0, connections = 0;
};

// A question to another host's clock: when it was asked and answered, by this host's, and what the other one said in
// between. Nanoseconds.
struct ClockSample {
  uint64_t requested = 0, says = 0, answered = 0;
};

class Peer {
 public:
  enum class State { kNew, kUp, kDown, kLost };
  // `window_ns`: without a connection for so long it is given up. A word is owed after a fifth of it (`pause_ns_`), and a
  // connection over which three of them have not come is taken for broken, which costs no more than another connection.
  Peer(Hub& hub, uint32_t host, uint64_t window_ns, std::shared_ptr<const Fd> doorbell);
  ~Peer() { Returning::drop(unheard_); }
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  const uint32_t host;
  State state() const { return state_; }
  uint64_t connections() const { return counts_.connections; }  // that there have been
  int fd() const { return connection_ ? connection_->fd() : -1; }
  bool has_handshake() const { return has_handshake_; }
  const std::string& reason() const { return reason_; }
  PeerCounts counts() const;

  void connect(Fd fd);
  // The connection is over; another may come. Like lose(), it needs no memory: that may be the reason.
  void drop(std::string_view reason) noexcept;
  // It is given up.
  void lose(std::string_view reason, std::string_view more = {}) noexcept;
  void say_bye() noexcept;

  // Something of `mirror` may have to be sent.
  void look(Mirror& mirror);
  // This host has it no more, as soon as this has returned.
  void close(Mirror& mirror) noexcept;
  void notify(uint32_t slot, uint32_t incarnation, uint32_t bit) { rung_.insert({slot, incarnation, bit}); }
  // Behind all that the process has written for that host. One that is not connected hears of all when it is.
  void tell_death(const Death& death);
  // Have the host's clock asked so often, one question after the other. How many answers there will be then, of all.
  uint64_t ask_clock(uint32_t times);
  uint64_t clock_answers() const { return clock_answers_; }
  // The last of them.
  const std::deque<ClockSample>& clock_samples() const { return clock_samples_; }

  const std::shared_ptr<Lent>& lent() const { return lent_; }
  const std::shared_ptr<Returning>& returning() const { return returning_; }
  // Its doorbell was rung: see what nobody here needs any more.
  void look_at_returning();

  // Read and heed what has come. True: something had. Drops the connection, or gives the host up.
  bool receive();
  // Send what can be sent; true: something was.
  bool send();
  // Something waits until the socket takes it.
  bool blocked() const { return connection_ && connection_->waiting() != 0; }
  // This process has not run for so long (it was stopped, or its machine was): the host could not be heard.
  void excuse(uint64_t ns);
  // What is due at `now`, which may be somewhat ago; when to look again (0: never).
  uint64_t tick(uint64_t now);

 private:
  void heed(const Prefix& prefix, const char* body);
  void take_messages();
  // What has come of the piece with what was before it.
  void take_piece();
  void piece_came(size_t size);
  void on_handshake(const Handshake& handshake);
  bool put_control();
  void put_frames();
  void put_returned();
  void put_closed();
  void put_deaths();
  void hear_closed(const Prefix& prefix, const char* body);
  // Neither host has that segment any more: see to what was sent of it, and has not come.
  void reconcile(uint64_t id, const Haves& theirs);
  void hear(const Returned& returned, uint64_t segment);
  void hear(const Heard& heard);
  void put_clock();
  void requested_clock(const Clock& clock);
  void hear(const Clock& clock);
  void wake_members(Mirror& mirror);
  void note_reason(std::string_view what, std::string_view more = {}) noexcept;

  Hub& hub_;
  const uint64_t window_ns_, pause_ns_;
  State state_ = State::kNew;
  std::unique_ptr<Connection> connection_;
  bool has_handshake_ = false;
  std::string reason_;
  uint64_t instance_ = 0;
  uint64_t heard_ns_ = 0, said_ns_ = 0, down_ns_ = 0;
  PeerCounts counts_;

  std::set<Mirror*> look_;
  std::deque<std::pair<Mirror*, OutRing*>> ready_;
  std::set<std::tuple<uint32_t, uint32_t, uint32_t>> rung_;
  std::vector<Death> deaths_;
  Closing closing_;
  // Questions to its clock: those that are wanted, and were answered, whether one is on its way; and the answers.
  uint64_t clock_wanted_ = 0, clock_answers_ = 0, clock_requested_ = 0;
  std::deque<ClockSample> clock_samples_;
  std::vector<uint64_t> clock_questions_;  // of the other host's, by its clock


  const std::shared_ptr<Lent> lent_ = std::make_shared<Lent>();
  const std::shared_ptr<Returning> returning_;
  // What this host has returned and the other one has not heard of, in its order; how many that one has, was told of
  // over this connection, and over any.
  Borrowed *unheard_ = nullptr, *last_ = nullptr, *next_told_ = nullptr;
  uint64_t heard_by_it_ = 0, told_ = 0, most_told_ = 0;
  // How many the other one has returned, and was told that this has been heard.
  uint64_t returned_ = 0, confirmed_ = 0;

  // A piece that is coming in: of whom, or of nobody.
  InRing* into_ = nullptr;
  Mirror* into_mirror_ = nullptr;
  char* to_ = nullptr;
  size_t piece_ = 0, left_ = 0;
};

}  // namespace conveyor::net
