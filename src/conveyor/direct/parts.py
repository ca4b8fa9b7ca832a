"""A part of a value that has stayed elsewhere: only that is fetched."""

from __future__ import annotations

import itertools
import math
import mmap
import pickle
import struct
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from numbers import Integral
from typing import Any

from conveyor import _core
from conveyor.codec import arrays
from conveyor.codec.arrays import ARRAY
from conveyor.codec.direct import Located
from conveyor.codec.encoded import FLAG_DEFINITIONS, FLAG_REFS, PICKLE
from conveyor.codec.frames import decode, encode
from conveyor.codec.pickling.definitions import SentDefinitions
from conveyor.codec.tensors import encoding as tensor_headers
from conveyor.codec.tensors.encoding import TENSOR
from conveyor.direct.memory import address_of, is_plain, is_tensor, nbytes_of
from conveyor.direct.structure import is_leaf

_RANGE = struct.Struct("<QQ")
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)


class Skeleton:
    """The value, decoded over memory that nobody uses: a ``__setstate__`` may write to it.

    value: itself. What has been made of the contents of its memory is wrong, unless :attr:`blind`.
    """

    def __init__(self, where: Located) -> None:
        """Raises whatever decoding does: the user's code may expect what is not there."""
        self._ranges = list(_RANGE.iter_unpack(where.ranges))
        lengths = [length for _, length in self._ranges]
        # The ranges of one buffer lie one behind the other, as they will when they are read.
        aligned = lengths if where.joined else [length + 63 & ~63 for length in lengths]
        self._starts = [*accumulate(aligned, initial=0)]
        total = self._starts.pop() if lengths else 0
        self._memory = mmap.mmap(-1, total or 1, flags=_PRIVATE)
        ((self._base, _),) = _RANGE.iter_unpack(_core.ranges_of([self._memory]))
        view = memoryview(self._memory)
        buffers = [view[:total]]
        if not where.joined:
            buffers = [
                view[start : start + n] for start, n in zip(self._starts, lengths, strict=True)
            ]
        #: What is empty lies nowhere.
        self._numbers = {
            (start, n): i
            for i, (start, n) in enumerate(zip(self._starts, lengths, strict=True))
            if n
        }
        self.value = decode(where.codec, where.meta, buffers)

    @property
    def ranges(self) -> int:
        """How many ranges have memory."""
        return len(self._numbers)

    @property
    def blind(self) -> bool:
        """Whether nobody has looked at the memory, so that its contents make no difference."""
        return _core.untouched(self._memory)

    def range_of(self, leaf: Any) -> int | None:
        """Return the number of the range that a tensor or an array is, element by element; ``None``: it is
        none of them."""
        if (is_tensor(leaf) and not leaf.is_cpu) or not is_plain(leaf):
            return None
        return self._numbers.get((address_of(leaf) - self._base, nbytes_of(leaf)))

    def sources_of(self, address: int, length: int) -> bytes | None:
        """Return the ranges in the other process for memory of this skeleton; ``None``: the memory is none
        of the value's."""
        offset = address - self._base
        i = bisect_right(self._starts, offset) - 1
        if i < 0:
            return None
        found = []
        while length > 0 and i < len(self._ranges):
            source, size = self._ranges[i]
            skipped = offset - self._starts[i]
            taken = min(size - skipped, length)
            if taken <= 0 or skipped < 0:
                return None  # between two of them
            found.append(_RANGE.pack(source + skipped, taken))
            offset += taken
            length -= taken
            i += 1
        return b"".join(found) if not length else None


#: All of a dimension.
_ALL: Any = slice(None)

Index = tuple[Any, ...]
#: Elements that are picked of a dimension: the first one, how many, and how far they are apart.
Picked = tuple[int, int, int]

#: ns that a run of bytes costs, and a byte that is fetched. Between many short runs lies less than they cost.
_NS_OF_RUN = 500
_NS_OF_BYTE = 0.25
#: A frame says of each run where it is.
_MOST_RUNS = 1 << 20


