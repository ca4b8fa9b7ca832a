"""Skeleton of a value that has stayed elsewhere: its contents and their places, without any of its memory."""

from __future__ import annotations

import mmap
import struct
from bisect import bisect_right
from itertools import accumulate
from typing import Any

from conveyor import _core
from conveyor.codec.direct import Located
from conveyor.codec.frames import decode
from conveyor.direct.memory import address_of, is_plain, is_tensor, nbytes_of

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
        self._room = mmap.mmap(-1, total or 1, flags=_PRIVATE)
        ((self._base, _),) = _RANGE.iter_unpack(_core.ranges_of([self._room]))
        view = memoryview(self._room)
        buffers = [view[:total]]
        if not where.joined:
            buffers = [
                view[start : start + n] for start, n in zip(self._starts, lengths, strict=True)
            ]
        #: What is empty lies nowhere.
        self._places = {
            (start, n): i
            for i, (start, n) in enumerate(zip(self._starts, lengths, strict=True))
            if n
        }
        self.value = decode(where.codec, where.meta, buffers)

    @property
    def ranges(self) -> int:
        """How many ranges have memory."""
        return len(self._places)

    @property
    def blind(self) -> bool:
        """Whether nobody has looked at the memory, so that its contents make no difference."""
        return _core.untouched(self._room)

    def range_of(self, leaf: Any) -> int | None:
        """Return the number of the range that a tensor or an array is, element by element; ``None``: it is
        none of them."""
        if (is_tensor(leaf) and not leaf.is_cpu) or not is_plain(leaf):
            return None
        return self._places.get((address_of(leaf) - self._base, nbytes_of(leaf)))

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
