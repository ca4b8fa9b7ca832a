"""The parts of a compiled graph, as they and those who show the graph see each other.

Each part is handed those it needs, and knows no part that uses it: ``CompiledGraph -> Submitter -> Entry ->
source of the refs -> account -> supervision -> epoch``.
"""

from __future__ import annotations

from typing import Protocol

from conveyor.config import Config
from conveyor.graph.status import GraphState, GraphStatus
from conveyor.graph.telemetry.afar import PATIENCE, Afar, Question
from conveyor.graph.telemetry.recording import Progress, Recording, Track
from conveyor.plan.model import Plan


def graph_id(number: int) -> str:
    """Return a text that names graph ``number`` among all of its session."""
    return f"{number:08x}"


class Upkeep(Protocol):
    """Keeps a graph fit for execution, and ends it; see the methods of the same names of
    ``CompiledGraph``."""

    @property
    def is_teardown(self) -> bool: ...

    def restart(self) -> None: ...

    def teardown(self, kill_actors: bool = False) -> None: ...

    def check_block(self) -> None:
        """Raise why the graph cannot be torn down at the end of a ``with`` block, before one begins."""
        ...


class Account(Protocol):
    """A graph's state, as the process that executes it can tell."""

    #: The graph's number among those of its session.
    number: int
    name: str
    plan: Plan
    config: Config

    @property
    def recording(self) -> Recording:
        """The records that the graph's processes keep about themselves."""
        ...

    @property
    def state(self) -> GraphState:
        """The state of the graph, as far as it has been noticed."""
        ...

    @property
    def is_teardown(self) -> bool: ...

    @property
    def hosts(self) -> dict[int, str]:
        """In words, the nodes of the actors and the executor, if there are several."""
        ...

    def check_open(self) -> None:
        """Raise the error that has ended the graph, if it was closed."""
        ...

    def progress(self) -> Progress:
        """Return how far the graph's executions are."""
        ...

    def tracks(self) -> list[Track]:
        """Return the graph's processes, the executing one first."""
        ...

    def afar(self, question: Question, patience: float) -> Afar:
        """Return the status of the graph's actors on other nodes, as these report it within ``patience``
        seconds."""
        ...

    def status(self, stacks: bool = False, patience: float = PATIENCE) -> GraphStatus:
        """Return the graph's status. ``patience``: seconds that other nodes have to answer."""
        ...
