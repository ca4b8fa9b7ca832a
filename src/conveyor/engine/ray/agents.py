"""The driver's side of the agents on other Ray nodes: one for each node that shares no memory with the
driver's."""

from __future__ import annotations

import itertools
import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from functools import partial
from typing import Any

from conveyor import __version__, _core
from conveyor.codec import Reader, claims
from conveyor.codec.header import unpack
from conveyor.engine.events import EventLoop, guarded
from conveyor.engine.net.carrier import Carrier, Parcel
from conveyor.engine.net.depot import Depot, Supply
from conveyor.engine.net.handshake import FOR_FETCHING, Identity, dial, hand_over, new_token
from conveyor.engine.net.listener import Listener
from conveyor.engine.ray import greeting
from conveyor.engine.ray.agent import Agent, News, Ready, Sent, Terms, Unclaimed
from conveyor.engine.ray.greeting import Elsewhere, Told
from conveyor.exceptions import ActorStartError, ConveyorError, RuntimeStateError
from conveyor.runtime.driver.far import FarOrder, Home
from conveyor.runtime.process import ArenaSize

_log = logging.getLogger("conveyor")

#: Seconds that an agent has to end in good order.
_LEAVE_SECONDS = 2.0


class AgentHost:
    """One node, by its agent. See :class:`conveyor.runtime.driver.far.FarHost`."""

    def __init__(
        self,
        number: int,
        name: str,
        agent: Any,
        ready: Ready,
        lose: Callable[[AgentHost, str], object],
        depot: Depot,
        dial_depot: Callable[[], socket.socket],
    ) -> None:
        """``agent``: Ray's handle. ``lose(host, why)``: it cannot do what it has to. ``depot``: of the
        driver's host; ``dial_depot()``: a connection to this one's."""
        self.number, self.name = number, name
        self.arena: ArenaSize = ready.arena
        self.address = ready.address
        #: Where the node's processes come.
        self.courier = ready.courier
        self.agent = agent
        #: Why it is no more.
        self.lost = ""
        self._lose = lose
        # Reentrant: a signal handler may have the host do something in the middle of this.
        self._lock = threading.RLock()
        self._awaited: set[Future[Any]] = set()
        self._lines = itertools.count(1)
        self.carrier = Carrier(depot, Supply(dial_depot), self._carry)

    def send(self, order: FarOrder) -> Future[Any]:
        """Have it do something; what comes of it."""
        return self._call(self.agent.do, order)

    def tell(self, order: FarOrder) -> None:
        """The same where nobody waits for it."""
        self._unawaited(self.send(order))

    def carry(self, sock: socket.socket) -> int:
        """See :class:`conveyor.runtime.driver.far.FarHost`, also for what follows."""
        number = next(self._lines)
        self.carrier.open(number, sock)
        return number

    def hold(self, fd: int) -> None:
        self.carrier.hold(fd)

    def let_go(self, fd: int) -> None:
        self.carrier.let_go(fd)

    def _carry(self, parcel: Parcel) -> None:
        self._unawaited(self._call(self.agent.receive, parcel))

    def expect(self, number: int, slot: int, told: Told, segments: list[int]) -> bytes:
        """See :meth:`Agent.expect`."""
        key: bytes = self._call(self.agent.expect, number, slot, told, segments).result()
        return key

    def disown(self, number: int) -> Future[Any]:
        """See :meth:`Agent.disown`."""
        return self._call(self.agent.disown, number)

    def kill(self, slot: int, incarnation: int) -> None:
        """Kill a process there."""
        self._unawaited(self._call(self.agent.kill, slot, incarnation))

    def leave(self) -> Future[Any]:
        """Have it end; done when it has."""
        return self._call(self.agent.leave)

    def forget(self, why: str) -> None:
        """It is no more: nobody waits for it any longer."""
        with self._lock:
            self.lost = self.lost or why
            awaited, self._awaited = self._awaited, set()
        for future in awaited:
            future.set_exception(self._loss())
        self.carrier.close()

    def _loss(self) -> ConveyorError:
        return RuntimeStateError(f"node {self.name} is lost: {self.lost}")

    def _call(self, method: Any, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self.lost:
                future.set_exception(self._loss())
                return future
            self._awaited.add(future)
            # With the lock: orders come as they were given.
            try:
                ref = method.options(concurrency_group="orders").remote(*args)
            except Exception as error:
                # Ray is disconnected, say. Who only tells is in the middle of something, and goes on with it.
                self._awaited.discard(future)
                future.set_exception(error)
                return future
        ref.future().add_done_callback(partial(self._done, future))
        return future

    def _done(self, future: Future[Any], result: Any) -> None:
        with self._lock:
            if future not in self._awaited:
                return
            self._awaited.discard(future)
        error = result.exception()
        if error is None:
            future.set_result(result.result())
        else:
            future.set_exception(getattr(error, "cause", None) or error)

    def _unawaited(self, future: Future[Any]) -> None:
        def look(done: Future[Any]) -> None:
            error = done.exception()
            if error is not None and not self.lost:
                self._lose(self, f"it could not do what it had to ({error})")

        future.add_done_callback(look)


class Agents:
    """All of them. Nothing is there before the first."""

    def __init__(
        self,
        ray: Any,
        events: EventLoop,
        window: float,
        on_news: Callable[[AgentHost, News], object],
        on_loss: Callable[[AgentHost], object],
    ) -> None:
        """``window``: seconds that a node may be without a connection. ``on_news(host, news)`` and
        ``on_loss(host)`` are called on the thread of ``events``."""
        self._ray, self._events, self._window = ray, events, window
        self._on_news, self._on_loss = on_news, on_loss
        self._home: Home | None = None
        self._token = new_token()
        self._numbers = itertools.count(1)
        #: Held while one is started.
        self._starting = threading.Lock()
        self._listener: Listener | None = None
        self._pump: _core.HostPump | None = None
        self._depot = Depot()
        self._by_node: dict[str, AgentHost] = {}
        self._closed = self._refuses = False
        #: What the agent says that is started just now.
        self._begun: Future[Ready] = Future()
        #: Held to add a host, and to close: an actor may be started while the session ends.
        self._adding = threading.Lock()

    def start(self, home: Home) -> None:
        """From now on there may be some."""
        self._home = home

    def at(self, node: Elsewhere) -> AgentHost:
        """The one of that node, which is started if there is none. ``ActorStartError`` if it cannot be."""
        with self._starting:
            host = self._by_node.get(node.node)
            if host is None or host.lost:
                self._check_open(node)
                host = self._start(node)
                try:
                    with self._adding:
                        self._check_open(node)
                        self._by_node[node.node] = host
                except ActorStartError as error:  # nobody else knows of it
                    host.forget(str(error))
                    self._kill(host.agent)
                    raise
            return host

    def _check_open(self, node: Elsewhere) -> None:
        if self._refuses:
            raise ActorStartError(
                f"the session has ended, and Ray has placed it on node {node.address}"
            )

    def _start(self, node: Elsewhere) -> AgentHost:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        assert self._home is not None
        number, address = next(self._numbers), self._open()
        terms = Terms(
            number,
            greeting.version(),
            self._token,
            self._home.driver,
            address,
            self._home.arena,
            self._window,
        )
        name = f"{node.address} ({node.node[:8]})"
        strategy = NodeAffinitySchedulingStrategy(node.node, soft=False)
        made = self._ray.remote(
            num_cpus=0, concurrency_groups={"orders": 1, "news": 1}, scheduling_strategy=strategy
        )(Agent)
        agent = made.remote(terms)
        try:
            ref = agent.begin.options(concurrency_group="orders").remote()
            ready = self._wait_for(ref, node)
        except BaseException as error:
            self._kill(agent)
            if not isinstance(error, Exception):
                raise
            cause = getattr(error, "cause", None) or error
            raise ActorStartError(
                f"Ray has placed it on node {name}, which shares no memory with the driver's, and the two "
                f"cannot be connected: {cause}"
            ) from error
        identity = Identity(0, __version__, purpose=FOR_FETCHING)
        dial_depot = partial(dial, ready.address, self._token, identity, self._window)
        host = AgentHost(
            number, name, agent, ready, self.lose, self._depot, lambda: dial_depot()[0]
        )
        self._hear(host)
        return host

    def _wait_for(self, ref: Any, node: Elsewhere) -> Ready:
        """What the agent says of itself, unless the session ends before."""
        begun: Future[Ready] = Future()
        with self._adding:
            self._check_open(node)
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
        """Let hosts in from now on; where."""
        assert self._home is not None
        if self._listener is None:
            self._pump = self._home.pump(self._window)
            self._events.add(self._pump.notice_fd, self._on_notice)
            self._listener = Listener(
                (self._ray.util.get_node_ip_address(), 0),
                self._token,
                Identity(0, __version__),
                self._let_in,
            )
        return self._listener.address

    def _let_in(self, sock: socket.socket, other: Identity) -> None:
        if other.purpose == FOR_FETCHING:
            self._depot.serve(sock)
            return
        assert self._pump is not None
        with suppress(OSError):  # it was given up
            hand_over(sock, self._pump, other.host)

    def _hear(self, host: AgentHost) -> None:
        """Have the next news of it told."""
        ref = host.agent.news.options(concurrency_group="news").remote()
        ref.future().add_done_callback(
            lambda result: self._events.call(partial(self._heard, host, result))
        )

    def _heard(self, host: AgentHost, result: Any) -> None:
        if host.lost or self._closed:
            return
        error = result.exception()
        if error is not None:
            self.lose(host, f"its agent has ended ({str(error).partition(chr(10))[0]})")
            return
        self._hear(host)
        for news in result.result():
            # The next are told in any case.
            if isinstance(news, Sent):
                guarded(partial(host.carrier.receive, news.parcel))
            elif isinstance(news, Unclaimed):
                guarded(partial(_withdraw, news.header, news.process))
            else:
                guarded(partial(self._on_news, host, news))

    def _on_notice(self) -> None:
        assert self._pump is not None
        for kind, number, reason in self._pump.events():
            host = next((one for one in self._by_node.values() if one.number == number), None)
            if kind == _core.HOST_LOST and host is not None:
                self.lose(host, reason)
        for header, slot, incarnation in self._pump.left():
            guarded(partial(_withdraw, header, (slot, incarnation)))

    def lose(self, host: AgentHost, why: str) -> None:
        """Take it for lost. On any thread."""
        self._events.call(partial(self._lose, host, why))

    def by_number(self, number: int) -> AgentHost | None:
        """The one with that number, while there is one."""
        return next((one for one in list(self._by_node.values()) if one.number == number), None)

    def _lose(self, host: AgentHost, why: str) -> None:
        if host.lost or self._closed:
            return
        _log.warning("node %s is lost, and the actors there with it: %s", host.name, why)
        host.forget(why)
        assert self._pump is not None
        assert self._home is not None
        self._pump.give_up(host.number, why)
        self._home.gone(host.number)
        self._on_loss(host)
        self._kill(host.agent)

    def _kill(self, agent: Any) -> None:
        # Ray may be disconnected by now, and its actors with it.
        with suppress(Exception):
            self._ray.kill(agent)

    def refuse(self) -> None:
        """None is started from now on, and who waits for one waits no longer: Ray may never place it."""
        with self._adding:
            self._refuses = True
        with suppress(InvalidStateError):
            self._begun.set_exception(ActorStartError("the session has ended"))

    def close(self) -> None:
        """Its processes are gone: so is the session there."""
        self.refuse()
        with self._adding:
            self._closed = True
            hosts = list(self._by_node.values())
        left = [host.leave() for host in hosts]
        wait(left, _LEAVE_SECONDS)
        for host in hosts:
            host.forget("the session is over")
            self._kill(host.agent)
        self._depot.close()
        if self._listener is not None:
            self._listener.close()
        if self._pump is not None:
            self._events.remove(self._pump.notice_fd)


def _withdraw(header: bytes, process: Reader) -> None:
    """That process does not come for what a frame with that header claims for it."""
    _, made, _ = unpack(header)
    claims.withdraw(made, (process,))
