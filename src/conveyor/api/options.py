"""Options of actors, functions, methods and sessions: their types, their checks, and those without effect.

The engines check theirs themselves, too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from msgspec import Struct, field
from msgspec.structs import replace

from conveyor.api.retries import check_most
from conveyor.checks import (
    check_amount,
    check_count,
    check_env_vars,
    check_flag,
    check_gpus,
    check_name,
)
from conveyor.dag.hints import known_transports
from conveyor.exceptions import ConveyorWarning
from conveyor.later import LaterModule, import_later
from conveyor.user_frames import users_level

# Rarely needed.
managers: Any = LaterModule("conveyor.direct.managers.registry")

#: Options of actors that say where one is to be, which only an engine with several nodes can use.
PLACEMENT_OPTIONS = {
    "accelerator_type": "all GPUs are this machine's; num_gpus chooses how many",
    "fallback_strategy": "there is one node",
    "label_selector": "there is one node",
    "memory": "nothing is reserved; a cgroup limits memory",
    "object_store_memory": "memory is the session's, see init()",
    "placement_group": "there is one node",
    "placement_group_bundle_index": "there is one node",
    "placement_group_capture_child_tasks": "there is one node",
    "resources": "nothing is reserved",
    "scheduling_strategy": "there is one node",
}

#: Options of actors and functions, and what each would mean.
ACTOR_OPTIONS_WITHOUT_EFFECT = {
    "allow_out_of_order_execution": "calls of one caller begin in their order",
    "enable_task_events": "graph.trace() shows what actors run",
    "lifetime": "an actor with a name lives until the session ends or it is killed, and none lives longer",
    "max_pending_calls": "calls beyond the mailbox wait in the caller's process",
    "namespace": "names belong to the session",
}

#: Options of methods.
METHOD_OPTIONS = {
    "concurrency_group": "max_concurrency is one limit for all methods of an actor",
    "enable_task_events": ACTOR_OPTIONS_WITHOUT_EFFECT["enable_task_events"],
}

#: Options of functions.
FUNCTION_OPTIONS_WITHOUT_EFFECT = {
    **ACTOR_OPTIONS_WITHOUT_EFFECT,
    **PLACEMENT_OPTIONS,
    "enable_tensor_transport": "what a function returns does not stay with its worker",
    "max_calls": "a worker runs any number of functions",
    "max_task_retries": "a function has no actor that could be started again",
    "max_retries": "a call that fails with ActorDiedError is to be made again by who made it",
    "retry_exceptions": "a call that fails is to be made again by who made it",
}

#: Options of ``init``.
INIT_OPTIONS = {
    "configure_logging": "the log is Python's own, named 'conveyor'",
    "dashboard_host": "there is no dashboard; graph.status() and conveyor.observe show a session",
    "dashboard_port": "there is no dashboard; graph.status() and conveyor.observe show a session",
    "include_dashboard": "there is no dashboard; graph.status() and conveyor.observe show a session",
    "job_config": "there are no jobs",
    "labels": "there is one node",
    "logging_config": "the log is Python's own, named 'conveyor'",
    "logging_format": "the log is Python's own, named 'conveyor'",
    "logging_level": "the log is Python's own, named 'conveyor'",
    "namespace": "names belong to the session",
    "num_cpus": "the kernel schedules all actors on all cores",
    "num_gpus": "CUDA_VISIBLE_DEVICES says which GPUs there are",
    "resources": "nothing is reserved",
    "_memory": "nothing is reserved; a cgroup limits memory",
    "_node_ip_address": "there is one node",
    "_system_config": "the settings are those of Config and of the environment",
    "_temp_dir": "nothing is written to files",
}

#: Arguments of ``init`` that mean something to Ray, where it is the engine.
RAYS_INIT_OPTIONS = {*INIT_OPTIONS, "object_store_memory", "runtime_env"}

# Said where nobody would expect anything else.
_SILENT = {
    "configure_logging",
    "enable_tensor_transport",
    "include_dashboard",
    "logging_level",
    "num_cpus",
}

_warned: set[tuple[str, str]] = set()


def take_out(options: dict[str, Any], known: Mapping[str, str], where: str) -> None:
    """Remove ``known`` options from ``options``; one warning for each kind that has a value."""
    for name in [name for name in options if name in known]:
        value = options.pop(name)
        if value in (None, 0, False, {}, []) or name in _SILENT or (where, name) in _warned:
            continue
        _warned.add((where, name))
        text = f"{where} has no use for {name}={value!r}: {known[name]}"
        warnings.warn(text, ConveyorWarning, stacklevel=users_level())


class InitOptions(TypedDict, total=False):
    """Options of ``init`` that depend on the engine; ``init`` says what they mean."""

    arena_bytes: int | None
    env_vars: Mapping[str, str] | None
    preload: Sequence[str] | None
    raise_descriptor_limit: bool
    # with engine="ray"
    address: str | None
    shared_memory: str
    node_timeout: float | None
    tls: bool | Mapping[str, Any] | None
    listen_address: str | None
    listen_ports: tuple[int, int] | None
    # Ray's
    local_mode: bool
    object_store_memory: int | None
    runtime_env: Mapping[str, Any] | None
    configure_logging: Any
    dashboard_host: Any
    dashboard_port: Any
    include_dashboard: Any
    job_config: Any
    labels: Any
    logging_config: Any
    logging_format: Any
    logging_level: Any
    namespace: Any
    num_cpus: Any
    num_gpus: Any
    resources: Any
    _memory: Any
    _node_ip_address: Any
    _system_config: Any
    _temp_dir: Any


class SharedOptions(TypedDict, total=False):
    """Options that actors and functions have in common."""

    num_cpus: float | None
    num_gpus: float | None
    enable_tensor_transport: bool | None
    max_task_retries: int | None
    # Ray's: where the process is to be
    accelerator_type: Any
    fallback_strategy: Any
    label_selector: Any
    memory: Any
    object_store_memory: Any
    placement_group: Any
    placement_group_bundle_index: Any
    placement_group_capture_child_tasks: Any
    resources: Any
    scheduling_strategy: Any
    # Ray's, without an effect
    allow_out_of_order_execution: Any
    enable_task_events: Any
    lifetime: Any
    max_pending_calls: Any
    namespace: Any


class ActorOptionTypes(SharedOptions, total=False):
    """Options of an actor; ``remote`` says what they mean."""

    name: str | None
    max_concurrency: int | None
    max_restarts: int
    env_vars: Mapping[str, str] | None
    get_if_exists: bool
    runtime_env: Mapping[str, Any] | None


class FunctionOptionTypes(SharedOptions, total=False):
    """Options of a function's worker."""

    # Ray's, without an effect
    max_calls: Any
    max_retries: Any
    retry_exceptions: Any


