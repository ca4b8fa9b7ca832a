"""Tensor transports by Ray's names: communicators of your own, and type hints in their older form."""

from __future__ import annotations

from typing import Any

from conveyor.dag.hints import TransportHint
from conveyor.transport.communicator import Communicator

__all__ = ["Communicator", "TorchTensorType"]


def TorchTensorType(
    transport: Any = "auto",
    device: str = "default",
    _static_shape: bool = False,
    _direct_return: bool = False,
) -> TransportHint:
    """Make the argument of ``node.with_type_hint(...)``, which does the same as
    ``node.with_tensor_transport(...)``.

    Raises:
        ValueError: the transport or the device is unknown.
    """
    return TransportHint(
        "auto" if transport is None else transport, device, _static_shape, _direct_return
    )
