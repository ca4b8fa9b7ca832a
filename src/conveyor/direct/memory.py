"""The memory of tensors and arrays."""

from __future__ import annotations

import functools
from typing import Any

from conveyor.device import registry as devices


def is_tensor(value: Any) -> bool:
    """Whether it is a torch tensor; torch is not imported for it."""
    cls: Any = type(value)
    return _is_tensor(cls)


def is_array(value: Any) -> bool:
    """Whether it is a numpy array; numpy is not imported for it."""
    cls: Any = type(value)
    return _is_array(cls)


@functools.lru_cache(maxsize=256)
def _is_tensor(cls: type) -> bool:
    return any(base.__module__ == "torch" and base.__name__ == "Tensor" for base in cls.__mro__)


@functools.lru_cache(maxsize=256)
def _is_array(cls: type) -> bool:
    return any(base.__module__ == "numpy" and base.__name__ == "ndarray" for base in cls.__mro__)


def storage_of(value: Any) -> tuple[int, int]:
    """Address and bytes of all the memory that a tensor or an array shares with others.

    Raises:
        TypeError: it is neither.
    """
    if is_tensor(value):
        if str(value.layout) != "torch.strided":
            raise TypeError(
                f"a tensor of {value.layout} has no memory of its own, but its parts have"
            )
        storage = value.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    if not is_array(value):
        raise TypeError(f"a torch tensor or a numpy array is needed, not a {type(value).__name__}")
    base = value
    while is_array(base.base):
        base = base.base
    return address_of(base), base.nbytes


def is_plain(value: Any) -> bool:
    """Whether the memory of a tensor or an array holds its elements, one behind the other."""
    if is_tensor(value):
        import torch

        if value.layout is not torch.strided or value.is_quantized or value.is_nested:
            return False
        return value.is_contiguous() and not value.is_conj() and not value.is_neg()
    return value.flags.c_contiguous and not value.dtype.hasobject


def lies_at(value: Any, address: int) -> bool:
    """Whether the elements of a tensor or an array are what lies there, one behind the other."""
    size = value.numel() if is_tensor(value) else value.size
    return is_plain(value) and (address_of(value) == address or not size)


def address_of(value: Any) -> int:
    """Where the first element of a tensor or an array lies."""
    address: int = value.data_ptr() if is_tensor(value) else value.__array_interface__["data"][0]
    return address


def memory_at(value: Any) -> tuple[int, int]:
    """Address and bytes of what somebody offers; 0, 0 if that is nothing that torch or numpy knows, or a
    tensor that has only the memory of its parts."""
    if is_array(value) or (is_tensor(value) and str(value.layout) == "torch.strided"):
        return address_of(value), value.nbytes
    return 0, 0


def memory_of(value: Any) -> memoryview:
    """The bytes of a tensor or an array, to be written to.

    Raises:
        TypeError: it is neither, or not in the host's memory.
        ValueError: its elements do not lie one behind the other, or cannot be written to.
    """
    if is_tensor(value):
        import torch

        _check_room(value, value.device.type == "cpu")
        flat = value.detach().reshape(-1).view(torch.uint8) if value.numel() else value.new_empty(0)
        return memoryview(flat.numpy()).cast("B") if value.numel() else memoryview(bytearray())
    if not is_array(value):
        raise TypeError(f"a torch tensor or a numpy array is needed, not a {type(value).__name__}")
    if not value.flags.c_contiguous:
        raise ValueError("what is read into must be contiguous")
    if not value.flags.writeable:
        raise ValueError("what is read into is read-only")
    if not value.size or value.dtype.hasobject:  # what points to objects is not to be read into
        return memoryview(bytearray())
    import numpy as np

    # NumPy hands out no memory of dates, say.
    return memoryview(np.asarray(value).reshape(-1).view("u1"))  # type: ignore[arg-type]


def nbytes_of(value: Any) -> int:
    """The bytes of the elements of a tensor or an array."""
    return int(value.numel() * value.element_size() if is_tensor(value) else value.nbytes)


def room_in(value: Any) -> memoryview | None:
    """The same as :func:`memory_of`; ``None`` for a tensor of a device, which is copied to by its device.

    Raises:
        TypeError: it is neither a tensor nor an array, or a tensor of no device that is known here.
        ValueError: its elements do not lie one behind the other, or cannot be written to.
    """
    if not is_tensor(value) or value.device.type == "cpu":
        return memory_of(value)
    _check_room(value, value.device.type != "meta" and devices.of(value) is not None)
    return None


def _check_room(tensor: Any, reachable: bool) -> None:
    """Refuse a tensor that has no memory here, or whose elements do not lie there one behind the other."""
    if not reachable:
        raise TypeError(f"a tensor on device {str(tensor.device)!r} cannot be read into here")
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise ValueError("what is read into must be contiguous")
