"""Questions of the driver to other nodes about their processes. They change nothing."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TypeVar

from conveyor import _core
from conveyor.driver.hosts.far_host import CountDue, FarHost, TellWhenCome
from conveyor.futures import Future, wait
from conveyor.graph.telemetry.afar import (
    HASTE,
    PATIENCE,
    Look,
    LookAtAll,
    Lookout,
    Seen,
    SeenAll,
)
from conveyor.runtime.kept import KeptAt, kept_on
from conveyor.runtime.process import Process
from conveyor.runtime.status import Page
from conveyor.runtime.waiting.inquiry import (
    NOBODY,
    Frames,
    LookAtWaits,
    WaitsThere,
    due_to,
    look_at_waits,
)

T = TypeVar("T")

#: The driver's own host.
HERE = 0


def _nothing() -> None:
    pass


#: A question that has been answered, in the form of ``Looks._awaited``.
_NOT_AWAITED = HERE, _nothing, _nothing


class Looks:
    """The driver's questions to all nodes, its own included."""

    def __init__(
        self,
        process: Process,
        hosts: Mapping[int, FarHost],
        lost: Collection[int],
        host_of: Callable[[int], int],
        pump: Callable[[], _core.HostPump | None],
    ) -> None:
        """``hosts``, ``lost``: the nodes that there are, and the lost ones, now and later. ``host_of``: the
        number of the node of the process with a slot. ``pump``: the pump of the driver's node."""
        self._process = process
        self._hosts, self._lost = hosts, lost
        self._host_of, self._pump = host_of, pump
        self._lookout = Lookout(process.board)
        self._numbers = itertools.count(1)
        #: By question number: the node where frames are to come, the function to call when they have, and the
        #: function to call if that is not told.
        self._awaited: dict[int, tuple[int, Callable[[], object], Callable[[], object]]] = {}

    def look(self, host: int, look: Look, segment: _core.Segment) -> Future[Seen]:
        """Have a node look at actors of a graph that are there. ``segment``: the graph's, as it is on the
        driver's node."""
        if host != HERE:
            return self._hosts[host].look(look)
        here: Future[Seen] = Future()
        here.set_result(self._lookout.look(look, segment))
        return here

    def look_at(self, slots: Sequence[int], hears: bool) -> list[Page | str]:
        """Return the process snapshots of these slots, on other nodes, as far as the nodes answer at once;
        otherwise why they are not known. ``hears``: the caller is the thread that hears the answers."""
        if hears:
            return ["its host was not asked"] * len(slots)
        hosts = {number: self._hosts.get(number) for number in map(self._host_of, slots)}
        answers = {n: host.look_at_all(LookAtAll(False)) for n, host in hosts.items() if host}
        wait(answers.values(), HASTE)
        return [self._seen(slot, answers.get(self._host_of(slot))) for slot in slots]

    def _seen(self, slot: int, answer: Future[SeenAll] | None) -> Page | str:
        if answer is None:
            return "it has ended"
        if not answer.done():
            return f"its host has not answered for {HASTE:g} s"
        error = answer.exception()
        if error is not None:
            return str(error) or type(error).__name__
        name = self._process.board.name(slot)
        found = (page for page in answer.result().pages if page.name == name)
        return next(found, "its host does not know it")

    def look_at_waits(self, host: int, look: LookAtWaits) -> Future[WaitsThere]:
        """Have a node say what its processes wait for. A lost node has none."""
        lost = host in self._lost
        if host != HERE and not lost:
            return self._hosts[host].look_at_waits(look)
        here: Future[WaitsThere] = Future()
        try:
            there = NOBODY if lost else look_at_waits(self._process.board, self._pump(), look)
        except OSError as error:  # the session ends
            here.set_exception(error)
        else:
            here.set_result(there)
        return here

    def due(self, host: int, to: int) -> Future[Frames]:
        """Return the frames published on ``host`` until now that node ``to`` is to have. Fails if ``host`` is
        given up, or the session is over."""
        if host != HERE:
            return self._hosts[host].tell(CountDue(to))
        return self._of_the_pump(lambda pump: due_to(pump, to))

    def when_come(
        self,
        to: int,
        host: int,
        frames: Frames,
        then: Callable[[], object],
        untold: Callable[[], object],
    ) -> None:
        """Call ``then`` when these frames of ``host`` have come to node ``to``, or none of ``host`` comes
        there any more. Call ``untold`` if ``to`` is given up, or the session is over."""
        number = next(self._numbers)
        self._awaited[number] = to, then, untold
        if to != HERE:
            asked = self._hosts[to].tell(TellWhenCome(host, frames, number))
        else:
            asked = self._of_the_pump(lambda pump: pump.tell_when_come(host, frames, number))
        asked.add_done_callback(partial(self._is_asked, number))

    def _is_asked(self, number: int, asked: Future[None]) -> None:
        if asked.exception() is not None:
            self._untold(number)

    def _untold(self, number: int) -> None:
        _, _, untold = self._awaited.pop(number, _NOT_AWAITED)
        untold()

    def come(self, number: int) -> None:
        """Note that the frames of question ``number`` have come, or never come. Called by the engine."""
        _, then, _ = self._awaited.pop(number, _NOT_AWAITED)
        then()

    def gone(self, host: int) -> None:
        """Note that node ``host`` is lost, and tells nothing any more."""
        for number, (to, _, _) in list(self._awaited.items()):
            if to == host:
                self._untold(number)

    def _of_the_pump(self, ask: Callable[[_core.HostPump], T]) -> Future[T]:
        """Return the answer of the pump of the driver's node."""
        here: Future[T] = Future()
        pump = self._pump()
        try:
            if pump is None:
                raise BrokenPipeError(errno.ESHUTDOWN, "the session is over")
            here.set_result(ask(pump))
        except BrokenPipeError as error:  # the pump's end; also where all hosts are given up
            here.set_exception(error)
        return here

    def kept_afar(self, own: int = HERE) -> list[KeptAt]:
        """Return the values that processes of other nodes than ``own`` store for others, as far as these
        nodes answer in time."""
        asked = [host.kept() for number, host in list(self._hosts.items()) if number != own]
        found = [] if own == HERE else kept_on(self._process.board, self._process.slot)
        for answer in wait(asked, PATIENCE):
            found += answer.result() if answer.exception() is None else []
        return found

    def forget(self, number: int) -> None:
        """Forget the segment of that number, which nobody uses any more."""
        self._lookout.forget(number)
