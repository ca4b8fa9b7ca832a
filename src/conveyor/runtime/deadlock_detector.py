"""Detection of whether a wait is part of a cycle that leads over several nodes: pure logic.

What is noted on one host (``runtime.deadlock``) can be read there alone, and at no common moment with what is
noted on another one; and a result may be on its way between two of them. So there are four rounds. First the
notes are followed, from host to host. If they lead to works that all wait, and from each of them back to the
wait in question, then all that these hosts have published until now has to have arrived wherever it goes.
Then all processes of the cycle are asked to look once more. At last each of them must have looked in vain
since, in the wait that it was in at first.

A wait that is the same in the first round and in the last one has lasted in between. So all of them held at
one moment, that of the second round; and what others had published for them by then had come before they
looked. Whatever is lost, late, or has changed meanwhile makes a detection begin anew, and come to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import TypeAlias

from msgspec import Struct, field

from conveyor import _core
from conveyor.runtime.wait_graph import BOUNDED, THREADS, Node, Note, lane_of, path_back

#: Conditions of a process that starts or is alive.
_LIVING = (1, 2)


def look_at_waits(
    process_table: _core.ProcessTable, pump: _core.HostPump | None, look: LookAtWaits
) -> WaitsThere:
    """Answer a round on the node that has that process table; on any thread. ``pump``: the node's own, if it
    has one."""
    has = pump is None or all(pump.has(host, frames) for host, frames in look.has.items())
    requested = {
        slot: process_table.ask(slot)
        for slot, incarnation in look.ask
        if not process_table.gone(slot, incarnation)
    }
    processes: dict[int, tuple[int, tuple[Row, ...] | None]] = {}
    for slot in range(process_table.used):
        if process_table.is_remote(slot) or process_table.condition(slot) not in _LIVING:
            continue
        incarnation, rows = process_table.incarnation(slot), process_table.all_waits(slot)
        if rows is None or rows:  # of whom nothing is noted, nothing has to be said
            processes[slot] = incarnation, None if rows is None else tuple(rows)
    # Behind the notes: what was published before a wait is among it.
    due: dict[int, list[tuple[int, int, int]]] = {}
    for host, *frames in pump.due() if pump is not None and not look.has and not look.ask else ():
        due.setdefault(host, []).append((frames[0], frames[1], frames[2]))
    sent: dict[int, Frames] = {host: tuple(frames) for host, frames in due.items()}
    return WaitsThere(has, requested, processes, sent)


def due_to(pump: _core.HostPump, host: int) -> Frames:
    """Return the frames that ``host`` is to have of all that was published where that pump is."""
    return tuple((segment, ring, upto) for to, segment, ring, upto in pump.due() if to == host)


#: A process's slot of the process tables, and which of its processes it is.
Reader: TypeAlias = "tuple[int, int]"
#: Noted wait: the work, a stamp that tells this wait from others of the process, the question since which it
#: has looked in vain, the mode, whom it waits for (slot, work) and both in words.
Row: TypeAlias = "tuple[int, int, int, int, int, int, str]"
#: Frames of one node for another one: (number of the segment, ring, frames).
Frames: TypeAlias = "tuple[tuple[int, int, int], ...]"


class LookAtWaits(Struct, frozen=True):
    """Request to one node. ask: have these processes look once more. has: whether these frames have come, by
    the node that has sent them."""

    ask: tuple[Reader, ...] = ()
    has: dict[int, Frames] = field(default_factory=dict)


class WaitsThere(Struct, frozen=True):
    """The answer of one host, in the order of what it says. has: whether all frames have come. asked: the
    numbers of the questions, by slot. processes: the notes of all processes there, by slot, with the
    process's incarnation; ``None``: they were being written. due: the frames that other hosts are to have of
    what was published there."""

    has: bool
    requested: dict[int, int]
    processes: dict[int, tuple[int, tuple[Row, ...] | None]]
    due: dict[int, Frames]


#: Answer of a node that is no more.
NOBODY = WaitsThere(True, {}, {}, {})


class Waiting(Struct, frozen=True):
    """Wait of a process that asks: its work, its lane (-1: none), and its stamp."""

    work: int
    lane: int
    stamp: int


class Verdict(Struct, frozen=True):
    """Verdict that a wait would never end. path: the slots of the cycle from the wait's own process on, each
    with the words of its wait. kinds: mode and work of all that take part. waits: these, by process and
    stamp. stamps: those of this process."""

    wait: Waiting
    path: tuple[tuple[int, str], ...]
    kinds: frozenset[tuple[int, int]]
    waits: frozenset[tuple[Reader, int]]
    stamps: frozenset[int]


class Look(Struct, frozen=True):
    """Round of questions, each to a node. ``shared``: answers to another's questions will do, if that round
    begins after this."""

    requested: dict[int, LookAtWaits]
    shared: bool = False


class Pause(Struct, frozen=True):
    """Pause while nothing can be said yet: go on after some time, longer from one to the next."""


#: Next step of a detection. A :class:`Look` is answered with the answer of each node.
Step: TypeAlias = "Look | Pause"
Detection: TypeAlias = "Generator[Step, dict[int, WaitsThere], Verdict | None]"


class _BeingNoted(Exception):
    """Raised if a note cannot be read just now."""


class _Seen:
    """Snapshot of the processes' waits, from all nodes that have answered."""

    def __init__(self, doomed: Callable[[Reader], Collection[int]]) -> None:
        self.hosts: dict[int, WaitsThere] = {}
        self._processes: dict[int, tuple[int, tuple[Row, ...] | None]] = {}
        self._doomed = doomed

    def add(self, found: Mapping[int, WaitsThere]) -> None:
        for host, there in found.items():
            self.hosts[host] = there
            self._processes.update(there.processes)

    def incarnation(self, slot: int) -> int:
        return self._processes.get(slot, (0, ()))[0]

    def rows(self, slot: int) -> Sequence[Row]:
        """Return the waits that the process notes, but for waits that are about to end with an error."""
        incarnation, rows = self._processes.get(slot, (0, ()))
        if rows is None:
            raise _BeingNoted
        doomed = self._doomed((slot, incarnation))
        return [row for row in rows if row[1] not in doomed] if doomed else rows

    def note(self, node: Node) -> Note | None:
        """Return the waits that keep a work from being done for ever: those of its lane, or its own.
        ``None``: there are none."""
        slot, work = node
        rows = self.rows(slot)
        found = [row for row in rows if row[0] == lane_of(work)] or [
            row for row in rows if row[0] == work
        ]
        if not found or found[0][3] == BOUNDED:
            return None
        _, stamp, answered, mode, *_ = found[0]
        return Note(stamp, answered, mode, tuple(row[4:] for row in found))


