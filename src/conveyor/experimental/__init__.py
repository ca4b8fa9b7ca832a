"""Features whose names may still change. Ray has them under the same names."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from conveyor.checks import check_bytes
from conveyor.later import LaterModule, names_later

if TYPE_CHECKING:
    from conveyor.direct.into import set_target_device_for_ref, set_target_for_ref
    from conveyor.direct.listing import wait_tensor_freed
    from conveyor.direct.managers.manager import (
        CommunicatorMetadata,
        FetchRequest,
        TensorTransportManager,
        TensorTransportMetadata,
    )
    from conveyor.direct.managers.registry import register_tensor_transport
    from conveyor.experimental import channel, collective

__all__ = [
    "CommunicatorMetadata",
    "FetchRequest",
    "TensorTransportManager",
    "TensorTransportMetadata",
    "channel",
    "collective",
    "deregister_nixl_memory",
    "register_nixl_memory",
    "register_nixl_memory_pool",
    "register_tensor_transport",
    "set_nixl_cuda_stream",
    "set_target_device_for_ref",
    "set_target_for_ref",
    "wait_tensor_freed",
]

# Rarely needed.
_into: Any = LaterModule("conveyor.direct.into")
_memory: Any = LaterModule("conveyor.direct.memory")

_MANAGER = "conveyor.direct.managers.manager"

__getattr__, __dir__ = names_later(
    globals(),
    {
        "CommunicatorMetadata": _MANAGER,
        "FetchRequest": _MANAGER,
        "TensorTransportManager": _MANAGER,
        "TensorTransportMetadata": _MANAGER,
        "channel": "conveyor.experimental.channel",
        "collective": "conveyor.experimental.collective",
        "set_target_device_for_ref": "conveyor.direct.into",
        "set_target_for_ref": "conveyor.direct.into",
        "register_tensor_transport": "conveyor.direct.managers.registry",
        "wait_tensor_freed": "conveyor.direct.listing",
    },
)


# Ray's functions that register memory with NIXL. They exist for Ray's programs, which call them. They
# only check their arguments: values are read from their own memory, so no memory has to be registered.


def register_nixl_memory(tensor: Any) -> None:
    """Check that ``tensor`` is a torch tensor. Its memory need not be registered to be read.

    Raises:
        TypeError: ``tensor`` is no torch tensor.
    """
    _check_tensor(tensor)


def deregister_nixl_memory(tensor: Any) -> None:
    """Check that ``tensor`` is a torch tensor. Its memory has not been registered.

    Raises:
        TypeError: ``tensor`` is no torch tensor.
    """
    _check_tensor(tensor)


def register_nixl_memory_pool(size: int, device: Any) -> None:
    """Check the arguments, and make no pool: a stored value is read from its own memory. With
    ``snapshot=True`` a copy is stored, as in a pool.

    Args:
        size: the pool's size in bytes.
        device: ``"cpu"`` or a device of this process.

    Raises:
        TypeError: ``size`` is no number, or ``device`` is neither a name nor a device.
        ValueError: ``size`` is not positive, or there is no such device.
    """
    check_bytes(size, "size")
    _into.checked_device(device)


def set_nixl_cuda_stream(stream: Any) -> None:
    """Check that ``stream`` is a stream or ``None``. No memory is registered, so no stream is waited for.

    Raises:
        TypeError: ``stream`` is neither a stream of torch's nor ``None``.
    """
    torch: Any = sys.modules.get("torch")
    if stream is not None and (torch is None or not isinstance(stream, torch.Stream)):
        raise TypeError(f"a stream of torch's is needed, not a {type(stream).__name__}")


def _check_tensor(tensor: Any) -> None:
    if not _memory.is_tensor(tensor):
        raise TypeError(f"a torch tensor is needed, not a {type(tensor).__name__}")
