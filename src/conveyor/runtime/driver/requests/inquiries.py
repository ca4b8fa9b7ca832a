"""Finding cycles of waits over several hosts, for the actors that ask for it (``waiting.inquiry``)."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence

from conveyor.flag import Flag
from conveyor.futures import Future
from conveyor.pauses import Pauses
from conveyor.runtime.driver.processes.far_hosts import FarHosts
from conveyor.runtime.driver.processes.record import ActorRecord
from conveyor.runtime.driver.processes.table import Table
from conveyor.runtime.waiting.inquiry import (
    Look,
    LookAtWaits,
    Reader,
    Verdict,
    Waiting,
    WaitsThere,
    inquire,
)
from conveyor.runtime.waiting.reports import Found

#: Seconds before something is looked at again that changes just now, at first and at most: notes and looks of
#: other hosts, and frames that are on their way there. Pumps could tell of the latter
#: (``HostPump.tell_when_come``), and one would have to ask again all the same for the rest.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.5


class Inquiries:
    """Each is made on the thread that answers the request."""

    def __init__(self, table: Table, abroad: FarHosts) -> None:
        self._board = table.board
        self._abroad = abroad
        self._over = Flag()
        self._lock = threading.Lock()
        # Looks that an inquiry may share: by host the one that is under way, and the one after that.
        self._now: dict[int, Future[WaitsThere]] = {}
        self._next: dict[int, Future[WaitsThere]] = {}
        # Waits that end with an error as soon as their process hears of it: one is enough for a cycle.
        self._doomed: dict[Reader, frozenset[int]] = {}

    def look(self, caller: ActorRecord, waits: Sequence[Waiting]) -> Found | None:
        """What one process asks; waits until it is known."""
        process = caller.reader
        with self._lock:
            for reader in [reader for reader in self._doomed if self._board.gone(*reader)]:
                del self._doomed[reader]
            # It asks again: so it has not heard of what was found.
            again = self._doomed.pop(process, frozenset()) - {wait.stamp for wait in waits}
            if again:
                self._doomed[process] = again
        while True:
            verdict = self._inquire(process, waits)
            if verdict is None:
                return None
            if self._convict(process, verdict):
                return self._found(verdict)

    def close(self) -> None:
        """The session is over: nobody waits for an answer any more."""
        self._over.set()

    def _inquire(self, process: Reader, waits: Sequence[Waiting]) -> Verdict | None:
        inquiry = inquire(process, waits, self._abroad.host_of, self._doomed_of)
        pauses = Pauses(_FIRST_PAUSE, _LONGEST_PAUSE)
        try:
            step = next(inquiry)
            while not self._over.is_set():
                if isinstance(step, Look):
                    looks = {
                        host: self._shared(host) if step.shared else self._own(host, look)
                        for host, look in step.asked.items()
                    }
                    step = inquiry.send({host: seen.result() for host, seen in looks.items()})
                else:
                    self._over.wait(pauses.next())
                    step = next(inquiry)
        except StopIteration as over:
            verdict: Verdict | None = over.value
            return verdict
        return None

    def _doomed_of(self, process: Reader) -> Collection[int]:
        return self._doomed.get(process, ())

    def _convict(self, process: Reader, verdict: Verdict) -> bool:
        """False: another wait of the same cycle was found meanwhile, and ends."""
        with self._lock:
            for reader, stamp in verdict.waits:
                if stamp in self._doomed.get(reader, ()):
                    return False
            self._doomed[process] = self._doomed.get(process, frozenset()) | verdict.stamps
        return True

    def _found(self, verdict: Verdict) -> Found:
        """In words."""
        slots = [slot for slot, _ in verdict.way]
        chain = []
        for (slot, text), to in zip(verdict.way, [*slots[1:], slots[0]], strict=True):
            there = self._abroad.host_of(to) != self._abroad.host_of(slot)
            chain.append(f"{text} (on {self._abroad.host_name(to)})" if there else text)
        return Found(
            verdict.wait.work,
            verdict.wait.stamp,
            tuple(chain),
            tuple(self._board.name(slot) for slot in slots),
            verdict.kinds,
        )

    # Looks

    def _own(self, host: int, look: LookAtWaits) -> Future[WaitsThere]:
        return self._abroad.looks.look_at_waits(host, look)

    def _shared(self, host: int) -> Future[WaitsThere]:
        """A look at that host that begins after this, for all that ask until then."""
        with self._lock:
            if host in self._now:
                if host not in self._next:
                    self._next[host] = Future()
                return self._next[host]
            answer = self._now[host] = Future()
        self._begin(host, answer)
        return answer

    def _begin(self, host: int, answer: Future[WaitsThere]) -> None:
        def done(seen: Future[WaitsThere]) -> None:
            with self._lock:
                following = self._next.pop(host, None)
                if following is None:
                    del self._now[host]
                else:
                    self._now[host] = following
            if following is not None:
                self._begin(host, following)
            error = seen.exception()
            if error is None:
                answer.set_result(seen.result())
            else:
                answer.set_exception(error)

        self._own(host, LookAtWaits()).add_done_callback(done)
