"""Facts about the machine and the software, written beside every result."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("conveyor", "ray", "pyzmq", "numpy", "torch")
ROOT = Path(__file__).resolve().parent.parent


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "CPU part")):
            return line.partition(":")[2].strip()
    return platform.machine()


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def _cgroup_cpu() -> str:
    try:
        return Path("/sys/fs/cgroup/cpu.max").read_text().strip()
    except OSError:
        return "unknown"


def _commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip() or "none"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def facts() -> dict[str, object]:
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "commit": _commit(),
        "cpu": _cpu_model(),
        "cores": sorted(os.sched_getaffinity(0)),
        "cgroup_cpu_max": _cgroup_cpu(),
        "memory_gib": round(_memory_gib(), 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "versions": {package: _version(package) for package in PACKAGES},
    }
