// What frames claim for their readers, where hosts lie in between.
//
// What a frame brings beside memory (kRefs) is claims, one for each reader, and somebody has to give up those of a reader
// that has left before the frame came. Its writer does so where it finds the reader gone; where the frame was on its way
// from host to host then, the pump tells whoever has it.
//
// Segments that one of two hosts has no more, while frames of theirs may be on their way to it. It says how far each ring
// had come there, again after a reconnect, until it hears that the other one has no such segment either. So whoever has
// sent a frame knows in the end whether it has come: what is in none of these has not, and never will. What such a frame
// claims somebody has to give up, and what it keeps is lent to nobody.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "../body.h"
#include "../ring.h"
#include "wire.h"

namespace conveyor::net {

// The header that names them, for the process of that slot and incarnation.
using Unclaimed = std::function<void(const std::string& header, uint32_t slot, uint32_t incarnation)>;

// Of a frame's body, whose block has `room` bytes: its meta bytes begin with it, and its length (codec/encoded.py). The
// bytes may be anything.
inline std::optional<std::string> header_in(const char* body, size_t size, size_t room) {
  const auto table = read_table(body, size, room);
  uint32_t length;
  if (!table || table->meta_length < sizeof length) return std::nullopt;
  std::memcpy(&length, table->meta, sizeof length);
  if (length > table->meta_length - sizeof length) return std::nullopt;
  return std::string(table->meta, sizeof length + length);
}

// The same of a body of which the first `there` bytes are at hand. None where the header ends beyond them.
inline std::optional<std::string> header_at(const char* body, size_t there) {
  TableHeader table;
  uint32_t length;
  if (there < sizeof table) return std::nullopt;
  std::memcpy(&table, body, sizeof table);
  const size_t at = sizeof table + size_t(table.buffers) * sizeof(BufferEntry);
  if (table.meta_length < sizeof length || at + sizeof length > there) return std::nullopt;
  std::memcpy(&length, body + at, sizeof length);
  if (length > table.meta_length - sizeof length || length > there - at - sizeof length) return std::nullopt;
  return std::string(body + at, sizeof length + length);
}

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
