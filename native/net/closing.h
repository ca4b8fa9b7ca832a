// Segments that one of two hosts has no more, while frames of theirs may be on their way to it. It says how far each ring
// had come there, again after a reconnect, until it hears that the other one has no such segment either. So whoever has
// sent a frame knows in the end whether it has come: what is in none of these has not, and never will. What such a frame
// claims somebody has to give up, and what it keeps is lent to nobody.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "wire.h"

namespace conveyor::net {

using Haves = std::vector<CloseEntry>;

// The number of frames of that ring that had come there.
inline uint64_t have_of(const Haves& haves, uint32_t ring) {
  for (const CloseEntry& entry : haves)
    if (entry.ring == ring) return entry.have;
  return 0;
}

// A frame that was sent, and what it claims for one of its readers there.
struct SentClaims {
  uint32_t ring;
  uint64_t number;
  std::string header;
  uint32_t slot, incarnation;
};

// What is to be told to one other host, and to be heard from it.
struct Closing {
  // Segments that this host has no more, until the other one has none either.
  std::map<uint64_t, Haves> closed;
  // Those of which the other one is to be told over this connection, and what it has told itself that was heard.
  std::vector<uint64_t> untold, heard;
  // What was sent of segments that this host has no more, until the other one has told how far it had come.
  std::map<uint64_t, std::vector<SentClaims>> sent;

  // The connection is another one.
  void begin_anew() {
    heard.clear();  // else it is told again
    untold.clear();
    for (const auto& [id, haves] : closed) untold.push_back(id);
  }
  // The other host is lost.
  void end() { *this = {}; }
};

}  // namespace conveyor::net
