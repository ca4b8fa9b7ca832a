"""Thread that calls a communicator, and nothing else."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from conveyor.codec.frames import Sealed
from conveyor.exceptions import SystemLimitError
from conveyor.flag import Flag
from conveyor.futures import Future
from conveyor.transport.communicator.abstract import Communicator

#: Name of its threads, after our own prefix.
_NAME = "communicator"

#: Seconds that a blocked call has to end when its communicator is destroyed.
_PATIENCE = 0.5


class CommunicatorThread:
    """A communicator with its thread, from its initialization to its end."""

    def __init__(
        self, sealed: Sealed, rank: int, start: Callable[[Callable[[], object], str], None]
    ) -> None:
        """``start`` starts threads, as :meth:`conveyor.transport.Wire.start_thread` does."""
        self._sealed = sealed
        self._rank = rank
        self._start = start
        self._jobs: queue.SimpleQueue[tuple[Callable[[Communicator], Any], Future[Any]] | None]
        self._jobs = queue.SimpleQueue()
        #: Whether the communicator is gone, or was given its time to end.
        self.over = False
        #: Guards the next two.
        self._lock = threading.Lock()
        self._communicator: Communicator | None = None
        self._ended = False
        self._gone = Flag()
        start(self._run, _NAME)

    def do(self, job: Callable[[Communicator], Any], future: Future[Any]) -> None:
        """Call ``job`` with the communicator, after what was given before."""
        self._jobs.put((job, future))

    def end(self, ended: Callable[[], object]) -> None:
        """Destroy the communicator and end the thread, without waiting for code of the user. ``ended`` is
        called, on any thread, once this is :attr:`over`."""
        with self._lock:
            self._ended = True
            communicator = self._communicator
        self._jobs.put(None)

        def watch() -> None:
            self._gone.wait(_PATIENCE)
            self.over = True
            ended()

        if communicator is not None:
            # On another thread: it has to end a call in which the first thread may be blocked.
            destroy = communicator.destroy
            _quietly(lambda: self._start(lambda: _quietly(destroy), _NAME))
        try:
            self._start(watch, _NAME)
        except SystemLimitError:  # there is no thread to be had: it is given no time to end
            self.over = True
            ended()

    def _run(self) -> None:
        try:
            while (given := self._jobs.get()) is not None and not self._ended:
                job, future = given
                try:
                    made = job(self._open())
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(made)
                    del made
                del given, job, future  # tensors are let go of before the next wait
        finally:
            self._gone.set()

    def _open(self) -> Communicator:
        if self._communicator is None:
            communicator: Communicator = self._sealed.open()
            with self._lock:
                if self._ended:
                    raise RuntimeError("it is not needed any more")
                self._communicator = communicator
            communicator.initialize(self._rank)
        return self._communicator


def _quietly(destroy: Callable[[], None]) -> None:
    try:
        destroy()
    except Exception as error:
        # Nobody waits for it, and what it held ends with the process.
        import logging

        logging.getLogger("conveyor").warning("destroy() of a communicator has failed: %r", error)
