"""The start and the end of a session."""

from __future__ import annotations

import os
from types import NoneType
from typing import Any

from conveyor import _core
from conveyor.api.options import (
    INIT_OPTIONS,
    RAYS_INIT_OPTIONS,
    InitOptions,
    refuse_environment,
    split_runtime_env,
    take_out,
)
from conveyor.checks import check_bytes, check_env_vars, check_flag
from conveyor.exceptions import RuntimeStateError
from conveyor.later import import_later
from conveyor.runtime import context
from conveyor.runtime.protocol import Runtime
from conveyor.typevars import Unpack

_ENGINES = ("local", "inline", "ray")
_DEBUG_WRITES = "CONVEYOR_DEBUG_WRITES"

# Addresses of Ray's that mean this machine.
_HERE = ("auto", "local")


class Session:
    """A session that ``init`` has started. As a context manager it ends the session with the block."""

    __slots__ = ("_runtime",)

    def __init__(self, runtime: Runtime | None) -> None:
        self._runtime = runtime

    def __repr__(self) -> str:
        return f"<conveyor session, {'running' if self._is_running() else 'ended'}>"

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._is_running():
            shutdown()

    def _is_running(self) -> bool:
        # The block may have ended this one, and started another.
        return self._runtime is not None and context.running() is self._runtime


def init(
    engine: str | None = None,
    *,
    ignore_reinit_error: bool = False,
    log_to_driver: bool = True,
    grace_seconds: float | None = None,
    handle_sigterm: bool = True,
    debug_writes: bool | None = None,
    **options: Unpack[InitOptions],
) -> Session:
    """Start a session. Optional: what needs one starts it with the defaults. ::

        with conveyor.init(arena_bytes=1 << 30):
            ...  # the session ends with the block

    Args:
        engine: where actors live: ``"local"`` in processes of this machine, ``"inline"`` all in
            this process, for the debugger, ``"ray"`` in processes that Ray starts where it likes. Default:
            what ``CONVEYOR_ENGINE`` in the environment says, else ``"local"``.
        ignore_reinit_error: do nothing if a session is running already.
        log_to_driver: whether what actors print is shown here.
        grace_seconds: how long actors may take to end in good order (see the guide) before they are
            killed; at least 0, which is at once. Default: what ``CONVEYOR_GRACE_SECONDS`` in the
            environment says, else 5.
        handle_sigterm: end the session in good order when this process gets SIGTERM; then it dies of
            the signal as always. Only if nothing else handles it, and the session is started on the
            main thread.
        debug_writes: look for writes to memory of direct objects that others can fetch, by checksums: who
            gets such a value raises ``SharedWriteError``. Default: whether ``CONVEYOR_DEBUG_WRITES`` in the
            environment is 1.
        **options: the engine's own options: ``arena_bytes`` (the memory cap), ``env_vars`` of all actors,
            ``preload`` (modules that are imported once, before actors start, and that all of them have then:
            an actor that needs torch starts in a fraction of the time, and shares its memory),
            and ``raise_descriptor_limit=False``, which leaves this process's soft limit of descriptors as
            it is instead of raising it to the hard one (at most to 65,536). With ``engine="ray"`` the
            arguments of ``ray.init`` are passed to it, ``address`` among them; if the program has called
            that itself, its connection is used, and stays. ``shared_memory="node"``: only processes of one of
            Ray's nodes share memory, also where a machine has several. ``node_timeout``: seconds (1; over
            TLS 10) after which a node that shares none, and that nothing comes from, is taken for lost.
            ``tls=True``: what goes between such nodes is encrypted, with a certificate made for the session;
            or ``tls={"certificate": path, "key": path, "ca": path}``, with files of each node.
            ``listen_address`` and ``listen_ports``: an interface, a network or an address, and the first and
            last port, at which nodes listen. Otherwise, of Ray's, ``address`` may be ``"auto"`` or
            ``"local"``, ``local_mode=True`` is ``engine="inline"``, ``object_store_memory`` is
            ``arena_bytes``, the ``env_vars`` of ``runtime_env`` are set in every actor, and those that have
            nothing to do on one machine are taken with a warning.

    Returns:
        The session, for a ``with`` statement.

    Raises:
        RuntimeStateError: a session is running already.
        ValueError: an unknown engine, ``local_mode`` with another one than ``"inline"``, a setting out of
            its range.
        TypeError: an option that the engine does not have.
    """
    given: dict[str, Any] = {**options}
    if not isinstance(engine, (str, NoneType)):
        raise TypeError(f"engine must be a str, not {type(engine).__name__}")
    check_flag(ignore_reinit_error, "ignore_reinit_error")
    check_flag(log_to_driver, "log_to_driver")
    check_flag(handle_sigterm, "handle_sigterm")
    if debug_writes is not None:
        check_flag(debug_writes, "debug_writes")
    for name in ("local_mode", "raise_descriptor_limit"):
        check_flag(given.get(name, False), name)
    engine, address = _engine_at(engine, given.pop("address", None), given.pop("local_mode", False))
    for name in given:  # whether or not a session is running
        if name not in InitOptions.__annotations__:
            raise TypeError(f"the {engine} engine has no option {name!r}")
    if engine == "ray":
        _gather_rays(given, address)
    else:
        _translate_rays(given)
    if not log_to_driver:
        given["log_to_driver"] = False
    if grace_seconds is not None:
        given["grace_seconds"] = grace_seconds
    if not handle_sigterm:
        given["handle_sigterm"] = False
    if debug_writes is not None:
        variables = {_DEBUG_WRITES: str(int(debug_writes))}  # of actors
        given["env_vars"] = {**check_env_vars(given.get("env_vars")), **variables}
    # The lock under which `context.current` starts a default session, so that there is only one.
    with context._lock:
        running = context.running()
        if running is not None and running.ending:
            running.shutdown()  # what an interrupted one has left
        if context.running() is None:
            context.begin(lambda: _start(engine, given, debug_writes))
            return Session(context.running())
    if not ignore_reinit_error:
        raise RuntimeStateError(
            "a session is running already: call shutdown() first, or pass ignore_reinit_error=True "
            "to go on with it"
        )
    return Session(running)


