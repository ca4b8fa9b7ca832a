"""Processes on other nodes, as the driver knows them: which there are, who has which segment, what they do.

A process of another node has the same slot in every process table. In the driver's own table, as on every
other node, a proxy stands for it. So reading from it and writing to it work here as with any process. Three
things differ: its endpoints are made by its node, its descriptors come in another way, and each segment is
made once on each node of its members.
"""

from __future__ import annotations

import errno
import itertools
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from conveyor import _core
from conveyor.codec import Reader
from conveyor.driver.actors import ActorRecord
from conveyor.driver.bootstrap import Startup
from conveyor.driver.process_engine import (
    Adopt,
    Answer,
    BreakGroup,
    CountDue,
    Cut,
    Forget,
    GiveUp,
    Locate,
    MarkClosed,
    MarkRefused,
    Reach,
    RemoteDescriptors,
    RemoteNode,
    Remove,
    SendDescriptors,
    Spread,
    Stand,
    TellWhenCome,
)
from conveyor.exceptions import ConveyorError, RuntimeStateError
from conveyor.futures import Future, wait
from conveyor.graph.edges import KNOWN_DEAD_WITHIN, Whereabouts
from conveyor.graph.telemetry import (
    BRIEF_TIME_LIMIT,
    TIME_LIMIT,
    Look,
    LookAtAll,
    Seen,
    SeenAll,
    StatusResponder,
)
from conveyor.runtime.blueprint import Blueprint, nodes_among
from conveyor.runtime.broker import Side
from conveyor.runtime.deadlock_detector import (
    NOBODY,
    Frames,
    LookAtWaits,
    WaitsThere,
    due_to,
    look_at_waits,
)
from conveyor.runtime.process import Process
from conveyor.runtime.status import ProcessSnapshot
from conveyor.runtime.stored_values import StoreSnapshot, stores_on
from conveyor.transport.base import Host

T = TypeVar("T")

#: The driver's own node.
HERE = 0


def _nothing() -> None:
    pass


#: A question that has been answered, in the form of ``StatusQueries._awaited``.
_NOT_AWAITED = HERE, _nothing, _nothing


