"""Runtime of this process."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from conveyor.exceptions import RuntimeStateError
from conveyor.later import import_later
from conveyor.runtime import ending, threads
from conveyor.runtime.protocol import Runtime


class Cluster:
    """Ray cluster on which the session's actors are placed. The connection to Ray is checked before anything
    is asked of Ray: without one Ray would connect by itself, to another cluster or a new one, where nothing
    knows of the session."""

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
        """Return the node that this process is on."""
        self.check()
        return str(self._ray.get_runtime_context().get_node_id())


_lock = threading.Lock()
_cluster: Cluster | None = None
_current: Runtime | None = None
_inherited = False  # this process was forked from one that had a runtime
_had_ray = False  # a session of this process has been on Ray
_inherited_ray = False  # this process was forked from one that was connected to Ray, then or before
_start_default: Callable[[], Runtime] | None = None


def set_default_start(start: Callable[[], Runtime]) -> None:
    """Set the function that starts a runtime where none was asked for: ``conveyor.init()`` is optional."""
    global _start_default
    _start_default = start


def current() -> Runtime:
    """This process's runtime, started with defaults if there is none yet."""
    runtime = _current
    if runtime is not None:
        return runtime
    if _start_default is None:
        raise RuntimeStateError("no engine is configured; import conveyor, not its inner modules")
    with _lock:
        if _current is None:
            if ending.begun_by_others():
                raise ending.ended()
            begin(_start_default)
        assert _current is not None
        return _current


def running() -> Runtime | None:
    """This process's runtime, or ``None``; never starts one."""
    return _current


def inherited() -> bool:
    """Whether this process was forked from one that had a runtime, which is not this one's."""
    return _inherited


def note_ray() -> None:
    """Note that a session of this process is to be on Ray."""
    global _had_ray
    _had_ray = True


def inherited_ray() -> bool:
    """Whether this process was forked from one that was connected to Ray, then or before. Ray's threads are
    not here: each request to Ray, also to end the connection or to open a new one, would wait for ever."""
    return _inherited_ray


def begin(start: Callable[[], Runtime]) -> None:
    """Start a runtime with ``start``, and make it this process's. If the start is interrupted, the process
    has none."""
    try:
        install(start())
    except BaseException:
        if _current is not None:
            try:
                _current.shutdown()
            finally:
                install(None)
        raise


def install(runtime: Runtime | None) -> None:
    """Make ``runtime`` this process's (``None``: it has none any more)."""
    global _current, _cluster
    _current = runtime
    ending.fault = ""
    if runtime is None:
        _cluster = None
    else:
        import_later("conveyor.logs").install()  # it imports logging, which a session needs first


def _fail(why: str) -> None:
    if _current is not None:
        _current.fail(why)


threads.fail_session = _fail


def cluster() -> Cluster | None:
    """Return the cluster of this process's session; ``None``: it is on this machine alone, or there is no
    session."""
    return _cluster


def place_on(cluster: Cluster) -> None:
    """Note that the session of this process, which has just begun, is placed on ``cluster``."""
    global _cluster
    _cluster = cluster


def _forget_in_child() -> None:
    global _current, _lock, _inherited, _inherited_ray, _cluster
    ray = sys.modules.get("ray")
    # What has no such function is still being imported.
    if _had_ray or (ray is not None and getattr(ray, "is_initialized", bool)()):
        _inherited_ray = True
    if _current is not None:
        _current.abandon()
        _inherited = True
    # The parent's runtime is not ours: its threads are not here, its leases are inert, and its
    # sockets belong to it. The child may start its own.
    _current = _cluster = None
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_in_child)


#: Registrations of transports by name, each pickled by value. Only the driver's are asked for.
TRANSPORTS: dict[str, bytes] = {}


def add_transport(name: str, registration: bytes) -> None:
    """Note the registration of a transport.

    Raises:
        ValueError: another transport has the name.
    """
    if TRANSPORTS.setdefault(name, registration) != registration:
        raise ValueError(f"there is a transport {name!r} already")
