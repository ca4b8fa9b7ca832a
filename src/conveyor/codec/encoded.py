"""What encoders make of a value, and what they make it with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

PICKLE = 16
"""Codec: a pickle, with buffers out of band."""
DEFINING = 17
"""Codec: the same, behind the definitions that it needs."""

DIRECT = 21
"""Codec: where a value is that has stayed."""

FLAG_DEFINITIONS = 1
"""The frame has a header: every reader must decode it, or at least announce it."""
FLAG_REFS = 4
"""There are claims to refs in the header."""
FLAG_BOUND = 8
"""The frame refers to definitions, which its channel may have carried before: in another channel it
would not be understood."""

Encoded: TypeAlias = (
    "tuple[int, int, bytes, list[Any] | None] | tuple[int, int, bytes, list[Any] | None, Any]"
)
"""codec, flags, meta, buffers; and, of a frame that its writer keeps something for, that."""

Reducer: TypeAlias = Callable[[Any], Any]
ReducerFactory: TypeAlias = "Callable[[dict[Any, Any]], dict[type, Reducer]]"
"""Makes reducers that may keep notes in a dict, which is emptied after every value."""

FINAL = "final"
"""Among the notes: an error that the value is not pickled again for. It is not about pickling."""
KEPT = "kept"
"""Among the notes: what the writer keeps as long as anybody has the frame."""
SENT = "sent"
"""Among the notes: the ``SentDefinitions`` of the channel that the value goes to."""


class Pieces(list[bytes]):
    """The file that a pickler writes: its strings, as they come."""

    __slots__ = ()
    write = list.append
