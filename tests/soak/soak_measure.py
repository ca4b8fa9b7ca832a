"""Memory of processes, and how fast this machine is just now."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence


def resident(pids: list[int]) -> int:
    """Bytes that these processes have in memory, what they share counted once. Without pages of
    files: how much of a library counts as theirs depends on who else on this machine has loaded it."""
    total = 0
    for pid in pids:
        with open(f"/proc/{pid}/smaps_rollup") as rollup:
            for line in rollup:
                if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                    total += int(line.split()[1]) * 1024
    return total


class Floor:
    """What executions are compared with: bytes through two other processes and back, over pipes.
    Nothing of conveyor's, and nearly nothing of Python's."""

    def __init__(self) -> None:
        pipes = [os.pipe() for _ in range(3)]
        self._send, self._receive = pipes[0][1], pipes[2][0]
        self._pids = []
        for number in range(2):
            pid = os.fork()
            if pid == 0:
                keep = {pipes[number][0], pipes[number + 1][1]}
                for end in {end for pipe in pipes for end in pipe} - keep:
                    os.close(end)
                while data := os.read(pipes[number][0], 64):
                    os.write(pipes[number + 1][1], data)
                os._exit(0)
            self._pids.append(pid)
        for end in {end for pipe in pipes for end in pipe} - {self._send, self._receive}:
            os.close(end)

    def round_trip(self) -> float:
        """Seconds."""
        start = time.perf_counter()
        os.write(self._send, b"x" * 64)
        os.read(self._receive, 64)
        return time.perf_counter() - start

    def close(self) -> None:
        os.close(self._send)
        for pid in self._pids:
            os.waitpid(pid, 0)
        os.close(self._receive)


def quantile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def median(values: Sequence[float]) -> float:
    return quantile(values, 0.5)
