"""Calls that could not be sent at once are sent later, by whoever is there to do it."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from typing import Protocol, TypeAlias

from conveyor import _core
from conveyor.callers import Site
from conveyor.calls.arguments import Taken, lacked
from conveyor.calls.call import START, Call
from conveyor.refs.ref import Ref, Source
from conveyor.runtime import threads

_orders = itertools.count()


class CallRef(Ref):
    """The result of an actor call."""

    __slots__ = ("method", "order", "passes_on")

    #: The place of one that waits at its caller, among all that do.
    order: int
    #: Whether its arguments have come by refs: it takes their place (``_core.Arena.note_given``).
    passes_on: bool

    def __init__(self, source: Source, number: int, method: str) -> None:
        super().__init__(source, number)
        self.method = method

    @classmethod
    def waiting(cls, source: Source, method: str) -> CallRef:
        """Return that of a call that waits at its caller."""
        ref = cls(source, -1, method)
        ref.order = next(_orders)
        ref.passes_on = False
        return ref


#: Call, with the arguments that were taken when it was made, and the line that has made it, as long as refs
#: among its arguments stand for their values.
Entry: TypeAlias = "tuple[CallRef, Call, Taken | None, Site | None]"


class Waiting(deque[Entry]):
    """The calls of one link, in the order in which they are to be sent."""

    #: So many at the front come before all that are called from now on.
    _first = 0

    def put(self, entry: Entry, again: bool) -> None:
        """Add a call. ``again``: it is made again, and comes before all that wait, but for others of its
        kind and the actor's constructor. Some of these calls may lack just that call's result."""
        if not again:
            self.append(entry)
            return
        if not self._first and self and self[0][1][4] == START:
            self._first = 1
        self.insert(self._first, entry)
        self._first += 1

    def take_out(self, place: int) -> None:
        """Remove the call in that place, which waits no more."""
        del self[place]
        self._first -= place < self._first


def place_of(waiting: Waiting, ref: Ref) -> int | None:
    """Return the place of the call of ``ref`` in the queue."""
    # By identity: arguments need not be comparable.
    return next((i for i, (r, *_) in enumerate(waiting) if r is ref), None)


def first_lacked(waiting: Waiting) -> Ref | None:
    """Return the argument that the first waiting call lacks, if it lacks one."""
    _, call, _, site = waiting[0] if waiting else (None, None, None, None)
    return lacked(call) if call is not None and site is not None else None


def lacked_now(waiting: Waiting, lock: threading.RLock) -> Ref | None:
    """Like :func:`first_lacked`, without waiting for ``lock``: the thread that has it may wait itself.
    ``None`` then."""
    if not lock.acquire(blocking=False):
        return None
    try:
        return first_lacked(waiting)
    finally:
        lock.release()


def withdraw(waiting: Waiting, ref: Ref) -> bool:
    """Whether the call of ``ref`` was waiting, and does no longer."""
    place = place_of(waiting, ref)
    if place is not None:
        waiting.take_out(place)
    return place is not None


class Pending(Protocol):
    """Sender that has calls waiting to be sent."""

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
        """Note that ``sender`` has calls that wait. Afterwards the sender itself sends once more all that it
        can send by now.

        Raises:
            SystemLimitError: no thread is to be had, and the calls might wait for ever.
        """
        with self.lock:
            if self._thread is None and not self._closed:
                self._wait.open()
                threads.serve(self._run, "pump")
        self._note(sender)

    def knows(self, sender: Pending) -> bool:
        """Whether the pump sends the calls that wait in ``sender``."""
        return id(sender) in self._senders

    def sent(self, sender: Pending) -> None:
        """Note that no call of ``sender`` waits any more."""
        if id(sender) not in self._senders:
            return
        self._wait.end(id(sender))
        self._senders.pop(id(sender), None)
        # A signal handler's call may have been added in between.
        if sender.has_pending:
            self._note(sender)

    def attending(self, sender: Pending, does: bool) -> _core.Attending:
        """Return a context manager. If it ``does``, this thread waits in its body, and has the sender flush
        each time the inbox's doorbell has rung. That lasts until the end of the body, or until ``end`` of
        the manager is called."""
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
