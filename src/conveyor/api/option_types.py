"""Types of the options that ``init``, ``remote`` and ``options`` take by name, for type checkers and editors.

What checks the options at run time is in ``api.options``, ``api.unused`` and the engines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict


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
