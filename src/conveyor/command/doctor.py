"""``conveyor doctor``: what a session uses of this system, and what is slower or impossible without it.

Nothing is started and no optional package is imported: their versions are read from what is installed.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from conveyor import __version__, _core
from conveyor.direct.store import let_session_read
from conveyor.engines.local.resources import visible_gpus
from conveyor.observe.units import size
from conveyor.runtime.process import arena_size, memory_groups, memory_limit, read_text
from conveyor.system_limits import cores, descriptor_limits
from conveyor.transport.network_interfaces import rdma_ports

_PAGES = "sys/kernel/mm/transparent_hugepage"
_YAMA = "proc/sys/kernel/yama/ptrace_scope"
_NVIDIA = "proc/driver/nvidia/version"
#: Descriptors of the driver for each actor.
_OF_AN_ACTOR = 7
#: Fewer are met by small sessions already.
_FEW_DESCRIPTORS, _FEW_PROCESSES, _LITTLE_MEMORY = 1024, 512, 256 << 20

#: Optional packages: the names under which each is installed, and what needs it.
_PACKAGES = {
    "numpy": (("numpy",), "arrays in values"),
    "torch": (("torch",), "tensors in values, the transports gloo and nccl"),
    "nixl": (("nixl", "nixl-cu12", "nixl-cu13"), "the transport nixl"),
    "ray": (("ray",), 'engine="ray"'),
}


class Finding(NamedTuple):
    """Finding about one part of the system. trouble: the thing that is slower or impossible in this state;
    empty if nothing is."""

    part: str
    found: str
    trouble: str = ""


def show() -> int:
    """Print a line for each part; the exit status of the command, which is 0 whatever is found."""
    findings = list(examine())
    print(f"conveyor {__version__}; lines with ! say what is slower or impossible here")
    for part, found, trouble in findings:
        print(f"{'!' if trouble else ' '} {part:<14} {found}{': ' if trouble else ''}{trouble}")
    return 0


def examine(root: str = "/") -> Iterator[Finding]:
    """Look at each part of the system. ``root``: where ``proc`` and ``sys`` are."""
    release = os.uname().release
    yield Finding("kernel", f"Linux {release} on {platform.machine()}")
    yield _memory_files()
    yield _futex_waitv(_core.DeathWatch.supported())
    yield _huge_pages(root, release)
    yield _peer_memory(root, let_session_read(is_driver=True))
    yield _open_files(*descriptor_limits())
    yield _processes(root)
    yield _locked_memory()
    try:
        arena = arena_size()
    except (TypeError, ValueError) as error:
        yield Finding("settings", "CONVEYOR_ARENA_BYTES", str(error))
        arena = arena_size(memory_limit(root) // 2)
    yield _addresses(arena.file)
    yield _memory(root, arena.cap)
    yield _cores(root, cores())
    yield _python()
    for name, (distributions, needed_for) in _PACKAGES.items():
        yield Finding(name, _version(distributions) or f"not installed ({needed_for})")
    yield _gpus(root)
    py_spy = shutil.which("py-spy")
    yield Finding(
        "py-spy", py_spy or "not installed (stacks of actors in `conveyor status --stacks`)"
    )


def _memory_files() -> Finding:
    try:
        os.close(_core.memory_file("conveyor-doctor"))
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        trouble = "no session can start; memfd_create and pidfd_open (Linux 5.3) must be allowed"
        return Finding("memory files", f"refused ({error.strerror})", trouble)
    return Finding("memory files", "memfd_create and pidfd_open work")


def _futex_waitv(available: bool) -> Finding:
    if available:
        return Finding("futex_waitv", "works: deaths are known at once")
    trouble = "deaths are known once the process has been reaped; needs Linux 5.16, and the container's leave"
    return Finding("futex_waitv", "refused", trouble)


def _huge_pages(root: str, release: str) -> Finding:
    modes = [_chosen(_read(root, f"{_PAGES}/{name}")) for name in ("enabled", "shmem_enabled")]
    found = f"enabled={modes[0]}, shmem_enabled={modes[1]}"
    off = re.search(r"^THP_enabled:\s*0$", _read(root, "proc/self/status"), re.MULTILINE)
    if off or modes[0] == "absent":
        return Finding(
            "huge pages",
            found,
            "there are none for this process: fetches and new memory are slower",
        )
    if _release(release) < (6, 1):
        return Finding(
            "huge pages",
            found,
            "new shared memory is made of small pages: 64 MiB take 50 ms, not 4 (Linux 6.1)",
        )
    if modes[0] == "never":
        return Finding(
            "huge pages",
            found,
            "many small tensors are fetched in twice the time; set it to madvise",
        )
    return Finding(
        "huge pages", f"{found}; new shared memory has them whatever these say (Linux 6.1)"
    )


def _peer_memory(root: str, available: bool) -> Finding:
    found = f"ptrace_scope={_read(root, _YAMA).strip() or 'absent'}"
    if available:
        return Finding(
            "peers' memory", f"{found}; processes may read each other's (process_vm_readv)"
        )
    trouble = "processes may not read each other's (process_vm_readv): direct objects travel as other values"
    return Finding("peers' memory", found, trouble)


def _open_files(soft: int, reachable: int) -> Finding:
    found = f"{soft:,}, and {reachable:,} in a session: some {reachable // _OF_AN_ACTOR:,} actors"
    few = "raise the hard limit (ulimit -Hn, LimitNOFILE=)" if reachable < _FEW_DESCRIPTORS else ""
    return Finding("open files", found, few)


def _processes(root: str) -> Finding:
    limits = [_limit(resource.RLIMIT_NPROC), *_of_groups(root, "pids.max")]
    least = min((limit for limit in limits if limit is not None), default=None)
    if least is None:
        return Finding("processes", "any number, threads included")
    few = "raise it (ulimit -u, pids.max of the container)" if least < _FEW_PROCESSES else ""
    return Finding("processes", f"{least:,}, threads included", few)


def _addresses(needed: int) -> Finding:
    limits = {"ulimit -v": _limit(resource.RLIMIT_AS), "ulimit -f": _limit(resource.RLIMIT_FSIZE)}
    low = [
        f"{size(limit)} ({name})"
        for name, limit in limits.items()
        if limit is not None and limit < needed
    ]
    if not low:
        return Finding("addresses", "enough, and files in memory may be as large as they need")
    trouble = f"each process's memory for values takes {size(needed)} of these; raise it"
    return Finding("addresses", ", ".join(low), trouble)


def _locked_memory() -> Finding:
    limit = _limit(resource.RLIMIT_MEMLOCK)
    if limit is None:
        return Finding("locked memory", "any amount")
    if ports := rdma_ports():
        trouble = f"what nixl registers for RDMA ({', '.join(ports)}) counts; raise it (ulimit -l)"
        return Finding("locked memory", size(limit), trouble)
    return Finding("locked memory", f"{size(limit)}; only RDMA would need more")


def _memory(root: str, cap: int) -> Finding:
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = memory_limit(root)
    of_group = f", of which the control group allows {size(limit)}" if limit < machine else ""
    little = "large values do not fit; see CONVEYOR_ARENA_BYTES" if cap < _LITTLE_MEMORY else ""
    return Finding(
        "memory", f"{size(machine)}{of_group}; {size(cap)} for a session's values", little
    )


def _cores(root: str, usable: int) -> Finding:
    found = f"{usable} of {os.cpu_count()}"
    quota = min((share for share in _quotas(root) if share < usable), default=None)
    if quota is not None:
        trouble = (
            "processes that wait use it up by spinning: set CONVEYOR_SPIN_US=0" if quota < 1 else ""
        )
        return Finding("cores", f"{found}, with processor time of {quota:g}", trouble)
    if usable == 1:
        return Finding(
            "cores", found, "each hop has to switch processes, which takes twice the time"
        )
    return Finding("cores", found)


def _python() -> Finding:
    found = f"{platform.python_version()} ({platform.python_implementation()})"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return Finding(
            "python", f"{found}, free-threaded", "the import of conveyor turns the GIL on"
        )
    if _core.DEBUG:
        return Finding(
            "python", found, "the native module has its asserts, and is slower (make build)"
        )
    return Finding("python", found)


def _gpus(root: str) -> Finding:
    driver = re.search(r"\b\d+\.\d+(\.\d+)?\b", _read(root, _NVIDIA))
    if driver is None:
        return Finding("gpus", "no driver of NVIDIA's (tensors of GPUs)")
    return Finding("gpus", f"{len(visible_gpus())} that CUDA may see, driver {driver[0]}")


def _read(root: str, path: str) -> str:
    """Return the text of a small file, or nothing if this kernel has none."""
    with suppress(OSError):
        return read_text(os.path.join(root, path))
    return ""


def _chosen(modes: str) -> str:
    """Return which of the kernel's modes is in brackets."""
    chosen = re.search(r"\[(\w+)\]", modes)
    return chosen[1] if chosen else "absent"


def _release(text: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _limit(kind: int) -> int | None:
    """Return a soft limit of this process, or None if there is none."""
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _of_groups(root: str, name: str) -> Iterator[int]:
    """Yield a limit of each control group around this process that has it."""
    for group in memory_groups(root):
        text = _read(group, name).strip()
        if text.isdigit():  # else "max"
            yield int(text)


def _quotas(root: str) -> Iterator[float]:
    """Yield how many cores' time each control group around this process allows."""
    for group in memory_groups(root):
        if quota := re.match(r"(\d+) (\d+)", _read(group, "cpu.max")):
            yield int(quota[1]) / int(quota[2])


def _version(distributions: tuple[str, ...]) -> str:
    """Return the version of the first of these that is installed, or nothing."""
    for name in distributions:
        with suppress(PackageNotFoundError):
            return version(name)
    return ""
