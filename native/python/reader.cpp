#include "reader.h"

#include "exit.h"
#include "hooks.h"

namespace conveyor {

namespace {

class Counted {
 public:
  explicit Counted(uint32_t& count) : count_(count) { ++count_; }
  ~Counted() { --count_; }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;

 private:
  uint32_t& count_;
};

}  // namespace

nb::object Reader::made_known() {
  if (hooks.known == nullptr) return nb::object();
  nb::object made = nb::steal(PyObject_CallNoArgs(hooks.known));
  if (!made.is_valid()) throw nb::python_error();
  return made;
}

nb::object Reader::definitions_for(uint32_t flags) const {
  const nb::handle known = known_for(flags);
  if (!known.is_valid()) return nb::object();
  nb::object generation = nb::steal(PyObject_GetAttrString(known.ptr(), "generation"));
  if (!generation.is_valid()) throw nb::python_error();
  return generation;
}

nb::object Reader::learn_and_decode(const Frame& frame) {
  if (frame.kind != Kind::kError && (frame.flags & kDefinitions)) announce(frame, known_for(frame.flags));
  const nb::object definitions = definitions_for(frame.flags);  // frames behind it may be learnt while it is decoded
  return decode(frame);
}

void Reader::give_up() noexcept {
  const SlotHeader slot = read_once(*ring.front());
  const size_t in_block = slot.block_size > kBlockHeader ? slot.block_size - kBlockHeader : 0;
  const bool names_refs = (slot.flags & kRefs) && slot.kind != Kind::kError;
  const bool in_slot = (slot.block == 0 || (slot.flags & kExternal)) && slot.size <= ring.capacity();
  nb::object claims;
  if (names_refs && in_slot) claims = claims_of(reinterpret_cast<const char*>(ring.front() + 1), slot.size, in_block);
  pass();
  give_up_claims(std::move(claims));
}

bool Reader::dry() const {
  try {
    return decoding_ == 0 && ring.empty();
  } catch (const std::system_error&) {  // it is broken: nobody takes anything out of it
    return true;
  }
}

bool Reader::announce_front(bool unwanted) {
  const SlotHeader slot = read_once(*ring.front());
  if (!(slot.flags & kDefinitions) || slot.kind == Kind::kError) return true;
  if (!front_) load_front();
  const uint64_t number = ring.next();
  const Frame f = *front_;
  unwanted ? discard(f, known_for(f.flags)) : announce(f, known_for(f.flags));
  return ring.next() == number && !ring.empty();
}

bool Reader::take_front_claims(nb::object& refs) {
  const SlotHeader slot = read_once(*ring.front());
  if (!(slot.flags & kRefs) || slot.kind == Kind::kError) return true;
  if (!front_) load_front();
  const uint64_t number = ring.next();
  const Frame f = *front_;
  refs = take_claims(f);
  return ring.next() == number && !ring.empty();
}

void Reader::skip() {
  const uint64_t number = ring.next();
  const SlotHeader slot = read_once(*ring.front());
  bool known = !(slot.flags & kDefinitions) || slot.kind == Kind::kError;
  if (!known) {
    try {
      if (!announce_front(true)) return;
      known = true;
    } catch (nb::python_error& error) {
      if (!is_final(error.value())) {  // Ctrl-C, say: it is skipped when it is tried again
        if ((slot.flags & kRefs) && ring.next() == number && !ring.empty()) give_up();  // but its claims are given up
        throw;
      }
    } catch (const std::exception&) {  // its definitions are sent again
    }
    if (ring.next() != number || ring.empty()) return;
  }
  known ? release_front(slot) : give_up();
}

// Whatever is raised meanwhile, its claims are given up; more than once is as good as once (see Exports._use).
void Reader::close() {
  if (ring.inherited()) return;
  ring.leave();
  std::exception_ptr raised;
  try {
    while (!ring.empty()) {
      const SlotHeader slot = read_once(*ring.front());
      const uint64_t number = ring.next();
      if ((slot.flags & kRefs) && slot.kind != Kind::kError) {
        try {
          if (PyErr_CheckSignals() != 0) throw nb::python_error();  // not while it is done
        } catch (const nb::python_error&) {
          raised = std::current_exception();
        }
        bool known = false;
        try {
          load_front();
          const Frame f = *front_;
          discard(f, known_for(f.flags));
          known = true;
        } catch (const nb::python_error& error) {
          if (!is_final(error.value())) raised = std::current_exception();
        } catch (const std::exception&) {  // nobody can read it
        }
        if (ring.next() != number) continue;  // Python code has taken it meanwhile
        if (!known) {
          give_up();
          continue;
        }
      }
      release_front(slot);
    }
  } catch (const std::system_error&) {  // a broken ring, of which whoever waited for it was told
  }
  Receiver::close();
  if (raised) std::rethrow_exception(raised);
}

Reader::~Reader() {
  nb::error_scope keep;
  try {
    close();
  } catch (nb::python_error& error) {
    error.discard_as_unraisable("values that nobody has received");
  }
}

nb::object Reader::receive_native() {
  const SlotHeader slot = checked_front();
  // Decoding runs no Python code, so nobody else can take this frame meanwhile.
  nb::object value = decode_native(slot.codec, reinterpret_cast<const char*>(ring.front() + 1), slot.size);
  tag = slot.tag;
  kind = slot.kind;
  given = 0;
  bytes += slot.size;
  ring.advance();
  return value;
}

template <class How>
nb::object Reader::read(const Frame& frame, How how) {
  const Counted counted(decoding_);
  try {
    return how(frame);
  } catch (...) {
    lose(frame);
    if (frame.flags & kRefs) give_up_claims(claims_of(frame.body, frame.size, frame.block_room()));
    throw;
  }
}

nb::object Reader::receive() {
  check_owner(fork_);
  std::optional<Frame> f;
  try {
    if (decodes_natively()) {
      if (brings_work) Arena::given = 0;
      return receive_native();
    }
    if (brings_work) note_idle();
    f = take();
    if (brings_work) Arena::given = given;
  } catch (...) {
    give_up();
    throw;
  }
  return read(*f, [&](const Frame& frame) { return learn_and_decode(frame); });
}

nb::object Reader::receive_undecoded(nb::handle make) {
  if (!front_keeps()) return receive();
  check_owner(fork_);
  std::optional<Frame> f;
  try {
    f = take();
  } catch (...) {
    give_up();
    throw;
  }
  return read(*f, [&](const Frame& frame) {
    announce(frame, known_for(frame.flags));  // frames behind it may be decoded first
    const nb::object snapshot = or_python_error([&] { return nb::cast(Snapshot{frame, nullptr, {}, definitions_for(frame.flags)}, nb::rv_policy::move); });
    Calling python;
    nb::object made = nb::steal(PyObject_CallOneArg(make.ptr(), snapshot.ptr()));
    if (!made.is_valid()) throw nb::python_error();
    return made;
  });
}

nb::object Reader::receive_head() {
  check_owner(fork_);
  if (read_once(*ring.front()).kind == Kind::kError) return nb::object();
  try {
    load_front();
    const Frame f = *front_;
    return learn_and_decode(f);
  } catch (...) {
    give_up();
    throw;
  }
}

void Reader::skip_head() noexcept {
  if (!ring.empty()) take_loaded();
}

nb::object Reader::receive_or_leave() {
  check_owner(fork_);
  const uint64_t number = ring.next();
  if (decodes_natively()) return receive_native();
  load_front();
  const Frame f = *front_;
  nb::object value = learn_and_decode(f);
  if (ring.next() == number && !ring.empty()) take();
  return value;
}

nb::object Reader::receive_snapshot() {
  check_owner(fork_);
  const uint64_t number = ring.next();
  try {
    if (decodes_natively() && read_once(*ring.front()).codec < kPlain) return receive_native();  // nobody can change it
    nb::object refs;
    if (!announce_front() || !take_front_claims(refs)) return nb::object();
    load_front();
    nb::object value = keep(*front_, std::move(refs), front_definitions());  // runs no Python code: the frame is still ours
    take();
    return value;
  } catch (...) {
    set_python_error();
    nb::python_error error;
    if (is_final(error.value()) && ring.next() == number && !ring.empty()) give_up();
    throw error;
  }
}

}  // namespace conveyor
