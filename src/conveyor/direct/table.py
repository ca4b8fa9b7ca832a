"""What this process keeps for others: values that it has made, which stay in its memory."""

from __future__ import annotations

import itertools
import os
import struct
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from conveyor import _core

_RANGE = struct.Struct("<QQ")


class Stored:
    """A value that stays here, as long as this does.

    number: which no other one has, in any process of any session.
    value: itself.
    ranges: address and length of each part of its memory that others may read.
    transport: the name that was asked for.
    since: when it was kept, by ``time.monotonic()``.
    """

    __slots__ = (
        "__weakref__",
        "_anchor",
        "_buffers",
        "_table",
        "number",
        "ranges",
        "since",
        "transport",
        "value",
    )

    def __init__(
        self,
        table: Table,
        number: int,
        value: Any,
        buffers: list[Any],
        ranges: bytes,
        transport: str,
    ) -> None:
        self._table = table
        self.number = number
        self.value = value
        self._buffers = buffers  # they keep the memory, whatever becomes of the value
        self.ranges = ranges
        self.transport = transport
        self.since = time.monotonic()
        # Last: what others may read by the number is there.
        self._anchor: _core.Anchor | None = _core.Anchor(number)

    def __del__(self) -> None:
        # First: who reads the memory meanwhile finds that it may be anybody's.
        self._anchor = None
        self._table.forget(self.number)

    @property
    def nbytes(self) -> int:
        """The bytes of all of its ranges."""
        return sum(length for _, length in _RANGE.iter_unpack(self.ranges))

    @property
    def anchor(self) -> int:
        """Where the word lies that says it is here."""
        assert self._anchor is not None
        return self._anchor.address


class Table:
    """All that is kept here."""

    def __init__(self) -> None:
        # Each process counts from a random number: who reads another one's memory finds none that it knows.
        self._numbers: Iterator[int] = itertools.count(_first_number())
        # Each value takes itself out. A dictionary of the standard library's that does so costs more than all
        # else here.
        self._stored: dict[int, weakref.ref[Stored]] = {}
        #: Of each value its ranges.
        self._lying: dict[int, bytes] = {}

    def keep(self, value: Any, buffers: list[Any], transport: str) -> Stored:
        """Keep a value; ``buffers`` is the memory that others may read."""
        number, ranges = next(self._numbers), _core.ranges_of(buffers)
        self._lying[number] = ranges
        try:
            stored = Stored(self, number, value, buffers, ranges, transport)
        except BaseException:
            self._lying.pop(number, None)
            raise
        self._stored[number] = weakref.ref(stored)
        return stored

    def forget(self, number: int) -> None:
        """The value of that number is garbage."""
        self._stored.pop(number, None)
        self._lying.pop(number, None)

    def find(self, number: int) -> Stored | None:
        """The value of that number, if it is kept here."""
        found = self._stored.get(number)
        return None if found is None else found()

    def all(self) -> list[Stored]:
        """All of them, the oldest first."""
        found = [
            ref() for ref in list(self._stored.values())
        ]  # one step, whatever other threads do
        return sorted([one for one in found if one is not None], key=lambda one: one.since)

    def holding(self, address: int, nbytes: int) -> int:
        """How many have some of their memory among these bytes.

        Who asks keeps none of them meanwhile: whoever else waits for them to go would find them here, and
        hear of nothing afterwards.
        """
        found = list(self._lying.values())  # one step, whatever other threads do
        return sum(_lies_in(ranges, address, nbytes) for ranges in found)


def _lies_in(ranges: bytes, address: int, nbytes: int) -> bool:
    end = address + nbytes
    return any(
        start < end and address < start + length for start, length in _RANGE.iter_unpack(ranges)
    )


def _first_number() -> int:
    return int.from_bytes(os.urandom(7), "little") + 1


def _forget_in_child() -> None:
    """What a forked child has inherited is its parent's."""
    TABLE.__init__()  # type: ignore[misc]


#: This process's.
TABLE = Table()
os.register_at_fork(after_in_child=_forget_in_child)

Decode = Callable[[int, bytes, "list[Any] | None"], Any]
