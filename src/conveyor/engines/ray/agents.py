"""The driver's side of all node agents: one for each Ray node that shares no memory with the driver's."""

from __future__ import annotations

import itertools
import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any

from conveyor import __version__, _core
from conveyor.cluster.addresses import Listening
from conveyor.cluster.carrier import Carrier, NodeMessage
from conveyor.cluster.connections import Listener
from conveyor.cluster.display import OWN_NODE, Display, NodeSeen, in_words
from conveyor.cluster.fetches import Fetches
from conveyor.cluster.handshake import (
    FOR_FETCHING,
    FOR_READING,
    Identity,
    dial_node,
    new_token,
)
from conveyor.cluster.servers import Memories, SharedFiles, Supply
from conveyor.cluster.tls import Credentials, Tls
from conveyor.codec import Reader, borrows
from conveyor.codec.encoded import unpack
from conveyor.driver.process_engine import DriverCallbacks, NodeOrder
from conveyor.engines.ray import bootstrap
from conveyor.engines.ray.agent import Agent, BorrowsWithdrawn, News, Ready, Secrets, Sent, Terms
from conveyor.engines.ray.bootstrap import BootstrapFile, NodeOfProcess
from conveyor.exceptions import ActorStartError, ConveyorError, RuntimeStateError
from conveyor.futures import Future, wait
from conveyor.graph.telemetry import STACKS, TIME_LIMIT, Look, LookAtAll, Seen, SeenAll
from conveyor.runtime.deadlock_detector import LookAtWaits, WaitsThere
from conveyor.runtime.events import EventLoop, guarded
from conveyor.runtime.process import ArenaSize
from conveyor.runtime.stored_values import StoreSnapshot

#: Limit of unanswered looks at a node: with so many, another one fails at once.
_MAX_QUERIES = 4