class RemoteOptionTypes(ActorOptionTypes, FunctionOptionTypes, total=False):
    """Options that ``remote`` takes before it is known what is decorated."""


#: Ray's name for a value that does not stay where it was made.
OBJECT_STORE = "object_store"

#: The transport that only graphs know: the communicator that they were compiled with.
_OF_GRAPHS = frozenset(("accelerator",))


def check_transport(value: Any, option: str = "tensor_transport") -> str | None:
    """The transport's name in lower case; ``None`` for a value that travels as any other.

    Raises:
        TypeError: it is no name.
        ValueError: there is no such transport.
    """
    if value is None:
        return None
    if not isinstance(value, str):
        raise TypeError(f"{option} is the name of a transport, not {value!r}")
    name = value.lower()
    if name == OBJECT_STORE:
        return None
    if name not in known_transports or name in _OF_GRAPHS:
        import_later("conveyor.transport.registry")  # it knows more names
        known = known_transports.difference(_OF_GRAPHS)
        for one in known:
            if one.lower() == name:
                return one
        if managers.is_known(name):
            return name
        listed = ", ".join(sorted({*known, OBJECT_STORE}))
        raise ValueError(f"invalid tensor transport: {value!r}; known are {listed}")
    return name


def check_has_transport(actor: Any, name: str) -> None:
    """Raise unless the actor can use a transport, which may be one of the user's own.

    Raises:
        ValueError: it cannot.
    """
    if name not in known_transports:
        managers.check_has_transport(actor, name)


def check_snapshot(snapshot: Any, transport: str | None) -> None:
    """Raise unless ``snapshot`` is true or false, and true only with a transport.

    Raises:
        TypeError: it is neither.
        ValueError: it is true, and the result does not stay where it was made.
    """
    check_flag(snapshot, "snapshot")
    if snapshot and transport is None:
        raise ValueError(
            "snapshot=True is of what stays where it was made: say tensor_transport=, too"
        )


def check_get_options(options: Mapping[str, Any]) -> None:
    """Raise unless all ``options`` are such as Ray's ``get`` takes beside a timeout.

    Raises:
        TypeError: an option that does not exist.
        ValueError: no such transport.
    """
    for name, value in options.items():
        if name == "_tensor_transport":
            check_transport(value, name)
        elif name != "_use_object_store":
            raise TypeError(f"get() got an unexpected keyword argument {name!r}")


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
            ValueError: a value out of range, or ``get_if_exists`` without a name.
        """
        variables, environment = split_runtime_env(options.pop("runtime_env", None))
        if options.pop("concurrency_groups", None):
            raise NotImplementedError(
                "concurrency_groups are not supported: max_concurrency is one limit for all methods of "
                "an actor; put methods with limits of their own into actors of their own"
            )
        take_out(options, ACTOR_OPTIONS_WITHOUT_EFFECT, "an actor")
        placement = {name: options.pop(name) for name in PLACEMENT_OPTIONS if name in options}
        if environment:
            placement["runtime_env"] = environment
        for name in options:
            if name not in _CHECKS:
                rays = ", ".join([*PLACEMENT_OPTIONS, "runtime_env", *ACTOR_OPTIONS_WITHOUT_EFFECT])
                raise TypeError(
                    f"unknown actor option {name!r}; known are {', '.join(_CHECKS)}, and of Ray's {rays}"
                )
        checked = {name: _CHECKS[name](value, name) for name, value in options.items()}
        if variables or "env_vars" in checked:
            checked["env_vars"] = {**variables, **checked.get("env_vars", {})}
        if placement:
            checked["placement"] = {**self.placement, **placement}
        made = replace(self, **checked)
        if made.get_if_exists and made.name is None:
            raise ValueError("get_if_exists looks for an actor by its name: give it a name")
        return made

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
