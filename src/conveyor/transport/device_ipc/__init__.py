"""Memory of a device that other processes open, as a transport: of any kind of device that can."""

from __future__ import annotations

from typing import TYPE_CHECKING

from conveyor.device import Device
from conveyor.transport.base import Capabilities, Transport, Wire

if TYPE_CHECKING:
    from conveyor.transport.device_ipc.conduit import DeviceIpcConduit

__all__ = ["DeviceIpcTransport"]


class DeviceIpcTransport(Transport):
    """Moves tensors of one kind of device between processes of one host, from memory of the device to memory
    of the device. A reader's task begins when they are there at the writer, and comes behind their copy on
    the reader's stream. No stream waits for another process.

    What else a value has, tensors of the CPU too, travels in its frame. To a reader that does not see the
    writer's device, as where each actor has a card, its tensors go by way of the host's memory.
    """

    def __init__(self, device: Device) -> None:
        """``device``: the kind. The transport is called after it: ``"cuda_ipc"``."""
        self.device = device
        self.name = f"{device.kind}_ipc"
        self.capabilities = Capabilities(
            devices=frozenset({device.kind}), others_in_frame=True, streams="overlap"
        )

    def viable(self) -> str | None:
        """As for :class:`Transport`."""
        return self.device.viable()

    def open(self, wire: Wire) -> DeviceIpcConduit:
        """As for :class:`Transport`."""
        from conveyor.transport.device_ipc.reader import Reader  # needs torch
        from conveyor.transport.device_ipc.writer import Writer

        return (Reader if wire.rank else Writer)(wire, self.device)
