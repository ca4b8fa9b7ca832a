"""Node agent of a Ray node that shares no memory with the driver's: a Ray actor there, for as long as the
session.

The agent has its node's station, accepts connections of other nodes, connects to them, and hands descriptors
to the processes that Ray starts on its node, as the driver does on its own. The driver sends orders as calls
of Ray, which come in order. The agent sends news as the result of a call that waits for them. The agent holds
no resources. The processes of its node watch the agent, and end with it.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
from contextlib import suppress
from functools import partial
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from conveyor import __version__, _core, descriptors, system_limits
from conveyor.cluster.addresses import Listening
from conveyor.cluster.carrier import Carrier, HungUp, NodeMessage
from conveyor.cluster.connections import Listener, Redials
from conveyor.cluster.fetches import Fetches
from conveyor.cluster.handshake import (
    FOR_FETCHING,
    FOR_READING,
    Identity,
    dial_node,
    hand_over,
)
from conveyor.cluster.node_agent import AgentCallbacks, NodeAgent
from conveyor.cluster.servers import Memories, SharedFiles, Supply
from conveyor.cluster.tls import Credentials, Tls
from conveyor.codec import Reader
from conveyor.driver.process_engine import NodeOrder, ProcessSnapshot
from conveyor.engines.ray import bootstrap
from conveyor.engines.ray.processes import AttachedProcesses, Processes, Resident, tail
from conveyor.exceptions import ActorStartError
from conveyor.graph.telemetry import Look, LookAtAll, Seen, SeenAll
from conveyor.runtime.deadlock_detector import Frames, LookAtWaits, WaitsThere, due_to
from conveyor.runtime.events import EventLoop, guarded
from conveyor.runtime.process import ArenaSize, memory_limit
from conveyor.runtime.stored_values import StoreSnapshot, stores_on


class Arrived(Struct, frozen=True):
    """Notice that the process expected under that number has come. ``refused``: why it cannot be taken."""

    number: int
    pid: int
    refused: str = ""


class ProcessRequest(Struct, frozen=True):
    """Request of a process to the driver."""

    process: Reader
    data: bytes


class Ended(Struct, frozen=True):
    """Notice that a process has ended.

    number: the number under which it came.
    status: its wait status.
    snapshot: its last process snapshot.
    left: whether a method ended it by ``sys.exit``.
    tail: the last lines that it has written to stderr.
    went_on: whether it had to be killed, since it went on without its main thread.
    due: the frames that the driver's node must have before it takes the process for ended: the last results
        of the process are among them.
    """

    number: int
    status: int
    snapshot: ProcessSnapshot
    left: bool
    tail: str
    went_on: bool
    due: Frames


class LostNode(Struct, frozen=True):
    """Notice that the agent's node has lost another node."""

    number: int
    reason: str


class Reached(Struct, frozen=True):
    """Notice that the agent's node is connected to another one, as ordered. ``error``: why it cannot be."""

    number: int
    error: Exception | None


class Come(Struct, frozen=True):
    """Notice that the frames of an order have come to the agent's node, or will not come any more. See
    :class:`conveyor.driver.process_engine.TellWhenCome`, which has the same number."""

    number: int


class Sent(Struct, frozen=True):
    """Message to the driver's node that belongs to a connection between two processes."""

    node_message: NodeMessage


class BorrowsWithdrawn(Struct, frozen=True):
    """Notice that a process has left before a frame came, and will not make good the borrows of its
    header."""

    header: bytes
    process: Reader


News = Arrived | ProcessRequest | Come | Ended | LostNode | Reached


#: Timeout of the first connection to another node, in seconds.
_TIME_LIMIT = 10.0
#: Number of the driver's node.
_DRIVER = 0
#: Process snapshot of a process that was cleaned up before it had ended, as nobody wanted it any more.
_NO_SNAPSHOT: ProcessSnapshot = (0, 0, 0, 0, 0, 0, "")


class Terms(Struct, frozen=True):
    """Bootstrap of an agent. ``version``: of the driver's Conveyor and Python. ``address``: where the
    driver's node accepts connections. ``window``: seconds without a connection after which a node is taken
    for lost. ``session``: the session's number in the driver's process table. ``listening``: where the agent
    listens."""

    number: int
    version: str
    driver: Reader
    address: tuple[str, int]
    arena: ArenaSize
    window: float
    session: int
    listening: Listening = Listening()


