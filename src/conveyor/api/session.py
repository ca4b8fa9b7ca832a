"""The start and the end of a session."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from conveyor.exceptions import RuntimeStateError
from conveyor.runtime import context
from conveyor.runtime.protocol import Runtime

_ENGINES = ("local", "inline")

# What Ray programs pass to `init`, and what has no meaning here.
_IGNORED = ("address", "num_cpus", "logging_level", "include_dashboard")


def init(
    engine: str | None = None,
    *,
    ignore_reinit_error: bool = False,
    log_to_driver: bool = True,
    **options: Any,
) -> None:
    """Start a session. Optional: what needs one starts it with the defaults.

    Args:
        engine: where actors live: ``"local"`` in processes of this machine, ``"inline"`` all in
            this process, for the debugger. Default: what ``CONVEYOR_ENGINE`` in the environment says,
            else ``"local"``.
        ignore_reinit_error: do nothing if a session is running already.
        log_to_driver: whether what actors print is shown here.
        **options: the engine's own options. Ray's ``address``, ``num_cpus``, ``logging_level`` and
            ``include_dashboard`` are accepted and have no effect.

    Raises:
        RuntimeStateError: a session is running already.
        ValueError: an unknown engine.
        TypeError: an option that the engine does not have.
    """
    engine = engine or _default_engine()
    if engine not in _ENGINES:
        raise ValueError(f"unknown engine {engine!r}; known are {', '.join(_ENGINES)}")
    for name in _IGNORED:
        options.pop(name, None)
    if not log_to_driver:
        options["log_to_driver"] = False
    # The lock under which `context.current` starts a default session, so that there is only one.
    with context._lock:
        if context.running() is None:
            context.install(_start(engine, options))
            return
    if not ignore_reinit_error:
        raise RuntimeStateError(
            "a session is running already: call shutdown() first, or pass ignore_reinit_error=True "
            "to go on with it"
        )


def shutdown() -> None:
    """End the session with all its actors and graphs. Does nothing if there is none."""
    runtime = context.running()
    if runtime is None:
        return
    try:
        runtime.shutdown()
    except RuntimeStateError:
        raise  # not ours to end: in an actor the session is the driver's
    except BaseException:
        _uninstall(runtime)
        raise
    _uninstall(runtime)


def _uninstall(runtime: Runtime) -> None:
    if context.running() is runtime:
        context.install(None)


def is_initialized() -> bool:
    """Whether this process has a session."""
    return context.running() is not None


def start_default() -> Runtime:
    """A session on the default engine, for whoever needs one without having asked for it."""
    return _start(_default_engine(), {})


def _default_engine() -> str:
    engine = os.environ.get("CONVEYOR_ENGINE", _ENGINES[0])
    if engine not in _ENGINES:
        raise ValueError(
            f"CONVEYOR_ENGINE={engine!r} in the environment: known are {', '.join(_ENGINES)}"
        )
    return engine


def _start(engine: str, options: dict[str, Any]) -> Runtime:
    # Imported when needed: `import conveyor` stays fast, and a broken engine hurts nobody else.
    module = import_module(f"conveyor.engine.{engine}")
    runtime: Runtime = module.start(**options)
    return runtime
