"""Descriptions of the values that ranks put in, and of what is wrong with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from conveyor.dag.collective.kernels import TENSORS, arrays_of
from conveyor.storages import lacking


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
    if _is_elsewhere(value):
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
    kind, way = type(value).__name__, "x.as_subclass(torch.Tensor)"
    if arrays_of(value) is not TENSORS:
        way = "numpy.asarray(x)"
    return (
        f"a {kind}, which may mean more than its elements, and only these would be kept: give it a plain one "
        f"({way}), and the rest, as the mask of a masked array, on its own"
    )


def described(value: Any) -> str:
    """Describe ``value`` to people."""
    arrays = arrays_of(value)
    if arrays is None:
        return f"a {type(value).__name__}"
    dtype = str(value.dtype).removeprefix("torch.")
    article = "a" if arrays is TENSORS else "an"
    where = f", {value.layout} on {value.device}" if _is_elsewhere(value) else ""
    return f"{article} {arrays.noun} of {dtype} with shape {tuple(value.shape)}{where}"


def _is_elsewhere(value: Any) -> bool:
    return arrays_of(value) is TENSORS and not TENSORS.alike([value])
