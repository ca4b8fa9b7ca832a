// The pump between hosts. It never calls Python: what it has to tell is fetched, when its descriptor says so.
#include "bind.h"
#include "exit.h"
#include "net/acceptor.h"
#include "net/pump.h"

namespace conveyor {
namespace {

uint64_t ns_of(double seconds) {
  if (!(seconds > 0 && seconds < 1e6)) throw nb::value_error("conveyor: a time in seconds, above 0");
  return uint64_t(seconds * 1e9);
}

std::vector<net::Due> frames_of(uint32_t host, const nb::tuple& frames) {
  std::vector<net::Due> due;
  for (nb::handle one : frames) {
    const nb::tuple parts = nb::cast<nb::tuple>(one);
    if (parts.size() != 3) throw nb::value_error("conveyor: frames are a segment, a ring and a number");
    due.push_back({host, nb::cast<uint64_t>(parts[0]), nb::cast<uint32_t>(parts[1]), nb::cast<uint64_t>(parts[2])});
  }
  return due;
}

// What `made(one)` gives of each. Where Python has no memory for it, all of it is told the next time.
template <class T, class Made>
nb::object listed(net::HostPump& pump, std::list<T> all, const Made& made) {
  try {
    const nb::object list = nb::steal(PyList_New(0));
    if (!list.is_valid()) nb::raise_python_error();
    for (const T& one : all) {
      const nb::object item = nb::steal(made(one));
      if (!item.is_valid() || PyList_Append(list.ptr(), item.ptr()) != 0) nb::raise_python_error();
    }
    return list;
  } catch (...) {
    pump.untold(std::move(all));
    throw;
  }
}

}  // namespace

void bind_net(nb::module_& m) {
  using net::HostPump;
  m.attr("NOT_BETWEEN_HOSTS") = nb::bytes(net::kNotBetweenHosts);
  m.attr("HOST_IS_FULL") = nb::bytes(net::kHostIsFull);
  m.attr("HOST_CONNECTED") = int(net::Event::kConnected);
  m.attr("HOST_DISCONNECTED") = int(net::Event::kDisconnected);
  m.attr("HOST_LOST") = int(net::Event::kLost);
  m.attr("WIRE_VERSION") = net::kWireVersion;

  nb::class_<net::RingSpec>(m, "MirroredRing")
      .def("__init__", [](net::RingSpec* self, size_t offset, std::pair<uint32_t, uint32_t> writer, const std::vector<std::pair<uint32_t, uint32_t>>& readers,
                          std::shared_ptr<ArenaView> view, size_t times, uint32_t kept) {
             std::vector<Target> targets;
             for (const auto& [slot, bit] : readers) targets.push_back({slot, bit});
             new (self) net::RingSpec{offset, {writer.first, writer.second}, std::move(targets), std::move(view), times, kept};
           }, "offset"_a, "writer"_a, "readers"_a, "view"_a.none() = nb::none(), "times"_a = 0, "kept"_a = 0);
  nb::class_<net::LimitsSpec>(m, "MirroredLimits")
      .def("__init__", [](net::LimitsSpec* self, size_t offset, uint32_t sets, uint32_t tasks, uint32_t home) { new (self) net::LimitsSpec{offset, sets, tasks, home}; },
           "offset"_a, "sets"_a, "tasks"_a, "home"_a);

  nb::class_<net::Acceptor>(m, "Acceptor")
      .def("__init__", [](net::Acceptor* self, int listener, const nb::bytes& token, double patience) {
             net::AcceptorLimits limits;
             limits.patience_ns = ns_of(patience);
             new (self) net::Acceptor(dup_cloexec(listener), std::string(token.c_str(), token.size()), limits);
           }, "listener"_a, "token"_a, "patience"_a)
      .def_prop_ro("ready_fd", &net::Acceptor::ready_fd)
      .def("take", [](net::Acceptor& a) {
             std::vector<Fd> taken = a.take();
             nb::list all;
             for (const Fd& fd : taken) all.append(fd.get());
             for (Fd& fd : taken) fd.release();
             return all;
           })
      .def("counts", [](net::Acceptor& a) {
             const net::Acceptor::Counts counts = a.counts();
             return nb::make_tuple(counts.strangers, counts.dropped);
           })
      .def("reasons", [](net::Acceptor& a) {
             nb::list all;
             for (const std::string& reason : a.reasons()) all.append(nb::str(reason.c_str(), reason.size()));
             return all;
           })
      .def("stop", [](net::Acceptor& a) {
             Unlocked unlocked;
             a.stop();
           });

  nb::class_<HostPump>(m, "HostPump")
      .def("__init__", [](HostPump* self, std::shared_ptr<Board> board, uint32_t host, double window, double spin_us) {
             new (self) HostPump(std::move(board), host, ns_of(window), uint64_t(std::max(0.0, spin_us) * 1000));
           }, "board"_a, "host"_a, "window"_a = double(HostPump::kWindowNs) / 1e9, "spin_us"_a = 100.0)
      .def_prop_ro("eventfd", &HostPump::eventfd)
      .def_prop_ro("notice_fd", &HostPump::notice_fd)
      .def("add_proxy", [](HostPump& p, uint32_t slot, uint32_t incarnation, uint32_t host, const std::string& name, std::shared_ptr<Arena> arena) {
             Unlocked unlocked;
             p.add_proxy(slot, incarnation, host, name, std::move(arena));
           }, "slot"_a, "incarnation"_a, "host"_a, "name"_a, "arena"_a)
      .def("remove_proxy", [](HostPump& p, uint32_t slot) {
             Unlocked unlocked;
             p.remove_proxy(slot);
           }, "slot"_a)
      .def("mirror", [](HostPump& p, uint64_t number, std::shared_ptr<Segment> segment, std::vector<net::RingSpec> rings, std::vector<net::LimitsSpec> limits) {
             Unlocked unlocked;
             p.mirror(number, std::move(segment), std::move(rings), std::move(limits));
           }, "number"_a, "segment"_a, "rings"_a, "limits"_a = nb::make_tuple())
      .def("unmirror", [](HostPump& p, uint64_t number) {
             Unlocked unlocked;
             p.unmirror(number);
           }, "number"_a)
      .def("connect", [](HostPump& p, int fd, uint32_t host) {
             Unlocked unlocked;
             p.connect(dup_cloexec(fd), host);
           }, "fd"_a, "host"_a)
      .def("disconnect", [](HostPump& p, uint32_t host, const std::string& reason) {
             Unlocked unlocked;
             p.disconnect(host, reason);
           }, "host"_a, "reason"_a)
      .def("give_up", [](HostPump& p, uint32_t host, const std::string& reason) {
             Unlocked unlocked;
             p.give_up(host, reason);
           }, "host"_a, "reason"_a)
      .def("connected", [](HostPump& p, uint32_t host) {
             Unlocked unlocked;
             return p.connected(host);
           }, "host"_a)
      .def("overslept", [](HostPump& p, double within) {
             Unlocked unlocked;
             return double(p.overslept(ns_of(within))) / 1e9;
           }, "within"_a)
      .def("ask_clock", [](HostPump& p, uint32_t host, uint32_t times, double timeout) {
             std::vector<net::ClockSample> samples;
             {
               Unlocked unlocked;
               samples = p.ask_clock(host, times, ns_of(timeout));
             }
             nb::list all;
             for (const net::ClockSample& s : samples) all.append(nb::make_tuple(s.asked, s.says, s.answered));
             return all;
           }, "host"_a, "times"_a, "timeout"_a)
      .def("due", [](HostPump& p) {
             std::vector<net::Due> due;
             {
               Unlocked unlocked;
               due = p.due();
             }
             nb::list all;
             for (const net::Due& d : due) all.append(nb::make_tuple(d.host, d.segment, d.ring, d.frames));
             return all;
           })
      .def("has", [](HostPump& p, uint32_t host, nb::tuple frames) {
             const std::vector<net::Due> due = frames_of(host, frames);
             Unlocked unlocked;
             return p.has(host, due);
           }, "host"_a, "frames"_a)
      .def("tell_when_come", [](HostPump& p, uint32_t host, nb::tuple frames, uint64_t number) {
             std::vector<net::Due> due = frames_of(host, frames);
             Unlocked unlocked;
             p.tell_when_come(host, std::move(due), number);
           }, "host"_a, "frames"_a, "number"_a)
      .def("come", [](HostPump& p) {
             return listed(p, p.come(), [](uint64_t number) { return PyLong_FromUnsignedLongLong(number); });
           })
      .def("events", [](HostPump& p) {
             return listed(p, p.events(), [](const net::Event& e) { return Py_BuildValue("iIs", int(e.kind), e.host, e.reason.c_str()); });
           })
      .def("left", [](HostPump& p) {
             return listed(p, p.left(), [](const net::Left& l) { return Py_BuildValue("NII", PyBytes_FromStringAndSize(l.header.data(), Py_ssize_t(l.header.size())), l.slot, l.incarnation); });
           })
      .def("counts", [](HostPump& p, uint32_t host) {
             net::PeerCounts counts;
             {
               Unlocked unlocked;
               counts = p.counts(host);
             }
             return nb::make_tuple(counts.frames_sent, counts.frames_received, counts.bytes_sent, counts.bytes_received, counts.connections);
           }, "host"_a)
      .def("stop", [](HostPump& p) {
             Unlocked unlocked;
             p.stop();
           });
}

}  // namespace conveyor
