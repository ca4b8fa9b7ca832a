"""Python stacks of actors, as py-spy sees them from outside."""

from __future__ import annotations

import os
import sys

_TIMEOUT = 10.0


def stack_of(pid: int) -> str:
    """Return the Python stack of every thread of the process, or in brackets why there is none."""
    # Imported here: they are slow to import, and rarely needed.
    import shutil
    import subprocess

    program = shutil.which("py-spy") or shutil.which("py-spy", path=os.path.dirname(sys.executable))
    if program is None:
        return "[no stack: py-spy is not installed; pip install py-spy]"
    try:
        # Without stopping the process: it may be stopped already, or in the middle of a hop.
        done = subprocess.run(
            [program, "dump", "--nonblocking", "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"[no stack: py-spy has not answered for {_TIMEOUT:g} s]"
    except OSError as error:
        return f"[no stack: py-spy cannot be run: {error}]"
    if done.returncode == 0:
        return done.stdout.strip()
    why = done.stderr.strip() or f"it ended with code {done.returncode}"
    if "ermission" in why:
        why += "; the kernel lets only root or a parent look (kernel.yama.ptrace_scope)"
    return f"[no stack: py-spy says: {why}]"
