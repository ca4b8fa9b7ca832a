"""Options of a session, on any engine."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from msgspec import Struct

from conveyor.checks import check_env_vars, check_modules, spin_of_environment
from conveyor.exceptions import RuntimeStateError
from conveyor.runtime.process import ArenaSize, arena_size

#: Functions that gevent and eventlet replace, and that a session's threads need unchanged.
_BLOCKING = (
    ("_thread", "start_new_thread"),
    ("select", "select"),
    ("socket", "socket"),
    ("subprocess", "Popen"),
)

#: Seconds of grace that actors have at their end, if nobody says.
_GRACE = 5.0


class SessionOptions(Struct, frozen=True):
    """The options, checked.

    log_to_driver: print what actors write, each line with the actor's name and pid.
    arena: the memory cap of the session: bytes behind the arenas of all its processes together.
    env_vars: environment variables of all actors, in addition to the driver's; an actor's own win.
    grace, handle_sigterm: ``grace_seconds`` and ``handle_sigterm`` of ``conveyor.init``.
    preload: modules that are imported once for all actors, before any of them starts.
    raise_descriptor_limit: raise this process's soft limit of descriptors to the hard one, at most to
        65,536. Processes that it starts later have that limit too.
    """

    log_to_driver: bool
    arena: ArenaSize
    env_vars: Mapping[str, str]
    preload: tuple[str, ...]
    grace: float
    handle_sigterm: bool
    raise_descriptor_limit: bool


def session_options(
    engine: str,
    *,
    log_to_driver: bool = True,
    arena_bytes: int | None = None,
    env_vars: Mapping[str, str] | None = None,
    preload: Sequence[str] | None = None,
    grace_seconds: float | None = None,
    handle_sigterm: bool = True,
    raise_descriptor_limit: bool = True,
    **unknown: Any,
) -> SessionOptions:
    """Return the session options that were given to ``engine``, or that the environment says. Raises
    ``TypeError`` and ``ValueError`` for invalid ones, before anything is done."""
    if unknown:
        raise TypeError(f"the {engine} engine has no option {next(iter(unknown))!r}")
    _refuse_green_threads()
    size, grace = arena_size(arena_bytes), _grace_period(grace_seconds)
    env_vars, modules = check_env_vars(env_vars), check_modules(preload, "preload")
    spin_of_environment()
    return SessionOptions(
        log_to_driver, size, env_vars, modules, grace, handle_sigterm, raise_descriptor_limit
    )


def _refuse_green_threads() -> None:
    for module, name in _BLOCKING:
        replacement: str = (
            getattr(getattr(sys.modules.get(module), name, None), "__module__", None) or ""
        )
        library = replacement.partition(".")[0]
        if library in ("gevent", "eventlet"):
            raise RuntimeStateError(
                f"{library} has replaced {module}.{name} of this process (monkey patching), and a session "
                "needs threads and descriptors that wait on their own: start it in a process that is not "
                "patched, or leave out thread, socket, select and subprocess"
            )


def _grace_period(seconds: float | None) -> float:
    """Return ``seconds``, or what ``CONVEYOR_GRACE_SECONDS`` in the environment says, or the default."""
    source = "grace_seconds"
    chosen: object = seconds
    if seconds is None:
        text = os.environ.get("CONVEYOR_GRACE_SECONDS")
        if text is None:
            return _GRACE
        source = "CONVEYOR_GRACE_SECONDS"
        chosen = text
        with suppress(ValueError):
            chosen = float(text)
    if isinstance(chosen, bool) or not isinstance(chosen, (int, float)) or not 0 <= chosen < 1e9:
        raise ValueError(f"{source} must be a number of seconds, 0 or more, not {chosen!r}")
    return float(chosen)
