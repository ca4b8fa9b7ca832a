"""Calls that could not be sent at once are sent later, by whoever is there to do it."""

from __future__ import annotations

import threading
from typing import Protocol

from conveyor import _core
from conveyor.runtime import threads


class Pending(Protocol):
    """What has calls that wait to be sent."""

    @property
    def has_pending(self) -> bool: ...

    def flush(self) -> bool: ...


class Pump:
    """Sends calls that could not be sent at once: an argument was not there, or the mailbox was full.

    A thread that waits for the result of such a call sends it, and what waits before it. One thread of the
    pump's, which is there from the first such call on, sends where nobody waits, and sleeps otherwise.
    """

    def __init__(self, inbox: _core.Inbox) -> None:
        self._wait = _core.PumpWait(inbox)
        #: Reentrant: a signal handler may end the session in the middle of :meth:`add`.
        self.lock = threading.RLock()
        #: By what the native part calls them. It is changed in single steps, without the lock: who sends
        #: holds his own lock, and must wait for nobody.
        self._senders: dict[int, Pending] = {}
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, sender: Pending) -> None:
        """It has calls that wait. What it can send by now, it sends once more itself afterwards.

        Raises:
            SystemLimitError: no thread is to be had, and they might wait for ever.
        """
        with self.lock:
            if self._thread is None and not self._closed:
                self._wait.open()
                threads.serve(self._run, "pump")
        self._note(sender)

    def knows(self, sender: Pending) -> bool:
        """Whether it sends what waits there."""
        return id(sender) in self._senders

    def sent(self, sender: Pending) -> None:
        """None of its calls waits any more."""
        if id(sender) not in self._senders:
            return
        self._wait.end(id(sender))
        self._senders.pop(id(sender), None)
        # A signal handler's call may have been added in between.
        if sender.has_pending:
            self._note(sender)

    def attending(self, sender: Pending, does: bool) -> _core.Attending:
        """A context manager. If it ``does``, this thread waits in its body, and has the sender flush each
        time the inbox's bell has rung, until the end of the body, or of what it is in it (``end``)."""
        return _core.Attending(self._wait, id(sender), does)

    def close(self) -> None:
        """Send nothing more. What the thread refers to is free when this returns."""
        with self.lock:
            self._closed = True
            thread = self._thread
        self._wait.close()
        # What it sends may run any code, also such that ends the session: then it ends when it is back.
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._wait.release()  # links that refs hold have this, too

    def _note(self, sender: Pending) -> None:
        self._senders[id(sender)] = sender
        self._wait.begin(id(sender))

    def _run(self) -> None:
        # Here, and not where it is started: a signal handler may raise there before it is noted.
        with self.lock:
            if self._thread is not None or self._closed:
                return
            self._thread = threading.current_thread()
        while self._wait.wait():
            self._flush()

    def _flush(self) -> None:
        """Send what can be sent. It is no part of the loop, whose frame would hold the last sender while the
        thread sleeps."""
        for sender in list(self._senders.values()):  # one step, whatever other threads do
            if not self._closed and sender.flush():
                self.sent(sender)
