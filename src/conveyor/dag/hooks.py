"""Where ``dag`` meets whoever can run a graph.

Nodes have ``compile`` and ``execute``, but this package knows no process. Whoever does (``api``,
when it is imported) installs a ``Host`` here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from conveyor.config import Config
from conveyor.exceptions import RuntimeStateError

if TYPE_CHECKING:
    from conveyor.dag.functions import Function
    from conveyor.dag.node import ActorRef, DAGNode


class Host(Protocol):
    """What nodes ask of the process they live in."""

    def compile(self, root: DAGNode, config: Config) -> Any:
        """Lay the graph that ends in ``root``."""
        ...

    def check(self, owner: object) -> None:
        """Raise if the actor that ``owner`` (a node's handle) stands for is not usable here."""
        ...

    def call(
        self,
        actor: ActorRef,
        method: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        num_returns: int,
    ) -> Any:
        """Start an ordinary actor call: one ref, or a list of refs for ``num_returns > 1``."""
        ...

    def stream(
        self,
        actor: ActorRef,
        method: str,
        is_async: bool,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Start an ordinary call of a generator method; the ref of its items."""
        ...

    def call_function(
        self,
        function: Function,
        owner: object,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        num_returns: int,
    ) -> Any:
        """Start an ordinary call of ``function``, in the actor that ``owner`` stands for or in a worker
        (``None``)."""
        ...

    def put(self, value: Any) -> Any:
        """A ref to ``value``, which is there already; ``value`` itself if it is one."""
        ...

    def value(self, value: Any) -> Any:
        """The value of a ref, which is waited for; anything else as it is."""
        ...

    def itself(self, value: Any) -> Any:
        """``value``, to be an argument of a call as it is, even if it is a ref."""
        ...

    def get(self, refs: Sequence[Any]) -> list[Any]:
        """The values of ``refs``."""
        ...


_host: Host | None = None


def install(host: Host | None) -> None:
    """Make ``host`` the one that runs this process's graphs."""
    global _host
    _host = host


def host() -> Host:
    """The installed host."""
    if _host is None:
        raise RuntimeStateError("nothing here can run a graph: import conveyor, not conveyor.dag")
    return _host
