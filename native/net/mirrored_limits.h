// The execution limits of a segment, as one host has them, and what the others were told of them.
//
// A deadline goes as a duration, since clocks differ, and with a version, since it may come on several ways: the host
// that submits counts one up for each new deadline of a set, and an older one changes nothing. All else only grows.
// That an execution has failed is told by its home only, the host that submits it, and by others to it: the frame that
// says why has come there before, so nobody skips a task for a failure that its executor cannot explain.
#pragma once

#include <map>
#include <vector>

#include "../execution_limits.h"
#include "connection.h"
#include "wire.h"

namespace conveyor::net {

struct LimitsSpec {
  size_t offset;
  uint32_t sets;
  uint32_t tasks;
  uint32_t home;  // the host that submits
};

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

}  // namespace conveyor::net
