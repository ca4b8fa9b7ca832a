"""Where graphs meet what shows them: ``observe`` lies above, and installs itself here when it is imported."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from conveyor.observe.stats import GraphStats
    from conveyor.observe.trace import Trace
    from conveyor.runtime.graph.compiled import CompiledGraph


class Views(Protocol):
    """What ``CompiledGraph`` asks for the methods of these names."""

    def draw(self, *args: Any) -> str:
        """Of a Plan, with the arguments of ``visualize``."""
        ...

    def stats(self, graph: CompiledGraph) -> GraphStats: ...

    def trace(
        self, graph: CompiledGraph, path: str | os.PathLike[str], max_events: int
    ) -> Trace: ...

    def html(self, graph: CompiledGraph) -> str: ...


_views: Views | None = None


def install(views: Views) -> None:
    """Let ``views`` be what graphs are shown with."""
    global _views
    _views = views


def installed() -> Views:
    """What was installed."""
    if _views is None:
        # By its name: most programs show no graph.
        import_module("conveyor.observe")
    assert _views is not None
    return _views
