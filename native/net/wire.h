// What goes over a connection between the pumps of two hosts. Messages are a Prefix, the words of their kind, and for
// some of them bytes. Nothing is interpreted before the handshake (cluster/handshake.py) has let the connection in;
// and what it says afterwards is trusted in nothing all the same: lengths are bounded by their kind, numbers are looked
// up, and whatever does not fit ends the connection (Violation).
//
// A frame of a ring is kFrame, with its body if that lies in the ring's slot, and kChunk for each piece of its block.
// Frames of a ring come in their order, and those of a segment behind all that their host knows of that segment's
// cursors and limits. So whoever reads a frame sees what its sender had seen, on whatever way it has come: on one host
// the memory does that. Of these, limits are told ahead of the cursors that were read before them: so whoever sees that a
// frame was taken sees what its reader had said before that.
//
// Refs of a frame (kRefs) are claims on the session's rendezvous, good wherever its readers are. A frame for which its
// writer keeps something (kKeeps) is lent: its readers' host says when nobody there has it any more (kReturned), again
// after a reconnect, until it hears that this has come. What cannot be sent is an error at its readers (kStandIn).
#pragma once

#include <cstdint>
#include <stdexcept>

#include "../process_table.h"

namespace conveyor::net {

constexpr uint64_t kHandshakeMagic = 0x31'74'65'6e'76'6e'6f'63;  // "convnet1", in the byte order of both
constexpr uint32_t kWireVersion = 7;
constexpr uint32_t kChunkBytes = 256 << 10;
constexpr uint32_t kMostRings = 1 << 15;         // of a segment
constexpr uint32_t kMostBitWords = 1 << 12;      // of one set of limits
constexpr uint64_t kMostBytes = uint64_t(1) << 46;  // of one frame
constexpr uint32_t kMostHosts = 1 << 12;

enum class What : uint16_t {
  kHandshake = 1,   // the first, once: who speaks
  kOpen,        // the speaker has this segment, and wants its frames from here on
  kClose,       // it has it no more: what had come of each ring until then
  kClosed,      // that was heard, and the speaker has it neither
  kFrame,
  kChunk,
  kHave,        // frames below this are here: their blocks are not needed any more
  kCredit,      // how far a reader has come
  kLimits,      // a set of execution limits
  kFailures,    // how many failures a host has counted
  kDeath,       // of a process of the speaker's host
  kRing,        // a doorbell of the listener's host was rung on the speaker's
  kPing,
  kClock,    // what does the listener's clock say?
  kClockIs,  // that
  kReturned,  // of a frame that was lent, the speaker's host has nothing any more
  kHeard,     // that, of all up to this one
  kBye,
  kLast = kBye,
};

enum PrefixFlags : uint16_t {
  kStandIn = 1,  // kFrame: what the ring has there is not sent; its readers get an error
};

struct Prefix {
  What what;
  uint16_t flags;
  uint32_t size;  // of what follows
  uint64_t segment;
};
static_assert(sizeof(Prefix) == 16);

struct Handshake {
  uint64_t magic;
  uint32_t version;
  uint32_t host;
  uint64_t instance;  // of the pump: another one has not what this one had
};

struct OpenHead {
  uint32_t rings;  // of the segment, to compare
  uint32_t count;  // entries that follow
};
struct OpenEntry {
  uint32_t ring;
  uint32_t readers;
  uint64_t have;  // the next frame that is wanted
  uint64_t at;    // bytes of its block that are here; 0: nothing of it
};

struct CloseHead {
  uint32_t count;  // entries that follow
  uint32_t nothing;
};
struct CloseEntry {
  uint32_t ring;
  uint32_t nothing;
  uint64_t have;  // frames below this had come
};

struct FrameHead {
  uint32_t ring;
  uint16_t kind;
  uint16_t codec;
  uint64_t number;
  uint64_t tag;
  uint32_t flags;
  uint32_t in_slot;  // bytes of the body that follow here
  uint64_t size;     // of the body
  uint64_t block;    // bytes that come as chunks
};
static_assert(sizeof(FrameHead) == 48);

struct ChunkHead {
  uint32_t ring;
  uint32_t nothing;
  uint64_t number;
  uint64_t at;
};

struct Have {
  uint32_t ring;
  uint32_t nothing;
  uint64_t have;
};

// What is known of a reader's cursor. Each part only grows.
struct CursorState {
  uint64_t next = 0;
  uint64_t wanted = 0;
  uint32_t lost = 0;
  uint32_t closed = 0;
  bool operator==(const CursorState&) const = default;
};
struct Credit {
  uint32_t ring;
  uint32_t reader;
  CursorState state;
};
static_assert(sizeof(Credit) == 32);

struct LimitsHead {
  uint32_t which;
  uint32_t set;
  uint32_t version;  // of its deadline
  uint32_t words;    // of bits, which follow
  uint64_t left;     // nanoseconds until the deadline: clocks differ; 0: there is none
  uint64_t ended;
  uint64_t skipped;
};
struct Failures {
  uint32_t which;
  uint32_t count;
};
struct Death {
  uint32_t slot;
  uint32_t incarnation;
  uint32_t signal;
  uint32_t nothing;
};
// Nanoseconds of CLOCK_MONOTONIC, which each host has its own of.
struct Clock {
  uint64_t requested;  // when that was, by who asks
  uint64_t says;   // kClockIs: the clock of who answers
};
struct Returned {
  uint32_t ring;
  uint32_t nothing;
  uint64_t number;
  uint64_t count;  // from 1 on: which one of all that the speaker has said
};
struct Heard {
  uint64_t count;
};
struct Rung {
  uint32_t slot;
  uint32_t incarnation;
  uint32_t bit;
  uint32_t nothing;
};

// The connection has said what it may not: its host is given up.
struct Violation : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The size of what follows a prefix, as far as it has to be there at once: the rest of kFrame and kChunk is passed on as
// it comes. Throws Violation for what cannot be.
inline uint32_t checked_head(const Prefix& p) {
  const auto exactly = [&](size_t size) {
    if (p.size != size) throw Violation("a message of a wrong size");
    return uint32_t(size);
  };
  const auto from = [&](size_t least, size_t most) {
    if (p.size < least || p.size > most) throw Violation("a message of a wrong size");
    return uint32_t(least);
  };
  switch (p.what) {
    case What::kHandshake: return exactly(sizeof(Handshake));
    case What::kOpen: from(sizeof(OpenHead), sizeof(OpenHead) + kMostRings * sizeof(OpenEntry)); return p.size;
    case What::kClose: from(sizeof(CloseHead), sizeof(CloseHead) + kMostRings * sizeof(CloseEntry)); return p.size;
    case What::kLimits: from(sizeof(LimitsHead), sizeof(LimitsHead) + kMostBitWords * sizeof(uint64_t)); return p.size;
    case What::kFrame: return from(sizeof(FrameHead), uint32_t(1) << 31);
    case What::kChunk: return from(sizeof(ChunkHead) + 1, sizeof(ChunkHead) + kChunkBytes) - 1;
    case What::kHave: return exactly(sizeof(Have));
    case What::kCredit: return exactly(sizeof(Credit));
    case What::kFailures: return exactly(sizeof(Failures));
    case What::kDeath: return exactly(sizeof(Death));
    case What::kRing: return exactly(sizeof(Rung));
    case What::kClock:
    case What::kClockIs: return exactly(sizeof(Clock));
    case What::kReturned: return exactly(sizeof(Returned));
    case What::kHeard: return exactly(sizeof(Heard));
    case What::kClosed:
    case What::kPing:
    case What::kBye: return exactly(0);
  }
  throw Violation("a message of an unknown kind");
}

}  // namespace conveyor::net
