"""A local Ray of its own for one process of cases, and actors in it."""

from __future__ import annotations

import os
import tempfile
from typing import Any

# Read when ray is imported. Ray's own deadlines are out of the way: the cases have theirs.
os.environ.update(
    RAY_USAGE_STATS_ENABLED="0",
    RAY_AUTH_MODE="disabled",
    RAY_DEDUP_LOGS="0",
    RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
    RAY_CGRAPH_submit_timeout="3600",
    RAY_CGRAPH_get_timeout="3600",
)

import ray
import ray.dag

# Large enough for ten buffers of 64 MB in both directions; the memory is not taken in advance.
OBJECT_STORE_BYTES = 4 << 30


class RayCluster:
    """Mixed into the systems that run on Ray."""

    api = ray
    package = "ray"
    startup_s = 90.0

    def open(self) -> None:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        ray.init(
            address="local",
            num_cpus=2,  # Ray starts as many idle workers in advance; actors reserve none
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=min(OBJECT_STORE_BYTES, memory // 4),
            _temp_dir=tempfile.mkdtemp(),
        )

    def close(self) -> None:
        ray.shutdown()

    def spawn(self, cls: type, *args: Any, **options: Any) -> Any:
        return ray.remote(cls).options(num_cpus=0, **options).remote(*args)
