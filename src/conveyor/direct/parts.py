"""A part of an array or a tensor that has stayed elsewhere: only that is fetched."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Sequence
from numbers import Integral
from typing import Any

from conveyor.codec import arrays, tensor_headers
from conveyor.codec.arrays import ARRAY
from conveyor.codec.direct import Located
from conveyor.codec.tensors import TENSOR

#: All of a dimension.
_ALL: Any = slice(None)

Index = tuple[Any, ...]


def part_of(where: Located, index: Index) -> Located | None:
    """Where ``value[index]`` lies; ``None``: the value is none of which a part could be fetched.

    Raises:
        IndexError: there is no such part.
    """
    header: Any = {ARRAY: arrays, TENSOR: tensor_headers}.get(where.codec)
    found = None if header is None else header.shape_of(where.meta)
    if found is None or len(where.ranges) != 16:
        return None
    shape, size = found
    picked = _picked(shape, index)
    if picked is None:
        return None
    address, _ = struct.unpack("<QQ", where.ranges)
    ranges = _ranges(address, shape, picked, size)
    # A dimension that one element is taken of is not there any more.
    left = tuple([n for (_, n), one in itertools.zip_longest(picked, index) if not _is_int(one)])
    return where._replace(ranges=ranges, meta=header.with_shape(where.meta, left), joined=True)


def _is_int(one: Any) -> bool:
    return isinstance(one, Integral) and not isinstance(one, bool)


def _picked(shape: Sequence[int], index: Index) -> list[tuple[int, int]] | None:
    """Of each dimension the first element and how many; ``None`` if they do not follow each other."""
    if not all(isinstance(one, slice) or _is_int(one) for one in index):
        return None
    if len(index) > len(shape):
        raise IndexError(f"a value of shape {list(shape)} has no part {index!r}")
    picked = []
    for n, one in itertools.zip_longest(shape, index, fillvalue=_ALL):
        if _is_int(one):
            if not -n <= one < n:
                raise IndexError(f"a value of shape {list(shape)} has no part {index!r}")
            picked.append((int(one) % n, 1))
            continue
        start, stop, step = one.indices(n)
        if step != 1:
            return None
        picked.append((start, max(stop - start, 0)))
    return picked


def _ranges(address: int, shape: Sequence[int], picked: list[tuple[int, int]], size: int) -> bytes:
    """The runs of bytes that are picked, in order."""
    if any(count == 0 for _, count in picked):
        return b""
    # The dimensions behind the last one that is not taken whole are one run.
    whole = len(shape)
    while whole and picked[whole - 1] == (0, shape[whole - 1]):
        whole -= 1
    inner = max(whole - 1, 0)
    strides = [size * math.prod(shape[i + 1 :]) for i in range(len(shape))]
    length = size * math.prod(count for _, count in picked[inner:])
    begin = address
    steps = []
    for (start, count), stride in zip(picked, strides, strict=True):
        begin += start * stride
        steps.append(range(0, count * stride, stride))
    runs = [begin + sum(offsets) for offsets in itertools.product(*steps[:inner])]
    numbers = [number for run in runs for number in (run, length)]
    return struct.pack(f"<{len(numbers)}Q", *numbers)
