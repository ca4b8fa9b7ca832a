"""Messages between the ends of an edge."""

from __future__ import annotations

from typing import Any, NamedTuple


class Part(NamedTuple):
    """Tensors of a transfer that are on one device of the writer. The note is a list of parts.

    number: of their staging buffer, which ``memory`` opens.
    filled: the handle of the event.
    places: the indices of these tensors in the transfer.
    """

    number: int
    memory: bytes
    filled: bytes
    places: tuple[int, ...]


class Taken(NamedTuple):
    """Message that a reader has enqueued its copies of a transfer, and has finished with all transfers
    before.

    reads: the handles of the events that happen with the copies, one for each part; empty: nothing is copied.
    reader: its process.
    """

    transfer: int
    reads: tuple[bytes, ...]
    reader: int


class Refused(NamedTuple):
    """Message that a reader cannot open the memory of a transfer, and asks for its tensors through host
    memory.

    sizes: how many bytes of each part's staging buffer it needs.
    """

    transfer: int
    sizes: tuple[int, ...]


class ByHost(NamedTuple):
    """Answer to :class:`Refused`, for the reader of that rank; the other readers ignore it.

    memory: the bytes of each part's staging buffer, in host memory.
    error: why there are none, in words.
    """

    reader: int
    transfer: int
    memory: tuple[Any, ...]
    error: str | None = None


class Gone(NamedTuple):
    """Message that staging buffers were released."""

    numbers: tuple[int, ...]


class Closed(NamedTuple):
    """Message that the writer releases all of its staging buffers."""
