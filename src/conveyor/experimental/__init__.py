"""What may still change in its names: Ray has it under the same ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from conveyor.later import names_later

if TYPE_CHECKING:
    from conveyor.direct.freed import wait_tensor_freed
    from conveyor.experimental import channel, collective

__all__ = ["channel", "collective", "wait_tensor_freed"]

__getattr__, __dir__ = names_later(
    globals(),
    {
        "channel": "conveyor.experimental.channel",
        "collective": "conveyor.experimental.collective",
        "wait_tensor_freed": "conveyor.direct.freed",
    },
)
