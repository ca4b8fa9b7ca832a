"""Reading what ``pickler`` has written."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

from conveyor.codec.encoded import DEFINING
from conveyor.codec.faults import is_fault
from conveyor.codec.header import unpack
from conveyor.codec.pickling import byvalue
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
    groups: Any = ()  # of a frame that is no channel's: as long as it is loaded
    if codec == DEFINING:
        definitions, _, gone, pickled = unpack(meta)
        if known is not None:
            known.learn(definitions, gone)
        elif definitions:
            groups = [byvalue.received(definition) for definition in definitions]
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
    finally:
        del groups


def loads(data: bytes, known: KnownDefinitions | None = None) -> Any:
    """The value of ``dumps_by_value``."""
    return load(DEFINING, data, None, known)


def learn(meta: bytes, known: KnownDefinitions) -> None:
    """Take note of a frame's definitions. Runs no code of the user's."""
    definitions, _, gone, _ = unpack(meta)
    known.learn(definitions, gone)


def _cannot_rebuild(error: BaseException) -> str:
    text = f"a received value cannot be rebuilt here: {type(error).__name__}: {error}"
    if isinstance(error, ModuleNotFoundError):
        text += (
            f"; the sender could import {error.name!r} and this process cannot: put it on the "
            "actor's PYTHONPATH, or call cloudpickle.register_pickle_by_value on it in the sender"
        )
    return text
