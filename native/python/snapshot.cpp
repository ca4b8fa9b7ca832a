#include "snapshot.h"

#include <cstring>

#include "encode.h"
#include "exit.h"

namespace conveyor {

namespace {
void place(Snapshot& s, std::shared_ptr<OwnedMemory> memory) {
  s.frame.memory = std::move(memory);
  s.frame.body = s.frame.memory->data;
  s.frame.kept = true;
}
}  // namespace

Snapshot snapshot(nb::handle value, nb::handle sent, size_t share_from) {
  Encoded e;
  encode(e, value, sent, 0, nullptr);
  Snapshot s;
  s.frame.codec = e.codec;
  s.frame.flags = e.flags & ~uint32_t(kBound);  // `sent` is its own: it brings its definitions
  s.frame.size = e.size;
  if (e.attached) s.frame.attached = std::make_shared<const Held>(std::move(e.keeps), std::move(e.attached));
  const auto make = [&] {
    std::shared_ptr<OwnedMemory> memory;
    if (share_from != 0 && e.size >= share_from) {
      s.fd = std::make_shared<const Fd>(make_memfd("conveyor-value", align_up(e.size, kGranule)));
      memory = std::make_shared<OwnedMemory>(s.fd, e.size);
    } else {
      memory = std::make_shared<OwnedMemory>(e.size);
    }
    e.write_body(memory->data);
    return memory;
  };
  // As in Writer::prepare(): `e` keeps what is copied. What is shared goes to other processes, with the GIL: an actor that
  // ends waits for nobody who is just making it.
  place(s, share_from != 0 ? make() : unlocked_from(e.size, make));
  e.sent = nb::object();
  return s;
}

Snapshot received_snapshot(uint16_t codec, uint32_t flags, size_t size, nb::handle data, int fd) {
  Snapshot s;
  s.frame.codec = codec;
  s.frame.flags = flags & ~uint32_t(kExternal | kSure);
  s.frame.size = size;
  if (fd >= 0) {
    const off_t length = ::lseek(fd, 0, SEEK_END);
    if (size == 0 || length < 0 || size_t(length) < size) throw std::system_error(EPROTO, std::generic_category(), "snapshot size");
    s.fd = std::make_shared<const Fd>(dup_cloexec(fd));
    place(s, std::make_shared<OwnedMemory>(s.fd, size));
    return s;
  }
  if (!PyBytes_CheckExact(data.ptr()) || size_t(PyBytes_GET_SIZE(data.ptr())) != size)
    throw std::system_error(EPROTO, std::generic_category(), "snapshot size");
  place(s, unlocked_from(size, [&] {
    auto memory = std::make_shared<OwnedMemory>(size);
    std::memcpy(memory->data, PyBytes_AS_STRING(data.ptr()), size);
    return memory;
  }));
  return s;
}

}  // namespace conveyor
