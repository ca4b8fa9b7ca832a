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
from conveyor.storages import check_storage, extent

if TYPE_CHECKING:
    import torch


def dense(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...] | None]:
    """Return ``tensor`` with its memory in one piece, and its strides if they are unusual. An expanded
    dimension (a stride of 0) takes memory once."""
    if tensor.is_contiguous():
        return tensor, None
    strides = tensor.stride()
    once = unexpanded(tensor)
    ordered = once.permute(sorted(range(once.ndim), key=lambda i: -strides[i]))
    if ordered.is_contiguous():
        return ordered, strides
    copied = once.contiguous()
    if once is tensor:
        return copied, None
    numbers = zip(copied.stride(), strides, tensor.shape, strict=True)
    return copied, tuple([0 if s == 0 and n > 1 else own for own, s, n in numbers])


def unexpanded(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` with one element in each dimension that is expanded; itself if none is."""
    for dimension, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def plain_values(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` detached, with its conjugation or negation carried out."""
    import torch

    if torch._is_zerotensor(tensor):
        tensor = tensor.clone()
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        return unexpanded(tensor).resolve_conj().resolve_neg().expand(tensor.shape)
    return tensor


def lies_within(tensor: torch.Tensor, first: torch.Tensor, offset: int) -> bool:
    """Whether ``tensor``, ``offset`` bytes behind ``first``, lies in what travels for that one."""
    size = tensor.element_size()
    return offset >= 0 and offset % size == 0 and offset + extent(tensor) <= extent(first)


def widest(first: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in which more of the later ones may lie. Both travel, are in one storage, and do not
    lie in each other's memory at the reader."""
    offset = first.data_ptr() - tensor.data_ptr()
    return tensor if lies_within(first, tensor, offset) else first


def alias(
    first: torch.Tensor,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    requires_grad: bool,
) -> torch.Tensor:
    """The tensor that begins ``offset`` bytes behind ``first``, in its memory."""
    import torch

    made = torch.empty(0, dtype=dtype, device=first.device)
    offset += first.storage_offset() * first.element_size()
    made.set_(first.untyped_storage(), offset // made.element_size(), shape, strides)
    return made.requires_grad_() if requires_grad else made


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether what travels for ``tensor`` is laid out as its own memory is."""
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda i: -strides[i])
    return bool(unexpanded(tensor).permute(order).is_contiguous())


def lies_here(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory has its values, in this process."""
    import torch

    if tensor.device.type != "cpu" or not tensor.numel() or torch._is_zerotensor(tensor):
        return False
    return not tensor.is_conj() and not tensor.is_neg()


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a header can describe ``tensor``; sparse, quantized and decorated ones: pickle."""
    import torch

    return (
        tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.__dict__
    )


REQUIRES_GRAD = 1
STRIDED = 2  # strides follow the shape: dense, but not contiguous
EMPTY = 4

fixed = struct.Struct("<BBBx")  # flags, length of dtype's name, ndim


def make_header(
    dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...] | None, requires_grad: bool
) -> bytes:
    """Describe a tensor; ``strides``: ``None``, if it is contiguous."""
    flags = REQUIRES_GRAD if requires_grad else 0
    numbers = shape
    if strides is not None:
        flags |= STRIDED
        numbers = (*shape, *strides)
    if 0 in shape:
        flags |= EMPTY
    name = dtype_name(dtype).encode()
    return (
        fixed.pack(flags, len(name), len(shape)) + name + struct.pack(f"<{len(numbers)}q", *numbers)
    )


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype's name without ``torch.``: ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def shape_of(header: bytes) -> tuple[tuple[int, ...], int] | None:
    """The shape that a header describes, and the bytes of an element; ``None`` if it is not contiguous."""
    import torch

    flags, length, ndim = fixed.unpack_from(header)
    if flags & STRIDED:
        return None
    end = fixed.size + length
    dtype = getattr(torch, header[fixed.size : end].decode())
    return struct.unpack_from(f"<{ndim}q", header, end), dtype.itemsize


def with_shape(header: bytes, shape: tuple[int, ...]) -> bytes:
    """A header that describes a contiguous tensor of another shape and the same dtype."""
    flags, length, _ = fixed.unpack_from(header)
    flags = flags & REQUIRES_GRAD | (EMPTY if 0 in shape else 0)
    name = header[fixed.size : fixed.size + length]
    return fixed.pack(flags, length, len(shape)) + name + struct.pack(f"<{len(shape)}q", *shape)


def describes(header: bytes, tensor: torch.Tensor) -> bool:
    """Whether a header is of a contiguous tensor of this one's dtype and shape."""
    flags, length, ndim = fixed.unpack_from(header)
    if flags & STRIDED or ndim != tensor.ndim:
        return False
    end = fixed.size + length
    shape = struct.unpack_from(f"<{ndim}q", header, end)
    return shape == tensor.shape and header[fixed.size : end].decode() == dtype_name(tensor.dtype)


def shaped(header: bytes, memory: torch.Tensor) -> torch.Tensor:
    """The tensor that a header describes, in ``memory``, a tensor of its bytes."""
    import torch

    flags, length, ndim = fixed.unpack_from(header)
    end = fixed.size + length
    made = memory.view(getattr(torch, header[fixed.size : end].decode()))
    shape = struct.unpack_from(f"<{ndim}q", header, end)
    if flags & STRIDED:
        made = made.as_strided(shape, struct.unpack_from(f"<{ndim}q", header, end + 8 * ndim))
    else:
        made = made.view(shape)
    return made.requires_grad_() if flags & REQUIRES_GRAD else made


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
    builder = _read.get(header)
    if builder is None:
        if len(_read) >= _CACHED:
            _read.clear()
        builder = _read[header] = _make_builder(header)
    return builder(buffer)


def _make_builder(header: bytes) -> Callable[[Any], torch.Tensor]:
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
