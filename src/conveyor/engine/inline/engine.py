"""The start of a session without processes."""

from __future__ import annotations

from typing import Any

from conveyor.engine.inline.runtime import InlineRuntime
from conveyor.engine.options import session_options
from conveyor.engine.program_end import ProgramEnd


def start(**given: Any) -> InlineRuntime:
    """Start a session in this process, with the options of ``engine.options``.

    ``log_to_driver``, ``env_vars``, ``preload`` and ``raise_descriptor_limit`` have no effect: what actors
    print is printed, their environment and modules are the driver's, and there are no processes that
    descriptors are needed for. The grace period is what an end waits for methods that run, for
    coroutines, and for ``__conveyor_exit__`` where it is one.
    """
    options = session_options("inline", **given)
    runtime = InlineRuntime(options.arena, options.grace)
    runtime.at_shutdown = ProgramEnd(runtime, options.grace, options.handle_sigterm).cancel
    return runtime
