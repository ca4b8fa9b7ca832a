"""Graphs of which other processes of the session have handles."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Literal

from conveyor.exceptions import GraphTornDownError, RuntimeStateError
from conveyor.graph.compiled import CompiledGraph, parts_of
from conveyor.graph.submission.arguments import reserved_inputs
from conveyor.plan.model import Plan
from conveyor.runtime import context
from conveyor.runtime.messages.message import Message
from conveyor.weak import WeakValues

if TYPE_CHECKING:
    from conveyor.refs.pickled.exchange import Parts
    from conveyor.runtime.waiting.works import Blockers


#: Questions to a graph's owner beside executions; the names are those of ``CompiledGraph``.
Question = Literal["explain", "status", "stats", "is_teardown"]


class ToOwner(Message, frozen=True):
    """A message of a handle to the graph's owner. Each request has a number."""


class Execute(ToOwner, frozen=True):
    """Begin an execution; answered by :class:`Answered`. ``patient``: wait for room, for ``patience`` seconds
    (``None``: for ever). ``left``: seconds that the execution has for all of it (``None``: no limit). These
    are durations, since clocks of nodes differ. The snapshot holds the arguments (``whole``: the only one, as
    it is), or the error of one of them (``failed``)."""

    number: int
    patient: bool
    whole: bool
    failed: bool
    patience: float | None
    left: float | None
    parts: Parts


class Show(ToOwner, frozen=True):
    """Answer a question about the graph; answered by :class:`Answered`."""

    number: int
    question: Question
    args: tuple[Any, ...]


class Withdraw(ToOwner, frozen=True):
    """Forget request ``number``: nobody waits for its answer any more."""

    number: int


class Whom(ToOwner, frozen=True):
    """Name the blockers of request ``number``; answered by :class:`HeldUp`."""

    number: int
    question: int


class FromOwner(Message, frozen=True):
    """A message of the owner to a handle, about one of its requests."""


class Answered(FromOwner, frozen=True):
    """The answer to a request: the pickled result, or (not ``ok``) the pickled error to raise."""

    number: int
    ok: bool
    data: bytes


class HeldUp(FromOwner, frozen=True):
    """Blockers of a request: the processes that have to do something before it is answered."""

    number: int
    question: int
    blockers: Blockers


def reducer_of(plan: Plan, account: object) -> Callable[[CompiledGraph], tuple[Any, ...]]:
    """Return the function that pickles a graph of this plan, in its owner. ``account``: the graph's."""
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
    """Load a pickled graph: the graph itself in its owner, otherwise a handle."""
    runtime = context.running()
    if runtime is None or runtime.exports.session != session:
        raise RuntimeStateError(
            f"{name} belongs to another session: a pickled graph can only be loaded by the driver and "
            "the actors of the session that it was compiled in"
        )
    return runtime.load_graph(number, name, whole, options)


class SharedGraphs:
    """The graphs of a session of which others may have handles: they live until they are torn down, and are
    known as long as somebody holds them."""

    def __init__(self, accounts: Collection[object]) -> None:
        """``accounts``: of all graphs of the session."""
        self._accounts = accounts
        self._shared: dict[int, CompiledGraph] = {}
        self._known: WeakValues[int, CompiledGraph] = WeakValues()

    def share(self, graph: CompiledGraph, account: object, closed: bool) -> bool:
        """Note that a handle of ``graph`` is about to leave. Return False if the graph is of another session;
        ``closed``: this one has ended."""
        if graph.is_teardown and not closed:
            raise _torn_down(graph.name)
        if graph.is_teardown or account not in self._accounts:
            return False
        number = parts_of(graph).number
        self._shared[number] = self._known[number] = graph
        return True

    def load(self, number: int, name: str) -> CompiledGraph:
        """Return the graph itself, which may be torn down. Raises ``GraphTornDownError`` if it is no more."""
        graph = self._known.get(number)
        if graph is None:
            raise _torn_down(name)
        return graph

    def forget(self, number: int) -> None:
        """Forget graph ``number``, which is torn down."""
        self._shared.pop(number, None)

    def clear(self) -> None:
        """Forget all graphs: the session has ended."""
        self._shared.clear()
        self._known.clear()


def _torn_down(name: str) -> GraphTornDownError:
    return GraphTornDownError(f"{name} has been torn down")
