"""Graphs in this process: what ``compile`` and ``execute`` of a node reach."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from conveyor.api.actor_handle import ActorHandle, check_owner
from conveyor.api.remote_function import start_worker
from conveyor.config import Config
from conveyor.dag import hooks
from conveyor.later import import_later
from conveyor.runtime import context
from conveyor.runtime.protocol import ActorId
from conveyor.system_limits import cores

if TYPE_CHECKING:
    from conveyor.dag import DAGNode, MethodNode
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
            check_owner(task.owner)
        workers: dict[Worker, ActorHandle] = {}
        placement: dict[MethodNode, ActorId] = {}
        for task, worker in place(shape, config.function_workers or cores()).items():
            if worker not in workers:
                assert task.function is not None
                workers[worker] = start_worker(task.function.is_async, task.function.options)
            placement[task] = workers[worker]._id
        # The graph keeps its workers; they end with it.
        return context.current().compile(root, config, placement)

    def execute(self, root: DAGNode, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return import_later("conveyor.api.eager").execute(root, args, kwargs)


def install() -> None:
    """Let graphs run on this process's runtime."""
    hooks.install(_Host())
