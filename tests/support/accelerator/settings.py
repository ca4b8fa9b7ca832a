"""Settings of a simulated accelerator, and which of its devices a process sees."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

KernelTime: TypeAlias = "float | Callable[[str, Sequence[tuple[int, ...]]], float]"
"""Seconds that a kernel takes, or what says so by its name (``"addmm"``) and the shapes of its tensors."""


VISIBLE = "SIM_VISIBLE_DEVICES"
"""The variable that says which devices a process sees, as ``CUDA_VISIBLE_DEVICES`` does: numbers with commas
between them. Empty: none. Unset: all."""


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


def visible(settings: Settings) -> tuple[int, ...]:
    """List the devices that this process sees, by the numbers that all processes have for them."""
    named = os.environ.get(VISIBLE)
    if named is None:
        return tuple(range(settings.devices))
    numbers = [int(number) for number in named.split(",") if number.strip()]
    return tuple([number for number in numbers if 0 <= number < settings.devices])


def _check(name: str, value: Any, right: bool, kinds: Any) -> None:
    if not isinstance(value, kinds) or isinstance(value, bool) or not right:
        raise ValueError(f"{name} of a simulated accelerator cannot be {value!r}")
