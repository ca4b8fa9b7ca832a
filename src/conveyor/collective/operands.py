"""Tensors in the form that the native core takes: torch's of the CPU, and numpy's arrays."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from conveyor.dag.collective.kernels import ELEMENT_TYPES
from conveyor.storages import lacking

#: torch's and numpy's types, once each of them was seen.
_numbers: dict[Any, int] = {}
_known: set[str] = set()


class Operand:
    """Tensor or array that is an argument of a call.

    address: of its elements, as a number or as an object with a buffer. They are contiguous there.
    staged: a contiguous copy, if the elements of the tensor itself are not contiguous.
    """

    __slots__ = ("address", "count", "number", "shape", "staged", "tensor")

    def __init__(
        self,
        tensor: Any,
        number: int,
        shape: tuple[int, ...],
        count: int,
        address: Any,
        staged: Any,
    ) -> None:
        self.tensor = tensor
        self.number = number
        self.shape = shape
        self.count = count
        self.address = address
        self.staged = staged

    def written(self) -> None:
        """Copy the elements that were written into the tensor."""
        if self.staged is None:
            return
        if isinstance(self.address, int):
            import torch

            with torch.no_grad():
                self.tensor.copy_(self.staged)
        else:
            self.tensor[...] = self.staged


def operand(tensor: Any, writes: bool, what: str = "the tensor") -> Operand:
    """``writes``: the tensor's elements are written. ``what`` it is, for errors."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return _of_torch(torch, tensor, writes, what)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(tensor, numpy.ndarray):
        return _of_numpy(numpy, tensor, writes, what)
    raise TypeError(
        f"{what} is a {type(tensor).__name__}: collective operations take torch tensors of the CPU and "
        "numpy arrays"
    )


def _of_torch(torch: Any, tensor: Any, writes: bool, what: str) -> Operand:
    number = _numbers.get(tensor.dtype)
    if number is None:
        number = _look_up(torch, "torch", tensor.dtype, what)
    if not tensor.is_cpu or tensor.layout is not torch.strided:
        where = f"on {tensor.device}" if not tensor.is_cpu else f"of layout {tensor.layout}"
        raise ValueError(f"{what} is {where}: collective operations take dense tensors of the CPU")
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        raise TypeError(
            f"{what} is a {type(tensor).__name__}, which may mean more than its elements: pass a plain "
            "torch.Tensor"
        )
    words = lacking(tensor)
    if words is not None:
        raise ValueError(f"{what} {words}")
    if tensor.is_contiguous() and not tensor.is_neg():
        return Operand(tensor, number, tensor.shape, tensor.numel(), tensor.data_ptr(), None)
    if writes:
        _check_apart(tensor.shape, tensor.stride(), what)
    staged = tensor.detach().resolve_neg().contiguous()
    return Operand(tensor, number, staged.shape, staged.numel(), staged.data_ptr(), staged)


def _of_numpy(numpy: Any, array: Any, writes: bool, what: str) -> Operand:
    number = _numbers.get(array.dtype)
    if number is None:
        number = _look_up(numpy, "numpy", array.dtype, what)
    if type(array) is not numpy.ndarray and type(array) is not numpy.memmap:
        raise TypeError(
            f"{what} is a {type(array).__name__}, which may mean more than its elements: pass a plain "
            "numpy.ndarray (numpy.asarray(x))"
        )
    if writes and not array.flags.writeable:
        raise ValueError(f"{what} is read-only, and the operation writes to it")
    if array.flags.c_contiguous:
        return Operand(array, number, array.shape, array.size, array, None)
    if writes:
        _check_apart(array.shape, array.strides, what)
    staged = numpy.ascontiguousarray(array)
    return Operand(array, number, staged.shape, staged.size, staged, staged)


def _check_apart(shape: Sequence[int], strides: Sequence[int], what: str) -> None:
    """Refuse elements that share memory, as those of an expanded tensor do: they cannot all be written."""
    reach = 0
    steps = [(abs(s), n) for s, n in zip(strides, shape, strict=True) if n > 1]
    for stride, length in sorted(steps) if 0 not in shape else ():
        if stride <= reach:
            raise ValueError(
                f"{what} has elements that share memory (shape {tuple(shape)}, strides {tuple(strides)}), "
                "and the operation writes to it: pass a copy, as clone() of torch and copy() of numpy make it"
            )
        reach += stride * (length - 1)


def _look_up(library: Any, name: str, dtype: Any, what: str) -> int:
    if name not in _known:
        for number, element in enumerate(ELEMENT_TYPES):
            theirs = getattr(library, element, None)
            if name == "numpy":
                # bfloat16 is none of its types, and `numpy.bool` is not of all versions.
                if element != "bfloat16":
                    _numbers[library.dtype(element)] = number
            elif theirs is not None:
                _numbers[theirs] = number
        _known.add(name)
    found: int | None = _numbers.get(dtype)
    if found is None:
        raise TypeError(f"{what} is of {dtype}, which collective operations do not take")
    return found


class Fused:
    """Tensors of one type as a single one."""

    __slots__ = ("parts", "shapes", "whole")

    def __init__(self, tensors: Sequence[Any]) -> None:
        parts = [operand(t, True, f"tensor {i} of the list") for i, t in enumerate(tensors)]
        if not parts:
            raise ValueError("the list of tensors is empty")
        first = parts[0]
        for i, part in enumerate(parts):
            if part.number != first.number or isinstance(part.address, int) != isinstance(
                first.address, int
            ):
                raise TypeError(
                    f"tensor {i} of the list is of {part.tensor.dtype}, and tensor 0 of "
                    f"{first.tensor.dtype}: what is reduced as one is of one type, and of one library"
                )
        self.parts = parts
        #: The same number wherever the shapes are the same.
        self.shapes = hash(tuple([tuple(part.shape) for part in parts])) & (2**64 - 1)
        if isinstance(first.address, int):
            import torch

            whole = torch.cat([part.tensor.detach().reshape(-1) for part in parts])
        else:
            import numpy

            whole = numpy.concatenate([part.tensor.reshape(-1) for part in parts])
        self.whole = operand(whole, True)

    def written(self) -> None:
        """Copy the result back into each tensor."""
        begin = 0
        for part in self.parts:
            piece = self.whole.tensor[begin : begin + part.count].reshape(part.shape)
            begin += part.count
            if isinstance(part.address, int):
                part.tensor.detach().copy_(piece)
            else:
                part.tensor[...] = piece
