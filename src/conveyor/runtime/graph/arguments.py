"""What ``execute`` is given, against what the graph takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conveyor.dag.parts import Key, given
from conveyor.plan.model import Plan


def match_inputs(
    plan: Plan, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """The arguments as the frames of the plan's input edges, in the order of ``plan.inputs``.

    ``name`` is the graph's. Raises ``TypeError`` if they do not fit the graph's inputs.
    """
    if plan.whole_input:
        if kwargs or len(args) != 1:
            raise TypeError(
                f"{name} takes exactly one argument, because its InputNode is used whole; "
                f"got {_count(args, kwargs)}"
            )
        return args
    if len(args) != plan.positional:
        raise TypeError(
            f"{name} takes {plan.positional} positional argument(s), got {_count(args, kwargs)}"
        )
    missing = [key for key in plan.keywords if key not in kwargs]
    unknown = [key for key in kwargs if key not in plan.keywords]
    if missing or unknown:
        raise TypeError(
            f"{name} takes the keyword argument(s) {', '.join(plan.keywords) or 'none'}"
            + (f"; missing: {', '.join(missing)}" if missing else "")
            + (f"; not known: {', '.join(unknown)}" if unknown else "")
        )
    return tuple(_frame(bundle.keys, args, kwargs) for bundle in plan.inputs)


def _frame(keys: tuple[Key | None, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if not keys:
        return None
    if keys == (None,):
        return given(None, args, kwargs)
    # Most inputs are whole arguments.
    return tuple([args[key] if type(key) is int else given(key, args, kwargs) for key in keys])


def _count(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    return f"{len(args)} positional and {len(kwargs)} keyword argument(s)"
