"""The floor: pickled values over the ring of ``ring.cpp``, between bare forked processes."""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sysconfig
import tempfile
from pathlib import Path as File
from types import ModuleType
from typing import Any

from benchmarks.systems.forked import ForkedSystem, Link, Receive, Send

PREBUILT = "CONVEYOR_BENCHMARKS_RING"


def build(folder: File) -> File:
    """Compile the extension into ``folder``."""
    target = folder / "ring.so"
    include = sysconfig.get_paths()["include"]
    source = File(__file__).with_name("ring.cpp")
    command = ["g++", "-O2", "-std=c++20", "-shared", "-fPIC", f"-I{include}"]
    done = subprocess.run(
        [*command, str(source), "-o", str(target)], check=False, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"g++ failed: {done.stderr.strip()[-300:]}")
    return target


def _load() -> ModuleType:
    prebuilt = os.environ.get(PREBUILT)
    library = File(prebuilt) if prebuilt else build(File(tempfile.mkdtemp()))
    spec = importlib.util.spec_from_file_location("ring", library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class RingLink(Link):
    def __init__(self, link: Any) -> None:
        self._link = link

    def sender(self) -> Send:
        put, dumps = self._link.send, pickle.dumps

        def send(value: Any) -> None:
            put(dumps(value, 5))

        return send

    def receiver(self) -> Receive:
        take, loads = self._link.receive, pickle.loads

        def receive() -> Any:
            return loads(take())

        return receive


class FloorSystem(ForkedSystem):
    name = "floor"

    def open(self) -> None:
        self._ring = _load()

    def link(self) -> Link:
        return RingLink(self._ring.Link())
