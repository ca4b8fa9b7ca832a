"""What ``execute`` is given, against what the graph takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conveyor.dag.parts import Key, Path, given
from conveyor.exceptions import ArgumentsError
from conveyor.plan.model import Passed, Plan


def match_inputs(
    plan: Plan, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """The arguments as the frames of the plan's input edges, in the order of ``plan.inputs``.

    ``name`` is the graph's. Raises ``ArgumentsError`` if they do not fit the graph's inputs.
    """
    check_inputs(plan, name, args, kwargs)
    if plan.whole_input:
        return args
    return tuple(_frame(bundle.keys, args, kwargs) for bundle in plan.inputs)


def takes_parts(plan: Plan) -> bool:
    """Whether parts of arguments are sent, or are results."""
    keys = [key for bundle in plan.inputs for key in bundle.keys]
    if plan.shape is not None:
        keys += [leaf.key for leaf in plan.shape.leaves if isinstance(leaf, Passed)]
    return any(isinstance(key, Path) for key in keys)


def check_inputs(plan: Plan, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise ``ArgumentsError`` if there are too few or too many, or others than the graph takes."""
    if plan.whole_input:
        if kwargs or len(args) != 1:
            raise ArgumentsError(
                f"{name} takes exactly one argument, because its InputNode is used whole; "
                f"got {_count(args, kwargs)}"
            )
        return
    if len(args) != plan.positional:
        raise ArgumentsError(
            f"{name} takes {plan.positional} positional argument(s), got {_count(args, kwargs)}"
        )
    missing = [key for key in plan.keywords if key not in kwargs]
    unknown = [key for key in kwargs if key not in plan.keywords]
    if missing or unknown:
        raise ArgumentsError(
            f"{name} takes the keyword argument(s) {', '.join(plan.keywords) or 'none'}"
            + (f"; missing: {', '.join(missing)}" if missing else "")
            + (f"; not known: {', '.join(unknown)}" if unknown else "")
        )


def _frame(keys: tuple[Key | None, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if not keys:
        return None
    if keys == (None,):
        return given(None, args, kwargs)
    # Most inputs are whole arguments.
    return tuple([args[key] if type(key) is int else given(key, args, kwargs) for key in keys])


def _count(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    return f"{len(args)} positional and {len(kwargs)} keyword argument(s)"
