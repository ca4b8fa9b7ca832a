"""The start of a session without processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conveyor.checks import check_env_vars, spin_of_environment
from conveyor.engine.inline.runtime import InlineRuntime
from conveyor.engine.program_end import ProgramEnd, grace_period
from conveyor.runtime.process import arena_size


def start(
    *,
    log_to_driver: bool = True,
    arena_bytes: int | None = None,
    env_vars: Mapping[str, str] | None = None,
    grace_seconds: float | None = None,
    handle_sigterm: bool = True,
    raise_descriptor_limit: bool = True,
    **unknown: Any,
) -> InlineRuntime:
    """Start a session in this process.

    log_to_driver, env_vars: have no effect; what actors print is printed, and their environment is the
        driver's.
    arena_bytes: the memory cap of large values on their way, all actors together.
    grace_seconds: how long an end waits for methods that run, for coroutines, and for
        ``__conveyor_exit__`` where it is one.
    handle_sigterm: see ``conveyor.init``.
    raise_descriptor_limit: has no effect; there are no processes that descriptors are needed for.
    """
    if unknown:
        raise TypeError(f"the inline engine has no option {next(iter(unknown))!r}")
    # All of it before anything is done.
    size, grace = arena_size(arena_bytes), grace_period(grace_seconds)
    check_env_vars(env_vars)
    spin_of_environment()
    runtime = InlineRuntime(size, grace)
    runtime.at_shutdown = ProgramEnd(runtime, grace, handle_sigterm).cancel
    return runtime
