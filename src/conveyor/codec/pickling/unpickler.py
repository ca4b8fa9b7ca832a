"""Reading what ``pickler`` has written."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

from conveyor.codec.encoded import DEFINING
from conveyor.codec.faults import is_fault
from conveyor.codec.header import unpack
from conveyor.codec.pickling.definitions import KnownDefinitions
from conveyor.exceptions import (
    ActorDiedError,
    InjectedFault,
    ObjectLostError,
    SerializationError,
    SharedWriteError,
    TransportError,
    WaitTimeoutError,
)

_known_to_all = KnownDefinitions()

#: What comes of a part that has stayed elsewhere, and cannot be fetched.
_FETCHING = (
    ActorDiedError,
    InjectedFault,
    ObjectLostError,
    SharedWriteError,
    TransportError,
    WaitTimeoutError,
)


def load(
    codec: int, meta: bytes, buffers: Sequence[Any] | None, known: KnownDefinitions | None
) -> Any:
    """The value of a frame with this codec, ``PICKLE`` or ``DEFINING``."""
    pickled: bytes | memoryview = meta
    if codec == DEFINING:
        pickled = learn(meta, known)
    try:
        return pickle.loads(pickled, buffers=buffers)
    except (SerializationError, MemoryError):  # it may be tried again when there is memory
        raise
    except _FETCHING:
        raise
    except BaseException as error:
        if not is_fault(error):
            raise
        raise SerializationError(_cannot_rebuild(error)) from error


def loads(data: bytes, known: KnownDefinitions | None = None) -> Any:
    """The value of ``dumps_by_value``."""
    return load(DEFINING, data, None, known)


def learn(meta: bytes, known: KnownDefinitions | None) -> memoryview:
    """Take note of a frame's definitions; the rest of the frame. Runs no code of the user's."""
    definitions, _, pickled = unpack(meta)
    (_known_to_all if known is None else known).learn(definitions)
    return pickled


def _cannot_rebuild(error: BaseException) -> str:
    text = f"a received value cannot be rebuilt here: {type(error).__name__}: {error}"
    if isinstance(error, ModuleNotFoundError):
        text += (
            f"; the sender could import {error.name!r} and this process cannot: put it on the "
            "actor's PYTHONPATH, or call cloudpickle.register_pickle_by_value on it in the sender"
        )
    return text