class StatusQueries:
    """The driver's questions to all nodes, its own included."""

    def __init__(
        self,
        process: Process,
        nodes: Mapping[int, RemoteNode],
        lost: Collection[int],
        node_of: Callable[[int], int],
        pump: Callable[[], _core.HostPump | None],
    ) -> None:
        """``nodes``, ``lost``: the nodes that there are, and the lost ones, now and later. ``node_of``: the
        number of the node of the process with a slot. ``pump``: the pump of the driver's node."""
        self._process = process
        self._nodes, self._lost = nodes, lost
        self._node_of, self._pump = node_of, pump
        self._status_responder = StatusResponder(process.process_table)
        self._numbers = itertools.count(1)
        #: By question number: the node where frames are to come, the function to call when they have, and the
        #: function to call if that is not told.
        self._awaited: dict[int, tuple[int, Callable[[], object], Callable[[], object]]] = {}

    def look(self, node: int, look: Look, segment: _core.Segment) -> Future[Seen]:
        """Have a node look at actors of a graph that are there. ``segment``: the graph's, as it is on the
        driver's node."""
        if node != HERE:
            return self._nodes[node].look(look)
        here: Future[Seen] = Future()
        here.set_result(self._status_responder.look(look, segment))
        return here

    def look_at(self, slots: Sequence[int], hears: bool) -> list[ProcessSnapshot | str]:
        """Return the process snapshots of these slots, on other nodes, as far as the nodes answer at once;
        otherwise why they are not known. ``hears``: the caller is the thread that hears the answers."""
        if hears:
            return ["its host was not asked"] * len(slots)
        nodes = {number: self._nodes.get(number) for number in map(self._node_of, slots)}
        answers = {n: node.look_at_all(LookAtAll(False)) for n, node in nodes.items() if node}
        wait(answers.values(), BRIEF_TIME_LIMIT)
        return [self._seen(slot, answers.get(self._node_of(slot))) for slot in slots]

    def _seen(self, slot: int, answer: Future[SeenAll] | None) -> ProcessSnapshot | str:
        if answer is None:
            return "it has ended"
        if not answer.done():
            return f"its host has not answered for {BRIEF_TIME_LIMIT:g} s"
        error = answer.exception()
        if error is not None:
            return str(error) or type(error).__name__
        name = self._process.process_table.name(slot)
        found = (snapshot for snapshot in answer.result().snapshots if snapshot.name == name)
        return next(found, "its host does not know it")

    def look_at_waits(self, node: int, look: LookAtWaits) -> Future[WaitsThere]:
        """Have a node say what its processes wait for. A lost node has none."""
        lost = node in self._lost
        if node != HERE and not lost:
            return self._nodes[node].look_at_waits(look)
        here: Future[WaitsThere] = Future()
        try:
            there = (
                NOBODY if lost else look_at_waits(self._process.process_table, self._pump(), look)
            )
        except OSError as error:  # the session ends
            here.set_exception(error)
        else:
            here.set_result(there)
        return here

    def due(self, node: int, to: int) -> Future[Frames]:
        """Return the frames published on ``node`` until now that node ``to`` is to have. Fails if ``node`` is
        given up, or the session is over."""
        if node != HERE:
            return self._nodes[node].tell(CountDue(to))
        return self._of_the_pump(lambda pump: due_to(pump, to))

    def when_come(
        self,
        to: int,
        node: int,
        frames: Frames,
        then: Callable[[], object],
        untold: Callable[[], object],
    ) -> None:
        """Call ``then`` when these frames of ``node`` have come to node ``to``, or none of ``node`` comes
        there any more. Call ``untold`` if ``to`` is given up, or the session is over."""
        number = next(self._numbers)
        self._awaited[number] = to, then, untold
        if to != HERE:
            requested = self._nodes[to].tell(TellWhenCome(node, frames, number))
        else:
            requested = self._of_the_pump(lambda pump: pump.tell_when_come(node, frames, number))
        requested.add_done_callback(partial(self._is_requested, number))

    def _is_requested(self, number: int, requested: Future[None]) -> None:
        if requested.exception() is not None:
            self._untold(number)

    def _untold(self, number: int) -> None:
        _, _, untold = self._awaited.pop(number, _NOT_AWAITED)
        untold()

    def come(self, number: int) -> None:
        """Note that the frames of question ``number`` have come, or never come. Called by the engine."""
        _, then, _ = self._awaited.pop(number, _NOT_AWAITED)
        then()

    def gone(self, node: int) -> None:
        """Note that node ``node`` is lost, and tells nothing any more."""
        for number, (to, _, _) in list(self._awaited.items()):
            if to == node:
                self._untold(number)

    def _of_the_pump(self, ask: Callable[[_core.HostPump], T]) -> Future[T]:
        """Return the answer of the pump of the driver's node."""
        here: Future[T] = Future()
        pump = self._pump()
        try:
            if pump is None:
                raise BrokenPipeError(errno.ESHUTDOWN, "the session is over")
            here.set_result(ask(pump))
        except BrokenPipeError as error:  # the pump's end; also where all nodes are given up
            here.set_exception(error)
        return here

    def remote_stored(self, own: int = HERE) -> list[StoreSnapshot]:
        """Return the values that processes of other nodes than ``own`` store for others, as far as these
        nodes answer in time."""
        requested = [node.stored() for number, node in list(self._nodes.items()) if number != own]
        found = [] if own == HERE else stores_on(self._process.process_table, self._process.slot)
        for answer in wait(requested, TIME_LIMIT):
            found += answer.result() if answer.exception() is None else []
        return found

    def forget(self, number: int) -> None:
        """Forget the segment of that number, which nobody uses any more."""
        self._status_responder.forget(number)


