"""Tensors of torch whose memory is ours, and the tensors of the CPU there that kernels work on."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, cast

from conveyor.later import LaterModule

if TYPE_CHECKING:
    import numpy as np
    import torch
else:
    np, torch = LaterModule("numpy"), LaterModule("torch")

#: DLPack's name for a device that torch calls PrivateUse1.
_EXTENSION = 12


class _Managed(ctypes.Structure):
    """The head of a ``DLManagedTensor``."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
    )


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)


class Memory:
    """Memory that lives as long as this does, and any array or tensor in it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
        }


def over(memory: Memory, index: int) -> torch.Tensor:
    """Make a tensor of the bytes of ``memory`` on the simulated device of that index."""
    # NumPy's capsule ends its array wherever torch ends the storage, with the GIL or without, also while an
    # exception is on its way. A callback of ctypes does not.
    capsule = np.asarray(cast(Any, memory)).__dlpack__()
    managed = _Managed.from_address(_pointer(capsule, b"dltensor"))
    managed.device_type, managed.device_id = _EXTENSION, index
    return torch._C._from_dlpack(capsule)


def twin(tensor: torch.Tensor) -> torch.Tensor:
    """Make a tensor of the CPU in a simulated device's memory. It does not keep that memory."""
    storage = tensor.untyped_storage()
    here = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), torch.device("cpu"), storage.nbytes()
    )
    made = torch.empty(0, dtype=tensor.dtype)
    made.set_(here, tensor.storage_offset(), tensor.shape, tensor.stride())
    if tensor.is_conj():
        made = made.conj()
    return torch._neg_view(made) if tensor.is_neg() else made
