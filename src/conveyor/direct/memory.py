"""The memory of tensors and arrays."""

from __future__ import annotations

import functools
from typing import Any

from conveyor.device import base as devices


def is_tensor(value: Any) -> bool:
    """Whether it is a torch tensor; torch is not imported for it."""
    cls: Any = type(value)
    return is_tensor_type(cls)


def is_array(value: Any) -> bool:
    """Whether it is a numpy array; numpy is not imported for it."""
    cls: Any = type(value)
    return is_array_type(cls)


@functools.lru_cache(maxsize=256)
def is_tensor_type(cls: type) -> bool:
    """Whether it is torch's class of tensors, or made of that."""
    return any(base.__module__ == "torch" and base.__name__ == "Tensor" for base in cls.__mro__)


@functools.lru_cache(maxsize=256)
def is_array_type(cls: type) -> bool:
    """Whether it is numpy's class of arrays, or made of that."""
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
    """Return the address of the first element of a tensor or an array."""
    address: int = value.data_ptr() if is_tensor(value) else value.__array_interface__["data"][0]
    return address


def memory_at(value: Any) -> tuple[int, int]:
    """Return address and bytes of the memory that somebody offers; 0, 0 if neither torch nor numpy knows it,
    or for a tensor that has only the memory of its parts."""
    if is_array(value) or (is_tensor(value) and str(value.layout) == "torch.strided"):
        return address_of(value), value.nbytes
    return 0, 0


def memory_of(value: Any) -> memoryview:
    """The bytes of a tensor or an array that :func:`range_to_fill` has let be written to."""
    if not nbytes_of(value):
        return memoryview(bytearray())
    if is_tensor(value):
        import torch

        value = value.detach().reshape(-1).view(torch.uint8).numpy()
    import numpy as np

    # NumPy hands out no memory of dates, say.
    return memoryview(np.asarray(value).reshape(-1).view("u1"))  # type: ignore[arg-type]


def nbytes_of(value: Any) -> int:
    """The bytes of the elements of a tensor or an array."""
    return int(value.numel() * value.element_size() if is_tensor(value) else value.nbytes)


def hold_memory(value: Any) -> Any:
    """Return an object that keeps the memory of a tensor or an array where it is."""
    if is_tensor(value):
        return value.untyped_storage() if value.is_cpu else value
    return memoryview(value) if is_array(value) and value.dtype.kind not in "mMO" else value


def range_to_fill(value: Any) -> tuple[int, int] | None:
    """Address and bytes of a tensor or an array that is to be read into. ``None``: it is written to in
    another way, as a tensor of a device is by its device, or an array of objects.

    Raises:
        TypeError: it is neither a tensor nor an array, or a tensor of no device that is known here.
        ValueError: its elements do not lie one behind the other, or cannot be written to.
    """
    if is_tensor(value):
        here = value.is_cpu
        if not here and (value.device.type == "meta" or devices.of(value) is None):
            raise TypeError(f"a tensor on device {str(value.device)!r} cannot be read into here")
        if not value.is_contiguous() or value.is_conj() or value.is_neg():
            raise ValueError("what is read into must be contiguous")
        if not here:
            return None
        address, size = value.data_ptr(), value.nbytes
        if not address and size:
            raise TypeError(f"a {type(value).__name__} has no memory of its own to be read into")
        return address, size
    if not is_array(value):
        raise TypeError(f"a torch tensor or a numpy array is needed, not a {type(value).__name__}")
    if not value.flags.c_contiguous:
        raise ValueError("what is read into must be contiguous")
    if not value.flags.writeable:
        raise ValueError("what is read into is read-only")
    return None if value.dtype.hasobject else (address_of(value), value.nbytes)
