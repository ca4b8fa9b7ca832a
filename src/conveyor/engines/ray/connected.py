"""Whether the program's connection to Ray is still the one that the session was started on."""

from __future__ import annotations

from typing import Any

from conveyor.exceptions import RuntimeStateError


class Connected:
    """Check of the connection to Ray, made before anything is asked of Ray. Without a connection Ray would
    connect by itself, to another cluster or a new one, where nothing knows of the session."""

    def __init__(self, ray: Any) -> None:
        """``ray``: the module, connected."""
        self._ray = ray
        self._worker = ray.get_runtime_context().get_worker_id()

    def check(self) -> None:
        """Raise ``RuntimeStateError`` if the connection is not that of the session's start."""
        ray = self._ray
        if not ray.is_initialized() or ray.get_runtime_context().get_worker_id() != self._worker:
            raise RuntimeStateError(
                "the connection to Ray that the session was started on has ended (by ray.shutdown()?). "
                "Call conveyor.shutdown(), and conveyor.init() again"
            )

    # Information on the cluster, as Ray gives it.

    def nodes(self) -> list[dict[str, Any]]:
        self.check()
        found: list[dict[str, Any]] = self._ray.nodes()
        return found

    def cluster_resources(self) -> dict[str, float]:
        self.check()
        return dict(self._ray.cluster_resources())

    def available_resources(self) -> dict[str, float]:
        self.check()
        return dict(self._ray.available_resources())

    def node_id(self) -> str:
        self.check()
        return str(self._ray.get_runtime_context().get_node_id())
