"""Processes that meet, two over a channel or the ranks of a group: what each of them learns of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from msgspec import Struct

from conveyor import _core
from conveyor.codec import Reader
from conveyor.exceptions import ChannelClosedError, ConveyorError
from conveyor.runtime.blueprint import Blueprint, LimitsPlan, RingPlan
from conveyor.runtime.process import CALL_STRIDE, RESULT_BIT, Process, RingEnd, slots_of
from conveyor.runtime.protocol import ActorId

#: An end of a channel: what is sent goes in at the first, and comes out at the second.
Side = Literal[0, 1]
SENDING: Side = 0
RECEIVING: Side = 1
#: How each end is called in messages to people.
SIDES = "sending", "receiving"


def other(side: Side) -> Side:
    """Return the end at the other side."""
    return RECEIVING if side == SENDING else SENDING


def channel_blueprint(depth: int, sender: Reader, receiver: Reader) -> Blueprint:
    """Memory for a channel: its ring at 0, and behind it a word for each end that says it is closed."""
    slots = slots_of(depth)
    ends = sender, receiver
    ring_ends = [RingEnd(*end, RESULT_BIT) for end in ends]
    ring = _core.Segment.ring_bytes(slots, CALL_STRIDE, 1)
    word = _core.Limits.bytes(1, 0)
    may_wait = _core.RING_WRITER_MAY_WAIT
    return Blueprint(
        ring + 2 * word,
        (RingPlan(0, slots, CALL_STRIDE, ring_ends[SENDING], (ring_ends[RECEIVING],), may_wait),),
        tuple([LimitsPlan(ring + side * word, 1, 0, ends[side][0]) for side in (0, 1)]),
    )


class ClosedWord:
    """Word that says that an end is closed. It is set once, without a lock. Between nodes the word overtakes
    values that were sent before: so it bears the number of these values."""

    def __init__(self, segment: _core.Segment, side: Side) -> None:
        ring = _core.Segment.ring_bytes(segment.slots(0), CALL_STRIDE, 1)
        self._words = _core.Limits(segment, ring + side * _core.Limits.bytes(1, 0), 1, 0)

    def after(self, count: int) -> bool:
        """Whether the end was closed when it had sent ``count`` values, so that no more come. ``count`` is 0
        for an end that sends none."""
        return self._words.cancelled(count)

    def mark(self, count: int = 0) -> None:
        """Mark the end as closed, with the number of values that it has sent. The caller has to notify
        whoever waits at the other end."""
        self._words.cancel(count)


class ChannelPeer(Struct, frozen=True):
    """Knowledge of the process at one end about the other. ``actor`` is ``None`` where that is the driver.
    ``view``: of the other process's arena; it keeps a descriptor, and is for whoever opens the receiving
    end. ``spread``: the channel's memory is on other nodes than the driver's; the driver is told when an end
    is closed, as these nodes have to let go of the memory."""

    segment: _core.Segment
    slot: int
    incarnation: int
    actor: ActorId | None
    view: _core.ArenaView | None
    spread: bool = False


def closed_error(number: int, side: Side) -> ChannelClosedError:
    """Make the error for whoever needs end ``side`` of channel ``number``, and finds it closed."""
    return ChannelClosedError(f"the {SIDES[side]} end of channel {number} is closed")


class Broker(Protocol):
    """Broker between the processes at the two ends of a channel. An end belongs to the process that first
    uses it, and cannot leave that process any more."""

    def open(self, depth: int) -> int:
        """Create a channel with both ends here, and return its number in the session."""
        ...

    def hold(self, number: int, side: Side) -> None:
        """Note that an end has come to this process, which has not used it yet."""
        ...

    def meet(self, number: int, side: Side, alone: bool) -> ChannelPeer | None:
        """Use an end in this process. ``alone``: the other end is here as well. ``None``: the process that
        has the other end does not use it yet; the doorbell rings when it does. Raises the death of that
        process, ``ChannelClosedError`` if the other end is closed, and ``RuntimeStateError`` if this end is
        another process's."""
        ...

    def awaits(self, number: int, side: Side) -> bool:
        """Whether it is known, at no cost, that :meth:`meet` would still find the other end unused, as it
        did before."""
        ...

    def close(self, number: int, side: Side) -> None:
        """Close an end whose process has not met the other, or whose channel is on other nodes."""
        ...

    def death(self, peer: ChannelPeer) -> ConveyorError:
        """Make the error for whoever needs the process at the other end, which is no more."""
        ...


def group_blueprint(members: Sequence[tuple[int, int]], nodes: tuple[int, ...]) -> Blueprint:
    """Memory for a group of these processes, which are on these nodes, counted from 0 on."""
    ring_ends = [RingEnd(*member, RESULT_BIT) for member in members]
    rings = [
        RingPlan(at, slots, stride, ring_ends[writer], tuple([ring_ends[r] for r in readers]))
        for writer, at, slots, stride, readers in _core.CollectiveGroup.rings(nodes)
    ]
    return Blueprint(_core.CollectiveGroup.bytes(nodes), tuple(rings), (), nodes)


