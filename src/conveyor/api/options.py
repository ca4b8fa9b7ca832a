"""The options an actor can be started with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from conveyor.api.retries import check_most
from conveyor.api.unused import ACTOR_OPTIONS, PLACEMENT_OPTIONS, take_out
from conveyor.checks import (
    check_amount,
    check_count,
    check_env_vars,
    check_flag,
    check_gpus,
    check_name,
)


class ActorOptions(Struct, frozen=True):
    """Checked options of an actor; ``ActorSpec`` says what they mean. ``placement`` are Ray's, which are
    looked at when an actor is started: only then is it known whether there is anything to choose from."""

    name: str | None = None
    num_cpus: float | None = None
    num_gpus: float = 0
    max_concurrency: int | None = None
    max_restarts: int = 0
    max_task_retries: int = 0
    enable_tensor_transport: bool = True
    env_vars: Mapping[str, str] = field(default_factory=dict)
    get_if_exists: bool = False
    placement: Mapping[str, Any] = field(default_factory=dict)

    def updated(self, **options: Any) -> ActorOptions:
        """A copy with ``options`` changed.

        ``runtime_env={"env_vars": ...}`` is Ray's spelling of ``env_vars``. Options of Ray's that have
        nothing to do are taken with a warning, and those that only Ray as the engine has a use for are kept.

        Raises:
            NotImplementedError: ``concurrency_groups``, which would have to mean something.
            TypeError: an option that does not exist, or a value of the wrong type.
            ValueError: a value out of range.
        """
        variables, environment = split_runtime_env(options.pop("runtime_env", None))
        if options.pop("concurrency_groups", None):
            raise NotImplementedError(
                "concurrency_groups are not supported: max_concurrency is one limit for all methods of "
                "an actor; put methods with limits of their own into actors of their own"
            )
        take_out(options, ACTOR_OPTIONS, "an actor")
        placement = {name: options.pop(name) for name in PLACEMENT_OPTIONS if name in options}
        if environment:
            placement["runtime_env"] = environment
        for name in options:
            if name not in _CHECKS:
                rays = ", ".join([*PLACEMENT_OPTIONS, "runtime_env", *ACTOR_OPTIONS])
                raise TypeError(
                    f"unknown actor option {name!r}; known are {', '.join(_CHECKS)}, and of Ray's {rays}"
                )
        checked = {name: _CHECKS[name](value, name) for name, value in options.items()}
        if variables or "env_vars" in checked:
            checked["env_vars"] = {**variables, **checked.get("env_vars", {})}
        if placement:
            checked["placement"] = {**self.placement, **placement}
        return replace(self, **checked)

    def placement_for(self, places: bool) -> Mapping[str, Any]:
        """Return the placement options for the hosts. Hosts that have no choice (``places`` is false) get
        none, and a warning says so.

        Raises:
            TypeError: ``runtime_env`` asks such hosts for more than variables.
        """
        if places or not self.placement:
            return self.placement
        refuse_environment(self.placement.get("runtime_env", {}))
        take_out(dict(self.placement), PLACEMENT_OPTIONS, "an actor")
        return {}


def split_runtime_env(value: Any) -> tuple[Mapping[str, str], dict[str, Any]]:
    """Split Ray's ``runtime_env`` into its environment variables and the rest.

    Raises:
        TypeError: it is no dict, or its variables are invalid.
    """
    if value is None:
        return {}, {}
    if not isinstance(value, Mapping):
        raise TypeError(f"runtime_env must be a dict, not {type(value).__name__}")
    env_vars = value.get("env_vars") or {}
    others = {key: part for key, part in value.items() if key != "env_vars"}
    return check_env_vars(env_vars, "runtime_env['env_vars']"), others


def refuse_environment(others: Mapping[str, Any]) -> None:
    """Raise ``TypeError`` if ``runtime_env`` has more than variables: only Ray provides the rest."""
    for key in others:
        raise TypeError(
            f"runtime_env[{key!r}] is not supported, only 'env_vars' is: actors run in the driver's "
            f'environment (with engine="ray" Ray makes them one of their own)'
        )


def _name(value: Any, option: str) -> str | None:
    if value is None:
        return None
    if value == "":
        raise ValueError(f"{option} must not be empty")
    return check_name(value, option)


def _concurrency(value: Any, option: str) -> int | None:
    return None if value is None else check_count(value, option, "at least 1", 1)


#: Each gives the option's value back, or raises with its name.
_CHECKS: dict[str, Callable[[Any, str], Any]] = {
    "name": _name,
    "num_cpus": check_amount,
    "num_gpus": lambda value, option: check_gpus(value, option) or 0,
    "max_concurrency": _concurrency,
    "max_restarts": check_most,
    "max_task_retries": lambda value, option: 0 if value is None else check_most(value, option),
    "enable_tensor_transport": lambda value, option: value is None or check_flag(value, option),
    "env_vars": check_env_vars,
    "get_if_exists": check_flag,
}