class _Cycle(Struct):
    wait: Waiting
    first: tuple[tuple[int, int, str], ...]
    notes: dict[Node, Note]
    mine: Callable[[Node], bool]

    def stamps(self, seen: _Seen) -> dict[Node, tuple[int, int]]:
        return {node: (seen.incarnation(node[0]), note.stamp) for node, note in self.notes.items()}


def detect(
    process: Reader,
    waits: Sequence[Waiting],
    host_of: Callable[[int], int],
    doomed: Callable[[Reader], Collection[int]],
) -> Detection:
    """Find out whether one of ``waits`` of ``process`` is part of a cycle. ``host_of(slot)``: the node of
    that process. ``doomed``: the stamps of a process's waits that have been found before, and will end."""
    while True:
        seen = _Seen(doomed)
        try:
            found = yield from _first_round(seen, process, waits, host_of)
            if found is None:
                return None
            if (yield from _confirmed(seen, found, process, host_of, doomed)):
                return _verdict(seen, found, process)
        except _BeingNoted:
            pass
        yield Pause()


def _first_round(
    seen: _Seen, process: Reader, waits: Sequence[Waiting], host_of: Callable[[int], int]
) -> Generator[Step, dict[int, WaitsThere], _Cycle | None]:
    needed = {host_of(process[0])}
    while True:
        more = {host: LookAtWaits() for host in needed - seen.hosts.keys()}
        if more:
            seen.add((yield Look(more, shared=True)))
        needed = set()
        for wait in waits:
            cycle = _cycle(seen, process, wait, host_of, needed)
            if cycle is not None:
                return cycle
        if not needed - seen.hosts.keys():
            return None


