// What a body is: the number of its codec, and the layout of those with buffers: a table, meta bytes, the buffers.
// Reading it trusts nothing: any bytes either give spans inside the body or an error.
#pragma once

#include <cstring>
#include <optional>
#include <vector>

#include "platform.h"

namespace conveyor {

enum Codec : uint16_t {
  kNone = 0,
  kTrue = 1,
  kFalse = 2,
  kInt = 3,
  kFloat = 4,
  kStr = 5,
  kBytes = 6,
  kPlain = 7,  // a tuple, list or dict of such
  kFirstPython = 16,
  kDirect = 21,     // where a value is that has stayed with its maker; no buffers (codec/direct/)
  kArguments = 22,  // the same, with parts that another codec has made without buffers
};

constexpr size_t kBufferAlign = 64;
constexpr size_t kMaxBuffers = 1 << 16;
constexpr uint64_t kInBlock = uint64_t(1) << 63;  // the offset counts from the start of the frame's block

struct BufferEntry {
  uint64_t offset;
  uint64_t length;
};

struct TableHeader {
  uint32_t meta_length;
  uint32_t buffers;
};

struct TableLayout {
  size_t meta_at;
  size_t total;
  std::vector<BufferEntry> entries;
};

inline TableLayout lay_out_table(size_t meta_length, const std::vector<size_t>& lengths) {
  TableLayout layout;
  layout.meta_at = sizeof(TableHeader) + lengths.size() * sizeof(BufferEntry);
  size_t at = layout.meta_at + meta_length;
  layout.entries.reserve(lengths.size());
  for (size_t length : lengths) {
    at = align_up(at, kBufferAlign);
    layout.entries.push_back({at, length});
    at += length;
  }
  layout.total = at;
  return layout;
}

struct TableView {
  const char* meta;
  size_t meta_length;
  std::vector<BufferEntry> entries;
};

// `body` of `size` bytes; `block_size` is the room behind kInBlock offsets (0: none allowed).
inline std::optional<TableView> read_table(const char* body, size_t size, size_t block_size) {
  TableHeader head;
  if (size < sizeof head) return std::nullopt;
  std::memcpy(&head, body, sizeof head);
  if (head.buffers > kMaxBuffers) return std::nullopt;
  const size_t meta_at = sizeof head + size_t(head.buffers) * sizeof(BufferEntry);
  if (meta_at > size || head.meta_length > size - meta_at) return std::nullopt;
  TableView view{body + meta_at, head.meta_length, {}};
  view.entries.resize(head.buffers);
  if (head.buffers != 0) std::memcpy(view.entries.data(), body + sizeof head, head.buffers * sizeof(BufferEntry));
  for (const BufferEntry& e : view.entries) {
    const bool in_block = e.offset & kInBlock;
    // Not even an empty buffer: whoever resolves it would ask a lease that is not there for its start.
    if (in_block && block_size == 0) return std::nullopt;
    const uint64_t at = e.offset & ~kInBlock;
    const uint64_t room = in_block ? block_size : size;
    if (at > room || e.length > room - at) return std::nullopt;
  }
  return view;
}

}  // namespace conveyor
