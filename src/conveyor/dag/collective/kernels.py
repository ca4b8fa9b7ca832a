"""Computations of collectives on tensors and arrays: torch's and numpy's operations for two of them, the
native core's for more.

This is the one place that computes. A faster kernel is put in here, and nothing else knows of it.
"""

from __future__ import annotations

import functools
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn

import conveyor  # what is above is known by its public name
from conveyor import _core
from conveyor.later import LaterModule
from conveyor.storages import lacking

#: The types of elements, by the numbers that the native core knows them by.
ELEMENT_TYPES = (
    *("float32", "float64", "float16", "bfloat16"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"),
)
#: Element types with numbers below this one are floating point numbers.
FLOATS = 4


class ReduceOp(Enum):
    """Reduction that turns one element of each rank into one element.

    ``SUM``, ``PRODUCT``, ``MIN``, ``MAX``, and ``AVG``: the sum divided by the number of ranks, for floating
    point numbers only. The native core knows the reductions by these values.
    """

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    AVG = 4


if TYPE_CHECKING:
    import numpy as np
    import torch
else:
    np, torch = LaterModule("numpy"), LaterModule("torch")

#: Results from so many bytes on are made in the process's arena. Its memory is warm, while new memory of this
#: size costs a page fault for each page; and a result that is sent on from there is not copied.
IN_ARENA = 64 << 10

#: An attribute of an enumeration takes as long to be found as a small array to be checked.
_AVG, _EXTREMES = ReduceOp.AVG, (ReduceOp.MIN, ReduceOp.MAX)

#: Up to so many elements an operation costs more than the memory that it goes over.
_SMALL = 2 << 10


class Arrays(ABC):
    """Operations on the arrays of one library. Arrays that are reduced have one dtype and are flat."""

    #: The library's word for an array, in messages.
    noun: ClassVar[str]

    def __init__(self) -> None:
        self.function = functools.cache(self._function)
        self.kind = functools.cache(self._kind)
        self.number = functools.cache(self._number)

    @abstractmethod
    def alike(self, values: Sequence[Any]) -> bool:
        """Say whether ``values`` are of one dtype and shape, and all of this library and readable."""

    @abstractmethod
    def is_plain(self, value: Any) -> bool:
        """Say whether ``value`` is no more than its elements. A value of a subclass may be more: a masked
        array."""

    @abstractmethod
    def is_small(self, array: Any) -> bool:
        """Say whether ``array`` has less than a page or two, so that each operation's own cost counts."""

    @abstractmethod
    def _function(self, op: ReduceOp) -> Callable[..., Any]:
        """Return the elementwise operation of ``op``, which takes two arrays and ``out``."""

    @abstractmethod
    def _kind(self, dtype: Any) -> str:
        """Return ``"float"``, ``"half"`` (summed in a wider type), ``"int"``, ``"bool"``, or ``"other"``."""

    @abstractmethod
    def plain(self, array: Any) -> Any:
        """Return ``array`` without the notes that would be taken of operations with it, such as
        autograd's."""

    @abstractmethod
    def empty(self, shape: Sequence[int], like: Any) -> Any:
        """Return a new array of the dtype of ``like``, in the arena if it is large."""

    @abstractmethod
    def single(self) -> Any:
        """Return an array without elements of the type in which 16-bit floats are summed."""

    @abstractmethod
    def flat(self, array: Any) -> Any:
        """Return the elements in one dimension, without a copy where they are contiguous."""

    @abstractmethod
    def _number(self, dtype: Any) -> int | None:
        """Return the native core's number of ``dtype``; ``None``: it has none."""

    @abstractmethod
    def buffer(self, array: Any) -> Any:
        """Return flat ``array`` in the form that the native core takes.

        It shares the memory of contiguous elements, and is a copy of others.
        """

    @abstractmethod
    def copy(self, to: Any, source: Any) -> None:
        """Write ``source`` into ``to``, rounded to its dtype."""

    @abstractmethod
    def join(self, arrays: Sequence[Any], out: Any) -> None:
        """Write ``arrays``, one after the other along dimension 0, into ``out``."""

    def size(self, array: Any) -> int:
        """Return the number of elements."""
        return math.prod(array.shape)


class Tensors(Arrays):
    """Torch's tensors on the CPU."""

    noun = "tensor"

    def alike(self, values: Sequence[Any]) -> bool:
        kind, strided = torch.Tensor, torch.strided
        dtype, shape = values[0].dtype, values[0].shape
        for value in values:
            if not isinstance(value, kind) or value.dtype != dtype or value.shape != shape:
                return False
            if not value.is_cpu or value.layout != strided:
                return False
        return True

    def is_plain(self, value: Any) -> bool:
        return type(value) is torch.Tensor or type(value) is torch.nn.Parameter

    def is_small(self, array: Any) -> bool:
        return bool(array.numel() <= _SMALL)

    def _function(self, op: ReduceOp) -> Callable[..., Any]:
        names = {ReduceOp.PRODUCT: "mul", ReduceOp.MIN: "minimum", ReduceOp.MAX: "maximum"}
        found: Callable[..., Any] = getattr(torch, names.get(op, "add"))
        return found

    def _kind(self, dtype: Any) -> str:
        if dtype in (torch.float32, torch.float64):
            return "float"
        if dtype in (torch.float16, torch.bfloat16):
            return "half"
        integers = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
        return "int" if dtype in integers else "bool" if dtype == torch.bool else "other"

    def plain(self, array: Any) -> Any:
        return array.detach() if array.requires_grad else array

    def empty(self, shape: Sequence[int], like: Any) -> Any:
        if math.prod(shape) * like.itemsize >= IN_ARENA:
            try:
                return conveyor.empty_tensor(shape, like.dtype)
            except MemoryError:
                pass  # the arena is full, and a result that stays on its actor needs none
        return torch.empty(shape, dtype=like.dtype)

    def single(self) -> Any:
        return torch.empty(0, dtype=torch.float32)

    def flat(self, array: Any) -> Any:
        return array if array.dim() == 1 else array.reshape(-1)

    def _number(self, dtype: Any) -> int | None:
        return _NUMBERS.get(str(dtype).removeprefix("torch."))

    def buffer(self, array: Any) -> Any:
        array = array.resolve_neg()
        if array.stride(0) != 1:  # ``contiguous`` would keep the stride of a single element
            array = array.clone(memory_format=torch.contiguous_format)
        return array.view(torch.uint8).numpy()

    def copy(self, to: Any, source: Any) -> None:
        to.copy_(source)

    def join(self, arrays: Sequence[Any], out: Any) -> None:
        torch.cat(list(arrays), out=out)


class Ndarrays(Arrays):
    """Numpy's arrays."""

    noun = "array"

    def alike(self, values: Sequence[Any]) -> bool:
        dtype, shape = values[0].dtype, values[0].shape
        return all(
            isinstance(value, np.ndarray) and value.dtype == dtype and value.shape == shape
            for value in values
        )

    def is_plain(self, value: Any) -> bool:
        return type(value) is np.ndarray or type(value) is np.memmap

    def is_small(self, array: Any) -> bool:
        return bool(array.size <= _SMALL and array.ndim)  # else its operations give scalars

    def _function(self, op: ReduceOp) -> Callable[..., Any]:
        names = {ReduceOp.PRODUCT: "multiply", ReduceOp.MIN: "minimum", ReduceOp.MAX: "maximum"}
        found: Callable[..., Any] = getattr(np, names.get(op, "add"))
        return found

    def _kind(self, dtype: Any) -> str:
        if dtype.kind == "f":
            return "half" if dtype.itemsize == 2 else "float"
        return {"i": "int", "u": "int", "b": "bool"}.get(dtype.kind, "other")

    def plain(self, array: Any) -> Any:
        return array

    def empty(self, shape: Sequence[int], like: Any) -> Any:
        if math.prod(shape) * like.itemsize >= IN_ARENA:
            try:
                return conveyor.empty(tuple(shape), like.dtype)
            except MemoryError:
                pass  # as above
        return np.empty(shape, like.dtype)

    def single(self) -> Any:
        return np.empty(0, np.float32)

    def flat(self, array: Any) -> Any:
        return array.reshape(-1)

    def _number(self, dtype: Any) -> int | None:
        return _NUMBERS.get(dtype.name) if dtype.isnative else None

    def buffer(self, array: Any) -> Any:
        return np.ascontiguousarray(array)

    def copy(self, to: Any, source: Any) -> None:
        np.copyto(to, source, casting="same_kind")

    def join(self, arrays: Sequence[Any], out: Any) -> None:
        np.concatenate(arrays, out=out)


_NUMBERS = {name: number for number, name in enumerate(ELEMENT_TYPES)}

TENSORS, NDARRAYS = Tensors(), Ndarrays()


def arrays_of(value: Any) -> Arrays | None:
    """Return the library that ``value`` is of; ``None``: it is neither a tensor nor an array."""
    # Neither is imported to find out: who has a value of theirs has imported it.
    found = sys.modules.get("torch")
    if found is not None and isinstance(value, found.Tensor):
        return TENSORS
    found = sys.modules.get("numpy")
    if found is not None and isinstance(value, found.ndarray):
        return NDARRAYS
    return None


def why_not(op: ReduceOp, arrays: Arrays, dtype: Any) -> str | None:
    """Return why ``op`` is not done with arrays of ``dtype``; ``None``: it is."""
    kind = arrays.kind(dtype)
    if kind == "other":
        return f"{dtype} is not reduced: floats of 16 to 64 bits, integers and bool are"
    if kind == "bool" and op not in _EXTREMES:
        return f"{op.name} of {dtype}: MAX tells whether any is true, MIN whether all are"
    if kind == "int" and op is _AVG:
        return f"AVG of {dtype} is no integer: convert to floats first, or take the SUM"
    return None


def reduced(op: ReduceOp, arrays: Arrays, values: Sequence[Any]) -> Any:
    """Reduce ``values``, which have one shape, into a new array of that shape."""
    first = values[0]
    if len(values) == 1 or not arrays.is_small(first) or _is_wide(op, arrays, values):
        out = arrays.empty(first.shape, first)
        reduce(op, arrays, [arrays.flat(value) for value in values], arrays.flat(out))
        return out
    function = arrays.function(op)
    total = function(first, values[1])
    for other in values[2:]:
        function(total, other, out=total)
    if op is _AVG:
        total /= len(values)
    return total


def reduce(op: ReduceOp, arrays: Arrays, sources: Sequence[Any], out: Any) -> None:
    """Reduce flat ``sources`` into ``out``, in their order, so that every rank gets the same bits.

    16-bit floats are summed and multiplied as 32-bit ones, and rounded once.
    """
    if len(sources) == 1:
        arrays.copy(out, sources[0])
        return
    number = arrays.number(out.dtype)
    if number is not None and (len(sources) > 2 or _is_wide(op, arrays, sources)):
        # The native core goes over the memory once, where several operations would go over it several times.
        buffers = tuple([arrays.buffer(source) for source in sources])
        _core.reduce((arrays.buffer(out),), buffers, number, op.value)
        return
    function = arrays.function(op)
    function(sources[0], sources[1], out=out)
    for other in sources[2:]:
        function(out, other, out=out)
    if op is _AVG:
        out /= len(sources)


def widens(op: ReduceOp, arrays: Arrays, dtype: Any) -> bool:
    """Say whether ``op`` combines elements of ``dtype`` in a wider type, and rounds at the end."""
    return arrays.kind(dtype) == "half" and op not in _EXTREMES


def _is_wide(op: ReduceOp, arrays: Arrays, values: Sequence[Any]) -> bool:
    """Say whether ``values`` are to be combined in a wider type."""
    if not widens(op, arrays, values[0].dtype):
        return False
    # Torch and numpy compute a single operation on halves in 32 bits themselves, and round once.
    return len(values) > 2 or op is _AVG


class Seen(NamedTuple):
    """Description of a value that a rank puts in, for all ranks, also those that do not get the value.

    words: what the value is, for people.
    noun: what its library calls it; ``None``: it belongs to no library.
    dtype, shape: as far as they can be read here; ``None`` for what cannot be read.
    more: why it may mean more than its elements, in words.
    lacks: why it has lost its memory, in words.
    """

    words: str
    noun: str | None
    dtype: str | None
    shape: tuple[int, ...]
    more: str | None
    lacks: str | None

    @property
    def kind(self) -> tuple[str | None, str | None, tuple[int, ...]]:
        """Library, dtype and shape, which must be the same at all ranks."""
        return self.noun, self.dtype, self.shape

    @property
    def fits(self) -> bool:
        """Whether nothing is wrong with the value alone."""
        return self.dtype is not None and self.more is None and self.lacks is None


def seen(value: Any, computes: bool = True) -> Seen:
    """Describe a value that a rank puts in. ``computes``: something new is made of its elements."""
    arrays, words = arrays_of(value), described(value)
    if arrays is None:
        return Seen(words, None, None, (), None, None)
    if _is_unusual_tensor(value):
        return Seen(words, arrays.noun, None, tuple(value.shape), None, None)
    more = None if not computes or arrays.is_plain(value) else more_than_elements(value)
    lacks = lacking(value) if arrays is TENSORS and more is None else None
    return Seen(words, arrays.noun, str(value.dtype), tuple(value.shape), more, lacks)


def check_seen(title: str, names: Sequence[str], ranks: Sequence[Seen]) -> None:
    """Do what ``refuse`` does, if anything is wrong with what ``ranks`` put in."""
    if not all(one.fits and one.kind == ranks[0].kind for one in ranks):
        refuse(title, names, ranks)


def refuse(title: str, names: Sequence[str], ranks: Sequence[Seen]) -> NoReturn:
    """Say what is wrong with what ``ranks`` put in.

    Args:
        title: what the operation is called.
        names: those of the ranks.
        ranks: what each of them puts in.

    Raises:
        TypeError: one is neither a tensor nor an array, or lies where it cannot be read, or may mean more
            than the elements that are computed with.
        ValueError: they differ in kind, dtype or shape, or a tensor's storage was freed.
    """
    said = ", ".join(f"{name} has {one.words}" for name, one in zip(names, ranks, strict=True))
    if any(one.noun is None for one in ranks):
        raise TypeError(f"{title}: it takes tensors or arrays: {said}")
    if any(one.dtype is None for one in ranks):
        raise TypeError(f"{title}: it takes dense tensors on the CPU: {said}")
    if all(one.kind == ranks[0].kind for one in ranks):
        for name, one in zip(names, ranks, strict=True):
            if one.more is not None:
                raise TypeError(f"{title}: {name} has {one.more}")
        for one in ranks:
            if one.lacks is not None:
                raise ValueError(f"{title}: {one.words} {one.lacks}")
    raise ValueError(f"{title}: the ranks differ: {said}")


def more_than_elements(value: Any) -> str:
    """Describe ``value``, of a subclass of the library's arrays, and say what to do."""
    kind, hint = type(value).__name__, "x.as_subclass(torch.Tensor)"
    if arrays_of(value) is not TENSORS:
        hint = "numpy.asarray(x)"
    return (
        f"a {kind}, which may mean more than its elements, and only these would be kept: give it a plain one "
        f"({hint}), and the rest, as the mask of a masked array, on its own"
    )


def described(value: Any) -> str:
    """Describe ``value`` to people."""
    arrays = arrays_of(value)
    if arrays is None:
        return f"a {type(value).__name__}"
    dtype = str(value.dtype).removeprefix("torch.")
    article = "a" if arrays is TENSORS else "an"
    where = f", {value.layout} on {value.device}" if _is_unusual_tensor(value) else ""
    return f"{article} {arrays.noun} of {dtype} with shape {tuple(value.shape)}{where}"


def _is_unusual_tensor(value: Any) -> bool:
    return arrays_of(value) is TENSORS and not TENSORS.alike([value])
