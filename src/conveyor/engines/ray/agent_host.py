"""The driver's side of one node agent."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from conveyor.cluster.carrier import Carrier, Parcel
from conveyor.cluster.depot import Depot, Supply
from conveyor.driver.hosts import FarOrder
from conveyor.engines.ray.agent import Ready
from conveyor.engines.ray.greeting import Told
from conveyor.exceptions import ConveyorError, RuntimeStateError
from conveyor.futures import Future
from conveyor.graph.telemetry import Look, LookAtAll, Seen, SeenAll
from conveyor.runtime.deadlock_detector import LookAtWaits, WaitsThere
from conveyor.runtime.process import ArenaSize
from conveyor.runtime.stored_values import KeptAt

#: Limit of unanswered looks at a node: with so many, another one fails at once.
_MOST_LOOKS = 4


class AgentHost:
    """A remote node, which is reached by its agent. See
    :class:`conveyor.driver.hosts.FarHost`."""

    def __init__(
        self,
        number: int,
        name: str,
        agent: Any,
        ready: Ready,
        lose: Callable[[AgentHost, str], object],
        depot: Depot,
        dial_depot: Callable[[], socket.socket],
        check: Callable[[], object] = lambda: None,
    ) -> None:
        """``agent``: Ray's handle. ``lose(host, why)`` gives a node up that cannot do what it has to.
        ``depot``: the driver's node's. ``dial_depot()`` connects to the depot of this node. ``check()``: see
        :class:`conveyor.engines.ray.agents.Agents`."""
        self.number, self.name = number, name
        self.arena: ArenaSize = ready.arena
        self.address = ready.address
        #: Where processes that Ray starts on the node connect.
        self.courier = ready.courier
        #: Where attached actors of the node connect.
        self.door = ready.door
        #: Where the agent runs, which its processes have to share memory with.
        self.locality = ready.locality
        self.agent = agent
        #: Why the node is lost, or an empty string.
        self.lost = ""
        self._lose, self._check = lose, check
        # Reentrant: a signal handler may call the agent while the lock is held.
        self._lock = threading.RLock()
        self._awaited: set[Future[Any]] = set()
        self._lines = itertools.count(1)
        self.carrier = Carrier(depot, Supply(dial_depot, self._out_of_reach), self._carry)
        self._looks = 0

    def send(self, order: FarOrder) -> Future[Any]:
        """Have the agent carry an order out; return its outcome."""
        return self._call(self.agent.do, order)

    def tell(self, order: FarOrder) -> Future[Any]:
        """Send an order whose outcome nobody waits for. If the order fails, the node is given up."""
        sent = self.send(order)
        self._unawaited(sent)
        return sent

    def carry(self, sock: socket.socket) -> int:
        """See :class:`conveyor.driver.hosts.FarHost`, also for the next two methods."""
        number = next(self._lines)
        self.carrier.open(number, sock)
        return number

    def hold(self, fd: int) -> None:
        self.carrier.hold(fd)

    def let_go(self, fd: int) -> None:
        self.carrier.let_go(fd)

    def _carry(self, parcel: Parcel) -> None:
        self._unawaited(self._call(self.agent.receive, parcel))

    def _out_of_reach(self, why: str) -> None:
        if not self.lost:
            host, port = self.address
            self._lose(
                self,
                f"a value that lies there cannot be fetched, since the driver's node cannot connect to "
                f"{host}:{port} ({why}): the driver's node has to reach the others, as they reach it",
            )

    def expect(
        self, number: int, slot: int, told: Told, segments: list[int], visits: bool = False
    ) -> bytes:
        """See :meth:`Agent.expect`."""
        key: bytes = self._call(self.agent.expect, number, slot, told, segments, visits).result()
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

    def kept(self) -> Future[list[KeptAt]]:
        """See :meth:`Agent.kept`."""
        return self._look(self.agent.kept)

    def _look(self, method: Any, *look: Look | LookAtAll) -> Future[Any]:
        with self._lock:
            if self._looks >= _MOST_LOOKS:
                refused: Future[Any] = Future()
                text = "its host has not answered the questions before this one"
                refused.set_exception(RuntimeStateError(text))
                return refused
            self._looks += 1
        future = self._call(method, *look, group="looks")
        future.add_done_callback(self._looked)
        return future

    def _looked(self, _: Future[Any]) -> None:
        with self._lock:
            self._looks -= 1

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