def part_of(where: Located, index: Index) -> Located | None:
    """Return the place of ``value[index]``; ``None``: no part of the value can be fetched alone.

    Raises:
        LookupError: there is no such part.
    """
    header: Any = {ARRAY: arrays, TENSOR: tensor_headers}.get(where.codec)
    if header is None:
        return _of_container(where, index)
    if not all(
        one is None or one is ... or isinstance(one, slice) or _is_int(one) for one in index
    ):
        return None
    found = header.shape_of(where.meta)
    if found is None or len(where.ranges) != 16:
        return _of_container(where, index)
    shape, size = found
    picked = _picked(shape, index)
    if picked is None:
        return _of_container(where, index)
    address, _ = _RANGE.unpack(where.ranges)
    whole = [n for _, n, _ in picked]
    if 0 in whole:
        level, ranges = len(shape), b""
    else:
        level, ranges = _runs(address, shape, picked, size)
    # A dimension that one element is taken of is not there any more.
    given = [*index, *[_ALL] * (len(shape) - len(index))]
    if not ranges or _is_exact(shape, picked, level):
        left = tuple([n for n, one in zip(whole, given, strict=True) if not _is_int(one)])
        return where._replace(
            ranges=ranges, meta=header.with_shape(where.meta, left), arena_ranges=b"", joined=True
        )
    # Whole blocks come, of which the part is taken where they are.
    _, count, step = picked[level]
    block = (*whole[:level], (count - 1) * step + 1, *shape[level + 1 :])
    rest = [(0, count, step), *picked[level + 1 :]]
    inner = [0 if _is_int(one) else _ALL for one in given[:level]]
    for one, (first, n, stride) in zip(given[level:], rest, strict=True):
        inner.append(first if _is_int(one) else slice(first, first + (n - 1) * stride + 1, stride))
    meta = _pickled(_taken, where.codec, header.with_shape(where.meta, block), tuple(inner))
    return where._replace(ranges=ranges, codec=PICKLE, meta=meta, arena_ranges=b"", joined=True)


def _is_int(one: Any) -> bool:
    return isinstance(one, Integral) and not isinstance(one, bool)


def _picked(shape: Sequence[int], index: Index) -> list[Picked] | None:
    """Return the elements that are picked of each dimension; ``None`` if the index is not so simple."""
    if not all(isinstance(one, slice) or _is_int(one) for one in index):
        return None
    if len(index) > len(shape):
        raise IndexError(f"a value of shape {list(shape)} has no part {index!r}")
    picked = []
    for n, one in itertools.zip_longest(shape, index, fillvalue=_ALL):
        if _is_int(one):
            if not -n <= one < n:
                raise IndexError(f"a value of shape {list(shape)} has no part {index!r}")
            picked.append((int(one) % n, 1, 1))
            continue
        start, stop, step = one.indices(n)
        if step < 1:
            return None
        picked.append((start, len(range(start, stop, step)), step))
    return picked


def _runs(address: int, shape: Sequence[int], picked: list[Picked], size: int) -> tuple[int, bytes]:
    """Return a dimension, and the runs of bytes to be fetched, in order. A run covers what is picked of that
    dimension, and all of those behind it. Fewer and longer runs may be less work than those that are
    picked."""
    strides = [size * math.prod(shape[i + 1 :]) for i in range(len(shape))]
    best: tuple[float, int, int] | None = None
    many = 1
    for level in range(len(shape) + 1):
        length = size
        if level < len(shape):
            _, count, step = picked[level]
            length = ((count - 1) * step + 1) * strides[level]
        cost = many * (_NS_OF_RUN + _NS_OF_BYTE * length)
        if best is None or (many <= _MOST_RUNS and cost < best[0]):
            best = cost, level, length
        if level < len(shape):
            many *= picked[level][1]
    assert best is not None
    _, level, length = best
    begin = address
    for (start, _, _), stride in zip(picked[: level + 1], strides, strict=False):
        begin += start * stride
    steps = []
    for (_, count, step), stride in zip(picked[:level], strides, strict=False):
        steps.append(range(0, count * step * stride, step * stride))
    return level, _table(begin, steps, length)


def _table(begin: int, steps: list[range], length: int) -> bytes:
    *outer, inner = steps or [range(1)]
    starts = array("Q")
    for offsets in itertools.product(*outer):
        first = begin + sum(offsets)
        starts.extend(range(first, first + inner.stop, inner.step))
    table = array("Q", bytes(2 * starts.itemsize * len(starts)))
    table[0::2] = starts
    table[1::2] = array("Q", [length]) * len(starts)
    return table.tobytes()


