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
from conveyor.driver.process_engine import RemoteDescriptors
from conveyor.driver.remote_processes import HERE, RemoteNodes
from conveyor.exceptions import ActorDiedError, ConveyorError
from conveyor.futures import Future, wait
from conveyor.graph.edges import Assignment, Layout, Whereabouts
from conveyor.graph.telemetry import (
    NONE,
    Look,
    LookedAt,
    Offset,
    Question,
    RemoteActorStatus,
    RemoteStatus,
    Rings,
    Seen,
    estimate,
)
from conveyor.runtime.blueprint import Blueprint
from conveyor.runtime.broker import Side
from conveyor.runtime.cleanup import Cleanup
from conveyor.runtime.process import RESULT_BIT, RingEnd, close_all
from conveyor.runtime.stored_values import StoreSnapshot
from conveyor.worker.messages import Accept, HangUp, Load

if TYPE_CHECKING:
    from conveyor.refs.ref import Ref


#: How often another node's clock is asked: a few of the answers come without delay.
_CLOCK_TIMES = 16


def look_at_remote(
    remote_nodes: RemoteNodes,
    question: Question,
    time_limit: float,
    number: int,
    layout: Layout,
    records: Sequence[ActorRecord],
    executor: int,
) -> RemoteStatus:
    """Return the status of these actors, as their nodes report it. The node of the executor, which has that
    slot, is left out. ``number`` and ``layout`` are of the graph's segment. ``time_limit``: seconds that the
    nodes have, all together."""
    own = remote_nodes.node_of(executor)
    requested: dict[int, list[LookedAt]] = {}
    for actor, record in enumerate(records):
        node = HERE if record.node is None else record.node.number
        if node != own:
            looked_at = LookedAt(actor, record.reader, layout.recorders[actor])
            requested.setdefault(node, []).append(looked_at)
    names = {node: remote_nodes.name_of(node) for node in requested}
    if time_limit <= 0:
        why = "it was not asked, by the thread that would hear its answer"
        return RemoteStatus(unknown=dict.fromkeys(names.values(), why))
    end = _core.monotonic() + time_limit
    queries = {
        node: Look(question, number, layout.offsets, tuple(actors))
        for node, actors in requested.items()
    }
    answers = {
        node: remote_nodes.status_queries.look(node, look, layout.segment)
        for node, look in queries.items()
    }
    clocks = _clocks(remote_nodes, own, answers, end) if question.trace else {}
    wait(answers.values(), max(end - _core.monotonic(), 0.0))
    seen: dict[int, RemoteActorStatus] = {}
    rings: dict[int, Rings] = {}
    by_actor: dict[int, Offset] = {}
    unknown: dict[str, str] = {}
    for node, answer in answers.items():
        why = _why_not(answer, time_limit)
        if why:
            unknown[names[node]] = why
            continue
        said = answer.result()
        seen.update(said.actors)
        rings.update(dict.fromkeys(said.actors, said.rings))
        if node in clocks:
            by_actor.update(dict.fromkeys(said.actors, clocks[node]))
    return RemoteStatus(seen, rings, by_actor, unknown)


def _why_not(answer: Future[Seen], time_limit: float) -> str:
    if not answer.done():
        return f"its host has not answered for {time_limit:g} s"
    error = answer.exception()
    return "" if error is None else str(error) or type(error).__name__


def _clocks(
    remote_nodes: RemoteNodes, own: int, nodes: Mapping[int, object], end: float
) -> dict[int, Offset]:
    """Return how far the clocks of these nodes are ahead of the executor's, as far as the nodes answer."""
    found = {node: _clock(remote_nodes, node, end) for node in {own, *nodes}}
    base = found[own]
    if base is None:
        return {}
    return {node: clock.seen_from(base) for node in nodes if (clock := found[node]) is not None}


