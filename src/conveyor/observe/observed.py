"""A compiled graph has something for those who look at it."""

from __future__ import annotations

from typing import Protocol

from conveyor.plan.model import Plan
from conveyor.runtime.graph.recording import Progress, Recording, Track


class Observed(Protocol):
    """A compiled graph, of whatever engine."""

    @property
    def name(self) -> str:
        """The graph is called so."""
        ...

    @property
    def plan(self) -> Plan:
        """This is what it does."""
        ...

    @property
    def recording(self) -> Recording:
        """Its processes note here what they do."""
        ...

    def progress(self) -> Progress:
        """Tell how far its executions are."""
        ...

    def tracks(self) -> list[Track]:
        """List its processes, the driver first."""
        ...

    def check_open(self) -> None:
        """Raise what has ended it, if it was closed."""
        ...
