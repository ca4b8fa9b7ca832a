// A segment that several hosts have, each its own, all laid out alike. Of each ring with ends on different hosts this
// host has the side that is here: it sends to each host of readers, or receives for its own. What all know of the cursors
// is passed on ahead of frames, also of rings that this host has no part in: the news of a frame that was taken may have
// to overtake it by way of a third host, since whoever writes the next one relies on it.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "../execution_limits.h"
#include "claims.h"
#include "connection.h"
#include "in_ring.h"
#include "out_ring.h"
#include "wire.h"

namespace conveyor::net {

struct LimitsSpec {
  size_t offset;
  uint32_t sets;
  uint32_t tasks;
  uint32_t home;  // the host that submits
};

// The execution limits of a segment, as one host has them, and what the others were told of them.
//
// A deadline goes as a duration, since clocks differ, and with a version, since it may come on several ways: the host
// that submits counts one up for each new deadline of a set, and an older one changes nothing. All else only grows.
// That an execution has failed is told by its home only, the host that submits it, and by others to it: the frame that
// says why has come there before, so nobody skips a task for a failure that its executor cannot explain.
class MirroredLimits {
 public:
  MirroredLimits(const std::shared_ptr<Segment>& segment, uint64_t id, uint32_t which, const LimitsSpec& spec, uint32_t self);

  // Whether words here have changed since the last time: then all hosts are to be told.
  bool changed() const { return limits_.changes() != seen_; }
  // Look at all words. Before tell().
  void look();
  // Put what `host` does not know yet.
  void tell(uint32_t host, Connection& to);
  // It has a new connection, and may not know what was told over the former one.
  void forget(uint32_t host) { told_.erase(host); }
  // What `host` says, which it knows then; true: something is new here. Throw Violation.
  bool hear(uint32_t host, const LimitsHead& head, const char* bits);
  bool hear(uint32_t host, const Failures& said);

 private:
  struct Set {
    uint32_t version = 0;
    Limits::Copy words{};
  };
  struct Told {
    std::vector<Set> sets;
    uint32_t failures = 0;
  };
  Told& told(uint32_t host);
  // What the words are now. That they have changed is still to be found by look(): all hosts are to be told.
  void read();

  const uint64_t id_;
  const uint32_t which_, self_, home_;
  Limits limits_;
  uint32_t seen_ = 0;
  std::vector<Set> sets_;
  std::map<uint32_t, uint32_t> failures_;  // by host: how many it has counted itself
  std::map<uint32_t, Told> told_;
};

struct RingSpec {
  size_t offset;
  Target writer;
  std::vector<Target> readers;
  std::shared_ptr<ArenaView> view{};  // of the writer's arena, if it is here
  size_t times = 0;                   // where it is noted when frames have come: of each at its tag, modulo `kept`, a power of two
  uint32_t kept = 0;                  // 0: nowhere
};

// Where the processes of the session are.
class Whereabouts {
 public:
  virtual uint32_t host_of(uint32_t slot) const = 0;
  virtual std::shared_ptr<Arena> arena_of(uint32_t slot) const = 0;  // of a process of another host
  virtual Unclaimed unclaimed() = 0;
  // What another host has of this one's, and what this one has of it and needs no more.
  virtual std::shared_ptr<Lent> lent(uint32_t host) = 0;
  virtual std::shared_ptr<Returning> returning(uint32_t host) = 0;
  virtual ~Whereabouts() = default;
};

class Mirror {
 public:
  Mirror(uint64_t id, std::shared_ptr<Segment> segment, const std::shared_ptr<ProcessTable>& process_table, const std::vector<RingSpec>& rings,
         const std::vector<LimitsSpec>& limits, uint32_t self, Whereabouts& where);

