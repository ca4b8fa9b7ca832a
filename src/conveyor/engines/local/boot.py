"""Executing the fork server."""

from __future__ import annotations

import marshal
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from conveyor import descriptors
from conveyor.engines.local.tunables import with_huge_heap

# On one line, and short: until the server sets its title this is what `ps` shows.
_BOOTSTRAP = (
    "import sys, marshal; f = open(0, 'rb', closefd=False); f.seek(0); setup = marshal.load(f); "
    "sys.path[:] = setup['path']; from conveyor.engines.local.server import main; main(setup)"
)


# A process group of its own: Ctrl-C in the terminal is the driver's affair. Not a session of its own:
# the kernel's autogroup scheduling would give the driver as much of a core as all actors together.
_OWN_GROUP: dict[str, Any] = (
    {"process_group": 0} if sys.version_info >= (3, 11) else {"preexec_fn": os.setpgrp}
)


class ForkServer(Struct, frozen=True):
    """Fork server, with the driver's ends of its connections. ``log``: what the server prints itself."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    log: int
    pidfd: int

    def kill(self) -> None:
        """Kill the server, and close the driver's ends."""
        self.process.kill()
        self.process.wait()
        self.control.close()
        os.close(self.log)
        os.close(self.pidfd)


def execute(preload: Sequence[str], wanted: Sequence[str]) -> ForkServer:
    """Start a fork server that will import ``preload`` and ``wanted``. Does not wait until it has."""
    control, theirs = descriptors.socket_pair()
    kept: list[int] = []
    passed = [theirs.detach()]
    process: subprocess.Popen[bytes] | None = None
    try:
        # A pidfd of ourselves, opened by ourselves: there is no moment at which it could mean
        # another process, and it stands for the process, not for the thread that runs this.
        passed.append(descriptors.own(os.pidfd_open(os.getpid())))
        passed.append(descriptors.memory_file("conveyor-setup"))
        log, log_writer = map(descriptors.own, os.pipe())
        kept.append(log)
        passed.append(log_writer)
        os.set_blocking(log, False)
        import_path: list[object] = list(sys.path)
        setup = {
            "path": [str(entry) for entry in import_path if isinstance(entry, str)],
            "control": passed[0],
            "driver": passed[1],
            "preload": list(preload),
            "wanted": list(wanted),
        }
        with open(passed[2], "wb", closefd=False) as file:
            marshal.dump(setup, file)
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        process = subprocess.Popen(
            [sys.executable, *flags, "-c", _BOOTSTRAP],
            stdin=passed[2],
            stdout=log_writer,
            stderr=log_writer,
            pass_fds=passed[:2],
            env=with_huge_heap(os.environ),
            **_OWN_GROUP,
        )
        return ForkServer(process, control, log, descriptors.own(os.pidfd_open(process.pid)))
    except BaseException:
        if process is not None:
            process.kill()
            process.wait()
        control.close()
        for fd in kept:
            os.close(fd)
        raise
    finally:
        for fd in passed:
            os.close(fd)