class Joins:
    """Connections between pairs of other nodes; each node has connected to the driver by itself. One thread
    at a time is in here, but for ``reached``."""

    def __init__(self, nodes: Mapping[int, RemoteNode]) -> None:
        self._nodes = nodes
        # Users of a connection wait for its future; a failed one is ordered again.
        self._joined: dict[tuple[int, int], Future[Any]] = {}

    def of(self, lower: int, higher: int) -> Future[Any]:
        """Have these nodes be connected; the future is done when they are, or cannot be."""
        joined = self._joined.get((lower, higher))
        if joined is None or has_failed(joined):
            joined = self._joined[lower, higher] = Future()
            self._nodes[lower].tell(Locate(higher, self._nodes[higher].address))
            # The node goes on meanwhile: one that does not answer may hold up nothing else there.
            sent = self._nodes[higher].send(Reach(lower, self._nodes[lower].address))
            sent.add_done_callback(lambda done: _fail(joined, done.exception()))
        return joined

    def reached(self, higher: int, lower: int, error: Exception | None) -> None:
        """Note the outcome of a connection, as node ``higher`` reports it."""
        joined = self._joined.get((lower, higher))
        if joined is None:  # one of them is lost
            return
        if error is not None:
            _fail(joined, error)
        else:
            with suppress(InvalidStateError):
                joined.set_result(None)

    def gone(self, node: int) -> None:
        """End the waits for connections to a node that is lost."""
        for pair in [pair for pair in self._joined if node in pair]:
            name = self._nodes[node].name
            _fail(self._joined.pop(pair), RuntimeStateError(f"node {name} is lost"))


def has_failed(one: Future[Any]) -> bool:
    """Return whether the future has an error."""
    return one.done() and one.exception() is not None


def _fail(joined: Future[Any], error: BaseException | None) -> None:
    if error is not None:
        with suppress(InvalidStateError):  # it is known already
            joined.set_exception(error)


logger = logging.getLogger("conveyor")


