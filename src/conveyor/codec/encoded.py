"""Encoded values: what encoders and pickle reducers return, and the header of a frame's meta bytes."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Sequence
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
"""The header names borrowed references."""
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
HELD = "held"
"""Among the notes: what the writer keeps as long as anybody has the frame."""
REFS = "refs"
"""Among the notes: the references in a pickle that is not made for a frame."""
SENT = "sent"
"""Among the notes: the ``SentDefinitions`` of the channel that the value goes to."""


class InBandReducers(dict[type, Reducer]):
    """Reducers of a pickler that leaves nothing out. The sender may set one for all exceptions, since their
    classes are not known in advance."""

    def __init__(self, reducers: dict[type, Reducer], notes: dict[Any, Any]) -> None:
        super().__init__(reducers)
        self._notes = notes

    def __getitem__(self, kind: type) -> Reducer:
        if issubclass(kind, BaseException):
            sent = self._notes.get(SENT)
            if sent is not None and sent.of_exceptions is not None:
                reducer: Reducer = sent.of_exceptions
                return reducer
        return super().__getitem__(kind)


class Pieces(list[Any]):
    """The output of a pickler, in order: its strings, and the buffers that it leaves out of them."""

    __slots__ = ()
    write = list.append

    def whole(self) -> bytes:
        """The pickle, of a pickler that leaves nothing out."""
        return self[0] if len(self) == 1 else b"".join(self)

    def parts(self, with_texts: bool) -> tuple[bytes, list[Any] | None]:
        """The pickle, and the buffers that are out of it, or ``None``.

        ``with_texts``: large ``bytes``, ``bytearray`` and ``str`` are among them. In the pickle each would be
        copied twice more on either side. The pickler writes them by themselves, behind a head that says what
        they are.
        """
        if len(self) == 1:
            return self[0], None
        pieces: list[Any] = []
        buffers: list[Any] = []
        for piece in self:
            if type(piece) is pickle.PickleBuffer:
                buffers.append(piece.raw())
                continue
            if with_texts and len(piece) >= _LARGE and pieces:
                before = pieces[-1]
                size = len(piece).to_bytes(8, "little")
                made = _MADE_OF.get(before[-9:-8]) if before[-8:] == size else None
                length = 9
                if made is None and size[4:] == bytes(4):
                    made = _MADE_OF.get(before[-5:-4]) if before[-4:] == size[:4] else None
                    length = 5
                if made is not None:
                    pieces[-1] = before[:-length] + made
                    buffers.append(memoryview(piece))
                    continue
            pieces.append(piece)
        return b"".join(pieces), buffers or None


#: Bytes. A pickler writes what is smaller together with other things.
_LARGE = 1 << 18


def _made_by(module: str, function: str) -> bytes:
    """Opcodes that call a function with the next buffer."""
    names = [name.encode() for name in (module, function)]
    called = b"".join(pickle.SHORT_BINUNICODE + bytes([len(name)]) + name for name in names)
    return called + pickle.STACK_GLOBAL + pickle.NEXT_BUFFER + pickle.TUPLE1 + pickle.REDUCE


#: By the opcode that a pickle has for a large one, whose length follows: what there is instead of both.
_MADE_OF = {
    pickle.BINBYTES: _made_by("conveyor._core", "bytes_of"),
    pickle.BINBYTES8: _made_by("conveyor._core", "bytes_of"),
    pickle.BINUNICODE: _made_by("conveyor._core", "text_of"),
    pickle.BINUNICODE8: _made_by("conveyor._core", "text_of"),
    pickle.BYTEARRAY8: _made_by("builtins", "bytearray"),
}


Token = bytes
"""Stands for a class or function that was defined by value; see ``byvalue``."""

Definition = tuple[tuple[Token, ...], bytes, tuple[Token, ...], bool]
"""How a group looks in a frame: tokens, payload, keys of the groups it needs."""

_header_size = struct.Struct("<I")


def pack(
    definitions: Sequence[Definition],
    pickled: bytes,
    borrows: Sequence[Any] = (),
    gone: Sequence[Token] = (),
) -> bytes:
    """The meta bytes of a frame with definitions, or with borrows to refs (``codec.borrows``).

    ``gone``: keys of groups that frames of this channel refer to no more, unless they are defined again.
    """
    header = pickle.dumps((definitions, borrows, gone), 5)
    return b"".join((_header_size.pack(len(header)), header, pickled))


def unpack(
    meta: bytes,
) -> tuple[Sequence[Definition], Sequence[Any], Sequence[Token], memoryview]:
    """The definitions, the borrows, the groups that are gone and the pickle in a frame's meta bytes.

    Runs no code of the user's.
    """
    view = memoryview(meta)
    (size,) = _header_size.unpack_from(view)
    body = _header_size.size + size
    definitions, borrows, gone = pickle.loads(view[_header_size.size : body])
    return definitions, borrows, gone, view[body:]
