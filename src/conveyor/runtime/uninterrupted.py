"""Work that no signal handler breaks off.

Python runs signal handlers on the main thread, between any two bytecodes. A handler that raises
(Ctrl-C) may lose a descriptor between its making and its noting, and may skip the rest of a clean-up.
No code of the main thread can be written so that this does not happen, since the code that would mend it
may be broken off as well. So such work is done by a thread of the library's own, where no handler runs.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Generic, TypeVar

from conveyor.exceptions import SystemLimitError
from conveyor.flag import forked
from conveyor.runtime import ending, threads


def try_each(*steps: Callable[[], object], name: str = "") -> KeyboardInterrupt | None:
    """Take all steps. What one raises is printed, as a failure of ``name`` if that is given, and ends no
    other: not even ``SystemExit``, since the end is under way.

    A ``KeyboardInterrupt`` is printed and returned (the first of several), for whom it may have meant
    more: in an actor's process, which Ctrl-C does not reach, only user code raises it.
    """
    interrupt: KeyboardInterrupt | None = None
    try:
        for step in steps:
            try:
                step()
            except BaseException as error:
                head = f"{name} has failed:\n" if name else ""
                print(head + traceback.format_exc(), file=sys.stderr)
                if isinstance(error, KeyboardInterrupt):
                    # Its traceback has this frame, and so the steps, and what they are to end: in a circle,
                    # of which a collection closes files in any order.
                    interrupt = interrupt or error.with_traceback(None)
        return interrupt
    finally:
        # The error in whose handling it was raised may have the frame of a generator that was closed. From
        # Python 3.12 on that leads back to this frame, which would close the same circle.
        del interrupt


T = TypeVar("T")

#: Seconds between two looks of the main thread. It is woken when the work is done; this is for a wake-up
#: that another interrupt has taken, and for signals that another thread of the user's was handed.
_LOOK = 0.05


def uninterrupted(work: Callable[[], T], on_interrupt: Callable[[], object] | None = None) -> T:
    """Do ``work()`` to its end and return what it returns, or raise what it raises.

    What a signal handler raises meanwhile is raised afterwards, the first one only. ``on_interrupt()`` is
    called for it at once, while the work goes on: the work may have a reason to hurry now.

    Only the first and the last moments are left open: before the work has begun, nothing is done; and
    what is raised after it, or on top of another interrupt, may come out while the work is still being
    done. So whoever needs its outcome has it noted by the work itself.

    Raises ``RuntimeStateError`` in a child that a signal handler has forked meanwhile.
    """
    if threading.current_thread() is not threading.main_thread() or _must_stay():
        return work()
    job = _Job(work)
    interrupt: BaseException | None = None
    hurried = started = False
    process = os.getpid()
    while not job.over:
        if os.getpid() != process:  # a handler has forked: here nobody does the work
            raise interrupt or forked()
        try:
            if interrupt is not None and not hurried:
                if on_interrupt is not None:
                    on_interrupt()
                hurried = True
            if not started:
                # Should it be started twice, because the first start was broken off, one of them does it.
                job.thread = threads.start(job.run, "uninterrupted")
                started = True
            job.doorbell.acquire(timeout=_LOOK)
        except SystemLimitError:  # no thread is to be had
            if job.begun():
                started = True
                continue
            return work()
        except BaseException as error:
            if interrupt is None:
                interrupt = error
    if job.thread is not None:
        job.thread.join()  # it has nothing left to do
    try:
        if interrupt is not None:
            raise interrupt
        if job.error is not None:
            raise job.take_error()
        return job.outcome[0]
    finally:
        del job, interrupt, work  # what is raised refers to this frame


class _Job(Generic[T]):
    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._run_lock = threading.Lock()
        self.outcome: list[T] = []
        self.error: BaseException | None = None
        self.over = False
        self.thread: threading.Thread | None = None
        # Not an event: those are written in Python, and an interrupt within its wait may leave its lock
        # locked for whoever would set it.
        self.doorbell = threading.Lock()
        self.doorbell.acquire()

    def begun(self) -> bool:
        return self._run_lock.locked()

    def take_error(self) -> BaseException:
        """Return the error that the work has raised, and forget it here: the error refers to the job."""
        error, self.error = self.error, None
        assert error is not None
        return error

    def run(self) -> None:
        if not self._run_lock.acquire(blocking=False):
            return
        try:
            self.outcome.append(self._work())
        except BaseException as error:
            self.error = error
        self.over = True
        self.doorbell.release()


def _must_stay() -> bool:
    """Whether the main thread may hold locks that the work needs: a handler of the user's has interrupted
    a call of this library, and has called it again. Or the program ends, which is not the time to start
    threads, and where an interrupt ends the process."""
    if ending.begun_here():
        return True
    frame: FrameType | None = sys._getframe(1)
    left = False
    while frame is not None:
        ours = str(frame.f_globals.get("__name__", "")).startswith("conveyor.")
        if ours and left:
            return True
        left = left or not ours
        frame = frame.f_back
    return False