class AgentNode:
    """A remote node, which is reached by its agent. See
    :class:`conveyor.driver.process_engine.RemoteNode`."""

    def __init__(
        self,
        number: int,
        name: str,
        agent: Any,
        ready: Ready,
        lose: Callable[[AgentNode, str], object],
        shared_files: SharedFiles,
        dial_shared_files: Callable[[], socket.socket],
        check: Callable[[], object] = lambda: None,
    ) -> None:
        """``agent``: Ray's handle. ``lose(node, why)`` gives a node up that cannot do what it has to.
        ``shared_files``: the driver's node's. ``dial_shared_files()`` connects to the shared files of this
        node. ``check()``: see :class:`conveyor.engines.ray.agents.Agents`."""
        self.number, self.name = number, name
        self.arena: ArenaSize = ready.arena
        self.address = ready.address
        #: Where processes that Ray starts on the node connect.
        self.process_listener = ready.process_listener
        #: Where attached actors of the node connect.
        self.attached_listener = ready.attached_listener
        #: Where the agent runs, which its processes have to share memory with.
        self.locality = ready.locality
        self.agent = agent
        #: Why the node is lost, or an empty string.
        self.lost = ""
        self._lose, self._check = lose, check
        # Reentrant: a signal handler may call the agent while the lock is held.
        self._lock = threading.RLock()
        self._awaited: set[Future[Any]] = set()
        self._connection_numbers = itertools.count(1)
        self.carrier = Carrier(
            shared_files, Supply(dial_shared_files, self._out_of_reach), self._carry
        )
        self._queries = 0

    def send(self, order: NodeOrder) -> Future[Any]:
        """Have the agent carry an order out; return its outcome."""
        return self._call(self.agent.do, order)

    def tell(self, order: NodeOrder) -> Future[Any]:
        """Send an order whose outcome nobody waits for. If the order fails, the node is given up."""
        sent = self.send(order)
        self._unawaited(sent)
        return sent

    def carry(self, sock: socket.socket) -> int:
        """See :class:`conveyor.driver.process_engine.RemoteNode`, also for the next two methods."""
        number = next(self._connection_numbers)
        self.carrier.open(number, sock)
        return number

    def hold(self, fd: int) -> None:
        self.carrier.hold(fd)

    def let_go(self, fd: int) -> None:
        self.carrier.let_go(fd)

    def _carry(self, node_message: NodeMessage) -> None:
        self._unawaited(self._call(self.agent.receive, node_message))

    def _out_of_reach(self, why: str) -> None:
        if not self.lost:
            host, port = self.address
            self._lose(
                self,
                f"a value that lies there cannot be fetched, since the driver's node cannot connect to "
                f"{host}:{port} ({why}): the driver's node has to reach the others, as they reach it",
            )

    def expect(
        self,
        number: int,
        slot: int,
        boot_file: BootstrapFile,
        segments: list[int],
        visits: bool = False,
    ) -> bytes:
        """See :meth:`Agent.expect`."""
        key: bytes = self._call(
            self.agent.expect, number, slot, boot_file, segments, visits
        ).result()
        return key

    def disown(self, number: int) -> Future[Any]:
        """See :meth:`Agent.disown`."""
        return self._call(self.agent.disown, number)

    def kill(self, slot: int, incarnation: int) -> None:
        """Kill a process of that node: see :meth:`Agent.kill`."""
        self._unawaited(self._call(self.agent.kill, slot, incarnation))

    def look(self, look: Look) -> Future[Seen]:
        """See :meth:`Agent.look`."""
        return self._look(self.agent.look, look)

    def look_at_all(self, look: LookAtAll) -> Future[SeenAll]:
        """See :meth:`Agent.look_at_all`."""
        return self._look(self.agent.look_at_all, look)

    def look_at_waits(self, look: LookAtWaits) -> Future[WaitsThere]:
        """See :meth:`Agent.look_at_waits`."""
        return self._call(self.agent.look_at_waits, look, group="waits")

    def stored(self) -> Future[list[StoreSnapshot]]:
        """See :meth:`Agent.stored`."""
        return self._look(self.agent.stored)

    def _look(self, method: Any, *look: Look | LookAtAll) -> Future[Any]:
        with self._lock:
            if self._queries >= _MAX_QUERIES:
                refused: Future[Any] = Future()
                text = "its host has not answered the questions before this one"
                refused.set_exception(RuntimeStateError(text))
                return refused
            self._queries += 1
        future = self._call(method, *look, group="queries")
        future.add_done_callback(self._looked)
        return future

    def _looked(self, _: Future[Any]) -> None:
        with self._lock:
            self._queries -= 1

    def leave(self) -> Future[Any]:
        """Have the agent end. The future is done when it has ended."""
        return self._call(self.agent.leave, ends=True)

    def forget(self, why: str) -> None:
        """Fail everything that waits for the node, which is lost or has ended."""
        with self._lock:
            self.lost = self.lost or why
            awaited, self._awaited = self._awaited, set()
        for future in awaited:
            future.set_exception(self._loss())
        self.carrier.close()

    def _loss(self) -> ConveyorError:
        return RuntimeStateError(f"node {self.name} is lost: {self.lost}")

    def _call(
        self, method: Any, *args: Any, group: str = "orders", ends: bool = False
    ) -> Future[Any]:
        """Call a method of the agent. ``ends``: the call ends the agent."""
        future: Future[Any] = Future()
        with self._lock:
            if self.lost:
                future.set_exception(self._loss())
                return future
            self._awaited.add(future)
            # With the lock, so that orders come in the order in which they were given.
            try:
                self._check()
                ref = method.options(concurrency_group=group).remote(*args)
            except Exception as error:
                # For example, Ray is disconnected. The error goes into the future, since callers of `tell`
                # have to go on.
                self._awaited.discard(future)
                future.set_exception(error)
                return future
        ref.future().add_done_callback(partial(self._done, future, ends))
        return future

    def _done(self, future: Future[Any], ends: bool, result: Any) -> None:
        error = result.exception()
        if not ends and self._is_of_rays(error):
            # The agent is dead. `forget` fails the futures, when the node's processes are known to be dead.
            self._lose(self, f"its agent has ended ({str(error).partition(chr(10))[0]})")
            return
        with self._lock:
            if future not in self._awaited:
                return
            self._awaited.discard(future)
        if error is None:
            future.set_result(result.result())
        else:
            future.set_exception(getattr(error, "cause", None) or error)

    @staticmethod
    def _is_of_rays(error: BaseException | None) -> bool:
        """Whether the error comes from Ray, about the agent, and not from the agent itself."""
        from ray.exceptions import RayActorError

        return isinstance(error, RayActorError)

    def _unawaited(self, future: Future[Any]) -> None:
        def look(done: Future[Any]) -> None:
            error = done.exception()
            if error is not None and not self.lost:
                self._lose(self, f"it could not do what it had to ({error})")

        future.add_done_callback(look)


_log = logging.getLogger("conveyor")

