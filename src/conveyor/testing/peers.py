"""The actors of the conformance checks."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import conveyor
from conveyor.device import Device
from conveyor.testing.samples import sample


class Peer:
    """Actor that makes values with tensors, and describes the values that it gets."""

    def __init__(self, device: Device | None = None) -> None:
        """``device``: the device of its tensors; ``None``: the CPU."""
        self.device = "cpu" if device is None else device.kind
        self.kept: list[Any] = []
        self.buffer: Any = None

    def make(self, kind: str) -> Any:
        """Make a sample, see :func:`conveyor.testing.samples.sample`."""
        import torch

        with torch.device(self.device):
            return sample(kind)

    def make_or_raise(self, number: int) -> Any:
        """Make a tensor of ``number``; raise if it is odd."""
        import torch

        if number % 2:
            raise ValueError(f"{number} is odd")
        return torch.full((1000,), float(number), device=self.device)

    def make_big(self, number: int) -> Any:
        """Make 4 MiB of ``number``."""
        import torch

        made = torch.full((1 << 20,), float(number), device=self.device)
        return {"tensor": made, "number": number}

    def make_again(self, number: int) -> Any:
        """Make 4 MiB of ``number``, in the same memory as the last time."""
        import torch

        if self.buffer is None:
            self.buffer = torch.empty(1 << 20, device=self.device)
        return {"tensor": self.buffer.fill_(number), "number": number}

    def total(self, value: Any) -> tuple[int, float, float]:
        """Describe the contents of a value of :meth:`make_big`."""
        tensor = value["tensor"]
        return value["number"], float(tensor.min()), float(tensor.max())

    def mean(self, tensor: Any) -> float:
        """Return the mean of a tensor."""
        return float(tensor.mean())

    def same(self, value: Any, kind: str) -> str:
        """Say how ``value`` differs from the sample; empty if it does not."""
        import torch

        from conveyor.testing.samples import difference

        with torch.device(self.device):
            return difference(value, sample(kind))

    def keep(self, value: Any) -> int:
        """Hold a value for good."""
        self.kept.append(value)
        return len(self.kept)

    def forget(self) -> None:
        """Let go of all values that are held."""
        self.kept.clear()

    def kept_totals(self) -> list[tuple[int, float, float]]:
        """Describe the contents of the values that are held."""
        return [self.total(value) for value in self.kept]

    def scribble(self, value: Any) -> float:
        """Write over a value that has come, and return what was in it."""
        before = float(value["tensor"].max())
        value["tensor"].zero_()
        return before

    def slow(self, value: Any) -> float:
        """Return the largest element of a value of :meth:`make_big`, after 50 ms."""
        time.sleep(0.05)
        return float(value["tensor"].max())

    def both(self, first: Any, second: Any) -> tuple[float, float]:
        """Return the largest elements of two values of :meth:`make_big`."""
        return float(first["tensor"].max()), float(second["tensor"].max())

    def meta(self, number: int) -> Any:
        """Make a tensor; every third one has no memory, so nothing can move it."""
        import torch

        return torch.full((10,), float(number), device="meta" if number % 3 == 0 else self.device)

    def holdings(self) -> tuple[int, int]:
        """Count this process's descriptors and threads."""
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    def die(self) -> None:
        """End this process at once."""
        os.kill(os.getpid(), 9)


RemotePeer = conveyor.remote(Peer)
