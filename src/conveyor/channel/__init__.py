"""How one value gets from one process to others: the frame codec, rings, leases."""

from __future__ import annotations

from conveyor import _core
from conveyor.channel.claims import Reader
from conveyor.channel.codec import announce, decode, discard, encode
from conveyor.channel.definitions import SentDefinitions
from conveyor.channel.errors import append_to_message, decode_error, encode_error
from conveyor.channel.full import arena_full
from conveyor.channel.pickling import (
    SENT,
    add_reducers,
    blamed,
    drop_picklers,
    dumps_by_value,
    loads,
)
from conveyor.channel.refused import refused
from conveyor.channel.siblings import add_sibling, summarize_error
from conveyor.channel.tensors import held_alone
from conveyor.exceptions import RuntimeStateError, SerializationError

__all__ = [
    "SENT",
    "Reader",
    "SentDefinitions",
    "add_reducers",
    "add_sibling",
    "append_to_message",
    "blamed",
    "decode_error",
    "drop_picklers",
    "dumps_by_value",
    "encode_error",
    "loads",
    "set_up_codec",
    "summarize_error",
]


def set_up_codec() -> None:
    """Tell the native core how to encode what it cannot itself. Safe to call again."""
    _core.set_codec(
        encode,
        decode,
        announce,
        discard,
        final_error=SerializationError,
        arena_full=arena_full,
        held_alone=held_alone,
        state_error=RuntimeStateError,
        refused=refused,
    )
