"""Faults on purpose: a transport that delays, reorders and fails, and values that cannot be fetched yet."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

from conveyor.api.actors import ActorHandle, AnyActor
from conveyor.exceptions import InjectedFault, RuntimeStateError
from conveyor.runtime import context
from conveyor.transport.base import Endpoint, Sending, TensorSpec, Transport, Wire
from conveyor.transport.registry import get


class FaultyTransport(Transport):
    """Transport that moves tensors out-of-band by another one, with faults on purpose."""

    def __init__(
        self,
        name: str = "faulty",
        *,
        over: str = "shm",
        delay: tuple[float, float] = (0.0, 0.0),
        reorder: bool = False,
        offers: Collection[int] = (),
        sends: Collection[int] = (),
        receives: Collection[int] = (),
        stuck: Collection[int] = (),
        seed: int = 0,
    ) -> None:
        """
        Args:
            name: the name to register it by.
            over: the transport that moves the tensors.
            delay: the least and the most seconds that a transfer takes longer at its reader.
            reorder: hold back the first of two transfers that an actor reads by this transport, until the
                second one is done, or for 0.05 s.
            offers: the transfers that cannot be sent, which is known before their frame is published.
            sends: the transfers whose sending fails afterwards.
            receives: the transfers whose receiving fails.
            stuck: the transfers that never end by themselves.
            seed: the seed of the delays.

        Raises:
            ValueError: there is no transport ``over``, or ``delay`` is no range of seconds.
        """
        self.name = name
        inner = get(over)
        if inner is None:
            raise ValueError(f"there is no transport {over!r}")
        if not 0 <= delay[0] <= delay[1]:
            raise ValueError(f"delay is (least, most) in seconds, not {delay!r}")
        self.inner = inner
        self.capabilities = replace(inner.capabilities, in_frame=False)
        self.delay = delay
        self.reorder = reorder
        self.offers = frozenset(offers)
        self.sends = frozenset(sends)
        self.receives = frozenset(receives)
        self.stuck = frozenset(stuck)
        self.seed = seed

    def open(self, wire: Wire) -> Endpoint:
        """Open this process's end for one edge: see :meth:`Transport.open`."""
        return _FaultyEndpoint(self, self.inner.open(wire), wire.rank)


#: Longest time that a transfer is held back for another one, in seconds.
_HELD_BACK = 0.05


