"""Torch tensors: a header and the raw memory, as for arrays.

What arrives is a leaf with the same values, dtype, shape, strides (of a dense tensor) and
``requires_grad``. The autograd graph stays behind. A view brings the part that it views, not the
storage behind it. What a tensor brings inside of another value is in ``reducers``.
"""

from __future__ import annotations

import functools
import struct
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from conveyor.codec.encoded import Encoded
from conveyor.codec.tensors.headers import (
    EMPTY,
    REQUIRES_GRAD,
    STRIDED,
    fixed,
    make_header,
)
from conveyor.codec.tensors.layouts import (
    dense,
    is_plain,
    plain_values,
)
from conveyor.storages import check_storage

if TYPE_CHECKING:
    import torch

TENSOR = 19
"""Codec: a dense ``torch.Tensor`` on the CPU."""
_CACHED = 4096


@functools.cache
def _views() -> dict[torch.dtype, torch.dtype | None]:
    """For each dtype, the one to view it as so that NumPy can view that (``None``: as it is)."""
    import torch

    same_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    views: dict[torch.dtype, torch.dtype | None] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some dtypes are experimental
        for dtype in {d for d in vars(torch).values() if isinstance(d, torch.dtype)}:
            if str(dtype).startswith("torch.q"):  # quantized: bytes are not all there is to it
                continue
            try:
                probe = torch.empty(0, dtype=dtype)
                try:
                    probe.numpy()
                    views[dtype] = None
                except TypeError:
                    probe.view(same_size[dtype.itemsize]).numpy()
                    views[dtype] = same_size[dtype.itemsize]
            except Exception:  # torch is without NumPy
                continue
    return views


def make_memory() -> Callable[[torch.Tensor], Any]:
    """A function that exports a contiguous tensor's memory. The export keeps the tensor alive."""
    views = _views()

    def memory_of(tensor: torch.Tensor) -> Any:
        dtype = tensor.dtype
        if dtype in views:
            view = views[dtype]
            return (tensor if view is None else tensor.view(view)).numpy()
        return _through_ctypes(tensor)

    return memory_of


def _through_ctypes(tensor: torch.Tensor) -> Any:
    import ctypes

    size = tensor.numel() * tensor.element_size()
    memory = (ctypes.c_char * size).from_address(tensor.data_ptr())
    memory.tensor = tensor
    return memory


#: Header, memory (``None``: it has none), and the address of the storage that this lies in; 0: it is a copy.
_Described = tuple[bytes, Any, int]


def make_describe() -> tuple[
    Callable[[torch.Tensor], _Described | None], Callable[[torch.Tensor], _Described | None]
]:
    """Two functions that describe tensors: the usual ones in a hurry, and any.

    They answer ``None`` to a tensor that is not usual, and to one that a header cannot describe.
    """
    memory_of = make_memory()
    views = _views()
    #: By dtype, shape and whether there is a gradient: header, bytes, and as what dtype NumPy views it.
    usual: dict[Any, tuple[bytes, int, torch.dtype | None]] = {}

    def describe_usual(tensor: torch.Tensor) -> _Described | None:
        requires_grad = tensor.requires_grad
        try:
            key = tensor.dtype, tensor.shape, requires_grad
            known = usual.get(key)
            if known is None:
                if tensor.dtype not in views or not tensor.numel():
                    return None
                if len(usual) >= _CACHED:
                    usual.clear()
                header = make_header(tensor.dtype, tuple(tensor.shape), None, requires_grad)
                known = usual[key] = header, tensor.nbytes, views[tensor.dtype]
            header, nbytes, view = known
            if not tensor.is_cpu or not tensor.is_contiguous() or tensor.__dict__:
                return None
            plain = tensor.detach() if requires_grad else tensor
            storage, offset = plain.untyped_storage(), plain.storage_offset()
            if nbytes + (offset and offset * plain.itemsize) > storage.nbytes():
                return None  # its storage was freed
            memory = (plain if view is None else plain.view(view)).numpy()
        except (RuntimeError, TypeError):  # it is sparse, or conjugate, say
            return None
        return header, memory, storage.data_ptr()

    def describe_any(tensor: torch.Tensor) -> _Described | None:
        requires_grad = tensor.requires_grad
        if not tensor.is_cpu or not is_plain(tensor):
            return None
        check_storage(tensor)
        shape = tuple(tensor.shape)
        contiguous, strides = dense(plain_values(tensor))
        header = make_header(tensor.dtype, shape, strides, requires_grad)
        if not contiguous.numel():
            return header, None, 0
        lies_there = contiguous.data_ptr() == tensor.data_ptr()
        address = tensor.untyped_storage().data_ptr() if lies_there else 0
        return header, memory_of(contiguous), address

    return describe_usual, describe_any


def make_encoder() -> Callable[[torch.Tensor], Encoded | None]:
    """An encoder for tensors; it answers ``None`` to one that is for the general pickler."""
    describe_usual, describe_any = make_describe()

    def encode(tensor: torch.Tensor) -> Encoded | None:
        described = describe_usual(tensor) or describe_any(tensor)
        if described is None:
            return None
        header, memory, _ = described
        return TENSOR, 0, header, None if memory is None else [memory]

    return encode


_read: dict[bytes, Callable[[Any], torch.Tensor]] = {}


def decode(meta: bytes, buffers: list[Any] | None) -> torch.Tensor:
    """The tensor over the buffer, without a copy."""
    return rebuild(meta, buffers[0] if buffers else None)


def rebuild(header: bytes, buffer: Any) -> torch.Tensor:
    maker = _read.get(header)
    if maker is None:
        if len(_read) >= _CACHED:
            _read.clear()
        maker = _read[header] = _make_maker(header)
    return maker(buffer)


def _make_maker(header: bytes) -> Callable[[Any], torch.Tensor]:
    import torch

    flags, length, ndim = fixed.unpack_from(header)
    end = fixed.size + length
    name = header[fixed.size : end].decode()
    dtype: torch.dtype = getattr(torch, name)
    shape = struct.unpack_from(f"<{ndim}q", header, end)
    strides = struct.unpack_from(f"<{ndim}q", header, end + 8 * ndim) if flags & STRIDED else None
    requires_grad = bool(flags & REQUIRES_GRAD)

    def empty(buffer: Any) -> torch.Tensor:
        if strides is None:
            made = torch.empty(shape, dtype=dtype)
        else:
            made = torch.empty_strided(shape, strides, dtype=dtype)
        return made.requires_grad_() if requires_grad else made

    def through_torch(buffer: Any) -> torch.Tensor:
        made = torch.frombuffer(buffer, dtype=dtype)
        made = made.view(shape) if strides is None else made.as_strided(shape, strides)
        return made.requires_grad_() if requires_grad else made

    if flags & EMPTY:
        return empty
    views = _views()
    if dtype not in views:
        return through_torch

    # Half as long as through torch alone, which makes its shape in a second step.
    import numpy as np

    view = views[dtype]
    numpy_dtype = torch.empty(0, dtype=view or dtype).numpy().dtype
    in_bytes = None if strides is None else tuple(s * numpy_dtype.itemsize for s in strides)
    from_numpy = torch.from_numpy
    new = np.ndarray

    def through_numpy(buffer: Any) -> torch.Tensor:
        made = from_numpy(new(shape, numpy_dtype, buffer, 0, in_bytes))
        if view is not None:
            made = made.view(dtype)
        return made.requires_grad_() if requires_grad else made

    return through_numpy
