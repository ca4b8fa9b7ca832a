"""Links and introductions between processes: a process that writes to another needs its arena and its
doorbell."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from conveyor import _core, descriptors
from conveyor.calls.links import Refusal, link_blueprint, link_depth
from conveyor.codec import Reader
from conveyor.driver.actors import ActorRecord, Introduced, Table
from conveyor.driver.hosts import Handed
from conveyor.driver.remote_processes import HERE, FarHosts
from conveyor.exceptions import ActorDiedError, ConveyorError
from conveyor.futures import Future, wait
from conveyor.graph.edges import Assignment, Layout, Whereabouts
from conveyor.graph.telemetry import (
    NONE,
    Afar,
    Look,
    LookedAt,
    Offset,
    Question,
    Rings,
    Seen,
    Sight,
    estimate,
)
from conveyor.runtime.blueprint import Blueprint
from conveyor.runtime.cleanup import Chores
from conveyor.runtime.meeting import Side
from conveyor.runtime.process import RESULT_BIT, Place, close_all
from conveyor.runtime.stored_values import KeptAt
from conveyor.worker.messages import Accept, HangUp, Load

if TYPE_CHECKING:
    from conveyor.refs.ref import Ref


#: How often another node's clock is asked: a few of the answers come without delay.
_CLOCK_TIMES = 16


def look_afar(
    abroad: FarHosts,
    question: Question,
    patience: float,
    number: int,
    layout: Layout,
    records: Sequence[ActorRecord],
    executor: int,
) -> Afar:
    """Return the status of these actors, as their nodes report it. The node of the executor, which has that
    slot, is left out. ``number`` and ``layout`` are of the graph's segment. ``patience``: seconds that the
    nodes have, all together."""
    own = abroad.host_of(executor)
    asked: dict[int, list[LookedAt]] = {}
    for actor, record in enumerate(records):
        host = HERE if record.host is None else record.host.number
        if host != own:
            looked_at = LookedAt(actor, record.reader, layout.recorders[actor])
            asked.setdefault(host, []).append(looked_at)
    names = {host: abroad.name_of(host) for host in asked}
    if patience <= 0:
        why = "it was not asked, by the thread that would hear its answer"
        return Afar(unknown=dict.fromkeys(names.values(), why))
    end = _core.monotonic() + patience
    looks = {
        host: Look(question, number, layout.offsets, tuple(actors))
        for host, actors in asked.items()
    }
    answers = {host: abroad.looks.look(host, look, layout.segment) for host, look in looks.items()}
    clocks = _clocks(abroad, own, answers, end) if question.trace else {}
    wait(answers.values(), max(end - _core.monotonic(), 0.0))
    seen: dict[int, Sight] = {}
    rings: dict[int, Rings] = {}
    by_actor: dict[int, Offset] = {}
    unknown: dict[str, str] = {}
    for host, answer in answers.items():
        why = _why_not(answer, patience)
        if why:
            unknown[names[host]] = why
            continue
        said = answer.result()
        seen.update(said.actors)
        rings.update(dict.fromkeys(said.actors, said.rings))
        if host in clocks:
            by_actor.update(dict.fromkeys(said.actors, clocks[host]))
    return Afar(seen, rings, by_actor, unknown)


def _why_not(answer: Future[Seen], patience: float) -> str:
    if not answer.done():
        return f"its host has not answered for {patience:g} s"
    error = answer.exception()
    return "" if error is None else str(error) or type(error).__name__


def _clocks(
    abroad: FarHosts, own: int, hosts: Mapping[int, object], end: float
) -> dict[int, Offset]:
    """Return how far the clocks of these nodes are ahead of the executor's, as far as the nodes answer."""
    found = {host: _clock(abroad, host, end) for host in {own, *hosts}}
    base = found[own]
    if base is None:
        return {}
    return {host: clock.seen_from(base) for host in hosts if (clock := found[host]) is not None}


def _clock(abroad: FarHosts, host: int, end: float) -> Offset | None:
    if host == HERE:
        return Offset(_core.monotonic_ns(), NONE.ahead, NONE.error)
    try:
        left = max(end - _core.monotonic(), 0.001)
        samples = abroad.pump.ask_clock(host, _CLOCK_TIMES, left)
    except OSError:  # the session ends
        return None
    return estimate(samples) if samples else None


