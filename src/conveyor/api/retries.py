"""``max_task_retries`` and ``retry_exceptions``: calls that are made again where they fail."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from conveyor.checks import check_count
from conveyor.exceptions import ConveyorWarning
from conveyor.later import import_later
from conveyor.refs.ref import ElementRef, elements_of
from conveyor.runtime.protocol import MethodInfo, Retries
from conveyor.user_frames import users_level

if TYPE_CHECKING:
    from conveyor.refs.ref import Ref
    from conveyor.runtime.protocol import ActorId, Runtime

#: Where ``method`` leaves what it was told of them; copied along by ``functools.wraps``.
RETRIES_MARK = "__conveyor_retries__"

NAMES = ("max_task_retries", "retry_exceptions")


def check_most(value: Any, name: str) -> int:
    """Return ``value``, which must be a number of retries.

    Raises:
        TypeError: it is no integer.
        ValueError: it is less than -1.
    """
    return check_count(value, name, "-1 (no limit), 0 (never) or more", -1)


def take_retries(options: dict[str, Any], before: Retries | None) -> Retries | None:
    """Take the retry options out of ``options`` and return them. ``before`` holds for those that are not
    given.

    Raises:
        TypeError: one is of the wrong type.
        ValueError: the number is less than -1.
    """
    taken = {name: options.pop(name, None) for name in NAMES}
    given = {name: value for name, value in taken.items() if value is not None}
    if not given:
        return before
    found = before or Retries()
    if "max_task_retries" in given:
        found = replace(found, most=check_most(given["max_task_retries"], "max_task_retries"))
    if "retry_exceptions" in given:
        found = replace(found, exceptions=_checked_exceptions(given["retry_exceptions"]))
    return found


def _checked_exceptions(value: Any) -> bool | tuple[type[BaseException], ...]:
    if isinstance(value, bool):
        return value
    if isinstance(value, (list, tuple)):
        if all(isinstance(one, type) and issubclass(one, BaseException) for one in value):
            return tuple(value)
        raise TypeError(f"retry_exceptions has something that is no class of exceptions: {value!r}")
    raise TypeError(f"retry_exceptions is True, False or a list of classes, not {value!r}")


def warn_of_generator(retries: Retries | None, is_generator: bool, what: str) -> None:
    """Warn that a generator is not called again where it fails: its items may have been taken already."""
    if is_generator and retries is not None and retries.most:
        text = f"{what} is a generator, which is not called again where it fails"
        warnings.warn(text, ConveyorWarning, stacklevel=users_level())


def with_default(methods: Mapping[str, MethodInfo], most: int) -> Mapping[str, MethodInfo]:
    """Give methods that set no ``max_task_retries`` of their own the actor's."""
    if not any(info.retries for info in methods.values()) and not most:
        return methods
    made = {}
    for name, info in methods.items():
        said = info.retries or Retries()
        if said.most is None:
            info = replace(info, retries=replace(said, most=most))
        made[name] = info
    return made


def call_with_retries(
    runtime: Runtime,
    actor: ActorId,
    method: str,
    call: Callable[[tuple[Any, ...], dict[str, Any], bool], Any],
    count: int,
    retries: Retries,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call a method of an actor with retries, and return its result: a reference, or a list of ``count``
    references. ``call`` makes one call; its last argument says whether it is a retry."""

    def make(args: tuple[Any, ...], kwargs: dict[str, Any], again: bool) -> Ref:
        made: Any = call(args, kwargs, again)
        if not isinstance(made, list):
            return made  # type: ignore[no-any-return]
        element: ElementRef = made[0]
        return element._whole

    tries = import_later("conveyor.calls.retries").Tries
    made = tries(runtime, actor, method, make, args, kwargs, retries)
    return elements_of(made.ref(), count)
