"""Waiting until tensors of a device have their values.

The host asks for the event (``device/waits.py`` says why): at first who needs the values, then a thread,
which rings this process's bell when they are there. So the wait ends and is told like any other, and event
loops run on.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from typing import Any, cast

from conveyor import _core
from conveyor.codec.direct import Located
from conveyor.codec.faults import NotThere
from conveyor.device import Event, waits
from conveyor.direct.awaiting import deferral
from conveyor.direct.under_way import UnderWay
from conveyor.exceptions import ActorDiedError
from conveyor.flag import Flag
from conveyor.runtime import threads
from conveyor.runtime.waiting.patience import wait_until

#: Seconds for which who needs the values asks by himself: a thread costs about as much.
_MOMENT = 0.3e-3


def wait_for_values(filled: Event, where: Located, nbytes: int, process: Any) -> None:
    """Return when the values are there, which is when ``filled`` has happened. ``nbytes``: how many those
    are.

    Raises:
        NotThere: they are not yet, and this is for an await.
        ActorDiedError: the process that was computing them has died.
        WaitTimeoutError: the ``get`` that needs them has no longer.
        SystemLimitError: there is no thread that could wait.
    """
    key = _Filling, where.number, nbytes
    stock = deferral.stock
    coming = None if stock is None else cast("_Filling | None", stock.get(key))
    if coming is None:
        if _soon(filled):
            return
        coming = _Filling(filled, where, nbytes, process)
        if stock is not None:
            stock[key] = coming
    if stock is not None:
        if not coming.done():
            raise NotThere(coming.done)
        del stock[key]
    try:
        wait_until(
            process.inbox,
            coming.done,
            _core.seconds_to_fetch(),
            lambda: f"a value that {where.keeper} keeps",
            lambda: "tensors of a device in it do not have their values yet",
        )
    finally:
        coming.give_up()
    if not filled.query():
        raise ActorDiedError(
            f"{where.keeper} has died before tensors of a device had the values that it was computing",
            where.keeper,
        )


def _soon(filled: Event) -> bool:
    end = _core.monotonic() + _MOMENT

    def sleep(seconds: float) -> bool:
        if _core.monotonic() > end:
            return True
        time.sleep(seconds)
        return False

    return waits.wait_until(filled.query, sleep)


class _Filling:
    """Values that are waited for."""

    def __init__(self, filled: Event, where: Located, nbytes: int, process: Any) -> None:
        self._filled = filled
        self.process = process
        self._maker = where.slot, where.incarnation
        self._wait = UnderWay(process, where.slot, where.number, nbytes)
        try:
            LOOKS.begin(self)
        except BaseException:
            self.give_up()
            raise

    def done(self) -> bool:
        """Whether they are there, or never will be."""
        gone: bool = self.process.board.gone(*self._maker)
        return gone or self._filled.query()

    def give_up(self) -> None:
        """Nobody waits for them any more."""
        try:
            self._wait.end()
        finally:  # also where a signal handler has raised
            LOOKS.end(self)


class Looks:
    """One thread for all that is waited for in this process."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """What a forked child has inherited is its parent's."""
        self._lock = threading.RLock()  # a signal handler may fetch a value, too
        # Single steps change it.
        self._all: dict[_Filling, None] = {}
        self._has_thread = False
        #: It is set when there is another one.
        self._more = Flag()

    def begin(self, one: _Filling) -> None:
        """Ring the bell of its process when it is done. ``SystemLimitError``: there is no thread."""
        self._all[one] = None
        with self._lock:
            if not self._has_thread:
                threads.start(self._run, "device-fills")
                self._has_thread = True
        self._more.set()

    def end(self, one: _Filling) -> None:
        """Nobody waits for that any more."""
        self._all.pop(one, None)

    def _run(self) -> None:
        pause = waits.FIRST
        while True:
            self._look()
            with self._lock:
                if not self._all:
                    self._has_thread = False
                    return
            pause = waits.FIRST if self._more.wait(pause) else min(2 * pause, waits.LONGEST)
            self._more.clear()

    def _look(self) -> None:
        for one in list(self._all):
            if _is_done(one):
                self.end(one)
                one.process.ring()


def _is_done(one: _Filling) -> bool:
    with suppress(Exception):  # of the device: who waits asks it, too, and is told
        return one.done()
    return True


LOOKS = Looks()
os.register_at_fork(after_in_child=LOOKS.forget)
