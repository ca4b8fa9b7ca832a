"""The floors' native parts: compiled once for a run, loaded by each process of cases."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

PREBUILT = "CONVEYOR_BENCHMARKS_FLOORS"
NAMES = ("ring", "pull")


def build(folder: Path) -> Path:
    """Compile the extensions into ``folder``, which is returned."""
    include = sysconfig.get_paths()["include"]
    for name in NAMES:
        source = Path(__file__).with_name(f"{name}.cpp")
        command = ["g++", "-O2", "-std=c++20", "-shared", "-fPIC", f"-I{include}"]
        done = subprocess.run(
            [*command, str(source), "-o", str(folder / f"{name}.so")],
            check=False,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"g++ failed: {done.stderr.strip()[-300:]}")
    return folder


def load(name: str) -> ModuleType:
    prebuilt = os.environ.get(PREBUILT)
    folder = Path(prebuilt) if prebuilt else build(Path(tempfile.mkdtemp()))
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.so")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
