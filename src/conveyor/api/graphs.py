"""Graphs in this process: what ``compile`` and ``execute`` of a node reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from conveyor.api.actor_handle import ActorHandle, check_usable
from conveyor.api.remote_function import call_function, cores, start_worker
from conveyor.config import Config
from conveyor.dag import hooks
from conveyor.later import import_later
from conveyor.runtime import context
from conveyor.runtime.protocol import ActorId
from conveyor.runtime.refs.ref import Itself, Ref

if TYPE_CHECKING:
    from conveyor.dag import ActorRef, DAGNode, MethodNode
    from conveyor.dag.functions import Function
    from conveyor.plan.place import Worker


class _Host:
    """This process's runtime, as graphs see it."""

    def compile(self, root: DAGNode, config: Config) -> Any:
        # Imported here: who only calls actors needs neither.
        import_later("conveyor.plan.place")
        from conveyor.dag.survey import survey
        from conveyor.plan.place import place

        # An actor's index means another actor in another session: look before anything is laid.
        shape = survey(root)
        for task in shape.tasks:
            self.check(task.owner)
        workers: dict[Worker, ActorHandle] = {}
        placement: dict[MethodNode, ActorId] = {}
        for task, worker in place(shape, config.function_workers or cores()).items():
            if worker not in workers:
                assert task.function is not None
                workers[worker] = start_worker(task.function)
            placement[task] = workers[worker]._id
        # The graph keeps its workers; they end with it.
        return context.current().compile(root, config, placement)

    def execute(self, root: DAGNode, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return import_later("conveyor.dag.eager").execute(root, self, args, kwargs)

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

    def call_function(
        self,
        function: Function,
        owner: object,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        num_returns: int,
    ) -> Any:
        return call_function(function, cast("ActorHandle | None", owner), args, kwargs, num_returns)

    def put(self, value: Any) -> Any:
        return value if isinstance(value, Ref) else context.current().keep(value)

    def value(self, value: Any) -> Any:
        return value.get() if isinstance(value, Ref) else value

    def itself(self, value: Any) -> Any:
        return Itself.of(value)

    def get(self, refs: Sequence[Any]) -> list[Any]:
        values: list[Any] = context.current().get(list(refs), None)
        return values


def install() -> None:
    """Let graphs run on this process's runtime."""
    hooks.install(_Host())
