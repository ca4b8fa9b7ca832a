"""Refs inside of values.

A frame whose value refers to refs names them in its header, each as a *claim*: whoever has the frame may
have that ref. Decoding makes the claims good. Who keeps a frame, to decode it later or again, takes the
refs at once and holds them as long as the frame; who drops one that was not decoded gives its claims up.
What a claim is, and what is done with it, is known above (``refs``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from conveyor.codec.encoded import unpack

Claim: TypeAlias = Any

Reader = tuple[int, int]
"""A process that decodes frames: its slot of the process table, and which of that slot's processes it is."""

#: Among a pickler's notes: by the id of a ref, the ref and its claim.
CLAIMS = "claims"


class ReferenceDirectory:
    """Directory of the refs that claims stand for. This one knows none; the code above installs another."""

    def confirm(self, claims: Sequence[Claim]) -> None:
        """Return when these claims, which were made here just now, can be made good."""

    def take(self, claims: Sequence[Claim]) -> Sequence[Any]:
        """Return the refs of these claims, as far as they still exist."""
        return ()

    def give_up(self, claims: Sequence[Claim]) -> None:
        """Note that this process will not ask for these refs, or asked for some of them before it failed.
        Each claim counts once. Finalizers may call it."""

    def withdraw(self, claims: Sequence[Claim], readers: Sequence[Reader]) -> None:
        """Withdraw claims that these readers, for which the claims were made, will never make good. Empty
        ``readers``: one unknown reader. Finalizers may call it."""


_directory = ReferenceDirectory()


def install(directory: ReferenceDirectory) -> None:
    global _directory
    _directory = directory


def confirm(claims: Sequence[Claim]) -> None:
    """Return when these claims, which were made for a value that is pickled by now, can be made good."""
    if claims:
        _directory.confirm(claims)


def confirm_noted(notes: dict[Any, Any], readers: Sequence[Reader]) -> None:
    """Confirm the claims that a pickler has made for these readers. If that raises, the claims are
    withdrawn."""
    made = notes.get(CLAIMS)
    if made:
        try:
            confirm([claim for _, claim in made.values()])
        except BaseException:
            drop_noted(notes, readers)
            raise


def take(meta: bytes) -> Sequence[Any]:
    """Return the refs that the value with these meta bytes (of ``DEFINING``) refers to. The caller holds
    them as long as the value may be decoded."""
    _, claims, _, _ = unpack(meta)
    return _directory.take(claims) if claims else ()


def give_up(meta: bytes) -> None:
    """Give up the claims of a value that this process, one of its readers, will not decode."""
    _, claims, _, _ = unpack(meta)
    if claims:
        _directory.give_up(claims)


def withdraw(claims: Sequence[Claim], readers: Sequence[Reader]) -> None:
    """Withdraw claims that these readers (empty: one unknown reader) will never make good."""
    if claims:
        _directory.withdraw(claims, readers)


def drop_noted(notes: dict[Any, Any], readers: Sequence[Reader]) -> None:
    """Withdraw all claims that a pickler has made for these readers so far: its frame will not be sent."""
    made = notes.pop(CLAIMS, None)
    if made:
        withdraw([claim for _, claim in made.values()], readers)