class Network:
    """The links between processes, and which process knows which. The driver has the descriptors of all
    actors' processes."""

    def __init__(self, table: Table, chores: Chores, abroad: FarHosts) -> None:
        self._table = table
        self._abroad = abroad
        self._board = table.board
        self._chores = chores
        self._numbers = itertools.count(1)

    def spread(self, blueprint: Blueprint, segment: _core.Segment | None) -> int:
        """Have all nodes of a segment's members make the segment; return its number there, 0 if all members
        are here."""
        return self._abroad.spread(blueprint, segment)

    def host_name(self, slot: int) -> str:
        """Return the name of the node of the process with that slot."""
        return self._abroad.host_name(slot)

    def whereabouts(self, places: Iterable[Place]) -> Whereabouts:
        """Return the nodes of these processes, for the out-of-band parts of a graph's edges."""
        return self._abroad.whereabouts([place.slot for place in places])

    def look_afar(
        self,
        question: Question,
        patience: float,
        number: int,
        layout: Layout,
        records: Sequence[ActorRecord],
        executor: Place,
    ) -> Afar:
        """Return the status of a graph's actors on other nodes than the executor's: see :func:`look_afar`."""
        return look_afar(self._abroad, question, patience, number, layout, records, executor.slot)

    def introduce(self, record: ActorRecord, process: Reader) -> bool:
        """Return whether that process lives on another node than ``record``'s. If so, ``record``'s node knows
        it from then on."""
        return not self._board.gone(*process) and self._abroad.introduce(record, process)

    def kept_afar(self, record: ActorRecord) -> list[KeptAt]:
        """Return the values that processes of other nodes than ``record``'s store for others."""
        return self._abroad.looks.kept_afar(self._abroad.host_of(record.slot))

    def forget(self, number: int) -> None:
        """Forget the segment of that number, which nobody uses any more."""
        self._abroad.forget(number)

    def forget_soon(self, number: int) -> None:
        """Call :meth:`forget` soon, from where no lock can be taken."""
        self._chores.soon(lambda: self._abroad.forget(number))

    def mark_closed_soon(self, party: ActorRecord, number: int, side: Side) -> None:
        """Have ``party`` find the other end of the channel of that segment closed. Takes no lock."""
        self._chores.soon(lambda: self._abroad.mark_closed(party, number, side))

    def load(
        self, record: ActorRecord, assignment: Assignment, segment_fd: int, number: int
    ) -> Ref:
        """Give an actor its part of a graph, whose segment has that number on other nodes. Return the ref of
        the actor's acknowledgement."""
        with record.control_lock:
            new, fds = self._new_peers(record, assignment.peers)
            try:
                if record.host is not None:
                    ticket = self._abroad.hand(record, number, new.items())
                else:
                    ticket = record.send_fds([segment_fd, *fds.numbers()])
                purpose = f"its part of {assignment.name}, which is being compiled"
                order = Load(assignment, tuple(new.items()), ticket)
                ack = record.order(order, purpose=purpose)
            finally:
                fds.close()
            record.known_peers.update(new)
            return ack

    def link(self, caller: ActorRecord, callee: ActorRecord) -> tuple[int, int, list[int] | Handed]:
        """Set up a link between two actors. Return its number, the mailbox bit, and the descriptors for the
        caller's process: the segment, and the callee's arena and eventfd. Whoever calls this closes them.

        This does not wait for the callee, which may be in a method for long: a callee that cannot accept the
        caller says so (:meth:`refuse`).
        """
        callee.check_alive()
        with callee.control_lock:
            # All that may fail comes before the callee is told. Neither is noted as a peer of the other:
            # a graph's assignment may overtake the answer, and the callee accepts the caller when it can.
            own = self._of(callee)
            fds: list[int] = []
            bit, shared = callee.bits.take(), 0
            try:
                blueprint = link_blueprint(
                    Place(*caller.reader, RESULT_BIT),
                    Place(*callee.reader, bit),
                    link_depth(callee.actor.max_concurrency),
                )
                segment = blueprint.make()
                own.insert(0, descriptors.duplicate(segment.fd))
                fds = self._of(caller)
                shared = self._abroad.spread(blueprint, segment)
                if callee.host is not None:
                    ticket = self._abroad.hand(callee, shared, [caller.reader])
                else:
                    ticket = callee.send_fds([segment.fd, *fds])
                ack = callee.order(Accept(caller.slot, caller.incarnation, bit, ticket))
            except BaseException as error:
                callee.bits.give_back(bit)
                close_all(own)
                self._abroad.forget(shared)
                if isinstance(error, ConveyorError):
                    callee.check_alive()  # its death is why a host could not, most often
                raise
            finally:
                close_all(fds)
            laid = Introduced(next(self._numbers), caller, callee, bit, segment, ack, shared)
            # Accepted links need not be kept.
            callee.introduced = [i for i in callee.introduced if not _accepted(i.ack)]
            callee.introduced.append(laid)
        caller.mailboxes[laid.number] = callee, bit, shared
        callee.callers[laid.number] = caller
        for record in (caller, callee):
            if record.exited.is_set():  # meanwhile
                self.ended(record)
        segment.close_fd()
        if caller.host is not None:
            close_all(own)
            return laid.number, bit, Handed(shared, (callee.reader,))
        return laid.number, bit, own

    def refuse(self, callee: ActorRecord, tag: int, error: ConveyorError) -> None:
        """Note that ``callee`` could not accept the caller of order ``tag``. ``error`` is the outcome of the
        calls over this link; the next call has another link set up."""
        if callee.control_link is not None:
            callee.control_link.flush()  # then whoever has just sent it has noted its tag
        with callee.control_lock:
            laid = next((i for i in callee.introduced if i.ack._number == tag), None)
            if (
                laid is None
            ):  # something else was sent with that tag, and whoever did waits for the answer
                return
            callee.introduced.remove(laid)
        if laid.caller.mailboxes.pop(laid.number, None) is None:
            return  # the caller is dead, or has let go of it
        callee.callers.pop(laid.number, None)
        callee.bits.give_back(laid.bit)
        laid.caller.refusals[laid.number] = error
        if laid.caller.host is not None:
            self._abroad.mark_refused(laid.caller, laid.shared)
        else:
            Refusal(laid.segment).mark()
            self._board.ring(laid.caller.slot, _core.ATTENTION_BIT)
        self._abroad.forget(laid.shared)

    def ended(self, record: ActorRecord) -> None:
        """Let go of all links of a process that is dead: those to it, and its callees' ends of those from
        it."""
        for number, caller in list(record.callers.items()):
            record.callers.pop(number, None)
            _, _, shared = caller.mailboxes.pop(number, (None, 0, 0))
            # Its last answers may be on their way to the caller's node.
            to = self._abroad.host_of(caller.slot)
            self._abroad.behind_its_last(record, to, partial(self._abroad.forget, shared))
        for number in list(record.mailboxes):
            self.hang_up(record, number)

    def hang_up(self, caller: ActorRecord, number: int) -> None:
        """Have the callee of link ``number`` let go of the link: the caller is dead, or could not open its
        end."""
        callee, bit, shared = caller.mailboxes.pop(number, (None, 0, 0))
        if callee is not None:
            callee.callers.pop(number, None)
            self._hang_up(callee, bit)
            self._abroad.forget(shared)

    def _hang_up(self, callee: ActorRecord, bit: int) -> None:
        try:
            if callee.alive:
                callee.order(HangUp(bit))
                callee.bits.give_back(bit)  # what takes it next is told after this
        except ActorDiedError:
            pass
        except Exception as error:  # no memory to say it with
            self._chores.again(lambda: self._hang_up(callee, bit), error)

    def _of(self, record: ActorRecord) -> list[int]:
        """Return duplicates of the arena and eventfd of one process; raise its death if it has none."""
        fds = self.duplicates([record])
        if not fds:
            raise record.death()
        return fds

    def duplicates(self, records: Iterable[ActorRecord]) -> list[int]:
        """Return duplicates of the arena and eventfd of each process that still has them. The caller closes
        them."""
        return self._duplicates(records).taken()

    def _duplicates(self, records: Iterable[ActorRecord]) -> _core.Duplicates:
        """Duplicate the descriptors of living processes. An actor may die, and its descriptors be closed,
        before they are sent: then other files may have their numbers."""
        with self._table.lock:
            alive = [record for record in records if record.arena_fd >= 0]
            return _core.Duplicates(
                [fd for record in alive for fd in (record.arena_fd, record.eventfd)]
            )

    def _new_peers(
        self, record: ActorRecord, processes: Iterable[tuple[int, int]]
    ) -> tuple[dict[int, int], _core.Duplicates]:
        """Return those of ``processes`` that ``record``'s process does not know yet, as incarnations by slot,
        and duplicates of the descriptors that introduce them."""
        with self._table.lock:
            known = {r.reader: r for r in self._table if r.arena_fd >= 0}
            new = {
                slot: incarnation
                for slot, incarnation in processes
                if (slot, incarnation) in known and record.known_peers.get(slot) != incarnation
            }
            return new, self._duplicates([known[process] for process in new.items()])


def _accepted(ack: Ref) -> bool:
    return ack.done() and not ack.has_failed()
