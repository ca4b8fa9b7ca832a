#include "decode.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <utility>

#include "exit.h"
#include "hooks.h"
#include "made_in_place.h"
#include "native_values.h"

namespace conveyor {

namespace {

// Of the innermost frame that the thread decodes.
struct FetchMode {
  FetchMode(bool fetches, const Frame& frame) : fetches(fetches), frame(frame), before(std::exchange(now, this)) {}
  ~FetchMode() { now = before; }
  FetchMode(const FetchMode&) = delete;
  FetchMode& operator=(const FetchMode&) = delete;
  const bool fetches;
  const Frame& frame;
  std::optional<Numbers> keeps{};  // sorted; read when it is first asked for
  FetchMode* const before;
  static thread_local FetchMode* now;
};
thread_local FetchMode* FetchMode::now = nullptr;

// This process's page of the process table. Guarded by the GIL.
struct OwnPage {
  Status& status() { return process_table->slot(slot)->status; }
  bool inherited() const { return fork != fork_generation.load(std::memory_order_relaxed); }
  const std::shared_ptr<ProcessTable> process_table;
  const uint32_t slot;
  const uint64_t fork = fork_generation.load(std::memory_order_relaxed);
  uint32_t decoding = 0;  // values, in all threads
  bool importing = false;
};
std::shared_ptr<OwnPage>& own_page = *new std::shared_ptr<OwnPage>;  // lives as long as the process

// While a value is decoded in Python, which may run any code, the page says so.
class Shown {
 public:
  Shown() {
    if (page_ && !page_->inherited() && page_->decoding++ == 0) page_->status().decoding_since_ns.store(now_ns(), std::memory_order_relaxed);
  }
  ~Shown() {
    if (!page_ || page_->inherited() || --page_->decoding != 0) return;
    page_->status().decoding_since_ns.store(0, std::memory_order_relaxed);
    end_import();
  }
  Shown(const Shown&) = delete;
  Shown& operator=(const Shown&) = delete;

