"""Description of a dense torch tensor in a frame, ahead of its memory."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

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
