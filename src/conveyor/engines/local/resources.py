"""Assignment of this machine's GPUs to actors.

Only GPUs are counted. ``num_cpus`` reserves nothing on the local engine: it sets how many threads
the actor's numeric libraries use (``OMP_NUM_THREADS`` and its kin), and the operating system shares
the cores out.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping, Sequence

from conveyor.driver.process_engine import GpusTakenError
from conveyor.exceptions import ActorStartError

# Shares are counted in whole ten-thousandths, so that ten times 0.1 is one.
_WHOLE = 10_000


def visible_gpus(
    environ: Mapping[str, str] | None = None, device_directory: str = "/dev"
) -> tuple[str, ...]:
    """The ids that ``CUDA_VISIBLE_DEVICES`` may name in this process, without asking the driver.

    The variable decides if it is set; else the device files do. Device files are only counted:
    CUDA numbers the GPUs of a container from 0, whatever their files are called.
    """
    value = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
    if value is None:
        try:
            names = os.listdir(device_directory)
        except OSError:
            return ()
        count = sum(re.fullmatch(r"nvidia\d+", name) is not None for name in names)
        return tuple(str(index) for index in range(count))
    ids: list[str] = []
    for part in value.split(","):
        gpu = part.strip()
        # As CUDA reads it: the first entry that names no device ends the list ("-1" by custom).
        if not re.fullmatch(r"\d+|(GPU|MIG)-\S+", gpu):
            break
        if gpu not in ids:
            ids.append(gpu)
    return tuple(ids)


class GpuPool:
    """The GPUs of this process and how much of each is taken. Safe to use from several threads."""

    def __init__(self, ids: Sequence[str] | None = None) -> None:
        """``ids``: the GPUs to share out; by default those visible to this process."""
        self._lock = threading.Lock()
        self._free = dict.fromkeys(visible_gpus() if ids is None else ids, _WHOLE)

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(self._free)

    def acquire(self, num_gpus: float) -> tuple[str, ...]:
        """Take ``num_gpus`` GPUs and return their ids.

        A whole number takes GPUs that nobody shares. A fraction below 1 takes a share of one GPU,
        the fullest on which it fits, so that others stay whole. Raises ``ActorStartError`` if
        there is not enough: ``GpusTakenError`` where others have what is lacking.
        """
        share = _units(num_gpus)
        if share == 0:
            return ()
        with self._lock:
            if share < _WHOLE:
                count = 1
                fitting = [gpu for gpu, free in self._free.items() if free >= share]
                taken = [min(fitting, key=self._free.__getitem__)] if fitting else []
            else:
                whole = [gpu for gpu, free in self._free.items() if free == _WHOLE]
                count = share // _WHOLE
                taken = whole[:count] if len(whole) >= count else []
            if not taken:
                error = GpusTakenError if len(self._free) >= count else ActorStartError
                raise error(self._shortage(num_gpus))
            for gpu in taken:
                self._free[gpu] -= min(share, _WHOLE)
            return tuple(taken)

    def release(self, ids: Sequence[str], num_gpus: float) -> None:
        """Give back what ``acquire(num_gpus)`` returned."""
        share = min(_units(num_gpus), _WHOLE)
        with self._lock:
            for gpu in ids:
                if self._free[gpu] + share > _WHOLE:
                    raise ValueError(f"GPU {gpu} is given back more than it was taken")
            for gpu in ids:
                self._free[gpu] += share

    def _shortage(self, num_gpus: float) -> str:
        requested = f"num_gpus={num_gpus:g} asked"
        if not self._free:
            return f"{requested}, but no GPU is visible to this process"
        shares = ", ".join(f"GPU {gpu}: {free / _WHOLE:g} free" for gpu, free in self._free.items())
        return f"{requested}, but of {len(self._free)} visible GPUs too little is free ({shares})"


class GpuClaim:
    """GPUs that one actor has taken from a pool. They are given back once, whoever releases them, and however
    often."""

    def __init__(self, pool: GpuPool, num_gpus: float) -> None:
        self._pool = pool
        self._num_gpus = num_gpus
        self._taken: list[tuple[str, ...]] = []

    @property
    def ids(self) -> tuple[str, ...]:
        """The GPUs that are taken."""
        return self._taken[0] if self._taken else ()

    def take(self) -> None:
        """Take the GPUs; see ``GpuPool.acquire``."""
        self._taken.append(self._pool.acquire(self._num_gpus))

    def release(self) -> None:
        """Give back what is taken, if anything is."""
        try:
            ids = self._taken.pop()
        except IndexError:
            return
        self._pool.release(ids, self._num_gpus)


def _units(num_gpus: float) -> int:
    if isinstance(num_gpus, bool) or not isinstance(num_gpus, (int, float)):
        raise ActorStartError(f"num_gpus must be a number, not {num_gpus!r}")
    if not 0 <= num_gpus < 1 << 20 or (num_gpus > 1 and num_gpus != int(num_gpus)):
        raise ActorStartError(
            f"num_gpus must be a whole number or a fraction below 1, not {num_gpus!r}"
        )
    if num_gpus == 0:
        return 0
    # Rounded down, so that six times 1/6 still fits on one; the small term undoes binary
    # fractions (0.29 * 10_000 is 2899.9999...).
    return max(1, int(num_gpus * _WHOLE + 1e-6))
