"""Letting go of results that were dropped before they came, and telling of errors among them."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress

from conveyor import _core
from conveyor.codec import first_line, summarize_error
from conveyor.codec.errors import read_error
from conveyor.exceptions import ConstructorError, TaskError
from conveyor.runtime import threads

#: Lines that one process logs of errors that nobody gets.
_MOST_LINES = 20


class Sweeper:
    """Thread that lets go of dropped results, started with the first channel that brings results to this
    process. It sleeps while no result is dropped that is still to come, and wakes up once for all that are
    dropped within ``quiet`` seconds."""

    def __init__(self, inbox: _core.Inbox, quiet: float) -> None:
        self._leftovers = inbox.leftovers
        self._quiet = quiet
        self._lock = threading.RLock()  # a signal handler may lay a channel, too
        self._thread: threading.Thread | None = None
        self._closed = False
        self._lines = 0
        #: Errors that nobody gets any more, until there is a line of each.
        self._unseen: deque[BaseException] = deque(maxlen=64)
        #: The actors whose constructor's error is known, or was logged; the last ones.
        self.failed_actors: deque[str] = deque(maxlen=256)

    def start(self) -> None:
        """Start the thread: results will come. Not called by finalizers, which drop results: they may start
        no thread."""
        with self._lock:
            if self._thread is None and not self._closed:
                with suppress(RuntimeError):  # no thread is to be had: the next channel tries again
                    self._thread = threads.serve(self._run, "sweeper")

    def close(self) -> None:
        """End the thread, after a last sweep."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None:
            self._leftovers.stop()
            thread.join()
            self._sweep()

    def tell(self, error: BaseException) -> None:
        """Have the thread log ``error``, the outcome of a reference that was dropped: nobody will get it.
        Logging here would not do: finalizers call this, with any lock held, and a handler of the log may
        need that lock."""
        self._unseen.append(error)
        if self._thread is None:  # of the inline engine, which has no other threads either
            self._say_unseen()
        else:
            self._leftovers.note_more()

    def _say_unseen(self) -> None:
        while self._unseen:
            self._say(self._unseen.popleft())

    def _say(self, error: BaseException) -> None:
        if isinstance(error, ConstructorError) and self._knows(error.actor):
            return
        kind, where = type(error), ""
        if isinstance(error, TaskError):
            where = f" (raised in actor {error.actor!r} and node {error.node!r})"
            kind = kind if error.cause is None else type(error.cause)
        with suppress(Exception):  # its own code may say what it is
            self._log(f"{kind.__name__}: {first_line(str(error))}{where}")

    def _run(self) -> None:
        while self._leftovers.wait(self._quiet):
            self._sweep()

    def _sweep(self) -> None:
        self._leftovers.sweep()
        self._say_unseen()
        for meta, more in self._leftovers.take_unseen():
            error = read_error(meta)
            # A constructor's comes again: to whoever calls the actor, and to the order that ends it.
            if not (error.constructor and (more or self._knows(error.actor))):
                self._log(summarize_error(meta))

    def _knows(self, actor: str) -> bool:
        """Whether the error of that actor's constructor needs no line any more."""
        with self._lock:
            known = actor in self.failed_actors
            if not known:
                self.failed_actors.append(actor)
        return known

    def _log(self, text: str) -> None:
        with self._lock:
            self._lines += 1
            lines = self._lines
        if lines > _MOST_LINES:
            return
        threads.log("warning", "an error that nobody has got: %s", text)
        if lines == _MOST_LINES:
            threads.log("warning", "further errors that nobody gets are not logged")