def _is_exact(shape: Sequence[int], picked: list[Picked], level: int) -> bool:
    """Whether the runs hold what is picked, and nothing else."""
    if level == len(shape):
        return True
    _, count, step = picked[level]
    behind = zip(shape[level + 1 :], picked[level + 1 :], strict=True)
    return (step == 1 or count == 1) and all((0, n, 1) == one for n, one in behind)


def _of_container(where: Located, index: Index) -> Located | None:
    """Return the place of a part of any other value. The contents of the value are known without its
    memory."""
    # What is taken of whole blocks has no ranges of its own parts.
    if where.joined and where.codec == PICKLE and where.meta.startswith(_TAKES, _PICKLE_HEAD):
        return None
    try:
        skeleton = Skeleton(where)
    except Exception:  # there is no room, or the user's code expects what is not there
        return None
    if is_leaf(skeleton.value) and where.codec == PICKLE:
        # An array that was pickled is one all the same.
        whole = _located(skeleton, where, skeleton.value)
        return part_of(whole, index) if whole and whole.codec in (ARRAY, TENSOR) else None
    try:
        part = skeleton.value[index[0] if len(index) == 1 else index]
    except LookupError:
        if skeleton.blind:
            raise
        return None
    except Exception:  # it has no parts; who gets the whole is told
        return None
    return _located(skeleton, where, part)


def _located(skeleton: Skeleton, where: Located, part: Any) -> Located | None:
    """Return the place of an object inside the value."""
    try:
        encoded = encode(part)
    except Exception:  # it is not to be sent alone
        return None
    codec, flags, meta, buffers = encoded[:4]
    made = None
    # What was made of the contents of its memory would be wrong.
    if len(encoded) == 4 and not flags & FLAG_REFS and skeleton.blind:
        made = _relocated(skeleton, where, codec, meta, buffers or [])
    if made is None and flags & FLAG_DEFINITIONS:
        SentDefinitions().undo(meta)  # its borrows
    return made


def _relocated(
    skeleton: Skeleton, where: Located, codec: int, meta: bytes, buffers: list[Any]
) -> Located | None:
    tables: list[bytes] = []
    spans: list[tuple[int, int]] = []
    pieces = list(_RANGE.iter_unpack(_core.ranges_of(buffers)))
    # What lies between two of them, so that each begins where its elements may, is bytes of the longest.
    spare = max(pieces, key=lambda one: one[1], default=(0, 0))[0]
    at = 0
    for address, length in pieces:
        gap = skeleton.sources_of(spare, -at % 64)
        if gap is not None:
            tables.append(gap)
            at += -at % 64
        table = skeleton.sources_of(address, length)
        if table is None:
            return None
        tables.append(table)
        spans.append((at, at + length))
        at += length
    if len(buffers) > 1:
        codec, meta = PICKLE, _pickled(_decode_joined, codec, meta, spans)
    return where._replace(
        ranges=b"".join(tables), codec=codec, meta=meta, arena_ranges=b"", joined=True
    )


class _Call:
    """Object that is pickled as a call, with a buffer as the last argument."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._made = function, (*args, pickle.PickleBuffer(bytearray()))

    def __reduce__(self) -> tuple[Any, ...]:
        return self._made


def _pickled(function: Callable[..., Any], *args: Any) -> bytes:
    return pickle.dumps(_Call(function, args), 5, buffer_callback=lambda _: None)


def _taken(codec: int, meta: bytes, index: Index, buffer: Any) -> Any:
    """A part of what is described, in memory of its own."""
    value = decode(codec, meta, [buffer])
    if not is_tensor(value):
        return value[index].copy()
    return value.detach()[index].clone().requires_grad_(value.requires_grad)


def _decode_joined(codec: int, meta: bytes, spans: list[tuple[int, int]], buffer: Any) -> Any:
    """A value of several buffers, which have come as one."""
    memory = memoryview(buffer).cast("B")
    pieces = [memory[start:end] for start, end in spans]
    aligned = [
        p if not start % 64 else bytearray(p) for p, (start, _) in zip(pieces, spans, strict=True)
    ]
    return decode(codec, meta, aligned)


#: Protocol and frame, which every pickle begins with; and how one that calls ``_taken`` goes on.
_PICKLE_HEAD = 11
_TAKES = pickle.dumps(_taken, 5)[_PICKLE_HEAD:-1].removesuffix(b"\x94")
