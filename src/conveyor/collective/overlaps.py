"""Which tensors of one call share memory, so that what is written to one changes another.

The native core reads and writes operands that lie in one row where they are; those that do not are copied
before it begins, and get their elements after it has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conveyor.collective.operands import Operand

#: What the tensor is called of which a call has one.
ONE = "the tensor"

_ADVICE = "what is written to must lie apart: pass a copy, as clone() of torch and copy() of numpy make it"


def check_outputs(to: Sequence[Operand], what: str) -> None:
    """Refuse outputs that share memory with each other: only one of them could be right.

    Raises:
        ValueError: two of them do; ``what`` the list of them is called.
    """
    if len(to) < 2:
        return
    spans = sorted([(*_span(one), i) for i, one in enumerate(to)])
    end = spans[0][1]
    for begin, until, _ in spans[1:]:
        if begin < end:
            break
        end = max(end, until)
    else:
        return
    for place, (_, end, i) in enumerate(spans):
        for begin, _, k in spans[place + 1 :]:
            if begin >= end:
                break
            if _share(to[i], to[k]):
                first, second = sorted((i, k))
                raise ValueError(
                    f"tensors {first} and {second} of {what} share memory, and the operation writes to "
                    f"both: {_ADVICE}"
                )


def check_inputs(to: Sequence[Operand], sources: Sequence[Operand], out: str, what: str) -> None:
    """Refuse inputs that lie partly in an output, which would change them before they are read. One that is
    the very memory of an output is fine.

    Raises:
        ValueError: one does; ``out`` and ``what`` the outputs and the inputs are called.
    """
    # A copy was made of what is not in one row, of inputs before and of outputs until after the operation.
    inputs = [(*_span(one), i) for i, one in enumerate(sources) if one.staged is None]
    outputs = [(*_span(one), i) for i, one in enumerate(to) if one.staged is None]
    for begin, end, i in inputs:
        for other, until, k in outputs:
            if other < end and begin < until and begin != other:
                raise ValueError(
                    f"{_named(what, i)} and {_named(out, k)} share a part of their memory, and "
                    f"the operation writes to the latter while it reads the former: {_ADVICE}, or the very "
                    "same tensor"
                )


def _named(what: str, place: int) -> str:
    return what if what == ONE else f"tensor {place} of {what}"


def _span(one: Operand) -> tuple[int, int]:
    """The addresses at which the memory of a tensor begins and ends."""
    address = one.address
    if one.staged is None:
        if isinstance(address, int):
            return address, address + one.count * one.tensor.itemsize
        begin = address.__array_interface__["data"][0]
        return begin, begin + address.nbytes
    if not one.count:
        return 0, 0
    begin, strides = _layout(one)
    reaches = [(n - 1) * s for n, s in zip(one.tensor.shape, strides, strict=True)]
    end = begin + sum(r for r in reaches if r > 0) + one.tensor.itemsize
    return begin + sum(r for r in reaches if r < 0), end


def _layout(one: Operand) -> tuple[int, tuple[int, ...]]:
    """The address of a tensor's first element, and its strides in bytes."""
    tensor = one.tensor
    if isinstance(one.address, int):
        return tensor.data_ptr(), tuple([s * tensor.itemsize for s in tensor.stride()])
    return tensor.__array_interface__["data"][0], tensor.strides


def _share(one: Operand, other: Operand) -> bool:
    """Whether two tensors between whose ends there is memory of both have an element in common."""
    if one.staged is None and other.staged is None:
        return True
    try:
        import numpy
    except ImportError:
        return True  # nobody else can tell whether their elements lie between each other's

    return bool(numpy.shares_memory(_Elements(one).seen(), _Elements(other).seen()))


class _Elements:
    """A tensor of any library and type, as numpy sees where its elements lie."""

    def __init__(self, one: Operand) -> None:
        address, strides = _layout(one)
        self.__array_interface__ = {
            "data": (address, True),
            "shape": tuple(one.tensor.shape),
            "strides": strides,
            "typestr": f"|V{one.tensor.itemsize}",
            "version": 3,
        }

    def seen(self) -> Any:
        import numpy

        return numpy.asarray(self)
