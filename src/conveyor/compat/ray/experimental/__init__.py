"""``ray.experimental``."""

from __future__ import annotations

from conveyor.experimental import channel, collective, wait_tensor_freed

__all__ = ["channel", "collective", "wait_tensor_freed"]