#: Seconds back in which a stop of this program may be why a node is lost.
_LATELY = 10.0
#: Seconds that an agent has to end in good order.
_LEAVE_SECONDS = 2.0
#: Concurrency groups of an agent's methods, with one thread each: queries delay neither orders nor news.
_GROUPS = {"orders": 1, "news": 1, "queries": 1, "waits": 1}


class Agents:
    """All node agents of the session. Nothing is opened before the first one starts."""

    def __init__(
        self,
        ray: Any,
        events: EventLoop,
        window: float,
        on_news: Callable[[AgentNode, News], object],
        on_loss: Callable[[AgentNode], object],
        tls: Credentials | None = None,
        check: Callable[[], object] = lambda: None,
        listening: Listening | None = None,
    ) -> None:
        """``window``: seconds that a node may be without a connection. ``on_news(node, news)`` and
        ``on_loss(node)`` are called on the thread of ``events``. ``tls``: the credentials that each node
        shows and accepts. ``check()`` raises if Ray must not be asked for anything any more. ``listening``:
        where all nodes listen, if not at any port of Ray's address."""
        self._check = check
        self._listening = listening or Listening()
        self._ray, self._events, self._window = ray, events, window
        self._credentials = tls
        self._tls = None if tls is None else Tls(tls)
        self._on_news, self._on_loss = on_news, on_loss
        self._callbacks: DriverCallbacks | None = None
        self._token = new_token()
        self._numbers = itertools.count(1)
        #: Held while an agent starts.
        self._starting = threading.Lock()
        self._listener: Listener | None = None
        self._display: Display | None = None
        self._pump: _core.HostPump | None = None
        self._shared_files = SharedFiles()
        self._memories: Memories | None = None
        self._fetches: Fetches | None = None
        self._by_node: dict[str, AgentNode] = {}
        self._closed = self._refuses = False
        #: Answer of the agent that is starting now.
        self._begun: Future[Ready] = Future()
        #: Held to add a node, and to close: an actor may be started while the session ends.
        self._adding = threading.Lock()

    def start(self, callbacks: DriverCallbacks) -> None:
        """Allow agents to be started from now on."""
        self._callbacks = callbacks

    def at(self, process_node: NodeOfProcess) -> AgentNode:
        """Return the agent of that node. Start one if there is none, or it is lost. ``ActorStartError`` if
        the agent cannot be started."""
        with self._starting:
            node = self._by_node.get(process_node.node)
            if node is None or node.lost:
                self._check_open(process_node)
                node = self._start(process_node)
                try:
                    with self._adding:
                        self._check_open(process_node)
                        self._by_node[process_node.node] = node
                except ActorStartError as error:  # `_by_node` does not have it: end it here
                    node.forget(str(error))
                    self._kill(node.agent)
                    raise
            return node

    def _check_open(self, process_node: NodeOfProcess) -> None:
        if self._refuses:
            raise ActorStartError(
                f"the session has ended, and Ray has placed it on node {process_node.address}"
            )

    def _start(self, process_node: NodeOfProcess) -> AgentNode:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        assert self._callbacks is not None
        number, address = next(self._numbers), self._open()
        terms = Terms(
            number,
            bootstrap.version(),
            self._callbacks.driver,
            address,
            self._callbacks.arena,
            self._window,
            self._callbacks.process.process_table.session,
            self._listening,
        )
        name = f"{process_node.address} ({process_node.node[:8]})"
        strategy = NodeAffinitySchedulingStrategy(process_node.node, soft=False)
        made = self._ray.remote(
            num_cpus=0, concurrency_groups=_GROUPS, scheduling_strategy=strategy
        )(Agent)
        agent = made.remote(terms)
        try:
            secrets = Secrets(self._token, self._credentials)
            ref = agent.begin.options(concurrency_group="orders").remote(secrets)
            ready = self._wait_for(ref, process_node)
        except BaseException as error:
            self._kill(agent)
            if not isinstance(error, Exception):
                raise
            cause = getattr(error, "cause", None) or error
            raise ActorStartError(
                f"Ray has placed it on node {name}, which shares no memory with the driver's, and the two "
                f"cannot be connected: {cause}"
            ) from error
        dial_shared_files = partial(self._dial, number, ready.address, FOR_FETCHING)
        at = number, name, agent
        node = AgentNode(*at, ready, self.lose, self._shared_files, dial_shared_files, self._check)
        self._hear(node)
        return node

    def _dial(self, number: int, address: tuple[str, int], purpose: int) -> socket.socket:
        identity = Identity(0, __version__, purpose=purpose)
        return dial_node(number, address, self._token, identity, self._window, self._tls)

    def _dial_memories(self, number: int) -> socket.socket:
        node = self.by_number(number)
        if node is None:
            raise ConnectionError("the host is lost")
        return self._dial(number, node.address, FOR_READING)

    def _wait_for(self, ref: Any, process_node: NodeOfProcess) -> Ready:
        """Return the agent's answer to ``begin``. ``ActorStartError`` if the session ends before."""
        begun: Future[Ready] = Future()
        with self._adding:
            self._check_open(process_node)
            self._begun = begun

        def tell(future: Any) -> None:
            error = future.exception()
            with suppress(InvalidStateError):  # the session has ended
                if error is None:
                    begun.set_result(future.result())
                else:
                    begun.set_exception(error)

        ref.future().add_done_callback(tell)
        return begun.result()

    def _open(self) -> tuple[str, int]:
        """Accept connections of nodes from now on; return the address."""
        assert self._callbacks is not None
        if self._listener is None:
            process = self._callbacks.process
            self._memories = Memories(process.process_table, process.slot)
            self._fetches = Fetches(
                self._callbacks.node_of,
                self._dial_memories,
                process.process_table.note_fetched,
                process.slot,
                self._callbacks.remote_stored,
            )
            process.remote_memory, process.serve_memory = self._fetches, self._fetches.serve
            listener = self._listening.begin(
                self._ray.util.get_node_ip_address(),
                lambda at: Listener(
                    at, self._token, Identity(0, __version__), self._let_in, tls=self._tls
                ),
            )
            try:
                # Nobody knows the listener's address yet, so the pump is there before the first connection.
                self._pump = self._callbacks.pump(self._window, listener.address[0])
                self._events.add(self._pump.notice_fd, self._on_notice)
                listener.give_to(self._pump)
            except BaseException:
                listener.close()
                raise
            self._listener = listener
            self._display = Display(self._events, self._gather)
        return self._listener.address

    def _gather(self, stacks: bool) -> list[NodeSeen]:
        """Return the status of the processes of all nodes that answer in time."""
        time_limit = STACKS if stacks else TIME_LIMIT
        requested = [(node, node.look_at_all(LookAtAll(stacks))) for node in self._nodes()]
        wait([answer for _, answer in requested], time_limit)
        names = {0: OWN_NODE, **{node.number: f"node {node.name}" for node, _ in requested}}
        own = {node.number: node.carrier.trouble for node, _ in requested}
        own.update(self._fetches.troubles() if self._fetches is not None else {})
        seen = [NodeSeen.of(node.name, answer, time_limit, names) for node, answer in requested]
        return [NodeSeen(OWN_NODE, troubles=in_words(own, names)), *seen]

    def _nodes(self) -> list[AgentNode]:
        return list(self._by_node.values())

    def _let_in(self, sock: socket.socket, other: Identity) -> None:
        """Serve a connection that is not for the pump."""
        if other.purpose == FOR_FETCHING:
            self._shared_files.serve(sock)
            return
        assert self._memories is not None
        self._memories.serve(sock)

    def _hear(self, node: AgentNode) -> None:
        """Ask the node's agent for its next news."""
        try:
            self._check()
            ref = node.agent.news.options(concurrency_group="news").remote()
        except Exception as error:  # for example, Ray is disconnected
            self.lose(node, f"its agent cannot be asked for news ({error})")
            return
        ref.future().add_done_callback(
            lambda result: self._events.call(partial(self._heard, node, result))
        )

    def _heard(self, node: AgentNode, result: Any) -> None:
        if node.lost or self._closed:
            return
        error = result.exception()
        if error is not None:
            ended = f"its agent has ended ({str(error).partition(chr(10))[0]})"
            self.lose(node, self._silence(ended))
            return
        self._hear(node)
        for news in result.result():
            # Guarded: an error does not keep the next ones from being handled.
            if isinstance(news, Sent):
                guarded(partial(node.carrier.receive, news.node_message))
            elif isinstance(news, BorrowsWithdrawn):
                guarded(partial(_withdraw, news.header, news.process))
            else:
                guarded(partial(self._on_news, node, news))

    def _on_notice(self) -> None:
        assert self._pump is not None
        for kind, number, reason in self._pump.events():
            node = next((one for one in self._by_node.values() if one.number == number), None)
            if kind == _core.HOST_LOST and node is not None:
                self.lose(node, self._silence(reason))
        for header, slot, incarnation in self._pump.left():
            guarded(partial(_withdraw, header, (slot, incarnation)))
        for number in self._pump.come():
            assert self._callbacks is not None
            guarded(partial(self._callbacks.come, number))

    def _silence(self, why: str) -> str:
        """Add to the reason of a node's silence, over TLS, another one that is possible there."""
        if self._tls is None:
            return why
        return (
            f"{why}. Over TLS a thread of Python carries what nodes say: if native code of this program, or "
            f"of that node's, has kept the interpreter to itself for node_timeout seconds "
            f"({self._window:g}), they have not heard of each other; init(node_timeout=) may be longer"
        )

    def _own_part(self, why: str) -> str:
        """Put before the reason of a node's loss that this program was stopped, if it was, for too long: a
        node that hears nothing of this program for ``node_timeout`` seconds ends."""
        assert self._pump is not None
        try:
            stopped = self._pump.overslept(_LATELY)
        except OSError:  # the pump has no memory left, and gives all nodes up
            return why
        if stopped < self._window / 2:
            return why
        return (
            f"this program did not run for {stopped:.1f} s (it was stopped, or its machine was), and a node "
            f"that does not hear of it for node_timeout seconds ({self._window:g}) gives it up, and ends: "
            f"{why}"
        )

    def lose(self, node: AgentNode, why: str) -> None:
        """Give a node up. On any thread."""
        self._events.call(partial(self._lose, node, why))

    def part(self, node: AgentNode, number: int, why: str) -> None:
        """Give up one of two nodes without a connection between them, as they cannot be in one graph.
        ``node`` has reported it of the node ``number``. The one that the driver's node has no connection to
        either is given up, otherwise the later one."""
        other = self.by_number(number)
        if other is None or other.lost:
            return
        assert self._pump is not None
        mute = [one for one in (node, other) if not self._pump.connected(one.number)]
        goes = mute[0] if len(mute) == 1 else max(node, other, key=lambda one: one.number)
        if goes is node:
            self.lose(node, f"it has no connection to node {other.name}: {why}")
        else:
            self.lose(other, f"node {node.name} has no connection to it: {why}")

    def by_number(self, number: int) -> AgentNode | None:
        """Return the node with that number, or ``None``."""
        return next((one for one in self._nodes() if one.number == number), None)

    def _lose(self, node: AgentNode, why: str) -> None:
        if node.lost or self._closed:
            return
        why = self._own_part(why)
        _log.warning("node %s is lost, and the actors there with it: %s", node.name, why)
        assert self._pump is not None
        assert self._callbacks is not None
        self._pump.give_up(node.number, why)
        node.forget(why)  # after `give_up`: whoever waits for the node finds its processes dead
        if self._fetches is not None:
            self._fetches.lose(node.number)
        self._callbacks.gone(node.number)
        self._on_loss(node)
        self._kill(node.agent)

    def _kill(self, agent: Any) -> None:
        # Ray may be disconnected by now, and its actors with it.
        with suppress(Exception):
            self._check()
            self._ray.kill(agent)

    def refuse(self) -> None:
        """Start no agent from now on, and end the wait for one that is starting: Ray may never place it."""
        with self._adding:
            self._refuses = True
        with suppress(InvalidStateError):
            self._begun.set_exception(ActorStartError("the session has ended"))

    def close(self) -> None:
        """End all agents. Their processes have ended before."""
        self.refuse()
        with self._adding:
            self._closed = True
            nodes = self._nodes()
        left = [node.leave() for node in nodes]
        wait(left, _LEAVE_SECONDS)
        for node in nodes:
            node.forget("the session is over")
            self._kill(node.agent)
        self._shared_files.close()
        if self._fetches is not None and self._memories is not None:
            self._fetches.close()
            self._memories.close()
        if self._display is not None:
            self._display.close()
        if self._listener is not None:
            self._listener.close()
        if self._pump is not None:
            self._events.remove(self._pump.notice_fd)


def _withdraw(header: bytes, process: Reader) -> None:
    """Withdraw the borrows that a frame's header makes for a process, which will never make them good."""
    _, made, _, _ = unpack(header)
    borrows.withdraw(made, (process,))
