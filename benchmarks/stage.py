"""A stage of a model on a device that is simulated, and the step that travels through such stages."""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

PR_SET_TIMERSLACK = 29

#: Bytes of what the scheduler tells every worker of a step, and elements of the hidden state (f32) that a
#: stage hands to the next: 8 sequences of 1,024 hidden units.
SCHEDULED_BYTES = 2048
HIDDEN = 8 * 1024

#: Seconds before its end for which a device is watched instead of slept on: as long as a core that halts
#: needs to come back.
_WATCHED = 150e-6


class SimulatedDevice:
    """Computes for given times: its work ends when the clock says so, and no core is used for it, but for
    the last moments of a kernel."""

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1)
        self.busy = 0.0

    def compute(self, seconds: float) -> None:
        """Run a kernel of that time, and wait for it."""
        end = time.perf_counter() + seconds
        if seconds > _WATCHED:
            time.sleep(seconds - _WATCHED)
        while time.perf_counter() < end:
            os.sched_yield()
        self.busy += seconds


class Stage:
    """One worker of a pipeline. Made in its own process."""

    def __init__(self, seconds: float) -> None:
        import numpy as np

        self._device = SimulatedDevice()
        self._seconds = seconds
        self._hidden = np.ones(HIDDEN, np.float32)
        self._group: Any = None
        self._ranks = 1

    def join(self, meeting: str, place: int, stages: int, ranks: int) -> None:
        """Meet the other workers over gloo, where the system has no collectives of its own. ``place``: counts
        the ranks of the first stage first."""
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=place, world_size=stages * ranks
        )
        groups = [
            dist.new_group(list(range(stage * ranks, (stage + 1) * ranks)))
            for stage in range(stages)
        ]
        self._group, self._ranks = groups[place // ranks], ranks

    def first(self, scheduled: Any) -> Any:
        """The first stage of a step: hidden states, or tokens if it is the last one as well."""
        return self.step(scheduled, None)

    def step(self, scheduled: Any, hidden: Any) -> Any:
        """One step: this worker's part of the hidden state for the next stage, or the whole of it where it
        has joined the others."""
        number, _ = scheduled
        if hidden is not None and int(hidden[0]) != number:
            raise AssertionError(f"step {number} has the hidden state of step {hidden[0]}")
        self._device.compute(self._seconds)
        self._hidden[0] = number
        if self._ranks > 1:
            import torch
            import torch.distributed as dist

            reduced = torch.from_numpy(self._hidden)
            dist.all_reduce(reduced, group=self._group)
            reduced /= self._ranks
        return self._hidden

    def last(self, scheduled: Any, hidden: Any) -> Any:
        """The last stage of a step where one worker has the whole of it: its tokens."""
        return self.pick(self.step(scheduled, hidden))

    def pick(self, hidden: Any) -> int:
        """The tokens, of the last stage's hidden state."""
        return int(hidden[0])

    def busy(self) -> float:
        """Seconds for which the device has computed."""
        return self._device.busy

    def pid(self) -> int:
        return os.getpid()


def scheduled(number: int) -> tuple[int, bytes]:
    """What every worker is told of a step."""
    return number, bytes(SCHEDULED_BYTES)
