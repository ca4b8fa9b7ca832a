"""Connection of ``dag`` to the code that can run a graph.

Nodes have ``compile`` and ``execute``, but this package knows no process. ``api``, which does, installs a
``Host`` here when it is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from conveyor.config import Config
from conveyor.exceptions import RuntimeStateError

if TYPE_CHECKING:
    from conveyor.dag.node import DAGNode


class Host(Protocol):
    """Process that nodes live in, as far as they ask something of it."""

    def compile(self, root: DAGNode, config: Config) -> Any:
        """Lay the graph that ends in ``root``."""
        ...

    def execute(self, root: DAGNode, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Execute the graph once without deploying it, by ordinary calls."""
        ...


_host: Host | None = None


def install(host: Host | None) -> None:
    """Have ``host`` run this process's graphs."""
    global _host
    _host = host


def host() -> Host:
    """The installed host."""
    if _host is None:
        raise RuntimeStateError("nothing here can run a graph: import conveyor, not conveyor.dag")
    return _host
