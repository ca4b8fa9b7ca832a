"""What a user may say about how a node's value should travel."""

from __future__ import annotations

from dataclasses import dataclass

from conveyor.later import import_later

TRANSPORTS = ("auto", "shm", "nccl", "accelerator")
DEVICES = ("default", "cpu", "gpu", "cuda")

#: The names that a hint may ask for: these, which Ray's programs use, and those of ``transport.registry``.
#: Whether such a transport can serve is the plan's to say.
known_transports = set(TRANSPORTS)


@dataclass(frozen=True, slots=True)
class TransportHint:
    """How the tensors of a node's value should reach their readers.

    transport: ``"auto"`` leaves the choice to the plan, the others force it.
    device: where the reader wants the tensors; ``"default"`` is the kind of device they came from.
    static_shape: shapes and types of the first execution hold for all.
    direct_return: the value is one tensor, not something that contains tensors.
    """

    transport: str = "auto"
    device: str = "default"
    static_shape: bool = False
    direct_return: bool = False

    def __post_init__(self) -> None:
        if self.transport not in _transports():
            import_later("conveyor.transport.registry")  # it is above, and knows more names
        if self.transport not in _transports():
            raise ValueError(
                f"unknown transport {self.transport!r}; known are {', '.join(_transports())}"
            )
        if self.device not in DEVICES:
            raise ValueError(f"unknown device {self.device!r}; known are {', '.join(DEVICES)}")

    def __str__(self) -> str:
        return f"with_tensor_transport(transport={self.transport!r}, device={self.device!r})"


def _transports() -> list[str]:
    """List the known transports, ours first."""
    return [*TRANSPORTS, *sorted(known_transports.difference(TRANSPORTS))]
