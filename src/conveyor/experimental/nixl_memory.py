"""What Ray's programs tell NIXL about memory.

Values are read where they lie, so no memory has to be registered for that. These check what they are given,
and are there for programs that call them.
"""

from __future__ import annotations

import sys
from typing import Any

from conveyor.checks import check_bytes
from conveyor.direct.given.targets import checked_device
from conveyor.direct.memory import is_tensor

__all__ = [
    "deregister_nixl_memory",
    "register_nixl_memory",
    "register_nixl_memory_pool",
    "set_nixl_cuda_stream",
]


def register_nixl_memory(tensor: Any) -> None:
    """Nothing has to be registered: a tensor's memory is read where it lies.

    Raises:
        TypeError: it is no torch tensor.
    """
    _check_tensor(tensor)


def deregister_nixl_memory(tensor: Any) -> None:
    """Nothing has been registered.

    Raises:
        TypeError: it is no torch tensor.
    """
    _check_tensor(tensor)


def register_nixl_memory_pool(size: int, device: Any) -> None:
    """There is no pool: what stays is read from its own memory. ``snapshot=True`` has a copy stay, as a pool
    would.

    Args:
        size: of the pool, in bytes.
        device: ``"cpu"`` or a device of this process.

    Raises:
        TypeError: ``size`` is no number, or ``device`` names no device.
        ValueError: ``size`` is not positive, or there is no such device.
    """
    check_bytes(size, "size")
    checked_device(device)


def set_nixl_cuda_stream(stream: Any) -> None:
    """Nothing is registered that a stream would have to be waited for.

    Raises:
        TypeError: it is neither a stream of torch's nor ``None``.
    """
    torch: Any = sys.modules.get("torch")
    if stream is not None and (torch is None or not isinstance(stream, torch.Stream)):
        raise TypeError(f"a stream of torch's is needed, not a {type(stream).__name__}")


def _check_tensor(tensor: Any) -> None:
    if not is_tensor(tensor):
        raise TypeError(f"a torch tensor is needed, not a {type(tensor).__name__}")
