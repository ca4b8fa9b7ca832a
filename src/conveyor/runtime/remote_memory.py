"""Memory of processes of other nodes, which a process has its own node fetch.

What a value's frame says of where it is means the same on each node. So whoever needs the memory asks its
node: the driver is its own, an actor asks over a connection, which it has from where it first needs one.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from typing import NamedTuple, Protocol

from msgspec import Struct

from conveyor import _core, descriptors
from conveyor.codec import Reader
from conveyor.exceptions import ArenaFullError
from conveyor.runtime.stored_values import StoreSnapshot

#: Values below are told with the news that they are there.
SMALL = 32 * 1024
#: Formats that ``_core.ranges_in_arena`` takes and gives: address and length; offset and size of a block,
#: and where in it.
_RANGE, _ARENA_RANGE = struct.Struct("<QQ"), struct.Struct("<QQQ")


class Wanted(Struct, frozen=True):
    """Memory of a process.

    process: its slot and incarnation. number, anchor: of the value; see ``codec.direct.Located``.
    ranges: address and length of each part, as pairs of 64-bit numbers.
    joined: they come one right behind the other; else each aligned, as ``_core.packed_size`` says.
    """

    process: Reader
    number: int
    anchor: int
    ranges: bytes
    joined: bool

    @property
    def size(self) -> int:
        """Size of the fetched memory, in bytes."""
        if self.joined:
            return sum(_core.lengths_of(self.ranges))
        return _core.packed_size(self.ranges)


class Brought(Struct, frozen=True):
    """Outcome of a fetch: the memory is where it was to be put, or there is an error.

    data: the memory, where it is so small that no buffer was made for it.
    error: of the system, as reading on one node would have given it; 0: the memory is there. why: in words.
    """

    data: bytes | None = None
    error: int = 0
    why: str = ""


class ReceiveBuffer:
    """Memory of this process that its node writes to, by the file that it lies in; of the arena, as values of
    this node would get it, or where there is none left, of its own.

    fd, at: the file, and where it begins there.
    """

    __slots__ = ("_file", "_memory", "_size", "at", "fd")

    def __init__(self, arena: _core.Arena, size: int) -> None:
        self._size = size
        self._memory: _core.Buffer | None = None
        self._file: Closing | None = None
        try:
            self._memory = arena.allocate(size)
        except ArenaFullError:
            self._file = Closing(descriptors.memory_file("conveyor-value"))
            os.ftruncate(self._file.fd, size)
            self.fd, self.at = self._file.fd, 0
            return
        place = _core.ranges_in_arena(_RANGE.pack(self._memory.address, size), arena)
        offset, _, begins = _ARENA_RANGE.unpack(place)
        self.fd, self.at = arena.file[0], offset + begins

    def memory(self) -> _core.Buffer:
        """Return the memory, once it has been written."""
        if self._memory is None:
            assert self._file is not None
            self._memory = _core.Buffer.copy_of(self._file.fd, self._size)
        return self._memory


class ReceiveFile(NamedTuple):
    """Receive buffer as the node's agent has it."""

    fd: int
    at: int


class Closing:
    """A file that is closed with whoever has it."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


class RemoteMemory(Protocol):
    """Memory of the processes of all other nodes."""

    def fetch(
        self, wanted: Wanted, buffer: ReceiveBuffer | None, tell: Callable[[Brought], object]
    ) -> Callable[[], object]:
        """Have memory fetched and put into ``buffer``, which is there until ``tell`` is called: once, by any
        thread. Without ``buffer`` the memory is less than :data:`SMALL`, and is told with the outcome.
        Returns a function to call if nobody waits any more."""
        ...

    def introduce(self, process: Reader) -> bool:
        """Whether that process, of which this node knows nothing, lives on another one. If so, it is known
        from now on."""
        ...

    def stored(self) -> list[StoreSnapshot]:
        """Return the stored values of the processes of all other nodes, as far as these answer in time."""
        ...

    def close(self) -> None:
        """Leave the session."""
        ...
