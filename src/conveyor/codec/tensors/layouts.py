"""Layout of a torch tensor's elements in memory: which part has to travel, and which tensor lies in which."""

from __future__ import annotations

from typing import TYPE_CHECKING

from conveyor.storages import extent

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
