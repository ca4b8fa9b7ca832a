"""A transport over another one, which delays, reorders and fails."""

from __future__ import annotations

import random
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import Any

from conveyor.transport.base import Capabilities, Conduit, Sending, TensorSpec, Transport, Wire
from conveyor.transport.registry import get


class InjectedFault(Exception):
    """What goes wrong in a :class:`FaultyTransport`."""


class FaultyTransport(Transport):
    """Moves tensors by another transport, beside the frames, and does it badly."""

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
            name: what it is registered as.
            over: the transport that moves the tensors.
            delay: the least and the most seconds that a transfer takes longer at its reader.
            reorder: a transfer is held back until the next one is done, or for 0.05 s.
            offers: the transfers that cannot be sent, which is known before their frame is published.
            sends: those whose sending fails afterwards.
            receives: those whose receiving fails.
            stuck: those that never come to an end by themselves.
            seed: of the delays.
        """
        self.name = name
        inner = get(over)
        if inner is None:
            raise ValueError(f"there is no transport {over!r}")
        self.inner = inner
        self.capabilities = Capabilities(devices=inner.capabilities.devices)
        self.delay = delay
        self.reorder = reorder
        self.offers = frozenset(offers)
        self.sends = frozenset(sends)
        self.receives = frozenset(receives)
        self.stuck = frozenset(stuck)
        self.seed = seed

    def open(self, wire: Wire) -> Conduit:
        """As for :class:`Transport`."""
        return _FaultyConduit(self, self.inner.open(wire), wire.rank)


#: How long a transfer is held back for the next one, in seconds.
_HELD_BACK = 0.05


class _FaultyConduit(Conduit):
    def __init__(self, faults: FaultyTransport, inner: Conduit, rank: int) -> None:
        self._faults = faults
        self._inner = inner
        self._random = random.Random(f"{faults.seed} {rank}")
        #: By transfer, what the reader waits for, done or held back here.
        self._open: dict[int, Future[list[Any]]] = {}
        self._timers: set[threading.Timer] = set()
        self._held: list[tuple[Future[list[Any]], Future[list[Any]]]] = []
        # Timers and the actor's own thread complete the same futures.
        self._lock = threading.RLock()

    def send(self, tensors: Sequence[Any], transfer: int) -> Sending:
        if transfer in self._faults.offers:
            raise InjectedFault(f"transfer {transfer} is not offered")
        inner = self._inner.send(tensors, transfer)

        def begin() -> Future[None]:
            if transfer in self._faults.sends:
                inner.withdraw()
                failed: Future[None] = Future()
                self._after(0.001, lambda: failed.set_exception(_fault("sent", transfer)))
                return failed
            return inner.begin()

        return Sending(begin, inner.note, inner.withdraw)

    def receive(self, specs: Sequence[TensorSpec], note: bytes, transfer: int) -> Future[list[Any]]:
        outer: Future[list[Any]] = Future()
        with self._lock:
            self._open[transfer] = outer
        came = self._inner.receive(specs, note, transfer)
        came.add_done_callback(lambda _: self._came(transfer, came))
        return outer

    def progress(self) -> None:
        self._inner.progress()

    def abort(self, reason: BaseException) -> None:
        with self._lock:
            waiting, self._open = self._open, {}
            self._held.clear()
            for timer in self._timers:
                timer.cancel()
        self._inner.abort(reason)
        for outer in waiting.values():
            if not outer.done():
                outer.set_exception(reason)

    def close(self) -> None:
        self._inner.close()

    def _came(self, transfer: int, came: Future[list[Any]]) -> None:
        """The other transport has done its part."""
        faults = self._faults
        if transfer in faults.stuck:
            return
        if transfer in faults.receives:
            failed: Future[list[Any]] = Future()
            failed.set_exception(_fault("received", transfer))
            came = failed
        least, most = faults.delay
        if most:
            self._after(self._random.uniform(least, most), lambda: self._due(transfer, came))
        else:
            self._due(transfer, came)

    def _due(self, transfer: int, came: Future[list[Any]]) -> None:
        """The transfer may end, unless it has to wait for the next one."""
        with self._lock:
            outer = self._open.pop(transfer, None)
            if outer is None:  # aborted
                return
            held, self._held = self._held, []
            if self._faults.reorder and not held:
                self._held = [(outer, came)]
                self._after(_HELD_BACK, self._let_go)
                return
        for waiting, done in [(outer, came), *held]:
            _pass_on(waiting, done)

    def _let_go(self) -> None:
        with self._lock:
            held, self._held = self._held, []
        for waiting, done in held:
            _pass_on(waiting, done)

    def _after(self, seconds: float, work: Any) -> None:
        def run() -> None:
            with self._lock:
                self._timers.discard(timer)
            work()

        timer = threading.Timer(seconds, run)
        timer.daemon = True
        with self._lock:
            self._timers.add(timer)
        timer.start()


def _fault(what: str, transfer: int) -> InjectedFault:
    return InjectedFault(f"transfer {transfer} is not {what}")


def _pass_on(outer: Future[list[Any]], done: Future[list[Any]]) -> None:
    if outer.done():
        return
    error = done.exception()
    if error is not None:
        outer.set_exception(error)
    else:
        outer.set_result(done.result())
