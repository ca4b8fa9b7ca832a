"""Faults of processes that are no actors: the driver and its fork server."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence

from chaos_faults import Fault
from chaos_forks import Children


class Elsewhere:
    """``server``: the fork server's pid. ``held``: arrays of the driver, with their checksums."""

    def __init__(self, server: int, held: Callable[[], Sequence[tuple[object, int]]]) -> None:
        self.server = server
        self._held = held
        self.children = Children()

    def do(self, fault: Fault) -> None:
        if fault.kind == "driver stopped":
            _stop_the_driver(fault.pause)
        elif fault.kind == "fork server stopped":
            self._stop_the_server(fault.pause)
        else:
            wait = fault.kind == "driver forks and waits"
            self.children.fork(self._held(), fault.pause, wait, "by the driver")

    def _stop_the_server(self, seconds: float) -> None:
        os.kill(self.server, signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            os.kill(self.server, signal.SIGCONT)


def _stop_the_driver(seconds: float) -> None:
    """By somebody else, who also lets it go on."""
    if os.isatty(0) and os.getpgrp() == os.getpid():
        return  # the shell that it is a job of would take it for suspended
    driver = os.getpid()
    script = f"kill -STOP {driver}; sleep {seconds}; kill -CONT {driver}"
    subprocess.run(["/bin/sh", "-c", script], check=True, stdin=subprocess.DEVNULL)
