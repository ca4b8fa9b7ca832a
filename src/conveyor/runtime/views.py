"""Where graphs meet what draws them: ``observe`` lies above and installs itself here."""

from __future__ import annotations

from collections.abc import Callable

_draw: Callable[..., str] | None = None


def install(draw: Callable[..., str]) -> None:
    """Let ``draw(plan, ...)`` be what ``CompiledGraph.visualize`` calls."""
    global _draw
    _draw = draw


def draw() -> Callable[..., str]:
    """What was installed."""
    assert _draw is not None, "import conveyor, which installs it"
    return _draw
