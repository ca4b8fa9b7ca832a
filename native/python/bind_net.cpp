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

  nb::class_<net::RingSpec>(m, "MirroredRing", "A ring of a segment that several hosts have.")
      .def("__init__", [](net::RingSpec* self, size_t offset, std::pair<uint32_t, uint32_t> writer, const std::vector<std::pair<uint32_t, uint32_t>>& readers,
                          std::shared_ptr<ArenaView> view, size_t times, uint32_t kept) {
             std::vector<Target> targets;
             for (const auto& [slot, bit] : readers) targets.push_back({slot, bit});
             new (self) net::RingSpec{offset, {writer.first, writer.second}, std::move(targets), std::move(view), times, kept};
           }, "offset"_a, "writer"_a, "readers"_a, "view"_a.none() = nb::none(), "times"_a = 0, "kept"_a = 0, R"(
           ``writer`` and ``readers``: slots and bits. ``view``: of the arena of a writer that is on this host.
           ``times``: the offset of ``kept`` numbers of 64 bits, a power of two, in which it is noted when frames have
           come from another host, that of each at its tag modulo ``kept``.)");
  nb::class_<net::LimitsSpec>(m, "MirroredLimits", "Limits of a segment that several hosts have; ``home``: the host that submits.")
      .def("__init__", [](net::LimitsSpec* self, size_t offset, uint32_t sets, uint32_t tasks, uint32_t home) { new (self) net::LimitsSpec{offset, sets, tasks, home}; },
           "offset"_a, "sets"_a, "tasks"_a, "home"_a);

  nb::class_<net::Acceptor>(m, "Acceptor", R"(
      Native thread that accepts connections of other nodes, and does the handshake with them. It never takes the GIL.
      Whoever does not know the token gets no further.)")
      .def("__init__", [](net::Acceptor* self, int listener, const nb::bytes& token, const nb::bytes& own, bool tls, double time_limit, size_t most_pending) {
             net::AcceptorLimits limits;
             limits.patience_ns = ns_of(time_limit);
             limits.most_admitted = std::max<size_t>(most_pending, 1);
             new (self) net::Acceptor(dup_cloexec(listener), std::string(token.c_str(), token.size()), std::string(own.c_str(), own.size()), tls, limits);
           }, "listener"_a, "token"_a, "own"_a, "tls"_a, "time_limit"_a, "most_pending"_a, R"(
           ``listener``: a listening socket, of which it has a duplicate. ``own``: this side's identity
           (``cluster.handshake``). ``tls``: it is not to go on with connections that are admitted. ``time_limit``: seconds
           for the first message, and for the handshake behind it. ``most_pending``: handshakes at once.)")
      .def_prop_ro("ready_fd", &net::Acceptor::ready_fd, "Becomes readable when there are connections to take, and when it is stopped.")
      .def("take", [](net::Acceptor& a) {
             std::vector<net::Arrival> taken = a.take();
             nb::list all;
             for (const net::Arrival& one : taken) all.append(nb::make_tuple(one.fd.get(), nb::bytes(one.identity.data(), one.identity.size()), int(one.verdict)));
             for (net::Arrival& one : taken) one.fd.release();
             return all;
           }, nb::sig("def take(self) -> list[tuple[int, bytes, int]]"), R"(
           Return connections of those that have proved themselves: descriptors, which are the caller's, identities and
           verdicts. The identity is empty where the connection is only admitted.)")
      .def("give_to", &net::Acceptor::give_to, "pump"_a, nb::keep_alive<1, 2>(), "Have the pump take the connections that are for it.")
      .def("introduce", [](net::Acceptor& a, int fd, const nb::bytes& binding) { a.introduce(dup_cloexec(fd), std::string(binding.c_str(), binding.size())); },
           "fd"_a, "binding"_a, R"(
           Go on with a connection that was admitted, and has TLS now; it has a duplicate. ``binding``: what its proofs
           cover of TLS.)")
      .def("counts", [](net::Acceptor& a) {
             const net::Acceptor::Counts counts = a.counts();
             return nb::make_tuple(counts.strangers, counts.dropped, counts.let_in);
           }, nb::sig("def counts(self) -> tuple[int, int, int]"),
           "Return how many have not proved themselves, how many were dropped for lack of room, and how many were let in.")
      .def("reasons", [](net::Acceptor& a) {
             nb::list all;
             for (const std::string& reason : a.reasons()) all.append(nb::str(reason.c_str(), reason.size()));
             return all;
           }, nb::sig("def reasons(self) -> list[str]"), "Return what was wrong with the latest strangers, since the last call.")
      .def("stop", [](net::Acceptor& a) {
             Unlocked unlocked;
             a.stop();
           }, "Accept nobody any more, and drop whoever is not taken.");

  nb::class_<HostPump>(m, "HostPump", R"(
      The native thread that joins this host's rings to those of others. It never takes the GIL. All but ``events``
      and ``stop`` return when it has done what was asked; ``OSError`` says what kept it from that: ``ESHUTDOWN``
      after ``stop``, ``EPERM`` in a forked child.)")
      .def("__init__", [](HostPump* self, std::shared_ptr<ProcessTable> process_table, uint32_t host, double window, double spin_us) {
             new (self) HostPump(std::move(process_table), host, ns_of(window), uint64_t(std::max(0.0, spin_us) * 1000));
           }, "process_table"_a, "host"_a, "window"_a = double(HostPump::kWindowNs) / 1e9, "spin_us"_a = 100.0,
           "``host``: this one's number. ``window``: seconds without a connection after which a host's processes are dead.")
      .def_prop_ro("eventfd", &HostPump::eventfd, "Of the bells of all proxies: every process of this host that writes to one has to have it.")
      .def_prop_ro("notice_fd", &HostPump::notice_fd, "Becomes readable when there are ``events``; stays the pump's.")
      .def("add_proxy", [](HostPump& p, uint32_t slot, uint32_t incarnation, uint32_t host, const std::string& name, std::shared_ptr<Arena> arena) {
             Unlocked unlocked;
             p.add_proxy(slot, incarnation, host, name, std::move(arena));
           }, "slot"_a, "incarnation"_a, "host"_a, "name"_a, "arena"_a, R"(
           Have a slot of the process table stand for a process of ``host``, which has the same there. What it sends comes to lie
           in ``arena``, which is made for that slot.)")
      .def("remove_proxy", [](HostPump& p, uint32_t slot) {
             Unlocked unlocked;
             p.remove_proxy(slot);
           }, "slot"_a, "Its process is no more.")
      .def("mirror", [](HostPump& p, uint64_t number, std::shared_ptr<Segment> segment, std::vector<net::RingSpec> rings, std::vector<net::LimitsSpec> limits) {
             Unlocked unlocked;
             p.mirror(number, std::move(segment), std::move(rings), std::move(limits));
           }, "number"_a, "segment"_a, "rings"_a, "limits"_a = nb::make_tuple(), R"(
           Join a segment to those of this number on the other hosts, which have the same rings and limits in the same
           order. A number is used once.)")
      .def("unmirror", [](HostPump& p, uint64_t number) {
             Unlocked unlocked;
             p.unmirror(number);
           }, "number"_a, "This host has it no more.")
      .def("connect", [](HostPump& p, int fd, uint32_t host) {
             Unlocked unlocked;
             p.connect(dup_cloexec(fd), host);
           }, "fd"_a, "host"_a, R"(
           A stream socket to ``host``, duplicated, which has been let in (``cluster.handshake``). It takes the place of
           the former one, and nothing is lost or comes twice.)")
      .def("disconnect", [](HostPump& p, uint32_t host, const std::string& reason) {
             Unlocked unlocked;
             p.disconnect(host, reason);
           }, "host"_a, "reason"_a, "End the connection, as if it had broken.")
      .def("give_up", [](HostPump& p, uint32_t host, const std::string& reason) {
             Unlocked unlocked;
             p.give_up(host, reason);
           }, "host"_a, "reason"_a, "Its processes are dead.")
      .def("connected", [](HostPump& p, uint32_t host) {
             Unlocked unlocked;
             return p.connected(host);
           }, "host"_a, "Whether the handshake with its pump is done over the present connection.")
      .def("overslept", [](HostPump& p, double within) {
             Unlocked unlocked;
             return double(p.overslept(ns_of(within))) / 1e9;
           }, "within"_a, "Seconds for which this process has not run, though its pump was to look: now, or the last time within so many seconds.")
      .def("ask_clock", [](HostPump& p, uint32_t host, uint32_t times, double timeout) {
             std::vector<net::ClockSample> samples;
             {
               Unlocked unlocked;
               samples = p.ask_clock(host, times, ns_of(timeout));
             }
             nb::list all;
             for (const net::ClockSample& s : samples) all.append(nb::make_tuple(s.requested, s.says, s.answered));
             return all;
           }, "host"_a, "times"_a, "timeout"_a, nb::sig("def ask_clock(self, host: int, times: int, timeout: float) -> list[tuple[int, int, int]]"),
           R"(
           Ask that host's clock so often, one question after the other, over the connection: when each was asked and
           answered, by this host's ``CLOCK_MONOTONIC``, and, in the middle, what the other one said. They are fewer if
           ``timeout`` seconds have passed before.)")
      .def("due", [](HostPump& p) {
             std::vector<net::Due> due;
             {
               Unlocked unlocked;
               due = p.due();
             }
             nb::list all;
             for (const net::Due& d : due) all.append(nb::make_tuple(d.host, d.segment, d.ring, d.frames));
             return all;
           }, nb::sig("def due(self) -> list[tuple[int, int, int, int]]"), R"(
           Which frames other hosts are to have of all that was published here until now, sent or not: (host, number of
           the segment, ring, frames).)")
      .def("has", [](HostPump& p, uint32_t host, nb::tuple frames) {
             const std::vector<net::Due> due = frames_of(host, frames);
             Unlocked unlocked;
             return p.has(host, due);
           }, "host"_a, "frames"_a, nb::sig("def has(self, host: int, frames: tuple[tuple[int, int, int], ...]) -> bool"), R"(
           Whether all of these frames of ``host`` are in their rings here: (number of the segment, ring, frames). Of a
           ring that is not here, or no more, none is waited for.)")
      .def("tell_when_come", [](HostPump& p, uint32_t host, nb::tuple frames, uint64_t number) {
             std::vector<net::Due> due = frames_of(host, frames);
             Unlocked unlocked;
             p.tell_when_come(host, std::move(due), number);
           }, "host"_a, "frames"_a, "number"_a,
           nb::sig("def tell_when_come(self, host: int, frames: tuple[tuple[int, int, int], ...], number: int) -> None"),
           "Have ``number`` be among ``come``, once, when ``has`` is true of these, or nothing of that host comes here any more.")
      .def("come", [](HostPump& p) {
             return listed(p, p.come(), [](uint64_t number) { return PyLong_FromUnsignedLongLong(number); });
           }, nb::sig("def come(self) -> list[int]"), "Numbers of ``tell_when_come``. To be asked behind ``events``, as ``left`` is.")
      .def("events", [](HostPump& p) {
             return listed(p, p.events(), [](const net::Event& e) { return Py_BuildValue("iIs", int(e.kind), e.host, e.reason.c_str()); });
           }, nb::sig("def events(self) -> list[tuple[int, int, str]]"),
           "What has happened since: ``HOST_CONNECTED``, ``HOST_DISCONNECTED`` (connect again) or ``HOST_LOST``, to which host, and why.")
      .def("left", [](HostPump& p) {
             return listed(p, p.left(), [](const net::Left& l) { return Py_BuildValue("NII", PyBytes_FromStringAndSize(l.header.data(), Py_ssize_t(l.header.size())), l.slot, l.incarnation); });
           }, nb::sig("def left(self) -> list[tuple[bytes, int, int]]"), R"(
           What frames have claimed for processes that had left before they came: their headers, slots and incarnations.
           To be asked behind ``events``: what comes later makes ``notice_fd`` readable again.)")
      .def("counts", [](HostPump& p, uint32_t host) {
             net::PeerCounts counts;
             {
               Unlocked unlocked;
               counts = p.counts(host);
             }
             return nb::make_tuple(counts.frames_sent, counts.frames_received, counts.bytes_sent, counts.bytes_received, counts.connections);
           }, "host"_a, nb::sig("def counts(self, host: int) -> tuple[int, int, int, int, int]"),
           "Frames sent and received, bytes sent and received, connections.")
      .def("stop", [](HostPump& p) {
             Unlocked unlocked;
             p.stop();
           }, "Say goodbye to the other hosts, and end. Proxies are dead then.");
}

}  // namespace conveyor
