"""Telling the injector which process is to fail which call."""

import ctypes
import mmap
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from contextlib import contextmanager
from pathlib import Path

NOBODY, PID, NEWCOMERS = 0, 1, 2
SYSTEM_CALLS, ALLOCATIONS = 1, 2
_OLD, _RANGES = 6, 200


class _Layout(ctypes.Structure):
    """As in injector.cpp."""

    _fields_ = (
        ("who", ctypes.c_uint32),
        ("pid", ctypes.c_uint32),
        ("old", ctypes.c_uint32 * _OLD),
        ("fail", ctypes.c_uint64),
        ("seen", ctypes.c_uint64),
        ("failed", ctypes.c_uint32),
        ("calls", ctypes.c_uint32),
        ("what", ctypes.c_char * 48),
        ("spared", ctypes.c_uint64),
        ("spare", ctypes.c_uint64 * (2 * _RANGES)),
    )


def _nanobind():
    """Where nanobind's code lies in the native module, as the linker has noted it."""
    root = Path(__file__).parents[2]
    text = (root / "build" / f"editable-{sys.implementation.cache_tag}" / "_core.map").read_text()
    found = []
    pattern = r"^ \.text\S*\s+0x([0-9a-f]+)\s+0x([0-9a-f]+)\s+\S*libnanobind[^\n]*$"
    for at, size in re.findall(pattern, text, re.MULTILINE):
        start, end = int(at, 16), int(at, 16) + int(size, 16)
        if start != 0 and end > start:
            found.append((start, end))
    merged = []
    for start, end in sorted(found):
        if merged and start - merged[-1][1] < 32:  # padding
            merged[-1][1] = end
        else:
            merged.append([start, end])
    assert 0 < len(merged) <= _RANGES, f"{len(merged)} ranges of nanobind in the linker's map"
    return merged


def build(folder):
    """Compile the injector; the environment of a program that is to be under it."""
    compiler = os.environ.get("CXX") or (sysconfig.get_config_var("CXX") or "c++").split()[0]
    compiler = shutil.which(compiler) or shutil.which("c++")
    library, control = Path(folder, "injector.so"), Path(folder, "control")
    source = Path(__file__).with_name("injector.cpp")
    subprocess.run(
        [
            compiler,
            "-std=c++20",
            "-O1",
            "-g",
            "-fPIC",
            "-shared",
            "-D_GNU_SOURCE",
            source,
            "-o",
            library,
            "-ldl",
        ],
        check=True,
    )
    control.write_bytes(bytes(4096))
    with open(control, "r+b") as file:
        words = _Layout.from_buffer(mmap.mmap(file.fileno(), 4096))
        ranges = _nanobind()
        words.spared = len(ranges)
        words.spare[: 2 * len(ranges)] = [word for one in ranges for word in one]
    return {"LD_PRELOAD": str(library), "CONVEYOR_FAULTS": str(control)}


class Control:
    """This program's injector, and that of every process it starts."""

    def __init__(self, path=None):
        with open(path or os.environ["CONVEYOR_FAULTS"], "r+b") as file:
            self._words = _Layout.from_buffer(mmap.mmap(file.fileno(), 4096))

    @contextmanager
    def armed(self, number, calls, pid=None, old=()):
        """Fail call ``number`` (from 1) of process ``pid``, or of all processes that are not in ``old``."""
        words = self._words
        words.failed, words.seen, words.fail, words.calls, words.what = 0, 0, number, calls, b""
        if pid is None:
            words.old[:] = [*old, *[0] * (_OLD - len(old))]
        else:
            words.pid = pid
        words.who = NEWCOMERS if pid is None else PID
        try:
            yield
        finally:
            words.who = NOBODY

    @property
    def failed(self):
        """What was failed since it was armed last; empty if there were fewer calls."""
        return self._words.what.decode() if self._words.failed else ""

    @property
    def number(self):
        """Which call is failed, or was last."""
        return self._words.fail