def _engine_at(engine: str | None, address: Any, local_mode: bool) -> tuple[str, Any]:
    """Return the engine that is meant, and the address of its cluster, if there is one."""
    if engine is not None and engine not in _ENGINES and _is_address(engine):
        engine, address = None, engine  # Ray's first argument
    if local_mode and engine not in (None, "inline"):
        raise ValueError(f'local_mode=True is engine="inline", and not engine={engine!r}')
    engine = "inline" if local_mode else engine or _default_engine()
    if engine not in _ENGINES:
        raise ValueError(f"unknown engine {engine!r}; known are {', '.join(_ENGINES)}")
    if address is not None and address not in _HERE and engine != "ray":
        raise ValueError(
            f"there is no cluster to connect to at {address!r}: a session's actors are processes of "
            f'this machine, and nothing has to be started for them (with engine="ray" they are Ray\'s)'
        )
    return engine, address


def _gather_rays(options: dict[str, Any], address: Any) -> None:
    """Move the options that are passed to Ray into ``options["cluster"]``, and add ``address``."""
    cluster = {n: options.pop(n) for n in list(options) if n in RAYS_INIT_OPTIONS}
    split_runtime_env(cluster.get("runtime_env"))  # or Ray would fail somewhere inside
    options["cluster"] = cluster
    options["address"] = address


def _translate_rays(options: dict[str, Any]) -> None:
    """Replace Ray's options by ours, for an engine without Ray."""
    take_out(options, INIT_OPTIONS, "init()")
    memory = options.pop("object_store_memory", None)
    if memory is not None:
        options.setdefault("arena_bytes", check_bytes(memory, "object_store_memory"))
    variables, others = split_runtime_env(options.pop("runtime_env", None))
    refuse_environment(others)
    if variables:
        options["env_vars"] = {**variables, **check_env_vars(options.get("env_vars"))}


def _is_address(text: str) -> bool:
    return text in _HERE or "://" in text or text.rpartition(":")[2].isdigit()


