"""Memory of processes of other hosts, which a process has its own host fetch.

What a value's frame says of where it is means the same on each host. So whoever needs the memory asks its
host: the driver is its own, an actor asks over a connection, which it has from where it first needs one.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from conveyor import _core
from conveyor.codec import Reader
from conveyor.runtime.kept import KeptAt


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
        """Of what comes."""
        if self.joined:
            return sum(_core.lengths_of(self.ranges))
        return _core.packed_size(self.ranges)


class Brought(Struct, frozen=True):
    """What has come of it: memory, or an error.

    error: of the system, as reading on one host would have given it; 0: it is there. why: in words.
    """

    memory: _core.Buffer | None = None
    error: int = 0
    why: str = ""


class FarMemory(Protocol):
    """Of all other hosts."""

    def fetch(self, wanted: Wanted, tell: Callable[[Brought], object]) -> None:
        """Have it fetched. ``tell`` is called once, by any thread."""
        ...

    def introduce(self, process: Reader) -> bool:
        """Whether that process, of which this host knows nothing, lives on another one. If so, it is known
        from now on."""
        ...

    def kept(self) -> list[KeptAt]:
        """What the processes of all other hosts keep for others, as far as these answer in time."""
        ...

    def close(self) -> None:
        """The process leaves its session."""
        ...


class HostsMemory(FarMemory, Protocol):
    """The same as a host has it."""

    def serve(self, sock: socket.socket) -> None:
        """Fetch what a process of this host asks for over ``sock``, which is the host's from now on."""
        ...
