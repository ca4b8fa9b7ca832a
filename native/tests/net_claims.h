// Frames that claim something for their readers, and what is told of it.
#pragma once

#include "body.h"
#include "net_setup.h"

namespace conveyor {

// A frame whose meta bytes begin with a header, and whose buffer makes it as large as that.
inline void send_claims(Host& from, uint32_t slot, Sender& sender, uint64_t n, const std::string& header, size_t buffer, Kind kind = Kind::kValue) {
  REQUIRE(from.wait_for_room(slot, sender));
  const auto length = uint32_t(header.size());
  const std::string meta = std::string(reinterpret_cast<const char*>(&length), sizeof length) + header + "and a pickle";
  const TableLayout layout = lay_out_table(meta.size(), {buffer});
  Outgoing out;
  out.tag = n;
  out.codec = kFirstPython;
  out.kind = kind;
  out.flags = kRefs | kDefinitions;
  out.size = layout.total;
  sender.reserve(out);
  char* const body = sender.body_of(out);
  const TableHeader table = {uint32_t(meta.size()), 1};
  std::memcpy(body, &table, sizeof table);
  std::memcpy(body + sizeof table, layout.entries.data(), sizeof(BufferEntry));
  std::memcpy(body + layout.meta_at, meta.data(), meta.size());
  sender.publish(out);
}

// What has been told of readers that were gone, as "header@slot".
struct Told {
  net::HostPump& pump;
  std::vector<std::string> all{};
  bool is(const std::vector<std::string>& expected) {
    for (const net::Left& l : pump.left()) all.push_back(l.header.substr(sizeof(uint32_t)) + "@" + std::to_string(l.slot));
    return all == expected;
  }
};

}  // namespace conveyor
