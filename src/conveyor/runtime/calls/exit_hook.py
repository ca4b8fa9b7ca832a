"""What a class can do at the end of its actor."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from typing import Any

from conveyor.runtime.calls.try_each import try_each

#: The method that is called when the actor ends in good order. It may be a coroutine function.
EXIT_HOOK = "__conveyor_exit__"


def call_exit_hook(
    instance: Any, actor: str, run: Callable[[Coroutine[Any, Any, Any]], object]
) -> KeyboardInterrupt | None:
    """Call it, if ``instance`` has one. What it raises is printed, and ends nothing else."""

    def call() -> None:
        hook = _of_the_class(instance, EXIT_HOOK)
        if hook is not None:
            outcome = hook()
            if inspect.iscoroutine(outcome):
                run(outcome)

    return try_each(call, name=f"{actor}.{EXIT_HOOK}")


def _of_the_class(instance: Any, name: str) -> Any:
    """The special method ``name`` of ``instance``, or ``None``. Found as Python finds its own: what the
    instance makes up for unknown names (``__getattr__``) is none."""
    for cls in type(instance).__mro__:
        if name in vars(cls):
            found = vars(cls)[name]
            bind = getattr(type(found), "__get__", None)
            return found if bind is None else bind(found, instance, type(instance))
    return None