class Secrets(Struct, frozen=True):
    """Secrets that let an agent into the session: the token and, over TLS, the credentials that the agent
    shows and accepts. They come by a method call, whose arguments Ray's control plane does not store; it
    stores those of a constructor for as long as the actor lives."""

    token: bytes
    tls: Credentials | None = None

    def __repr__(self) -> str:
        return "Secrets(...)"  # keeps the secrets out of logs and error texts


class Ready(Struct, frozen=True):
    """Notice of an agent that it is connected to the driver's node. ``address``: where other nodes connect.
    ``process_listener``: where the processes of its node connect. ``attached_listener``: where attached
    actors do. ``locality``: where the agent runs."""

    address: tuple[str, int]
    process_listener: str
    attached_listener: str
    arena: ArenaSize
    locality: bootstrap.Locality


class _Expected(Resident, eq=False, kw_only=True):
    number: int
    slot: int
    incarnation: int
    visits: bool = False
    stderr: str = ""


class Agent:
    """The Ray actor. Ray calls each of its four concurrency groups (orders, news, queries, waits) on a thread
    of its own; the rest happens on the event loop's thread, but connecting to other nodes, which may wait."""

    def __init__(self, terms: Terms) -> None:
        if bootstrap.version() != terms.version:
            raise ActorStartError(
                f"there is {bootstrap.version()}, and the driver is {terms.version}: install the same on both"
            )
        system_limits.raise_descriptor_limit()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._terms = terms
        self._token = b""
        self._tls: Tls | None = None
        self._news: queue.SimpleQueue[News | Sent | BorrowsWithdrawn | None] = queue.SimpleQueue()
        self._events = EventLoop()
        #: Addresses of all known nodes.
        self._addresses: dict[int, tuple[str, int]] = {}
        self._redials = Redials(partial(self._dial, time_limit=terms.window), terms.window)
        arena = replace(terms.arena, cap=min(terms.arena.cap, max(memory_limit() // 2, 1 << 20)))
        callbacks = AgentCallbacks(
            self._requested,
            self._headless,
            self._reach,
            self._locate,
            self._connection,
            self._memory,
        )
        self._node_agent = NodeAgent(
            terms.number, terms.driver, arena, self._events, callbacks, terms.window, terms.session
        )
        self._processes = Processes(self._events)
        self._attached_processes = AttachedProcesses(self._events)
        self._expected: dict[int, _Expected] = {}  # by the number under which they connect
        self._living: dict[int, _Expected] = {}  # by slot
        self._identity = Identity(terms.number, __version__)
        self._shared_files = SharedFiles()
        self._memories = Memories(self._node_agent.process_table)
        self._fetches = Fetches(
            self._node_agent.node_of,
            partial(self._dial_for, FOR_READING),
            self._node_agent.process_table.note_fetched,
        )
        self._carrier = Carrier(
            self._shared_files,
            Supply(partial(self._dial_for, FOR_FETCHING, _DRIVER)),
            lambda node_message: self._news.put(Sent(node_message)),
        )

    def begin(self, secrets: Secrets) -> Ready:
        """Accept connections of other nodes, and connect to the driver's node."""
        import ray

        address = ray.util.get_node_ip_address()
        node: str = ray.get_runtime_context().get_node_id()
        system_limits.name_process(f"the agent of node {address} ({node[:8]})")
        pump = self._node_agent.pump
        self._token = secrets.token
        if secrets.tls is not None:
            self._tls = Tls(secrets.tls)
        self._listener = self._terms.listening.begin(
            address,
            lambda at: Listener(at, self._token, self._identity, self._let_in, tls=self._tls),
        )
        self._listener.give_to(pump)
        self._events.add(pump.notice_fd, self._on_notice)
        self._locate(_DRIVER, self._terms.address)
        self._redials.prepare(_DRIVER)
        self._dial(_DRIVER, _TIME_LIMIT)
        self._processes.process_listener.start()
        self._attached_processes.process_listener.start()
        return Ready(
            self._listener.address,
            self._processes.process_listener.address,
            self._attached_processes.process_listener.address,
            self._node_agent.arena,
            bootstrap.Locality.own(),
        )

    def do(self, order: NodeOrder) -> Any:
        """Carry out an order of the driver, and return its outcome."""
        return self._node_agent.do(order)

    def receive(self, node_message: NodeMessage) -> None:
        """Take a message of the driver's node that belongs to a connection between two processes."""
        self._carrier.receive(node_message)

    def expect(
        self,
        number: int,
        slot: int,
        boot_file: bootstrap.BootstrapFile,
        segments: list[int],
        visits: bool = False,
    ) -> bytes:
        """Expect a process under that number, for that slot; return the secret that it has to prove. The
        process will get ``boot_file``, and its ends of these segments. ``visits``: the process is that of an
        attached actor, which the session does not end."""
        incarnation = self._node_agent.local(slot).incarnation
        fds = bootstrap.made_for(boot_file, self._node_agent.given_at_start(slot, segments))
        one = _Expected(number=number, slot=slot, incarnation=incarnation, fds=fds, visits=visits)
        one.on_end = partial(self._ended, one)
        self._expected[number] = one
        process_listener = self._processes_of(one).process_listener
        try:
            return process_listener.expect(
                number, partial(self._arrived, one), partial(self._refused, one)
            )
        except BaseException:
            del self._expected[number]
            one.close_fds()
            raise

    def disown(self, number: int) -> bool:
        """Stop expecting the process of that number, which does not come or is not wanted any more. Return
        whether it had not come. If it had, there is or was news of it."""
        one = self._expected.pop(number, None)
        if one is not None:
            self._events.call(partial(self._disown, one))
        return one is not None

    def _disown(self, one: _Expected) -> None:
        self._processes_of(one).process_listener.forget(one.number)
        self._close(one)

    def _processes_of(self, one: _Expected) -> Processes | AttachedProcesses:
        return self._attached_processes if one.visits else self._processes

    def kill(self, slot: int, incarnation: int) -> None:
        """Kill a process. An attached actor leaves instead, when its method has returned."""
        one = self._living.get(slot)
        if one is None or one.incarnation != incarnation:
            return
        if one.visits:
            self._attached_processes.tell_to_leave(one.pid)
        else:
            self._processes.signal(one, signal.SIGKILL)

    def look(self, look: Look) -> Seen:
        """Return the status of a graph's actors on this node."""
        return self._node_agent.look(look)

    def look_at_all(self, look: LookAtAll) -> SeenAll:
        """Return the status of all processes of this node."""
        to_driver = {_DRIVER: self._carrier.trouble} if self._carrier.trouble else {}
        troubles = {**self._fetches.troubles(), **to_driver}
        return SeenAll(self._node_agent.look_at_all(look), troubles)

    def look_at_waits(self, look: LookAtWaits) -> WaitsThere:
        """Return the waits of all processes of this node."""
        return self._node_agent.look_at_waits(look)

    def stored(self) -> list[StoreSnapshot]:
        """Return the values that the processes of this node store for others."""
        return stores_on(self._node_agent.process_table, None)

    def leave(self) -> None:
        """End the agent: the session is over, and all processes of this node have ended."""
        import ray

        self._node_agent.pump.stop()
        self._events.call(
            self._attached_processes.see_off
        )  # otherwise they would see the agent die
        self._news.put(None)
        ray.actor.exit_actor()

    def news(self) -> list[News | Sent | BorrowsWithdrawn]:
        """Return the news for the driver. Wait until there are any, or the session is over."""
        found = [self._news.get()]
        with suppress(queue.Empty):
            while True:
                found.append(self._news.get_nowait())
        return [news for news in found if news is not None]

    # Processes, on the events' thread

    def _arrived(self, one: _Expected, pid: int, stderr: str) -> list[int]:
        if self._expected.pop(one.number, None) is None:
            raise OSError("nobody wants it any more")
        self._processes_of(one).add(one, pid)
        if not one.visits:
            one.stderr = stderr  # the stderr of an attached actor is the program's own
        self._living[one.slot] = one
        self._events.call(partial(self._sent, one))
        return one.fds

    def _sent(self, one: _Expected) -> None:
        self._close(one)
        if one.pid:  # otherwise it was refused after all
            self._news.put(Arrived(one.number, one.pid))

    def _refused(self, one: _Expected, why: str) -> None:
        self._expected.pop(one.number, None)
        if one.visits and one.pid:  # added before its descriptors could not be sent
            self._living.pop(one.slot, None)
            self._attached_processes.forget(one)
            one.pid = 0
        self._close(one)
        self._news.put(Arrived(one.number, 0, why))

    def _close(self, one: _Expected) -> None:
        one.close_fds()
        if self._node_agent.has(one.slot, one.incarnation):  # otherwise it is cleaned up already
            self._node_agent.local(one.slot).close_passed()

    def _ended(self, one: _Expected) -> None:
        if self._living.get(one.slot) is one:
            del self._living[one.slot]
        snapshot, left = _NO_SNAPSHOT, False
        if self._node_agent.has(one.slot, one.incarnation):  # else the slot may be another's
            snapshot, left = self._node_agent.last_snapshot(one.slot)
        self._news.put(
            Ended(
                one.number,
                one.wait_status(),
                snapshot,
                left,
                tail(one.stderr),
                one.went_on,
                due_to(self._node_agent.pump, _DRIVER),
            )
        )

    def _requested(self, slot: int, incarnation: int, data: bytes) -> None:
        self._news.put(ProcessRequest((slot, incarnation), data))

    def _headless(self, slot: int) -> None:
        one = self._living.get(slot)
        if one is not None and not one.visits:
            self._processes.end_headless(one)

    # Other nodes

    def _connection(self, number: int) -> socket.socket:
        try:
            here, there = descriptors.socket_pair()
        except OSError:
            self._news.put(Sent(HungUp(number)))  # the other end is there already
            raise
        self._carrier.open(number, here)
        return there

    def _memory(self) -> socket.socket:
        here, there = descriptors.socket_pair()
        try:
            self._fetches.serve(here)
        except BaseException:
            there.close()
            raise
        return there

    def _dial_for(self, purpose: int, node: int) -> socket.socket:
        own = replace(self._identity, purpose=purpose)
        address, window = self._addresses[node], self._terms.window
        return dial_node(node, address, self._token, own, window, self._tls)

    def _let_in(self, sock: socket.socket, other: Identity) -> None:
        """Serve a connection that is not for the pump."""
        if other.purpose == FOR_FETCHING:
            self._shared_files.serve(sock)
            return
        self._memories.serve(sock)

    def _locate(self, node: int, address: tuple[str, int]) -> None:
        self._addresses[node] = address

    def _reach(self, node: int, address: tuple[str, int]) -> None:
        self._locate(node, address)
        self._redials.prepare(node)
        first = partial(self._dial, node, _TIME_LIMIT)
        self._redials.begin(node, first, lambda error: self._news.put(Reached(node, error)))

    def _dial(self, node: int, time_limit: float) -> None:
        address = self._addresses[node]
        sock = dial_node(node, address, self._token, self._identity, time_limit, self._tls)
        hand_over(sock, self._node_agent.pump, node)

    def _on_notice(self) -> None:
        for kind, node, reason in self._node_agent.pump.events():
            # Guarded: an error does not keep the next ones from being handled.
            guarded(partial(self._heed, kind, node, reason))
        for header, slot, incarnation in self._node_agent.pump.left():
            self._news.put(BorrowsWithdrawn(header, (slot, incarnation)))
        for number in self._node_agent.pump.come():
            self._news.put(Come(number))

    def _heed(self, kind: int, node: int, reason: str) -> None:
        if kind == _core.HOST_CONNECTED:
            self._redials.connected(node)
        elif kind == _core.HOST_DISCONNECTED:
            self._redials.broken(node)
        elif kind == _core.HOST_LOST:
            self._redials.lost(node)
            self._fetches.lose(node)
            if node == _DRIVER:
                self._end()
            self._news.put(LostNode(node, reason))

    def _end(self) -> None:
        """Kill all processes of this node, and the agent: the driver's node is lost, and the session over."""
        self._processes.kill_all()
        os.kill(os.getpid(), signal.SIGKILL)