class RemoteNodes:
    """The driver's view of all other nodes. Nothing is there before the first process of another node."""

    def __init__(self, process: Process, own_view: Callable[[], _core.ArenaView]) -> None:
        """``own_view``: of the driver's arena."""
        self._process = process
        self._own_view = own_view
        #: Held while orders are given that belong together, and for the state here; never while an order's
        #: outcome is waited for.
        self._lock = threading.RLock()
        self._pump: _core.HostPump | None = None
        self._window, self._address = 0.0, ""
        self._nodes: dict[int, RemoteNode] = {}
        self._lost: set[int] = set()
        # Pairs of a node and a lost node that it has given up: nothing comes to it from there any more.
        self._given_up: set[tuple[int, int]] = set()
        #: Called when there is another one of these, on any thread.
        self.on_given_up: Callable[[], object] = lambda: None
        # By slot, of processes of other nodes: the node; the proxy's arena; the segments of its own links.
        self._node_of: dict[int, int] = {}
        self._arenas: dict[int, _core.Arena] = {}
        self._links: dict[int, list[int]] = {}
        # By node, the processes of other nodes that it has proxies of. Users of a proxy wait for its future;
        # a failed one is ordered again.
        self._known: dict[int, dict[Reader, Future[Any]]] = {}
        #: Dead processes of which a node still has a proxy, by node and slot: their last frames are on their
        #: way there.
        self._stale_proxies: dict[tuple[int, int], Reader] = {}
        self._joins = Joins(self._nodes)
        self._segments: dict[int, list[int]] = {}
        self._numbers = itertools.count(1)
        #: Questions to nodes about their processes.
        self.status_queries = StatusQueries(
            process, self._nodes, self._lost, self.node_of, lambda: self._pump
        )

    def open(self, window: float, address: str) -> _core.HostPump:
        """Return the pump of the driver's node, which is made the first time. A node that is without a
        connection for ``window`` seconds is lost. ``address``: where the driver's node listens."""
        with self._lock:
            if self._pump is None:
                self._pump = _core.HostPump(self._process.process_table, HERE, window)
                self._window, self._address = window, address
            return self._pump

    @property
    def pump(self) -> _core.HostPump:
        """The pump of the driver's node, if there is a process on another."""
        assert self._pump is not None
        return self._pump

    def node_of(self, slot: int) -> int:
        """Return the number of the node of the process that has that slot."""
        return self._node_of.get(slot, HERE)

    def node_name(self, slot: int) -> str:
        """Return the name of the node of the process that has that slot."""
        return self.name_of(self.node_of(slot))

    def name_of(self, node: int) -> str:
        """Return the name of a node, by its number."""
        known = self._nodes.get(node)
        return "the driver's node" if known is None else known.name

    def whereabouts(self, slots: Iterable[int]) -> Whereabouts:
        """Return the nodes of the processes with these slots, for the out-of-band parts of a graph's
        edges."""
        numbers = [self.node_of(slot) for slot in slots]
        if len(set(numbers)) < 2:
            return Whereabouts(deployed=_core.monotonic_ns())
        nodes = tuple(
            [
                Host(number, self._address if number == HERE else self._nodes[number].address[0])
                for number in numbers
            ]
        )
        # A connection that is silent breaks within a window, and the node is lost after another one. The rest
        # is for the news to get there.
        known = 2 * self._window + KNOWN_DEAD_WITHIN / 2
        return Whereabouts(nodes, max(known, KNOWN_DEAD_WITHIN), _core.monotonic_ns())

    # A process

    def prepare(self, record: ActorRecord, startup: Startup, node: RemoteNode) -> bytes:
        """Prepare a process that will be on ``node``: have that node make its endpoints, and add a proxy of
        it here. Return its bootstrap message."""
        slot, incarnation = record.reader
        size, process_table = self._process.arena_size, self._process.process_table
        arena = _core.Arena(record.arena_fd, size.file, size.cap, process_table, slot, size.idle)
        with self._lock:
            self._nodes[node.number] = record.node = (
                node  # first: what fails is buried as one of that node
            )
            self._remove_stale_proxies(slot)
            self._arenas[slot], self._node_of[slot] = arena, node.number
            self.pump.add_proxy(slot, incarnation, node.number, record.id.name, arena)
            record.eventfd = process_table.eventfd(slot)
            done = [node.send(Adopt(slot, incarnation, record.id.name))]
            links = self._links[slot] = []
            for blueprint, segment in startup.links:
                links.append(self._spread(blueprint, segment, done))
        _wait_for(done)
        return startup.message(node.arena)

    def links_of(self, record: ActorRecord) -> list[int]:
        """Return the numbers of the segments of the driver's links to the process: of calls, and of
        orders."""
        return self._links[record.slot]

    def remove_dead(self, record: ActorRecord) -> None:
        """Remove a dead process everywhere: its slot is about to be another's. A process of the driver's own
        node has proxies on others, too."""
        slot, node = record.slot, record.node
        with self._lock:
            for other, known in self._known.items():
                if known.pop(record.reader, None) is not None:
                    self._stale_proxies[other, slot] = record.reader
                    self.behind_its_last(
                        record, other, partial(self._remove_proxy, other, record.reader)
                    )
            if node is None:
                return
            for number in self._links.pop(slot, ()):
                self._forget(number)
            node.tell(Remove(*record.reader))
            self._node_of.pop(slot, None)
            arena = self._arenas.pop(slot, None)
            if self._pump is not None:
                self._pump.remove_proxy(slot)
        if arena is not None:
            arena.close()
            arena.leave_slot()

    def behind_its_last(self, record: ActorRecord, to: int, then: Callable[[], object]) -> None:
        """Call ``then`` when all frames that the dead process has written for node ``to`` are there, or none
        of them comes there any more."""
        node = HERE if record.node is None else record.node.number
        if node == to:
            then()
        else:
            due = self.status_queries.due(node, to)
            due.add_done_callback(partial(self._is_counted, node, to, then))

    def _is_counted(
        self, node: int, to: int, then: Callable[[], object], due: Future[Frames]
    ) -> None:
        if due.exception() is None and due.result():
            self.status_queries.when_come(to, node, due.result(), then, then)
        else:
            then()

    def _remove_proxy(self, other: int, process: Reader) -> None:
        with self._lock:
            if self._stale_proxies.get((other, process[0])) == process:
                del self._stale_proxies[other, process[0]]
                self._nodes[other].tell(Remove(*process))

    def _remove_stale_proxies(self, slot: int) -> None:
        """Remove the former process of the slot everywhere, whatever is on its way: another process gets the
        slot."""
        for (other, of), process in list(self._stale_proxies.items()):
            if of == slot:
                self._remove_proxy(other, process)

    def gone(self, number: int) -> None:
        """Have all nodes give a node up that is lost, or has ended; the driver's node has given it up
        already."""
        with self._lock:
            self._lost.add(number)
            self._known.pop(number, None)
            self._joins.gone(number)
            self._given_up.add((HERE, number))
            for other in self._nodes.keys() - self._lost:
                done = self._nodes[other].tell(GiveUp(number))
                done.add_done_callback(partial(self._gave_up, other, number))
        self.status_queries.gone(number)
        self.on_given_up()

    def _gave_up(self, node: int, lost: int, done: Future[Any]) -> None:
        if done.exception() is None:  # else it is lost itself, or about to be
            self._given_up.add((node, lost))
            self.on_given_up()

    def reached(self, node: int, other: int, error: Exception | None) -> None:
        """Note that node ``node`` has connected to ``other``, as ordered, or cannot."""
        self._joins.reached(node, other, error)

    def comes(self, node: int, to: int) -> bool:
        """Return whether frames of dead processes of ``node`` may still be on their way to node ``to``."""
        return to != node and (to, node) not in self._given_up

    def is_lost(self, node: int) -> bool:
        return node in self._lost

    # Segments

    def spread(self, blueprint: Blueprint, segment: _core.Segment | None) -> int:
        """Have all nodes of the members make such a segment. Return its number, 0 if all members are here.
        ``segment``: the one that is here, if some members are."""
        if not self._node_of:
            return 0
        with self._lock:
            if nodes_among(blueprint.processes, self.node_of) == [HERE]:
                return 0
            done: list[Future[Any]] = []
            number = self._spread(blueprint, segment, done)
        try:
            _wait_for(done)
        except BaseException:
            self.forget(number)
            raise
        return number

    def _spread(
        self, blueprint: Blueprint, segment: _core.Segment | None, done: list[Future[Any]]
    ) -> int:
        """Order a segment's copies, with the lock. The outcomes to wait for are added to ``done``."""
        nodes = nodes_among(blueprint.processes, self.node_of)
        number = next(self._numbers)
        for lower, higher in itertools.combinations(nodes, 2):
            self._join(lower, higher, done)
        submitter_hosts = {
            limits.submitter: self.node_of(limits.submitter) for limits in blueprint.limits
        }
        ordered = self._segments[number] = []
        try:
            for node in nodes:
                if node == HERE:
                    assert segment is not None
                    ordered.append(node)  # first: who is interrupted may have done it
                    blueprint.mirror(self.pump, number, segment, self._view_of, self.node_of)
                    continue
                self._introduce(node, blueprint.processes, done)
                order = Spread(number, blueprint, submitter_hosts, len(nodes) > 1)
                ordered.append(node)
                done.append(self._nodes[node].send(order))
        except BaseException:
            self._forget(number)
            raise
        return number

    def _join(self, lower: int, higher: int, done: list[Future[Any]]) -> None:
        if lower != HERE:
            done.append(self._joins.of(lower, higher))

    def _introduce(self, node: int, processes: Iterable[Reader], done: list[Future[Any]]) -> None:
        """Have ``node`` add proxies of the processes that are not its own. It has always had the driver's."""
        known = self._known.setdefault(node, {})
        for slot, incarnation in processes:
            where = self.node_of(slot)
            if where == node or slot == self._process.slot:
                continue
            stands = known.get((slot, incarnation))
            if stands is None or has_failed(stands):
                self._remove_stale_proxies(slot)
                order = Stand(slot, incarnation, where, self._process.process_table.name(slot))
                stands = known[slot, incarnation] = self._nodes[node].send(order)
            done.append(stands)

    def introduce(self, record: ActorRecord, process: Reader) -> bool:
        """Return whether that process, which lives, is on another node than ``record``'s. If so, ``record``'s
        node knows it from then on, and can connect to the process's node."""
        own, other = self.node_of(record.slot), self.node_of(process[0])
        if own == other:
            return False
        if own != HERE:
            with self._lock:
                done: list[Future[Any]] = []
                self._join(min(own, other), max(own, other), done)
                self._introduce(own, (process,), done)
            try:
                _wait_for(done)
            except ConveyorError:
                if other not in self._lost:
                    raise
                return False  # it has died meanwhile
        return True

    def _view_of(self, slot: int) -> _core.ArenaView | None:
        if self.node_of(slot) != HERE:
            return None
        if slot == self._process.slot:
            return self._own_view()
        return self._process.arena_of(slot, self._process.process_table.incarnation(slot))

    def break_group(self, number: int, members: tuple[Reader, ...], session: bool) -> None:
        """Have the members on other nodes be told that the collective group of that segment is broken."""
        with self._lock:
            for node in self._segments.get(number, ()):
                if node != HERE:
                    self._nodes[node].tell(BreakGroup(number, members, session))

    def forget(self, number: int) -> None:
        """Forget a segment, which nobody uses any more; 0: there is none."""
        if number:
            with self._lock:
                self._forget(number)

    def _forget(self, number: int) -> None:
        self.status_queries.forget(number)
        for node in self._segments.pop(number, ()):
            if node != HERE:
                self._nodes[node].tell(Forget(number))
            elif self._pump is not None:
                self._pump.unmirror(number)

    # What goes to a process of another host

    def send_descriptors(
        self, record: ActorRecord, segment: int, processes: Iterable[Reader]
    ) -> int:
        """Have the process's node give it the descriptors of a segment and of other processes. Return the
        id."""
        assert record.node is not None
        fds_id = record.next_fds_id()
        with self._lock:
            done: list[Future[Any]] = []
            processes = tuple(processes)
            self._introduce(record.node.number, processes, done)
            done.append(
                record.node.send(SendDescriptors(*record.reader, fds_id, segment, processes))
            )
        try:
            _wait_for(done)
        except ConveyorError:
            record.check_alive()  # its death is why its node could not, most often
            raise
        return fds_id

    def answer(
        self,
        record: ActorRecord,
        data: bytes,
        remote_descriptors: RemoteDescriptors | None,
        wait: bool = True,
    ) -> None:
        """Send the process the answer to a request. ``wait``: until its node has done so. The engine's
        thread, which is told when a node is lost, must not wait."""
        assert record.node is not None
        given = remote_descriptors or RemoteDescriptors()
        with self._lock:
            done: list[Future[Any]] = []
            self._introduce(record.node.number, given.processes, done)
            order = Answer(
                *record.reader, data, given.segment, given.processes, given.connection, given.memory
            )
            sent = record.node.send(order)
        if wait:
            _wait_for([*done, sent])
        else:
            sent.add_done_callback(partial(self._sent, record))

    def _sent(self, record: ActorRecord, sent: Future[Any]) -> None:
        """Look at the outcome of an answer that nobody waits for. If the process takes no answer, it is cut
        off; that is no loss of its node."""
        error = sent.exception()
        if error is not None and record.alive:
            logger.warning("a request of %s cannot be answered: %s", record.id.name, str(error))
            self.cut(record)

    def cut(self, record: ActorRecord) -> None:
        """Tell the process that it cannot be answered any more."""
        if record.node is not None:
            record.node.tell(Cut(*record.reader))

    def mark_refused(self, caller: ActorRecord, segment: int) -> None:
        """Tell ``caller`` that nobody serves its link with that segment."""
        if caller.node is not None:
            caller.node.tell(MarkRefused(segment, caller.slot))

    def mark_closed(self, party: ActorRecord, segment: int, side: Side) -> None:
        """Tell ``party`` that ``side`` of the channel of that segment, the other end than its own, was
        closed."""
        if party.node is not None:
            party.node.tell(MarkClosed(segment, side, party.slot))

    def close(self) -> None:
        """Stop the pump and close the arenas: the session is over, and its processes gone."""
        with self._lock:
            pump, self._pump = self._pump, None
            arenas = list(self._arenas.values())
            self._arenas.clear()
        if pump is not None:
            pump.stop()
        for arena in arenas:
            arena.close()


def _wait_for(done: list[Future[Any]]) -> None:
    """Wait until all of these are done. Raises the first error."""
    for one in done:
        try:
            one.result()
        except ConveyorError:
            raise
        except OSError as error:
            raise RuntimeStateError(f"another host cannot do what it has to: {error}") from error
