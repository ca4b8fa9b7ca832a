"""Options of Ray that have no effect, here or on one machine: accepted, with one warning that says so."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from conveyor.callers import users_level
from conveyor.exceptions import ConveyorWarning

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
ACTOR_OPTIONS = {
    "allow_out_of_order_execution": "calls of one caller begin in their order",
    "enable_task_events": "graph.trace() shows what actors run",
    "lifetime": "an actor with a name lives until the session ends or it is killed, and none lives longer",
    "max_pending_calls": "calls beyond the mailbox wait in the caller's process",
    "namespace": "names belong to the session",
}

#: Options of methods.
METHOD_OPTIONS = {
    "concurrency_group": "max_concurrency is one limit for all methods of an actor",
    "enable_task_events": ACTOR_OPTIONS["enable_task_events"],
}

#: Options of functions.
FUNCTION_OPTIONS = {
    **ACTOR_OPTIONS,
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