 private:
  const std::shared_ptr<OwnPage> page_ = own_page;
};

}  // namespace

void show_decoding_on(std::shared_ptr<ProcessTable> process_table, uint32_t slot) {
  own_page.reset(process_table ? new OwnPage{std::move(process_table), slot} : nullptr);
}

bool note_import(const std::string& module) {
  if (FetchMode::now == nullptr || !own_page || own_page->inherited() || own_page->importing) return false;
  own_page->importing = true;
  own_page->status().importing.set(module);
  return true;
}

void end_import() {
  if (!own_page || own_page->inherited() || !std::exchange(own_page->importing, false)) return;
  own_page->status().importing.set("");
}

void note_idle() {
  if (own_page && !own_page->inherited()) own_page->status().state.store(uint32_t(State::kIdle), std::memory_order_relaxed);
}

TableView table_of(const Frame& frame) {
  const bool external = frame.flags & kExternal;
  auto table = read_table(frame.body, frame.size, external ? frame.block_room() : 0);
  if (!table) bad_frame();
  return std::move(*table);
}

namespace {

// Where buffers of a frame lie: in its body, or in the block beside it.
struct Place {
  Place(const Frame& frame, bool in_block) {
    const bool leased = frame.lease && (in_block || !frame.memory);
    start = in_block && leased ? frame.lease->data() : const_cast<char*>(frame.body);
    owner = leased ? std::shared_ptr<void>(frame.lease) : frame.memory;
    if (leased) lease = frame.lease;
    others = leased ? frame.readonly : frame.kept;
    mapping = leased ? lease->shared_mapping() : frame.memory ? frame.memory->mapping : nullptr;
  }
  char* start;
  std::shared_ptr<void> owner{};
  std::shared_ptr<Lease> lease{};
  std::shared_ptr<Mapping> mapping{};
  bool others = false;   // read it, or it is decoded again
  size_t first = SIZE_MAX, end = 0;  // of its buffers
  std::shared_ptr<Unshared> unshared{};
};

}  // namespace

nb::object buffers_of(const Frame& frame, const TableView& table, bool as_it_lies) {
  if (table.entries.empty()) return nb::none();
  Place places[] = {Place(frame, false), Place(frame, true)};
  const auto place_of = [&](const BufferEntry& e) -> Place& { return places[e.offset & kInBlock ? 1 : 0]; };
  for (const BufferEntry& e : table.entries) {
    if (e.length == 0) continue;
    Place& place = place_of(e);
    place.first = std::min(place.first, size_t(e.offset & ~kInBlock));
    place.end = std::max(place.end, size_t((e.offset & ~kInBlock) + e.length));
  }
  for (Place& place : places)
    if (place.others && !as_it_lies && place.end != 0)
      place.unshared = std::make_shared<Unshared>(place.owner, place.mapping, place.start + place.first, place.end - place.first);
  nb::list list;
  for (const BufferEntry& e : table.entries) {
    const Place& place = place_of(e);
    list.append(nb::cast(Buffer{place.start + (e.offset & ~kInBlock), size_t(e.length), place.owner, place.lease, nullptr, e.length != 0 ? place.unshared : nullptr}, nb::rv_policy::move));
  }
  return list;
}

namespace {

nb::object decode_in_python(uint16_t number, const nb::bytes& meta, const nb::object& buffers) {
  const Shown shown;
  nb::object codec = nb::int_(number);
  Calling python;
  nb::object value = nb::steal(PyObject_CallFunctionObjArgs(hooks.decode, codec.ptr(), meta.ptr(), buffers.ptr(), nullptr));
  if (!value.is_valid()) throw nb::python_error();
  return value;
}

// What is nested first: that runs any code, and nobody may see a tuple that is not whole.
nb::object decode_arguments(const Frame& frame) {
  std::vector<nb::object> nested;
  for (const Nested& one : nested_in(frame.body, frame.size)) nested.push_back(decode_in_python(one.codec, nb::bytes(one.meta, one.length), nb::none()));
  return decode_natively(frame.body, frame.size, nested);
}

nb::object decode_frame(const Frame& frame) {
  if (frame.kind == Kind::kError)
    return nb::cast(ErrorFrame{nb::bytes(frame.body, frame.size)}, nb::rv_policy::move);
  if (frame.codec < kFirstPython) return decode_natively(frame.codec, frame.body, frame.size);
  if (frame.codec == kArguments) return decode_arguments(frame);
  const TableView table = table_of(frame);
  return decode_in_python(frame.codec, nb::bytes(table.meta, table.meta_length), buffers_of(frame, table));
}

// The header that the meta bytes of a frame with definitions begin with, which has its length in front
// (codec/encoded.py), of a body in a block that is not mapped: no mapping is needed for so little.
nb::bytes unmapped_header(const Frame& frame) {
  TableHeader table;
  if (frame.size < sizeof table) bad_frame();
  frame.read(0, &table, sizeof table);
  uint32_t length;
  const size_t meta_at = sizeof table + size_t(table.buffers) * sizeof(BufferEntry);
  if (table.buffers > kMaxBuffers || meta_at > frame.size || table.meta_length > frame.size - meta_at || table.meta_length < sizeof length) bad_frame();
  frame.read(meta_at, &length, sizeof length);
  if (length > table.meta_length - sizeof length) bad_frame();
  std::vector<char> header(sizeof length + length);
  frame.read(meta_at, header.data(), header.size());
  return nb::bytes(header.data(), header.size());
}

nb::bytes header_of(const Frame& frame) {
  if (frame.body == nullptr) return unmapped_header(frame);
  const auto table = read_table(frame.body, frame.size, frame.block_room());
  if (!table) bad_frame();
  return nb::bytes(table->meta, table->meta_length);
}

nb::object tell_header(const Frame& frame, PyObject* hook, PyObject* known = nullptr) {
  if (hook == nullptr) return {};  // the interpreter ends
  const nb::bytes meta = header_of(frame);
  Calling python;
  nb::object result = nb::steal(PyObject_CallFunctionObjArgs(hook, meta.ptr(), known, nullptr));
  if (!result.is_valid()) throw nb::python_error();
  return result;
}

}  // namespace

nb::object decode_native(uint16_t codec, const char* body, size_t size) {
  return or_python_error([&] { return decode_natively(codec, body, size); });
}

nb::object decode(const Frame& frame, bool fetches) {
  const FetchMode mode(fetches, frame);
  return or_python_error([&] { return decode_frame(frame); });
}

bool fetches() noexcept { return FetchMode::now == nullptr || FetchMode::now->fetches; }

std::shared_ptr<Lease> sure_lease(uint64_t number) {
  FetchMode* const now = FetchMode::now;
  if (now == nullptr || !(now->frame.flags & kSure) || !now->frame.lease || now->frame.lease->inherited()) return nullptr;
  if (!now->keeps) {
    Numbers keeps = now->frame.keeps();
    std::sort(keeps.begin(), keeps.end());
    now->keeps = std::move(keeps);
  }
  return std::binary_search(now->keeps->begin(), now->keeps->end(), number) ? now->frame.lease : nullptr;
}

nb::bytes meta_of(const Frame& frame) {
  const TableView table = table_of(frame);
  return nb::bytes(table.meta, table.meta_length);
}

nb::object keep(const Frame& frame, nb::object refs, nb::object definitions) {
  // At once what nobody can change, unless others run meanwhile: the frame is the caller's only until then.
  const bool at_once = frame.codec < kPlain && !(frame.codec == kBytes && frame.size >= kLargeObject);
  if (frame.kind == Kind::kError || at_once) return decode(frame);
  return or_python_error([&] {
    Frame kept = frame;
    kept.kept = kept.readonly = true;
    return nb::cast(Snapshot{std::move(kept), nullptr, std::move(refs), std::move(definitions)}, nb::rv_policy::move);
  });
}

nb::object value_of(nb::handle kept) {
  if (nb::inst_check(kept) && nb::isinstance<Snapshot>(kept)) {
    nb::object alive = nb::borrow(kept);  // decoding runs any code
    return decode(nb::inst_ptr<Snapshot>(kept)->frame);
  }
  return nb::borrow(kept);
}

void announce(const Frame& frame, nb::handle known) {
  if (!known.is_valid() || !(frame.flags & kDefinitions) || frame.kind == Kind::kError) return;
  or_python_error([&] { tell_header(frame, hooks.announce, known.ptr()); });
}

void discard(const Frame& frame, nb::handle known) {
  if (!(frame.flags & kRefs) || frame.kind == Kind::kError) return announce(frame, known);
  or_python_error([&] { tell_header(frame, hooks.discard, known.ptr()); });
}

nb::object take_claims(const Frame& frame) {
  if (!(frame.flags & kRefs) || frame.kind == Kind::kError) return {};
  return or_python_error([&] { return tell_header(frame, hooks.take); });
}

nb::object claims_of(const char* body, size_t size, size_t in_block) noexcept {
  try {
    if (const auto table = read_table(body, size, in_block)) return nb::bytes(table->meta, table->meta_length);
  } catch (nb::python_error& error) {
    error.discard_as_unraisable("the refs in a value that could not be read");
  } catch (const std::exception&) {  // there is no memory for this either: they are kept as long as this process lives
  }
  return nb::object();
}

void give_up_claims(nb::object claims) noexcept {
  if (!claims.is_valid() || hooks.discard == nullptr) return;
  Calling python;
  for (int tries = 0; tries < 3; ++tries) {
    const nb::object result = nb::steal(PyObject_CallFunctionObjArgs(hooks.discard, claims.ptr(), nullptr));
    if (result.is_valid()) return;
    const bool broken_off = !PyErr_ExceptionMatches(PyExc_Exception);
    PyErr_WriteUnraisable(hooks.discard);
    // What a signal handler has broken off is done again: more than once is as good as once (see Exports._use).
    if (!broken_off) return;
  }
}

namespace {

constexpr uint16_t kJoined = 1 << 15;
constexpr std::string_view kSnapshot{"\0snapshot", 9};

}  // namespace

std::optional<LocatedParts> read_located(std::string_view packed) {
  struct [[gnu::packed]] {
    uint16_t codec, names;
    uint32_t slot, incarnation, pid, ranges, beside, lying;
    uint64_t number, anchor;
  } head;
  static_assert(sizeof head == 44);
  if (packed.size() < sizeof head) return std::nullopt;
  std::memcpy(&head, packed.data(), sizeof head);
  packed.remove_prefix(sizeof head);
  std::array<std::string_view, 4> parts;
  const std::array<size_t, 4> sizes{head.names, head.ranges, head.beside, head.lying};
  for (size_t i = 0; i < parts.size(); ++i) {
    if (sizes[i] > packed.size()) return std::nullopt;
    parts[i] = packed.substr(0, sizes[i]);
    packed.remove_prefix(sizes[i]);
  }
  const auto& [names, ranges, beside, lying] = parts;
  const auto codec = uint16_t(head.codec & ~kJoined);
  return LocatedParts{codec, (head.codec & kJoined) != 0, names.ends_with(kSnapshot), head.slot, head.incarnation, head.pid, head.number, head.anchor, ranges, beside, lying, packed};
}

std::optional<LocatedParts> located_in(const Frame& frame) {
  if (frame.codec != kDirect || frame.kind == Kind::kError || !(frame.flags & kKeeps) || (frame.flags & kExternal) || frame.body == nullptr) return std::nullopt;
  const auto table = read_table(frame.body, frame.size, 0);
  return table ? read_located({table->meta, table->meta_length}) : std::nullopt;
}

}  // namespace conveyor