  const uint64_t id;
  uint32_t rings() const { return uint32_t(rings_.size()); }
  // The other hosts that have a part in it.
  const std::vector<uint32_t>& hosts() const { return hosts_; }
  bool is_on(uint32_t host) const { return peers_.count(host) != 0; }
  // What is rung at the other hosts' processes, and where.
  struct Doorbell {
    uint32_t host;
    Target target;
  };
  const std::vector<Doorbell>& doorbells() const { return doorbells_; }
  // The same of this host's: who may wait for something of this segment.
  const std::vector<Target>& members() const { return members_; }

  // `host` has a new connection.
  void reconnected(uint32_t host) noexcept;
  // Whether it was told, over this connection, that the segment is here.
  bool is_open(uint32_t host) const { return peers_.at(host).open; }
  void put_open(uint32_t host, Connection& to);
  // It may have had no segment of this number when it was told that one is here: then it is told again, once.
  void opened(uint32_t host, const OpenHead& head, const char* entries);
  // It has the segment no more, of whose rings so much had come.
  void closed(uint32_t host, Haves theirs);
  // What it has said then; null: nothing yet.
  const Haves* closed_with(uint32_t host) const {
    const auto& theirs = peers_.at(host).theirs;
    return theirs ? &*theirs : nullptr;
  }
  // How much of each ring has come from there.
  Haves haves(uint32_t host) const;
  // Nothing is sent there any more. What was sent, as far as it claims something there and may not have come.
  std::vector<SentClaims> forsake(uint32_t host);

  // Before limits are looked at: see wire.h. What is found there is put by tell().
  void look_at_cursors(uint32_t host);
  // Put what `host` does not know yet of cursors and limits.
  void tell(uint32_t host, Connection& to);
  // True, once each time that words here have changed: all hosts are to be told.
  bool look_at_limits();
  // Ask the readers of rings from `host` to ring when that should be told. True: they have come so far already.
  bool ask(uint32_t host);

  // What `host` says. Throw Violation. `true`: the members here are to look.
  void hear(uint32_t host, const Credit& credit);
  void hear(uint32_t host, const Have& have);
  bool hear(uint32_t host, const LimitsHead& head, const char* bits);
  bool hear(uint32_t host, const Failures& said);

  InRing& in(uint32_t host, uint32_t ring);
  std::vector<OutRing*> out(uint32_t host);
  // Whether something that this process here has written is still to come to `host`, which has the segment.
  bool owes(uint32_t host, uint32_t writer) const;
  // Whether that frame was sent to `host`, which has not said yet that it is there.
  bool lends(uint32_t host, uint32_t ring, uint64_t number) const;
  // Whether all frames below `head` of a ring from `host` are here; also where no ring leads here from there.
  bool has(uint32_t host, uint32_t ring, uint64_t head) const {
    return ring >= rings_.size() || !rings_[ring].in || rings_[ring].writer_host != host || rings_[ring].in->have() >= head;
  }

 private:
  struct Entry {
    Ring ring;
    uint32_t writer;
    uint32_t writer_host;
    std::vector<uint32_t> reader_hosts;
    size_t first_cursor;  // among all
    std::unique_ptr<InRing> in{};
    std::map<uint32_t, std::unique_ptr<OutRing>> out{};
  };
  struct Peer {
    std::vector<CursorState> told;
    bool open = false;   // it was told that the segment is here
    bool heard = false;  // it has told so
    bool has = false;    // over whatever connection, and not closed it since
    std::optional<Haves> theirs{};  // that it is not there any more
  };
  CursorState state(const Entry& entry, uint32_t reader) const;
  MirroredLimits& limits(uint32_t which);

  const uint32_t self_;
  const std::shared_ptr<Segment> segment_;
  std::vector<Entry> rings_;
  std::vector<MirroredLimits> limits_;
  std::vector<uint32_t> hosts_;
  std::vector<Doorbell> doorbells_;
  std::vector<Target> members_;
  std::vector<CursorState> known_;  // of readers elsewhere
  std::map<uint32_t, Peer> peers_;
  std::vector<std::pair<uint32_t, uint32_t>> told_;  // (ring, reader) of cursors that others are told of
  std::vector<Credit> credits_;                      // what is told just now
};

}  // namespace conveyor::net
