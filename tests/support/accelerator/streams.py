"""Streams: a queue with a thread that does what is in it, in order."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from conveyor.device import Event, Stream
from conveyor.runtime import threads

if TYPE_CHECKING:
    from accelerator.machine import Machine

#: Seconds after which a thread without work ends.
_IDLE = 2.0
#: Seconds after which one that waits for an event looks whether it may still happen.
_LOOK = 0.05


class Work(NamedTuple):
    """Something that a stream has done, as :func:`watching` notes it.

    stream: the stream's name: ``"sim:0 stream 1"``.
    name: of what: a kernel's name (``"addmm"``), or ``"copy to sim"``, ``"copy to host"``.
    begin, end: when, by ``time.perf_counter()``.
    """

    stream: str
    name: str
    begin: float
    end: float


class _Job(NamedTuple):
    name: str
    do: Callable[[], None]
    seconds: float
    shown: bool


class SimStream(Stream):
    """A stream of a simulated device."""

    def __init__(self, machine: Machine, index: int, name: str) -> None:
        self.device = machine.device
        self.index = index
        self.name = name
        self._machine = machine
        # Reentrant: a tensor may be freed wherever objects are made. By itself, since a signal handler that
        # raises may leave a condition held that was entered: its entering is Python's.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._jobs: deque[_Job] = deque()
        self._enqueued = 0
        self._done = 0
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def enqueue(
        self, name: str, do: Callable[[], None], seconds: float = 0.0, *, shown: bool = True
    ) -> int:
        """Have ``do`` called behind all that was enqueued before, by a thread; it takes ``seconds`` at least.
        ``shown``: it is noted. What is returned is its number, for :meth:`wait_for`."""
        self._machine.check_process()
        with self._lock:
            self._jobs.append(_Job(name, do, seconds, shown))
            self._enqueued += 1
            number = self._enqueued
            if self._thread is None:
                self._thread = threads.start(self._work, "simulated-stream")
            else:
                self._changed.notify_all()
        return number

    def wait_for(self, number: int) -> None:
        """Have the host wait until the job of that number is done; raise what has gone wrong here by then."""
        with self._lock:
            while self._done < number:
                self._changed.wait()
            error, self._error = self._error, None
        if error is not None:
            raise error

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, SimEvent)
        number, word = event.word.recorded, event.word
        if not word.happened(number):
            self.enqueue("wait", lambda: self._await(event, number), shown=False)

    def query(self) -> bool:
        with self._lock:
            return self._done == self._enqueued

    def synchronize(self) -> None:
        """Wait for all that was enqueued. Raise what has gone wrong in a kernel since the last time."""
        self._machine.check_process()
        self.wait_for(self._enqueued)

    def fail(self, error: BaseException) -> None:
        """Have the next one that waits for the stream get ``error``."""
        with self._lock:
            if self._error is None:
                self._error = error

    def leave(self, deadline: float) -> None:
        """Do nothing any more. Wait, until ``deadline`` at most, for what is being done."""
        with self._lock:
            self._done += len(self._jobs)
            self._jobs.clear()
            while self._done < self._enqueued and time.monotonic() < deadline:
                self._changed.wait(_LOOK)

    def __repr__(self) -> str:
        return f"<stream {self.name!r}>"

    def _await(self, event: SimEvent, number: int) -> None:
        while not event.word.happened(number):
            if self._machine.ending.is_set():
                return
            # That of a process which is killed never happens, as in CUDA.
            event.word.sleep(number, _LOOK)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._changed.wait(_IDLE)
                    if not self._jobs:
                        self._thread = None
                        return
                job = self._jobs.popleft()
            begin = time.perf_counter()
            try:
                job.do()
            except BaseException as error:
                if self._error is None:
                    self._error = error
            rest = begin + job.seconds - time.perf_counter()
            if rest > 0:
                self._machine.ending.wait(rest)
            if job.shown:
                note(Work(self.name, job.name, begin, time.perf_counter()))
            del job  # what it refers to is let go of before anybody is told
            with self._lock:
                self._done += 1
                self._changed.notify_all()


class SimEvent(Event):
    """An event of a simulated device, of this process."""

    def __init__(self, machine: Machine, index: int, interprocess: bool) -> None:
        self._machine = machine
        self._index = index
        self._interprocess = interprocess
        self._slot = machine.heap(index).new_slot()
        self.word = self._slot.word

    def record(self, stream: Stream | None = None) -> None:
        on = self._machine.current_stream() if stream is None else stream
        assert isinstance(on, SimStream)
        slot = self._slot  # it stays taken until then
        number = slot.word.next()
        on.enqueue("record", lambda: slot.word.tell(number), shown=False)

    def query(self) -> bool:
        return self.word.happened(self.word.recorded)

    def synchronize(self) -> None:
        number = self.word.recorded
        while not self.word.happened(number):
            self.word.sleep(number, _LOOK)
            self.check()

    def handle(self) -> bytes:
        if not self._interprocess:
            raise RuntimeError("an event has a handle if it was made with interprocess=True")
        return self._machine.heap(self._index).handle(self._slot.number)

    def check(self) -> None:
        """Raise an error if it cannot happen any more."""


class ForeignEvent(SimEvent):
    """An event of another process."""

    def __init__(self, opened: Any, word: Any) -> None:
        self._opened = opened  # its memory stays mapped
        self.word = word

    def record(self, stream: Stream | None = None) -> None:
        """Refuse: the process that made it does that."""
        raise RuntimeError("an event is recorded in the process that has made it")

    def handle(self) -> bytes:
        """Refuse, as CUDA does."""
        raise RuntimeError("an event of another process has no handle here")

    def check(self) -> None:
        """Raise an error if its process has ended."""
        self._opened.check()


_watchers: list[list[Work]] = []


def note(work: Work) -> None:
    """Tell all that watch."""
    for watcher in _watchers:
        watcher.append(work)


@contextmanager
def watching() -> Iterator[list[Work]]:
    """Note what the streams of this process do meanwhile: ``with watching() as works: ...`` gives a list of
    :class:`Work`, in the order of their ends. What was enqueued may end later: synchronise first."""
    works: list[Work] = []
    _watchers.append(works)
    try:
        yield works
    finally:
        _watchers[:] = [watcher for watcher in _watchers if watcher is not works]
