"""What a compiled graph has for those who look at it."""

from __future__ import annotations

from typing import Protocol

from conveyor.plan.model import Plan
from conveyor.runtime.graph.recording import Progress, Recording, Track


class Observed(Protocol):
    """A compiled graph, of whatever engine."""

    @property
    def name(self) -> str:
        """What the graph is called."""
        ...

    @property
    def plan(self) -> Plan:
        """What it does."""
        ...

    @property
    def recording(self) -> Recording:
        """What its processes note about themselves."""
        ...

    def progress(self) -> Progress:
        """How far its executions are."""
        ...

    def tracks(self) -> list[Track]:
        """Its processes, the driver first."""
        ...

    def check_open(self) -> None:
        """Raise what has ended it, if it was closed."""
        ...
