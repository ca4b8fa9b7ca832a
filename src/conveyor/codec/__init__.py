"""Values to bytes and back, and what has to be known of them on both sides."""

from __future__ import annotations

from conveyor import _core
from conveyor.codec.borrows import Reader, take
from conveyor.codec.encoded import SENT
from conveyor.codec.errors import (
    add_sibling,
    append_to_message,
    arena_full,
    completed,
    copy_to_raise,
    decode_error,
    encode_error,
    first_line,
    refused,
    set_later,
    summarize_error,
)
from conveyor.codec.frames import decode, discard, encode
from conveyor.codec.pickling.definitions import KnownDefinitions, SentDefinitions
from conveyor.codec.pickling.pickler import (
    add_reducers,
    blamed,
    drop_picklers,
    dumps_by_value,
)
from conveyor.codec.pickling.unpickler import importing, learn, loads
from conveyor.exceptions import RuntimeStateError, SerializationError
from conveyor.storages import storage_held_alone

__all__ = [
    "SENT",
    "Reader",
    "SentDefinitions",
    "add_reducers",
    "add_sibling",
    "append_to_message",
    "blamed",
    "completed",
    "copy_to_raise",
    "decode_error",
    "drop_picklers",
    "dumps_by_value",
    "encode_error",
    "first_line",
    "importing",
    "loads",
    "set_later",
    "set_up_codec",
    "summarize_error",
]


def set_up_codec() -> None:
    """Tell the native core how to encode what it cannot itself. Safe to call again."""
    _core.set_codec(
        encode,
        decode,
        learn,
        discard,
        final_error=SerializationError,
        arena_full=arena_full,
        storage_held_alone=storage_held_alone,
        state_error=RuntimeStateError,
        refused=refused,
        take=take,
        known=KnownDefinitions,
    )