class _FaultyEndpoint(Endpoint):
    #: The transfer that is held back in this process, by the transport's name, for all its edges.
    _held: ClassVar[dict[str, Callable[[], None]]] = {}
    # Timers and the actor's own thread complete the same futures.
    _lock = threading.RLock()

    def __init__(self, faults: FaultyTransport, inner: Endpoint, rank: int) -> None:
        self._faults = faults
        self._inner = inner
        self._random = random.Random(f"{faults.seed} {rank}")
        #: Futures that the reader waits for, by transfer.
        self._open: dict[int, Future[list[Any]]] = {}
        self._timers: dict[object, threading.Timer] = {}

    def send(self, tensors: Sequence[Any], transfer: int) -> Sending:
        if transfer in self._faults.offers:
            raise InjectedFault(f"transfer {transfer} is not offered")
        inner = self._inner.send(tensors, transfer)

        def begin() -> Future[None]:
            if transfer not in self._faults.sends:
                return inner.begin()
            inner.withdraw()
            failed: Future[None] = Future()
            self._after(0.001, lambda: failed.set_exception(_fault("sent", transfer)))
            return failed

        return Sending(begin, inner.note, inner.withdraw)

    def receive(self, specs: Sequence[TensorSpec], note: bytes, transfer: int) -> Future[list[Any]]:
        outer: Future[list[Any]] = Future()
        with self._lock:
            self._open[transfer] = outer
        came = self._inner.receive(specs, note, transfer)
        came.add_done_callback(functools.partial(self._came, transfer))
        return outer

    def drop(self, transfer: int) -> None:
        with self._lock:
            self._open.pop(transfer, None)
        self._inner.drop(transfer)

    def progress(self) -> None:
        self._inner.progress()

    def abort(self, reason: BaseException) -> None:
        with self._lock:
            waiting, self._open = self._open, {}
            for timer in self._timers.values():
                timer.cancel()
            self._timers.clear()
        self._inner.abort(reason)
        for outer in waiting.values():
            outer.set_exception(reason)

    def close(self) -> None:
        self._inner.close()

    def _came(self, transfer: int, came: Future[list[Any]]) -> None:
        """Delay or fail a transfer that the other transport has done."""
        faults = self._faults
        if transfer in faults.stuck:
            return
        error = came.exception()
        if transfer in faults.receives:
            error = _fault("received", transfer)
        tensors = None if error is not None else came.result()
        least, most = faults.delay
        if most:
            due = functools.partial(self._due, transfer, error, tensors)
            self._after(self._random.uniform(least, most), due)
        else:
            self._due(transfer, error, tensors)

    def _due(self, transfer: int, error: BaseException | None, tensors: list[Any] | None) -> None:
        """End a transfer, or hold it back for another one."""
        end = functools.partial(self._end, transfer, error, tensors)
        if self._faults.reorder:
            with self._lock:
                held = self._held.pop(self._faults.name, None)
                if held is None:
                    self._held[self._faults.name] = end
            if held is None:
                self._after(_HELD_BACK, functools.partial(self._let_go, end))
                return
            end()
            held()
        else:
            end()

    def _let_go(self, end: Callable[[], None]) -> None:
        """End a transfer that was held back, unless another one has ended it meanwhile."""
        with self._lock:
            if self._held.get(self._faults.name) is end:
                del self._held[self._faults.name]
        end()

    def _end(self, transfer: int, error: BaseException | None, tensors: list[Any] | None) -> None:
        with self._lock:
            outer = self._open.pop(transfer, None)
        if outer is None:  # dropped, aborted, or ended already
            return
        if error is not None:
            outer.set_exception(error)
        else:
            outer.set_result(tensors or [])

    def _after(self, seconds: float, work: Callable[[], None]) -> None:
        # By a separate key: a timer whose function refers to it would be a cycle for the garbage collector.
        key = object()
        timer = threading.Timer(seconds, self._fire, (key, work))
        timer.daemon = True
        with self._lock:
            self._timers[key] = timer
        timer.start()

    def _fire(self, key: object, work: Callable[[], None]) -> None:
        with self._lock:
            if self._timers.pop(key, None) is None:  # aborted
                return
        work()


def _fault(what: str, transfer: int) -> InjectedFault:
    return InjectedFault(f"transfer {transfer} is not {what}")


@contextmanager
def hold_transfers(actor: AnyActor | None = None) -> Iterator[None]:
    """Let nobody fetch a value that ``actor`` (``None``: this process) stores for others, within the body. A
    fetch waits for the end of the body, its own timeout, or the actor's death. The actor takes no part in
    this.

    Several contexts may hold the transfers of one actor, which go on when all have ended. A value that is
    being read already is read to the end.

    Raises:
        TypeError: ``actor`` is no actor.
        RuntimeStateError: the engine is the inline one, where nothing is fetched.
        ActorDiedError: the actor has died already.
    """
    with _changed(actor, 1, 0):
        yield


@contextmanager
def fail_transfers(actor: AnyActor | None = None) -> Iterator[None]:
    """Let each fetch of a value that ``actor`` (``None``: this process) stores for others fail
    with :class:`InjectedFault`, within the body. Afterwards the values can be fetched.

    Raises as :func:`hold_transfers`.
    """
    with _changed(actor, 0, 1):
        yield


@contextmanager
def _changed(actor: AnyActor | None, held: int, failing: int) -> Iterator[None]:
    if actor is not None and not isinstance(actor, ActorHandle):
        raise TypeError(f"an actor is needed, not {actor!r}")
    runtime: Any = context.current()
    process_table = runtime.process.process_table
    if actor is None:
        identity = runtime.process.identity
    else:
        link = runtime._known_link(actor._id)
        if not hasattr(link, "actor_slot"):
            raise RuntimeStateError(
                "on the inline engine all values are in one process, and nothing is fetched"
            )
        identity = link.actor_slot, process_table.incarnation(link.actor_slot)
    process_table.change_transfers(identity[0], held, failing)
    try:
        yield
    finally:
        # A restarted actor in the same slot begins without these faults.
        if not process_table.gone(*identity):
            process_table.change_transfers(identity[0], -held, -failing)
