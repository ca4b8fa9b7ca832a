"""What an actor of ours asks of Ray: resources, a place, an environment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from conveyor.runtime.protocol import ProcessOptions


def ray_options(options: ProcessOptions) -> dict[str, Any]:
    """The options of the Ray actor for one of ours.

    It has no name, as ours are found by ``conveyor.get_actor``, and is not restarted by Ray: a process that
    Ray starts again would know nobody. Restarts are ours, each with a Ray actor of its own.
    """
    asked = dict(options.placement)
    if options.num_cpus is not None:
        asked["num_cpus"] = options.num_cpus
    if options.num_gpus:
        asked["num_gpus"] = options.num_gpus
    if options.env_vars:
        # Ray has the process started with them: the linker and the interpreter read some before anything of
        # ours runs.
        asked["runtime_env"] = {**asked.get("runtime_env", {}), "env_vars": options.env_vars}
    return asked


def start(made: Any, asked: Mapping[str, Any], name: str) -> Any:
    """The handle of an actor of Ray's class ``made``. ``TypeError`` or ``ValueError`` if Ray does not take
    what is ``asked`` for it; some of that it finds by an assertion without a word."""
    try:
        return made.options(**asked).remote()
    except (TypeError, ValueError, AttributeError, LookupError, AssertionError) as error:
        kind = TypeError if isinstance(error, (TypeError, AttributeError)) else ValueError
        given = ", ".join(f"{key}={value!r}" for key, value in asked.items())
        why = str(error) or f"{type(error).__name__} in Ray"
        raise kind(f"Ray takes no actor {name!r} with {given}: {why}") from error


def wanted(asked: Mapping[str, Any]) -> str:
    """What it waits for, in words."""
    parts = {
        key: asked[key]
        for key in (
            "num_cpus",
            "num_gpus",
            "memory",
            "resources",
            "accelerator_type",
            "label_selector",
        )
        if asked.get(key)
    }
    text = ", ".join(f"{key}={value!r}" for key, value in parts.items()) or "a process"
    strategy = asked.get("scheduling_strategy") or asked.get("placement_group")
    return text if strategy is None else f"{text}, where {strategy!r} says"


#: What Ray calls amounts that have an option of their own.
_NAMES = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
#: Options by which a node may be none for an actor that has all that it wants.
_CHOOSE = (
    "accelerator_type",
    "fallback_strategy",
    "label_selector",
    "placement_group",
    "scheduling_strategy",
)


def is_free(asked: Mapping[str, Any], nodes: Iterable[Mapping[str, float]]) -> bool:
    """Whether one of the nodes, by what is free there, has all that is wanted."""
    if any(asked.get(option) for option in _CHOOSE):
        return False  # that is Ray's to say
    amounts = {name: asked.get(option) or 0 for option, name in _NAMES.items()}
    amounts.update(asked.get("resources") or {})
    return any(
        all(free.get(name, 0) >= amount for name, amount in amounts.items()) for free in nodes
    )


def still_waits(ray: Any, asked: Mapping[str, Any]) -> str:
    """What an actor waits for that has been asked for some time ago, in words."""
    by_node: dict[str, dict[str, float]] = ray._private.state.available_resources_per_node()
    if is_free(asked, by_node.values()):
        logs = ray._private.worker.global_worker.node.get_logs_dir_path()
        return (
            f"all that it wants is free ({wanted(asked)}), so Ray makes its environment, or starts its "
            f"process. Where that fails Ray tries again, and says why in its logs on that node only: "
            f"{logs}, raylet.out, worker-*.err and runtime_env_setup-*.log"
        )
    return f"Ray has to place it, and it wants {wanted(asked)}; available are {ray.available_resources()}"
