"""The process that executes a graph over processes, the driver or an actor, as the graph needs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from conveyor import _core
from conveyor.exceptions import ActorDiedError, GraphError
from conveyor.plan.model import EXECUTOR
from conveyor.runtime.graph.edges.ends import ReadEnd, WriteEnd
from conveyor.runtime.graph.edges.failures import FailureRings
from conveyor.runtime.graph.edges.layout import Layout, LimitsPlace
from conveyor.runtime.graph.telemetry.afar import Afar, Question
from conveyor.runtime.graph.telemetry.recording import RecorderPlace
from conveyor.runtime.process import Process
from conveyor.runtime.protocol import ActorId
from conveyor.runtime.waiting.patience import Patience

if TYPE_CHECKING:
    from conveyor.config import Config
    from conveyor.plan.model import Plan
    from conveyor.runtime.graph.origins import Origins
    from conveyor.runtime.refs.ref import Ref


class Member(Protocol):
    """An actor of a graph, as whoever executes the graph sees it."""

    @property
    def id(self) -> ActorId: ...

    @property
    def pid(self) -> int: ...

    @property
    def incarnation(self) -> int:
        """Which of the processes that have had this slot it is."""
        ...

    @property
    def slot(self) -> int:
        """Its place on the board."""
        ...

    @property
    def death_number(self) -> int:
        """Which of the session's deaths its own is; 0: it lives, or that is not known yet."""
        ...

    @property
    def alive(self) -> bool: ...

    def death(self, label: Callable[[int, int], str | None] | None = None) -> ActorDiedError:
        """The error for whoever needed it. ``label`` names a (graph, node)."""
        ...


class LaidMember(Struct, frozen=True):
    """What the executor is told of an actor of its graph."""

    id: ActorId
    pid: int
    slot: int
    incarnation: int


class LaidChannels(Struct, frozen=True):
    """What the executor is told of the graph's channels. The rings lie at ``offsets``; ``reads`` and
    ``writes`` are its own ends of them; ``bits`` are what rings the members' programs. ``hosts``: where the
    actors and the executor are, in words, if not all of them on one host."""

    number: int
    members: tuple[LaidMember, ...]
    offsets: tuple[int, ...]
    reads: tuple[ReadEnd, ...]
    writes: tuple[WriteEnd, ...]
    limits: LimitsPlace
    failures: FailureRings
    recorders: dict[int, RecorderPlace]
    bits: tuple[int, ...]
    hosts: dict[int, str]

    @staticmethod
    def of(
        number: int,
        members: Sequence[Member],
        layout: Layout,
        bits: tuple[int, ...],
        hosts: dict[int, str] | None = None,
    ) -> LaidChannels:
        """Those of graph ``number``, which were laid out like this."""
        return LaidChannels(
            number,
            tuple(LaidMember(m.id, m.pid, m.slot, m.incarnation) for m in members),
            layout.offsets,
            layout.reads.get(EXECUTOR, ()),
            layout.writes.get(EXECUTOR, ()),
            layout.limits,
            layout.failures,
            layout.recorders,
            bits,
            hosts or {},
        )


class Laid(Struct, frozen=True):
    """A graph whose channels are laid, in the process that executes it."""

    channels: LaidChannels
    members: Sequence[Member]
    segment: _core.Segment

    @property
    def number(self) -> int:
        """The graph's, in the session."""
        return self.channels.number


class Executor(Protocol):
    """The runtime of the executing process."""

    process: Process

    def lay(self, plan: Plan, config: Config, begun: Callable[[int], object]) -> Laid:
        """Lay the graph's channels and load every actor's program. All or nothing. ``begun`` is told the
        number as soon as there is one: whoever is interrupted before he has what this returns drops it."""
        ...

    def lay_again(self, number: int, first: int, patience: Patience) -> Laid:
        """Bring dead actors of graph ``number`` back and lay it anew; ``first``: the number of the next
        execution. All or nothing. ``WaitTimeoutError`` where ``patience`` ends before they are back."""
        ...

    def comes_back(self, number: int) -> bool:
        """Whether the dead actors of graph ``number`` are started again without being asked."""
        ...

    def end_unmade(self, number: int) -> None:
        """End the processes of graph ``number`` whose constructor has raised: they can do nothing, and
        others may replace them."""
        ...

    def unlay(self, number: int) -> list[tuple[Member, Ref]]:
        """Take graph ``number`` down; the acknowledgements that are still to come."""
        ...

    def drop(self, number: int) -> None:
        """Graph ``number`` became garbage. Called by a finalizer: only notes it."""
        ...

    def keep(self, value: Any) -> Ref:
        """A reference to ``value`` as it is now."""
        ...

    def label(self, graph: int, node: int) -> str | None:
        """What node ``node`` of graph ``graph`` is called, if that is known here."""
        ...

    def afar(self, number: int, question: Question, patience: float) -> Afar:
        """What other hosts say of their actors of graph ``number``, in so many seconds at most."""
        ...

    def afar_later(self, number: int, then: Callable[[Afar | Exception], object]) -> None:
        """Have ``then`` called, on any thread, with what other hosts say from now on, or with what keeps
        them from it."""
        ...

    def origins(self) -> Origins:
        """Where results were got; of graphs in debug mode."""
        ...

    def kill(self, actor: ActorId) -> None:
        """Kill ``actor`` at once."""
        ...


def refuse_own(plan: Plan, executor: ActorId) -> None:
    """Raise ``GraphError`` if the actor that is to execute ``plan`` is a part of it."""
    if any(info.key.index == executor.index for info in plan.actors):
        raise GraphError(
            f"{executor.name} cannot execute a graph that it is itself a part of: it would wait for "
            f"itself. Compile the graph in the driver, or in an actor that is not in it"
        )


def first_death(members: Sequence[Member]) -> Member | None:
    """Of those that are dead the one that died first: who depends on several names that one."""
    dead = [member for member in members if not member.alive]
    # One without a number is being announced just now.
    return min(dead, key=lambda member: member.death_number or 1 << 32, default=None)
