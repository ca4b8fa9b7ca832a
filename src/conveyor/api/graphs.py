"""Graphs in this process: what ``compile`` and ``execute`` of a node reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from conveyor.api.actor_handle import ActorHandle, check_usable
from conveyor.config import Config
from conveyor.dag import hooks
from conveyor.dag.survey import survey
from conveyor.runtime import context
from conveyor.runtime.protocol import ActorId

if TYPE_CHECKING:
    from conveyor.dag import ActorRef, DAGNode


class _Host:
    """This process's runtime, as graphs see it."""

    def compile(self, root: DAGNode, config: Config) -> Any:
        # An actor's index means another actor in another session: look before anything is laid.
        for task in survey(root).tasks:
            self.check(task.owner)
        return context.current().compile(root, config)

    def check(self, owner: object) -> None:
        if isinstance(owner, ActorHandle):
            check_usable(owner)

    def call(
        self,
        actor: ActorRef,
        method: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        num_returns: int,
    ) -> Any:
        # Nodes bound through a handle have its ActorId.
        return context.current().call(cast(ActorId, actor), method, args, kwargs, num_returns)

    def stream(
        self,
        actor: ActorRef,
        method: str,
        is_async: bool,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        return context.current().stream(cast(ActorId, actor), method, is_async, args, kwargs)

    def put(self, value: Any) -> Any:
        return context.current().put(value)

    def get(self, refs: Sequence[Any]) -> list[Any]:
        values: list[Any] = context.current().get(list(refs), None)
        return values


def install() -> None:
    """Let graphs run on this process's runtime."""
    hooks.install(_Host())
