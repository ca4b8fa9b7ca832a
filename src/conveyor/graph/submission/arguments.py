"""Arguments of ``execute``, matched with the graph's inputs and with the options of ``execute`` itself."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, cast

from conveyor.checks import check_deadline, check_timeout
from conveyor.dag.inputs import Key, Path, given
from conveyor.exceptions import ArgumentsError
from conveyor.plan.model import Passed, Plan

#: The options of ``execute``. Inputs of the graph may have the same names.
RESERVED = ("timeout", "deadline")


def reserved_inputs(plan: Plan) -> tuple[str, ...]:
    """Return the inputs of the graph with the name of an option of ``execute``: they win over it."""
    return tuple(name for name in RESERVED if name in plan.keywords)


class Options:
    """Tells the options of ``execute`` from inputs of the same names."""

    def __init__(
        self,
        inputs: tuple[str, ...],
        submit_timeout: float | None = None,
        deadline: float | None = None,
    ) -> None:
        """inputs: see ``reserved_inputs``. submit_timeout, deadline: the defaults."""
        self._timeout_is_input = "timeout" in inputs
        self._deadline_is_input = "deadline" in inputs
        self._submit_timeout = submit_timeout
        self._seconds = deadline

    def take(
        self, kwargs: dict[str, Any], timeout: Any, deadline: Any
    ) -> tuple[float | None, float | None]:
        """Return the timeout and the deadline of an execution, both in seconds. An option that is an input
        goes to ``kwargs``."""
        if self._timeout_is_input:
            kwargs["timeout"] = timeout
            timeout = None
        timeout = check_timeout(timeout)
        if timeout is None:
            timeout = self._submit_timeout
        return timeout, self.deadline(kwargs, deadline)

    def deadline(self, kwargs: dict[str, Any], deadline: Any) -> float | None:
        """Return the deadline, as :meth:`take` does, for a submission without a timeout."""
        if self._deadline_is_input:
            if deadline is not None:
                kwargs["deadline"] = deadline
            deadline = None
        return self._seconds if deadline is None else check_deadline(deadline)


def match_inputs(
    plan: Plan, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return the arguments as the frames of the plan's input edges, in the order of ``plan.inputs``.

    ``name`` is the graph's. Raises ``ArgumentsError`` if they do not fit the graph's inputs.
    """
    check_inputs(plan, name, args, kwargs)
    if plan.whole_input:
        return args * len(plan.inputs)
    return tuple(_frame(bundle.keys, args, kwargs) for bundle in plan.inputs)


def takes_parts(plan: Plan) -> bool:
    """Return whether parts of arguments are sent, or are results."""
    keys = [key for bundle in plan.inputs for key in bundle.keys]
    if plan.shape is not None:
        keys += [leaf.key for leaf in plan.shape.leaves if isinstance(leaf, Passed)]
    return any(isinstance(key, Path) for key in keys)


def whole_arguments(plan: Plan) -> tuple[tuple[int | str, ...], ...] | None:
    """Return the arguments that the frames of each input edge are made of; ``None``: parts of some are
    sent."""
    inputs = tuple([bundle.keys for bundle in plan.inputs])
    for key in itertools.chain.from_iterable(inputs):
        if not (type(key) is str or (type(key) is int and 0 <= key < plan.positional)):
            return None
    return cast("tuple[tuple[int | str, ...], ...]", inputs)


def check_inputs(plan: Plan, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise ``ArgumentsError`` if there are too few arguments or too many, or others than the graph takes."""
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
