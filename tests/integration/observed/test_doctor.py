"""`conveyor doctor`: what this system has, and what is slower or impossible on it."""

import os
import resource
import subprocess
import sys

import numpy as np

import conveyor
from conveyor.command.doctor import examine


def command(*arguments, limits=(), **environment):
    def limit():
        for kind, value in limits:
            resource.setrlimit(kind, (value, value))

    done = subprocess.run(
        [sys.executable, "-m", "conveyor", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
        preexec_fn=limit,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def doctor(**options):
    """What is said of each part, and which parts are marked."""
    head, *lines = command("doctor", **options).splitlines()
    assert head.startswith(f"conveyor {conveyor.__version__};")
    said = {line[2:16].strip(): line[17:] for line in lines}
    return said, {line[2:16].strip() for line in lines if line[0] == "!"}


def on(root, files):
    """What is said on a system that has these files below ``root``, in whose empty memory group we are."""
    for path, text in {"proc/self/cgroup": "0::/\n", **files}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return {finding.part: finding for finding in examine(str(root))}


def test_the_version():
    assert command("--version") == f"conveyor {conveyor.__version__}\n"


def test_each_part_has_a_line():
    said, _ = doctor()
    assert os.uname().release in said["kernel"]
    assert said["numpy"] == np.__version__
    assert str(len(os.sched_getaffinity(0))) in said["cores"]
    assert {
        "memory files",
        "futex_waitv",
        "huge pages",
        "peers' memory",
        "memory",
        "python",
    } <= said.keys()
    assert {"torch", "nixl", "ray", "gpus", "py-spy", "processes", "locked memory"} <= said.keys()


def test_low_limits_are_marked():
    limits = [
        (resource.RLIMIT_NOFILE, 100),
        (resource.RLIMIT_NPROC, 100),
        (resource.RLIMIT_FSIZE, 1 << 20),
    ]
    said, marked = doctor(limits=limits)
    assert {"open files", "processes", "addresses"} <= marked
    assert "some 14 actors" in said["open files"]
    assert "ulimit -f" in said["addresses"]


def test_little_memory_is_marked():
    said, marked = doctor(CONVEYOR_ARENA_BYTES=str(1 << 20))
    assert "memory" in marked
    assert "1.00 MiB for a session's values" in said["memory"]


def test_a_setting_that_is_none_is_said():
    said, marked = doctor(CONVEYOR_ARENA_BYTES="much")
    assert "settings" in marked
    assert "CONVEYOR_ARENA_BYTES" in said["settings"]
    assert "a session's values" in said["memory"]


def test_a_control_group_that_allows_little(tmp_path):
    group = "sys/fs/cgroup/"
    said = on(
        tmp_path,
        {
            f"{group}memory.max": "104857600\n",
            f"{group}pids.max": "30\n",
            f"{group}cpu.max": "50000 100000\n",
        },
    )
    assert "allows 100 MiB" in said["memory"].found
    assert said["processes"].found.startswith("30")
    assert said["processes"].trouble
    assert "of 0.5" in said["cores"].found
    assert "CONVEYOR_SPIN_US" in said["cores"].trouble


def test_huge_pages(tmp_path):
    folder = "sys/kernel/mm/transparent_hugepage/"
    modes = {f"{folder}shmem_enabled": "always [never]\n"}
    assert on(tmp_path, {})["huge pages"].trouble
    said = on(tmp_path, {**modes, f"{folder}enabled": "always madvise [never]\n"})["huge pages"]
    assert said.trouble
    assert said.found.startswith("enabled=never, shmem_enabled=never")
    good = {**modes, f"{folder}enabled": "always [madvise] never\n"}
    assert on(tmp_path, {**good, "proc/self/status": "THP_enabled:\t0\n"})["huge pages"].trouble


def test_gpus(tmp_path):
    assert "no driver" in on(tmp_path, {})["gpus"].found
    version = (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 1 00:00:00 UTC 2026\n"
    )
    assert "570.86.15" in on(tmp_path, {"proc/driver/nvidia/version": version})["gpus"].found