def enter(
    process: Process,
    segment: _core.Segment,
    membership: Membership,
    arenas: Sequence[_core.ArenaView],
) -> Joined:
    """Take the place that ``process`` has. ``arenas``: of all ranks, its own included."""
    rank, ranks = membership.rank, len(membership.members)
    ring_ends = [RingEnd(*member, RESULT_BIT) for member in membership.members]
    rings = [_core.CollectiveGroup.ring_at(ranks, r) for r in range(ranks)]
    group = _core.CollectiveGroup(
        segment,
        process.inbox,
        rank,
        membership.members,
        membership.nodes,
        process.arena,
        arenas,
        RESULT_BIT,
    )
    carries = "a collective group"
    return Joined(
        group,
        membership,
        process.writer(segment, rings[rank], ring_ends, carries),
        tuple(
            [
                process.reader(segment, ring, rank, end, arena, carries, shared=True)
                for ring, end, arena in zip(rings, ring_ends, arenas, strict=True)
            ]
        ),
    )


#: The attribute of an error that follows from what another rank has raised in the same execution of a graph:
#: the graph and that execution.
FAILED_IN = "_conveyor_failed_in"
#: The attribute of an error that says that a rank has died: the slot and the incarnation of its process.
DEAD_RANK = "_conveyor_dead_rank"


#: Most characters of an error's text that other ranks are told.
_WORDS = 200

_name_of = type.__dict__["__name__"].__get__


def in_words(error: BaseException) -> str:
    """Describe an error by its class and message. Neither has to be well-behaved."""
    name = _name_of(type(error))  # whatever its own class says
    try:
        text = f"has raised {name}: {error}"
    except Exception:
        text = f"has raised {name}"
    text = text if len(text) <= _WORDS else f"{text[:_WORDS]}..."
    return text.encode("utf-8", "replace").decode()  # a lone surrogate cannot be told


class Membership(Struct, frozen=True):
    """Data for a process that joins a group: its rank, and the actor and the process of each rank, as slot
    and incarnation."""

    rank: int
    actors: tuple[ActorId, ...]
    members: tuple[tuple[int, int], ...]
    #: The driver's rank, which every process knows already; ``None``: it is not in the group.
    driver: int | None = None
    #: Node of each rank, counted from 0 on.
    nodes: tuple[int, ...] = ()


class Joined(Struct, frozen=True):
    """A group that this process is in, with its ends of the rings of values that ranks give each other."""

    group: _core.CollectiveGroup
    membership: Membership
    writer: _core.Writer
    #: By the ranks that write.
    readers: tuple[_core.Reader, ...]

    def leave(self) -> None:
        """Take no more values; what has come in vain is given back."""
        for reader in self.readers:
            reader.close()
        self.group.close()


def doing(
    process: Process,
    membership: Membership,
    ranks: Sequence[int],
    label: Callable[[int, int], str | None],
) -> list[str]:
    """See ``Collectives``. ``label`` names a (graph, node)."""
    actors = [rank for rank in ranks if rank != membership.driver]
    statuses = process.statuses([membership.members[rank] for rank in actors], label)
    said = {rank: f", {status.describe()}" for rank, status in zip(actors, statuses, strict=True)}
    return [said.get(rank, "") for rank in ranks]


class Collectives(Protocol):
    """Interface by which processes meet in groups. It also records for the group code of this process: by
    name, the groups that this process has created (``made``), and the groups that it is in (``entered``)."""

    made: dict[str, Any]
    entered: dict[str, Any]

    def open(self, actors: Sequence[ActorId], driver: int | None = None) -> int:
        """A new group of the processes that ``actors`` have now, in this order: its number. ``driver``: the
        rank that the driver has among them, if this is the driver."""
        ...

    def join(self, number: int) -> Joined:
        """Take this process's place in a group."""
        ...

    def leave(self, joined: Joined) -> None:
        """Leave the group: this process has nothing to do with it any more."""
        ...

    def close(self, number: int) -> None:
        """End all operations in this group: every rank in one is told. Does nothing the second time."""
        ...

    @property
    def until(self) -> Callable[[], int] | None:
        """Return a function that gives the latest end of what runs here, on the monotonic clock in
        nanoseconds; 0: none. Below 0: nobody waits for it any more; -2: its execution has failed. ``None``:
        several things run side by side, and the one that asks is not known."""
        ...

    def doing(self, joined: Joined, ranks: Sequence[int]) -> list[str]:
        """Describe what the processes of these ranks do, in words that follow their names; empty for the
        driver."""
        ...

    def death(self, joined: Joined, rank: int) -> ConveyorError:
        """Make the error that says how the process of that rank has died."""
        ...