def _clock(remote_nodes: RemoteNodes, node: int, end: float) -> Offset | None:
    if node == HERE:
        return Offset(_core.monotonic_ns(), NONE.ahead, NONE.error)
    try:
        left = max(end - _core.monotonic(), 0.001)
        samples = remote_nodes.pump.ask_clock(node, _CLOCK_TIMES, left)
    except OSError:  # the session ends
        return None
    return estimate(samples) if samples else None


class Network:
    """The links between processes, and which process knows which. The driver has the descriptors of all
    actors' processes."""

    def __init__(self, table: Table, cleanup: Cleanup, remote_nodes: RemoteNodes) -> None:
        self._table = table
        self._remote_nodes = remote_nodes
        self._process_table = table.process_table
        self._cleanup = cleanup
        self._numbers = itertools.count(1)

    def spread(self, blueprint: Blueprint, segment: _core.Segment | None) -> int:
        """Have all nodes of a segment's members make the segment; return its number there, 0 if all members
        are here."""
        return self._remote_nodes.spread(blueprint, segment)

    def node_name(self, slot: int) -> str:
        """Return the name of the node of the process with that slot."""
        return self._remote_nodes.node_name(slot)

    def whereabouts(self, ring_ends: Iterable[RingEnd]) -> Whereabouts:
        """Return the nodes of these processes, for the out-of-band parts of a graph's edges."""
        return self._remote_nodes.whereabouts([end.slot for end in ring_ends])

    def look_at_remote(
        self,
        question: Question,
        time_limit: float,
        number: int,
        layout: Layout,
        records: Sequence[ActorRecord],
        executor: RingEnd,
    ) -> RemoteStatus:
        """Return the status of a graph's actors on other nodes than the executor's: see
        :func:`look_at_remote`."""
        return look_at_remote(
            self._remote_nodes, question, time_limit, number, layout, records, executor.slot
        )

    def introduce(self, record: ActorRecord, process: Reader) -> bool:
        """Return whether that process lives on another node than ``record``'s. If so, ``record``'s node knows
        it from then on."""
        return not self._process_table.gone(*process) and self._remote_nodes.introduce(
            record, process
        )

    def remote_stored(self, record: ActorRecord) -> list[StoreSnapshot]:
        """Return the values that processes of other nodes than ``record``'s store for others."""
        return self._remote_nodes.status_queries.remote_stored(
            self._remote_nodes.node_of(record.slot)
        )

    def forget(self, number: int) -> None:
        """Forget the segment of that number, which nobody uses any more."""
        self._remote_nodes.forget(number)

    def forget_soon(self, number: int) -> None:
        """Call :meth:`forget` soon, from where no lock can be taken."""
        self._cleanup.soon(lambda: self._remote_nodes.forget(number))

    def mark_closed_soon(self, party: ActorRecord, number: int, side: Side) -> None:
        """Have ``party`` find the other end of the channel of that segment closed. Takes no lock."""
        self._cleanup.soon(lambda: self._remote_nodes.mark_closed(party, number, side))

    def load(
        self, record: ActorRecord, assignment: Assignment, segment_fd: int, number: int
    ) -> Ref:
        """Give an actor its part of a graph, whose segment has that number on other nodes. Return the ref of
        the actor's acknowledgement."""
        with record.control_lock:
            new, fds = self._new_peers(record, assignment.peers)
            try:
                if record.node is not None:
                    fds_id = self._remote_nodes.send_descriptors(record, number, new.items())
                else:
                    fds_id = record.send_fds([segment_fd, *fds.numbers()])
                purpose = f"its part of {assignment.name}, which is being compiled"
                order = Load(assignment, tuple(new.items()), fds_id)
                ack = record.order(order, purpose=purpose)
            finally:
                fds.close()
            record.known_peers.update(new)
            return ack

    def link(
        self, caller: ActorRecord, callee: ActorRecord
    ) -> tuple[int, int, list[int] | RemoteDescriptors]:
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
                    RingEnd(*caller.reader, RESULT_BIT),
                    RingEnd(*callee.reader, bit),
                    link_depth(callee.actor.max_concurrency),
                )
                segment = blueprint.make()
                own.insert(0, descriptors.duplicate(segment.fd))
                fds = self._of(caller)
                shared = self._remote_nodes.spread(blueprint, segment)
                if callee.node is not None:
                    fds_id = self._remote_nodes.send_descriptors(callee, shared, [caller.reader])
                else:
                    fds_id = callee.send_fds([segment.fd, *fds])
                ack = callee.order(Accept(caller.slot, caller.incarnation, bit, fds_id))
            except BaseException as error:
                callee.bits.give_back(bit)
                close_all(own)
                self._remote_nodes.forget(shared)
                if isinstance(error, ConveyorError):
                    callee.check_alive()  # its death is why a node could not, most often
                raise
            finally:
                close_all(fds)
            deployed = Introduced(next(self._numbers), caller, callee, bit, segment, ack, shared)
            # Accepted links need not be kept.
            callee.introduced = [i for i in callee.introduced if not _accepted(i.ack)]
            callee.introduced.append(deployed)
        caller.mailboxes[deployed.number] = callee, bit, shared
        callee.callers[deployed.number] = caller
        for record in (caller, callee):
            if record.cleaned_up.is_set():  # meanwhile
                self.ended(record)
        segment.close_fd()
        if caller.node is not None:
            close_all(own)
            return deployed.number, bit, RemoteDescriptors(shared, (callee.reader,))
        return deployed.number, bit, own

    def refuse(self, callee: ActorRecord, order_id: int, error: ConveyorError) -> None:
        """Note that ``callee`` could not accept the caller of order ``order_id``. ``error`` is the outcome
        of the calls over this link; the next call has another link set up."""
        if callee.control_link is not None:
            callee.control_link.flush()  # then whoever has just sent it has noted its id
        with callee.control_lock:
            deployed = next((i for i in callee.introduced if i.ack._number == order_id), None)
            if (
                deployed is None
            ):  # something else was sent with that id, and whoever did waits for the answer
                return
            callee.introduced.remove(deployed)
        if deployed.caller.mailboxes.pop(deployed.number, None) is None:
            return  # the caller is dead, or has let go of it
        callee.callers.pop(deployed.number, None)
        callee.bits.give_back(deployed.bit)
        deployed.caller.refusals[deployed.number] = error
        if deployed.caller.node is not None:
            self._remote_nodes.mark_refused(deployed.caller, deployed.shared)
        else:
            Refusal(deployed.segment).mark()
            self._process_table.notify(deployed.caller.slot, _core.ATTENTION_BIT)
        self._remote_nodes.forget(deployed.shared)

    def ended(self, record: ActorRecord) -> None:
        """Let go of all links of a process that is dead: those to it, and its callees' ends of those from
        it."""
        for number, caller in list(record.callers.items()):
            record.callers.pop(number, None)
            _, _, shared = caller.mailboxes.pop(number, (None, 0, 0))
            # Its last answers may be on their way to the caller's node.
            to = self._remote_nodes.node_of(caller.slot)
            self._remote_nodes.behind_its_last(
                record, to, partial(self._remote_nodes.forget, shared)
            )
        for number in list(record.mailboxes):
            self.hang_up(record, number)

    def hang_up(self, caller: ActorRecord, number: int) -> None:
        """Have the callee of link ``number`` let go of the link: the caller is dead, or could not open its
        end."""
        callee, bit, shared = caller.mailboxes.pop(number, (None, 0, 0))
        if callee is not None:
            callee.callers.pop(number, None)
            self._hang_up(callee, bit)
            self._remote_nodes.forget(shared)

    def _hang_up(self, callee: ActorRecord, bit: int) -> None:
        try:
            if callee.alive:
                callee.order(HangUp(bit))
                callee.bits.give_back(bit)  # what takes it next is told after this
        except ActorDiedError:
            pass
        except Exception as error:  # no memory to say it with
            self._cleanup.again(lambda: self._hang_up(callee, bit), error)

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
