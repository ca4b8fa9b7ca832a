"""Read-only views of what is compiled and what runs."""

from __future__ import annotations

from typing import Any

from conveyor.runtime import views


def _draw(*args: Any, **kwargs: Any) -> str:
    # Most programs draw nothing.
    from conveyor.observe.visualize import visualize

    return visualize(*args, **kwargs)


views.install(_draw)
