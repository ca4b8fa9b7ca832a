"""What a simulated accelerator is like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

KernelTime: TypeAlias = "float | Callable[[str, Sequence[tuple[int, ...]]], float]"
"""Seconds that a kernel takes, or what says so by its name (``"addmm"``) and the shapes of its tensors."""


@dataclass(frozen=True)
class Settings:
    """What a simulated accelerator is like.

    devices: how many there are: ``sim:0``, ``sim:1``...
    memory: bytes of each, in each process. Memory that nobody has written to costs nothing.
    bandwidth: bytes a second that a copy between host and device, or between devices, moves. Of each
        direction one copy is under way at a time. ``None``: copies take what they take.
    kernel_time: the least seconds that a kernel takes.
    """

    devices: int = 2
    memory: int = 256 << 20
    bandwidth: float | None = None
    kernel_time: float = 0.0

    def __post_init__(self) -> None:
        _check("devices", self.devices, 1 <= self.devices <= 64, int)
        _check("memory", self.memory, self.memory >= 1 << 16, int)
        if self.bandwidth is not None:
            _check("bandwidth", self.bandwidth, self.bandwidth > 0, (int, float))
        _check("kernel_time", self.kernel_time, self.kernel_time >= 0, (int, float))


def _check(name: str, value: Any, right: bool, kinds: Any) -> None:
    if not isinstance(value, kinds) or isinstance(value, bool) or not right:
        raise ValueError(f"{name} of a simulated accelerator cannot be {value!r}")
