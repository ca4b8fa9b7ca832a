"""Hints of the user about how a node's value should travel."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from conveyor.device import base as devices
from conveyor.later import LaterModule, import_later

# Of a higher layer.
communicators: Any = LaterModule("conveyor.transport.communicator")

TRANSPORTS = ("auto", "shm", "gloo", "nccl", "nixl", "cuda_ipc", "accelerator")
DEVICES = ("default", "cpu", "gpu", "cuda")

#: The names that a hint may ask for: these, which Ray's programs use, and those of ``transport.registry``.
#: Whether such a transport can serve is the plan's to say.
known_transports = set(TRANSPORTS)


class TransportHint(Struct, frozen=True):
    """How the tensors of a node's value should reach their readers.

    transport: ``"auto"`` leaves the choice to the plan, the others force it; it may be a
        ``conveyor.experimental.channel.Communicator`` as well.
    device: where the reader wants the tensors; ``"default"`` is the kind of device they came from. Beside
        those below it is any kind that ``conveyor.device`` knows.
    static_shape: shapes, types and devices of the first execution hold for all.
    direct_return: the value is one tensor, not something that contains tensors.
    """

    transport: Any = "auto"
    device: str = "default"
    static_shape: bool = False
    direct_return: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.transport, str):
            if not communicators.is_one(self.transport):
                raise ValueError(
                    f"unknown transport {self.transport!r}: it is a name or a "
                    f"conveyor.experimental.channel.Communicator; known are {', '.join(_transports())}"
                )
        elif self.transport not in _transports():
            import_later("conveyor.transport.registry")  # it knows more names
            if self.transport not in _transports():
                raise ValueError(
                    f"unknown transport {self.transport!r}; known are {', '.join(_transports())}"
                )
        for name in ("static_shape", "direct_return"):
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"_{name} is True or False, not {getattr(self, name)!r}")
        if self.device not in DEVICES and self.device not in devices.kinds():
            known = dict.fromkeys([*DEVICES, *devices.kinds()])
            raise ValueError(f"unknown device {self.device!r}; known are {', '.join(known)}")

    def __str__(self) -> str:
        promises = f", _static_shape={self.static_shape}" if self.static_shape else ""
        promises += f", _direct_return={self.direct_return}" if self.direct_return else ""
        return (
            f"with_tensor_transport(transport={self.transport!r}, device={self.device!r}{promises})"
        )


def _transports() -> list[str]:
    """List the known transports, ours first."""
    return [*TRANSPORTS, *sorted(known_transports.difference(TRANSPORTS))]
