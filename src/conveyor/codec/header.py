"""The header of a frame's meta bytes: what the frame defines, and which refs its value has."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from typing import Any

Token = bytes
"""Stands for a class or function that was defined by value; see ``byvalue``."""

Definition = tuple[tuple[Token, ...], bytes, tuple[Token, ...], bool]
"""How a group looks in a frame: tokens, payload, keys of the groups it needs."""

_header_size = struct.Struct("<I")


def pack(
    definitions: Sequence[Definition],
    pickled: bytes,
    claims: Sequence[Any] = (),
    gone: Sequence[Token] = (),
) -> bytes:
    """The meta bytes of a frame with definitions, or with claims to refs (``codec.claims``).

    ``gone``: keys of groups that frames of this channel refer to no more, unless they are defined again.
    """
    header = pickle.dumps((definitions, claims, gone), 5)
    return b"".join((_header_size.pack(len(header)), header, pickled))


def unpack(
    meta: bytes,
) -> tuple[Sequence[Definition], Sequence[Any], Sequence[Token], memoryview]:
    """The definitions, the claims, the groups that are gone and the pickle in a frame's meta bytes.

    Runs no code of the user's.
    """
    view = memoryview(meta)
    (size,) = _header_size.unpack_from(view)
    body = _header_size.size + size
    definitions, claims, gone = pickle.loads(view[_header_size.size : body])
    return definitions, claims, gone, view[body:]
