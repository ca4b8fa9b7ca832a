// What a frame brings beside memory (kRefs) is claims, one for each reader, and somebody has to give up those of a reader
// that has left before the frame came. Its writer does so where it finds the reader gone; where the frame was on its way
// from host to host then, the pump tells whoever has it.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "../body.h"
#include "../ring.h"

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

}  // namespace conveyor::net
