"""What the ends of an edge tell each other."""

from __future__ import annotations

from typing import NamedTuple


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


class Gone(NamedTuple):
    """Stretches that are no more."""

    numbers: tuple[int, ...]


class Closed(NamedTuple):
    """The writer lets go of all of its stretches."""
