"""What a class can do at the end of its actor."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Coroutine
from typing import Any

#: The method that is called when the actor ends in good order. It may be a coroutine function.
EXIT_HOOK = "__conveyor_exit__"


def call_exit_hook(
    instance: Any, actor: str, run: Callable[[Coroutine[Any, Any, Any]], object]
) -> None:
    """Call it, if ``instance`` has one. What it raises is printed, and ends nothing else."""
    hook = getattr(instance, EXIT_HOOK, None)
    if hook is None:
        return
    try:
        outcome = hook()
        if inspect.iscoroutine(outcome):
            run(outcome)
    except KeyboardInterrupt:
        raise
    except BaseException:  # the actor ends in any case: SystemExit asks for no more
        print(f"{actor}.{EXIT_HOOK} has failed:\n{traceback.format_exc()}", file=sys.stderr)
