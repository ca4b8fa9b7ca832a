"""Graphs that other processes of the session have handles of."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Literal

from conveyor.exceptions import GraphTornDownError, RuntimeStateError
from conveyor.plan.model import Plan
from conveyor.runtime import context
from conveyor.runtime.graph.compiled import CompiledGraph, parts_of
from conveyor.runtime.graph.submission.arguments import reserved_inputs
from conveyor.runtime.messages.message import Message
from conveyor.weak import WeakValues

if TYPE_CHECKING:
    from conveyor.runtime.refs.pickled.exchange import Parts
    from conveyor.runtime.waiting.works import Blockers


#: What can be asked of a graph's owner beside executions; the names are those of ``CompiledGraph``.
Question = Literal["explain", "status", "stats", "is_teardown"]


class ToOwner(Message, frozen=True):
    """What a handle says. Each request has a number."""


class Execute(ToOwner, frozen=True):
    """Begin an execution. ``patient``: wait for room, for ``patience`` seconds (``None``: for ever).
    ``left``: seconds that it has for all of it (``None``: no limit). These are durations, since clocks of
    hosts differ. The snapshot holds the arguments (``whole``: the only one, as it is), or the error of one of
    them (``failed``). Answered by :class:`Answered`."""

    number: int
    patient: bool
    whole: bool
    failed: bool
    patience: float | None
    left: float | None
    parts: Parts


class Show(ToOwner, frozen=True):
    """Say something of the graph. Answered by :class:`Answered`."""

    number: int
    question: Question
    args: tuple[Any, ...]


class Withdraw(ToOwner, frozen=True):
    """Nobody waits for the answer any more."""

    number: int


class Whom(ToOwner, frozen=True):
    """Who has to do something before the request is answered? Answered by :class:`HeldUp`."""

    number: int
    question: int


class FromOwner(Message, frozen=True):
    """What a handle is told, each about a request of its."""


class Answered(FromOwner, frozen=True):
    """What was asked for, pickled, or (not ``ok``) the error to raise."""

    number: int
    ok: bool
    data: bytes


class HeldUp(FromOwner, frozen=True):
    """Who has to do something before the request is answered."""

    number: int
    question: int
    blockers: Blockers


def reducer_of(plan: Plan, account: object) -> Callable[[CompiledGraph], tuple[Any, ...]]:
    """What pickles a graph of this plan, in the process that compiled it. ``account``: the graph's."""
    # Whether its input is one argument that travels as it is.
    whole = plan.whole_input and plan.shape is None
    options = reserved_inputs(plan)

    def reduce(graph: CompiledGraph) -> tuple[Any, ...]:
        runtime = context.running()
        if runtime is None or not runtime.share_graph(graph, account):
            raise RuntimeStateError(f"{graph.name} cannot be pickled: its session has ended")
        session, number = runtime.exports.session, parts_of(graph).number
        return load, (session, number, graph.name, whole, options)

    return reduce


def load(session: str, number: int, name: str, whole: bool, options: tuple[str, ...]) -> Any:
    """Load a pickled graph: the graph itself where it was compiled, else a handle."""
    runtime = context.running()
    if runtime is None or runtime.exports.session != session:
        raise RuntimeStateError(
            f"{name} belongs to another session: a pickled graph can only be loaded by the driver and "
            "the actors of the session that it was compiled in"
        )
    return runtime.load_graph(number, name, whole, options)


class SharedGraphs:
    """Of the graphs of a session those that others may have handles of: they live until they are torn
    down, and are known as long as somebody holds them."""

    def __init__(self, accounts: Collection[object]) -> None:
        """``accounts``: of all graphs of the session."""
        self._accounts = accounts
        self._shared: dict[int, CompiledGraph] = {}
        self._known: WeakValues[int, CompiledGraph] = WeakValues()

    def share(self, graph: CompiledGraph, account: object, closed: bool) -> bool:
        """A handle of ``graph`` is about to leave. False if it is of another session; ``closed``: this
        one has ended."""
        if graph.is_teardown and not closed:
            raise _torn_down(graph.name)
        if graph.is_teardown or account not in self._accounts:
            return False
        number = parts_of(graph).number
        self._shared[number] = self._known[number] = graph
        return True

    def load(self, number: int, name: str) -> CompiledGraph:
        """The graph itself, which may be torn down; ``GraphTornDownError`` if it is no more."""
        graph = self._known.get(number)
        if graph is None:
            raise _torn_down(name)
        return graph

    def forget(self, number: int) -> None:
        """Graph ``number`` is torn down."""
        self._shared.pop(number, None)

    def clear(self) -> None:
        """The session has ended."""
        self._shared.clear()
        self._known.clear()


def _torn_down(name: str) -> GraphTornDownError:
    return GraphTornDownError(f"{name} has been torn down")
