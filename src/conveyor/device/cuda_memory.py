"""Memory of NVIDIA's GPUs that other processes open, by CUDA's driver.

torch can share memory, too, but its handles are good for one reader each, and the writer's memory stays until
that reader has opened it. Here whoever shares memory keeps it, and anybody may open it any number of times.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

_LAZY_PEER_ACCESS = 1  # of cuIpcOpenMemHandle: from other GPUs, once it is used there
_BUFFER_ID = 7  # of cuPointerGetAttribute: a number that no other allocation of the process has

#: The library, which comes with the kernel's module.
LIBRARY = "libcuda.so.1"


class _Handle(ctypes.Structure):
    """``CUipcMemHandle``, which goes by value."""

    _fields_ = (("bytes", ctypes.c_ubyte * 64),)


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise RuntimeError(f"CUDA's driver cannot be loaded: {error}") from None
    pointer, out, flags = ctypes.c_uint64, ctypes.POINTER(ctypes.c_uint64), ctypes.c_uint
    context = ctypes.c_void_p
    for name, arguments in {
        "cuInit": (flags,),
        "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
        "cuDevicePrimaryCtxRetain": (ctypes.POINTER(context), ctypes.c_int),
        "cuCtxPushCurrent_v2": (context,),
        "cuCtxPopCurrent_v2": (ctypes.POINTER(context),),
        "cuMemGetAddressRange_v2": (out, ctypes.POINTER(ctypes.c_size_t), pointer),
        "cuPointerGetAttribute": (out, ctypes.c_int, pointer),
        "cuIpcGetMemHandle": (ctypes.POINTER(_Handle), pointer),
        "cuIpcOpenMemHandle_v2": (out, _Handle, flags),
        "cuIpcCloseMemHandle": (pointer,),
        "cuGetErrorString": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    }.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, ctypes.c_int
    _check(library.cuInit(0), "cuInit", library)
    return library


def _check(code: int, call: str, library: ctypes.CDLL) -> None:
    if code:
        told = ctypes.c_char_p()
        library.cuGetErrorString(code, ctypes.byref(told))
        why = told.value.decode() if told.value else f"error {code}"
        raise RuntimeError(f"{call} has failed: {why}")


def _call(name: str, *arguments: Any) -> None:
    library = _driver()
    _check(getattr(library, name)(*arguments), name, library)


@functools.cache
def _context(index: int) -> ctypes.c_void_p:
    """The context that torch works in. It is retained, and never given back: torch's is not, either."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuDeviceGet", ctypes.byref(device), index)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    return context


@contextmanager
def _on(index: int) -> Iterator[None]:
    _call("cuCtxPushCurrent_v2", _context(index))
    try:
        yield
    finally:
        _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


def export(index: int, address: int) -> tuple[bytes, int]:
    """Describe the allocation that an address of a GPU lies in. Returns the handle, behind which stands the
    number that the allocation has in this process, and how far the address is behind its beginning. So no
    two allocations have the same handle, although one may be where another was.

    Raises:
        RuntimeError: CUDA cannot share memory of this kind (``expandable_segments``, say).
    """
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
    number = ctypes.c_uint64()
    with _on(index):
        _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
        _call("cuPointerGetAttribute", ctypes.byref(number), _BUFFER_ID, address)
        try:
            _call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        except RuntimeError as error:
            raise RuntimeError(
                f"{error}: other processes cannot open memory of this kind. torch makes such memory where "
                "PYTORCH_CUDA_ALLOC_CONF says expandable_segments:True"
            ) from None
    return bytes(handle.bytes) + bytes(number), address - base.value


class Opened:
    """A part of another process's allocation, mapped here as long as this lives. torch takes it for a tensor
    of bytes.

    address: where the part begins.
    """

    def __init__(self, index: int, handle: bytes, offset: int, nbytes: int) -> None:
        """Map the memory.

        Raises:
            RuntimeError: the process has ended, or the GPU cannot be reached.
        """
        self._index = index
        self._base: int | None = None
        self._nbytes = nbytes
        base = ctypes.c_uint64()
        with _on(index):
            packed = _Handle.from_buffer_copy(handle)
            _call("cuIpcOpenMemHandle_v2", ctypes.byref(base), packed, _LAZY_PEER_ACCESS)
        self._base = base.value
        self.address = base.value + offset

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Array interface, as Numba defines it: contiguous bytes, in the order of whatever stream uses
        them."""
        return {
            "shape": (self._nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 2,
        }

    def __del__(self) -> None:
        base, self._base = self._base, None
        if base is not None:
            # CUDA may have ended before, or the process that it was opened from.
            with suppress(RuntimeError), _on(self._index):
                _call("cuIpcCloseMemHandle", base)
