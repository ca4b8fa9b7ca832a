"""Values are encoded of which something was promised."""

from __future__ import annotations

from conveyor.codec.encoded import FLAG_DEFINITIONS, Encoded
from conveyor.codec.pickling import pickler
from conveyor.codec.pickling.definitions import SentDefinitions
from conveyor.codec.promises import Keeper, Promised


def encode(promised: Promised, sent: SentDefinitions | None) -> Encoded:
    """Encode a value with promises; see :func:`conveyor.codec.frames.encode`."""
    sent = SentDefinitions() if sent is None else sent
    sent.keeper = promised.keeper
    try:
        encoded = pickler.dump(promised.value, sent)
    finally:
        sent.keeper = None
    _, flags, meta, *_ = encoded
    end_of(promised.keeper, sent, flags, meta)
    return encoded


def end_of(keeper: Keeper, sent: SentDefinitions, flags: int, meta: bytes) -> None:
    """Finish the pickling of a value with promises. If the value breaks a promise, its definitions are taken
    back."""
    try:
        keeper.end()
    except BaseException:
        if flags & FLAG_DEFINITIONS:
            sent.undo(meta)
        raise