def shutdown() -> None:
    """End the session with all its actors and graphs, in good order and at most within the grace period
    (see ``init``). Who waits in other threads gets ``SessionEndedError``. Does nothing if there is no
    session.

    Ctrl-C meanwhile ends the grace period: the actors that are left are killed, and ``KeyboardInterrupt``
    is raised when the session has ended, as is whatever else a signal handler raises."""
    runtime = context.running()
    if runtime is not None:
        runtime.shutdown()


def is_initialized() -> bool:
    """Whether this process has a session."""
    return context.running() is not None


def start_default() -> Runtime:
    """Start a session on the default engine, for code that needs one without having asked for it."""
    return _start(_default_engine(), {})


def _default_engine() -> str:
    engine = os.environ.get("CONVEYOR_ENGINE", _ENGINES[0])
    if engine not in _ENGINES:
        raise ValueError(
            f"CONVEYOR_ENGINE={engine!r} in the environment: known are {', '.join(_ENGINES)}"
        )
    return engine


def _start(engine: str, options: dict[str, Any], debug_writes: bool | None = None) -> Runtime:
    if debug_writes is None:
        debug_writes = os.environ.get(_DEBUG_WRITES) == "1"
    _core.check_writes(debug_writes)
    # Imported when needed: `import conveyor` stays fast, and a broken engine hurts nobody else.
    module = import_later(f"conveyor.engines.{engine}.engine")
    runtime: Runtime = module.start(**options)
    return runtime


class RuntimeContext:
    """Session, node and actor of the calling code; see ``get_runtime_context``."""

    def get_actor_id(self) -> str | None:
        """Return the actor's identity within the session, as a text; ``None`` in the driver."""
        actor = context.current().own_actor
        return None if actor is None else f"{actor.index:08x}"

    def get_actor_name(self) -> str | None:
        """Return the actor's name in messages: the one that it was given, if any. ``None`` in the driver."""
        actor = context.current().own_actor
        return None if actor is None else actor.name

    def get_job_id(self) -> str:
        """Return the session's identity, as a text."""
        return context.current().exports.session

    def get_node_id(self) -> str:
        """Return this machine's name; with Ray as the engine Ray's number of the node."""
        cluster = context.cluster()
        return os.uname().nodename if cluster is None else cluster.node_id()

    def get_worker_id(self) -> str:
        """This process, as a text."""
        return f"{os.getpid():08x}"

    @property
    def namespace(self) -> str:
        """Names belong to the session: there are no namespaces."""
        return ""


def get_runtime_context() -> RuntimeContext:
    """Return the session, node and actor of the calling code, under Ray's names."""
    return RuntimeContext()


def nodes() -> list[dict[str, Any]]:
    """Return this machine, as Ray lists nodes; with Ray as the engine the nodes of its cluster."""
    cluster = context.cluster()
    if cluster is not None:
        return cluster.nodes()
    host = os.uname().nodename
    return [
        {
            "NodeID": host,
            "Alive": True,
            "NodeManagerHostname": host,
            "NodeManagerAddress": "127.0.0.1",
            "Resources": cluster_resources(),
        }
    ]


def cluster_resources() -> dict[str, float]:
    """Return the cores that this process may use (``"CPU"``), the GPUs that it sees (``"GPU"``) and the
    machine's memory in bytes (``"memory"``). Nothing is reserved, so all of it is always available. With Ray
    as the engine: the resources of all nodes of its cluster."""
    cluster = context.cluster()
    if cluster is not None:
        return cluster.cluster_resources()
    from conveyor.engines.local.resources import visible_gpus  # the engine is slow to import

    resources = {
        "CPU": float(len(os.sched_getaffinity(0))),
        "memory": float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")),
    }
    gpus = visible_gpus()
    if gpus:
        resources["GPU"] = float(len(gpus))
    return resources


def available_resources() -> dict[str, float]:
    """Return the free resources: those of ``cluster_resources``, since nothing is reserved. With Ray as the
    engine: the resources that are free in its cluster."""
    cluster = context.cluster()
    if cluster is not None:
        return cluster.available_resources()
    return cluster_resources()
