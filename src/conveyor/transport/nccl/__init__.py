"""Tensors of GPUs over NVIDIA's NCCL."""

from __future__ import annotations

from typing import TYPE_CHECKING

from conveyor.device import Device
from conveyor.device.cuda import DEVICE
from conveyor.transport.base import Capabilities, Transport, Wire
from conveyor.transport.nccl.group import Group, NcclGroup

if TYPE_CHECKING:
    from conveyor.transport.nccl.endpoint import NcclEndpoint


class NcclTransport(Transport):
    """Moves tensors between devices, by groups of two ranks for each edge and reader.

    It uses neither ``torch.distributed`` nor its groups. The rest of a value travels in its frame.
    """

    def __init__(self, device: Device, groups: type[Group] = NcclGroup, name: str = "nccl") -> None:
        """``device``: the kind whose tensors it moves. ``groups``: the class of the groups that move them."""
        self.device = device
        self.groups = groups
        self.name = name
        self.capabilities = Capabilities(
            devices=frozenset({device.kind}),
            others_in_frame=True,
            streams="own",
            between_hosts=True,
        )

    def viable(self) -> str | None:
        """Return why this process cannot use NCCL, or ``None`` if it can."""
        why_not = self.device.viable()
        return f"it moves tensors of GPUs, and {why_not}" if why_not else self.groups.missing()

    def open(self, wire: Wire) -> NcclEndpoint:
        """Open this process's end of an edge."""
        from conveyor.transport.nccl.endpoint import NcclEndpoint  # needs torch

        return NcclEndpoint(wire, self.device, self.groups)


TRANSPORT = NcclTransport(DEVICE)
