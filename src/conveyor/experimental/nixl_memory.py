"""Ray's functions that register memory with NIXL.

Values are read from their own memory, so no memory has to be registered. The functions only check their
arguments. They exist for Ray's programs, which call them.
"""

from __future__ import annotations

import sys
from typing import Any

from conveyor.checks import check_bytes
from conveyor.direct.into import checked_device
from conveyor.direct.memory import is_tensor

__all__ = [
    "deregister_nixl_memory",
    "register_nixl_memory",
    "register_nixl_memory_pool",
    "set_nixl_cuda_stream",
]


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
    checked_device(device)


def set_nixl_cuda_stream(stream: Any) -> None:
    """Check that ``stream`` is a stream or ``None``. No memory is registered, so no stream is waited for.

    Raises:
        TypeError: ``stream`` is neither a stream of torch's nor ``None``.
    """
    torch: Any = sys.modules.get("torch")
    if stream is not None and (torch is None or not isinstance(stream, torch.Stream)):
        raise TypeError(f"a stream of torch's is needed, not a {type(stream).__name__}")


def _check_tensor(tensor: Any) -> None:
    if not is_tensor(tensor):
        raise TypeError(f"a torch tensor is needed, not a {type(tensor).__name__}")
