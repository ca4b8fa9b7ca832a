"""Refs inside of values.

A frame whose value refers to refs names them in its header, each as a *borrow*: whoever has the frame may
have that ref. Decoding resolves the borrows. Who keeps a frame, to decode it later or again, takes the
refs at once and holds them as long as the frame; who drops one that was not decoded gives its borrows up.
What a borrow is, and what is done with it, is known above (``refs``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from conveyor.codec.encoded import unpack

Borrow: TypeAlias = Any

Reader = tuple[int, int]
"""A process that decodes frames: its slot of the process table, and which of that slot's processes it is."""

#: Among a pickler's notes: by the id of a ref, the ref and its borrow.
BORROWS = "borrows"


class ReferenceDirectory:
    """Directory of the refs that borrows stand for. This one knows none; the code above installs another."""

    def confirm(self, borrows: Sequence[Borrow]) -> None:
        """Return when these borrows, which were made here just now, can be made good."""

    def take(self, borrows: Sequence[Borrow]) -> Sequence[Any]:
        """Return the refs of these borrows, as far as they still exist."""
        return ()

    def give_up(self, borrows: Sequence[Borrow]) -> None:
        """Note that this process will not ask for these refs, or asked for some of them before it failed.
        Each borrow counts once. Finalizers may call it."""

    def withdraw(self, borrows: Sequence[Borrow], readers: Sequence[Reader]) -> None:
        """Withdraw borrows that these readers, for which the borrows were made, will never make good. Empty
        ``readers``: one unknown reader. Finalizers may call it."""


_directory = ReferenceDirectory()


def install(directory: ReferenceDirectory) -> None:
    global _directory
    _directory = directory


def confirm(borrows: Sequence[Borrow]) -> None:
    """Return when these borrows, which were made for a value that is pickled by now, can be made good."""
    if borrows:
        _directory.confirm(borrows)


def confirm_noted(notes: dict[Any, Any], readers: Sequence[Reader]) -> None:
    """Confirm the borrows that a pickler has made for these readers. If that raises, the borrows are
    withdrawn."""
    made = notes.get(BORROWS)
    if made:
        try:
            confirm([borrow for _, borrow in made.values()])
        except BaseException:
            drop_noted(notes, readers)
            raise


def take(meta: bytes) -> Sequence[Any]:
    """Return the refs that the value with these meta bytes (of ``DEFINING``) refers to. The caller holds
    them as long as the value may be decoded."""
    _, borrows, _, _ = unpack(meta)
    return _directory.take(borrows) if borrows else ()


def give_up(meta: bytes) -> None:
    """Give up the borrows of a value that this process, one of its readers, will not decode."""
    _, borrows, _, _ = unpack(meta)
    if borrows:
        _directory.give_up(borrows)


def withdraw(borrows: Sequence[Borrow], readers: Sequence[Reader]) -> None:
    """Withdraw borrows that these readers (empty: one unknown reader) will never make good."""
    if borrows:
        _directory.withdraw(borrows, readers)


def drop_noted(notes: dict[Any, Any], readers: Sequence[Reader]) -> None:
    """Withdraw all borrows that a pickler has made for these readers so far: its frame will not be sent."""
    made = notes.pop(BORROWS, None)
    if made:
        withdraw([borrow for _, borrow in made.values()], readers)
