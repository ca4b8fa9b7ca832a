"""What the ends of an edge tell each other."""

from __future__ import annotations

from typing import Any, NamedTuple


class Part(NamedTuple):
    """The tensors of a transfer that are on one device of the writer. The note is a list of them.

    number: of their stretch, which ``memory`` opens.
    filled: the handle of the event.
    places: which tensors of the transfer they are.
    """

    number: int
    memory: bytes
    filled: bytes
    places: tuple[int, ...]


class Taken(NamedTuple):
    """A reader has enqueued its copies of a transfer, and has done with all before.

    reads: the handles of the events that happen with them, one for each part; none: nothing is copied.
    reader: its process.
    """

    transfer: int
    reads: tuple[bytes, ...]
    reader: int


class Refused(NamedTuple):
    """A reader cannot open the memory of a transfer, and asks for its tensors by way of the host.

    sizes: how many bytes of each part's stretch it needs.
    """

    transfer: int
    sizes: tuple[int, ...]


class ByHost(NamedTuple):
    """The answer, for the reader of that rank; others have no use for it.

    memory: what each part's stretch has, in memory of the host.
    error: why there is none, in words.
    """

    reader: int
    transfer: int
    memory: tuple[Any, ...]
    error: str | None = None


class Gone(NamedTuple):
    """Stretches that are no more."""

    numbers: tuple[int, ...]


class Closed(NamedTuple):
    """The writer lets go of all of its stretches."""