def _cycle(
    seen: _Seen, process: Reader, wait: Waiting, host_of: Callable[[int], int], needed: set[int]
) -> _Cycle | None:
    """Return the cycle of one wait, if the notes make one. Nodes that have to be looked at before that is
    known are added to ``needed``."""
    slot, incarnation = process
    if seen.incarnation(slot) != incarnation:
        return None
    own = seen.rows(slot)
    first = tuple(row[4:] for row in own if (row[0], row[1]) == (wait.work, wait.stamp))
    notes: dict[Node, Note] = {}
    ahead = [(to, work) for to, work, _ in first]
    missing = set()
    while ahead:
        node = ahead.pop()
        if node in notes:
            continue
        host = host_of(node[0])
        if host not in seen.hosts:
            missing.add(host)
            continue
        note = seen.note(node)
        if note is None:
            return None
        notes[node] = note
        ahead += [(to, work) for to, work, _ in note.waits]
    if missing:
        needed |= missing
        return None
    of_lane = [row for row in own if row[0] == wait.lane]

    def mine(node: Node) -> bool:
        if node[0] != slot:
            return False
        if node[1] == wait.work:
            return True
        return bool(of_lane) and (of_lane[0][3] != THREADS or lane_of(node[1]) == wait.lane)

    if not notes or any(path_back(notes, node, mine) is None for node in notes):
        return None
    return _Cycle(wait, first, notes, mine)


def _confirmed(
    seen: _Seen,
    cycle: _Cycle,
    process: Reader,
    host_of: Callable[[int], int],
    doomed: Callable[[Reader], Collection[int]],
) -> Generator[Step, dict[int, WaitsThere], bool]:
    stamps = cycle.stamps(seen)
    # The wait itself looks before it believes in anything; but what was sent to its process has to have come.
    hosts = set(seen.hosts)
    sent: dict[int, dict[int, Frames]] = {}
    for host in hosts:
        for to, frames in seen.hosts[host].due.items():
            sent.setdefault(to, {})[host] = frames
    while sent:
        have = yield Look({to: LookAtWaits(has=frames) for to, frames in sent.items()})
        sent = {to: frames for to, frames in sent.items() if not have[to].has}
        if sent:
            yield Pause()
    asking: dict[int, set[Reader]] = {}
    for (slot, _), (incarnation, _) in stamps.items():
        asking.setdefault(host_of(slot), set()).add((slot, incarnation))
    requested: dict[int, int] = {}
    answers = yield Look({h: LookAtWaits(ask=tuple(sorted(whom))) for h, whom in asking.items()})
    for there in answers.values():
        requested |= there.requested
    while True:
        now = _Seen(doomed)
        now.add((yield Look({host: LookAtWaits() for host in hosts})))
        try:
            again = _cycle(now, process, cycle.wait, host_of, set())
            if again is None or again.stamps(now) != stamps:
                return False
            if all(
                slot in requested and _since(note.answered, requested[slot])
                for (slot, _), note in again.notes.items()
            ):
                return True
        except _BeingNoted:
            pass
        yield Pause()


def _since(answered: int, requested: int) -> bool:
    return (answered - requested) & 0xFFFFFFFF < 1 << 31


def _verdict(seen: _Seen, cycle: _Cycle, process: Reader) -> Verdict:
    slot, work, text = cycle.first[0]
    path = path_back(cycle.notes, (slot, work), cycle.mine)
    assert path is not None
    stamps = {note.stamp for node, note in cycle.notes.items() if cycle.mine(node)}
    return Verdict(
        cycle.wait,
        ((process[0], text), *path),
        frozenset((note.mode, work) for (_, work), note in cycle.notes.items()),
        frozenset(((s, i), stamp) for (s, _), (i, stamp) in cycle.stamps(seen).items()),
        frozenset({cycle.wait.stamp, *stamps}),
    )
