"""What may still change in its names: Ray has it under the same ones."""

from __future__ import annotations

from conveyor.direct.freed import wait_tensor_freed

__all__ = ["wait_tensor_freed"]
