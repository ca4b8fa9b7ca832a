"""The options an actor can be started with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from conveyor.api.unused import ACTOR_OPTIONS, take_out
from conveyor.checks import check_env_vars


@dataclass(frozen=True, slots=True)
class ActorOptions:
    """Checked options of an actor; ``ActorSpec`` says what they mean."""

    name: str | None = None
    num_cpus: float | None = None
    num_gpus: float = 0
    max_concurrency: int | None = None
    max_restarts: int = 0
    env_vars: Mapping[str, str] = field(default_factory=dict)
    get_if_exists: bool = False

    def updated(self, **options: Any) -> ActorOptions:
        """A copy with ``options`` changed.

        ``runtime_env={"env_vars": ...}`` is Ray's spelling of ``env_vars``. Options of Ray's that have
        nothing to do here are taken with a warning.

        Raises:
            NotImplementedError: ``concurrency_groups``, which would have to mean something.
            TypeError: an option that does not exist, or a value of the wrong type.
            ValueError: a value out of range.
        """
        rays = runtime_env(options.pop("runtime_env", None))
        if options.pop("concurrency_groups", None):
            raise NotImplementedError(
                "concurrency_groups are not supported: max_concurrency is one limit for all methods of "
                "an actor; put methods with limits of their own into actors of their own"
            )
        take_out(options, ACTOR_OPTIONS, "an actor")
        for name, value in options.items():
            if name not in _CHECKS:
                raise TypeError(f"unknown actor option {name!r}; known are {', '.join(_CHECKS)}")
            _CHECKS[name](name, value)
        if rays or "env_vars" in options:
            options["env_vars"] = {**rays, **(options.get("env_vars") or {})}
        if "num_gpus" in options:
            options["num_gpus"] = options["num_gpus"] or 0
        return replace(self, **options)


def runtime_env(value: Any) -> Mapping[str, str]:
    """The environment variables in Ray's ``runtime_env``, which may hold nothing else.

    Raises:
        TypeError: it is no dict, or holds something else.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"runtime_env must be a dict, not {type(value).__name__}")
    for key in value:
        if key != "env_vars":
            raise TypeError(
                f"runtime_env[{key!r}] is not supported, only 'env_vars' is: actors run in the "
                f"driver's environment"
            )
    env_vars = value.get("env_vars") or {}
    return check_env_vars(env_vars, "runtime_env['env_vars']")


def _check_name(option: str, value: Any) -> None:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{option} must be a str, not {type(value).__name__}")
    if value == "":
        raise ValueError(f"{option} must not be empty")


def _check_flag(option: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{option} must be True or False, not {value!r}")


def _check_amount(option: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{option} must be a number, not {type(value).__name__}")
    if not 0 <= value < float("inf"):
        raise ValueError(f"{option} must be a number from 0 up, not {value!r}")


def _check_count(option: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{option} must be an integer, not {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{option} must be at least 1, not {value}")


def _check_restarts(option: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{option} must be an integer, not {type(value).__name__}")
    if value < -1:
        raise ValueError(f"{option} must be -1 (no limit), 0 (never) or more, not {value}")


_CHECKS: dict[str, Callable[[str, Any], object]] = {
    "name": _check_name,
    "num_cpus": _check_amount,
    "num_gpus": _check_amount,
    "max_concurrency": _check_count,
    "max_restarts": _check_restarts,
    "env_vars": lambda option, value: check_env_vars(value, option),
    "get_if_exists": _check_flag,
}
