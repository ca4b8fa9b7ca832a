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
    nbytes: of all of them.
    transport: how its users want it to be moved.
    since: when it was kept, by ``time.monotonic()``.
    """

    __slots__ = (
        "__weakref__",
        "_anchor",
        "_buffers",
        "_lying",
        "nbytes",
        "number",
        "ranges",
        "since",
        "transport",
        "value",
    )

    def __init__(
        self,
        number: int,
        value: Any,
        buffers: list[Any],
        ranges: bytes,
        transport: str,
        lying: dict[int, bytes],
    ) -> None:
        """``lying`` has the ranges by the number, as long as this is here."""
        self.number = number
        self._lying = lying
        self.value = value
        self._buffers = buffers  # they keep the memory, whatever becomes of the value
        self.ranges = ranges
        self.nbytes = sum(length for _, length in _RANGE.iter_unpack(ranges))
        self.transport = transport
        self.since = time.monotonic()
        lying[number] = ranges
        # Last: what others may read by the number is there.
        self._anchor: _core.Anchor | None = _core.Anchor(number)

    def __del__(self) -> None:
        # First: who reads the memory meanwhile finds that it may be anybody's.
        self._anchor = None
        self._lying.pop(self.number, None)

    @property
    def anchor(self) -> int:
        """Where the word lies that says it is here."""
        assert self._anchor is not None
        return self._anchor.address


class Table:
    """All that is kept here."""

    def __init__(self) -> None:
        # Another process's begin elsewhere: who reads the wrong one's memory finds no number that he knows.
        self._numbers: Iterator[int] = itertools.count(_first_number())
        self._stored: weakref.WeakValueDictionary[int, Stored] = weakref.WeakValueDictionary()
        self._lying: dict[int, bytes] = {}

    def keep(self, value: Any, buffers: list[Any], transport: str) -> Stored:
        """Keep a value; ``buffers`` is the memory that others may read."""
        ranges = _core.ranges_of(buffers)
        stored = Stored(next(self._numbers), value, buffers, ranges, transport, self._lying)
        self._stored[stored.number] = stored
        return stored

    def find(self, number: int) -> Stored | None:
        """The value of that number, if it is kept here."""
        return self._stored.get(number)

    def all(self) -> list[Stored]:
        """All of them, the oldest first."""
        found = [ref() for ref in self._stored.valuerefs()]  # one step, whatever other threads do
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
