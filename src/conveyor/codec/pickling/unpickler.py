"""Reading what ``pickler`` has written."""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from conveyor import _core
from conveyor.codec.encoded import DEFINING, unpack
from conveyor.codec.faults import is_fault, message_of
from conveyor.codec.pickling import definitions as byvalue
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

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType

#: Bytes of a pickle from which on the garbage collector pauses while it is loaded.
_MANY_OBJECTS = 1 << 16
#: Errors that a part which has stayed elsewhere, and cannot be fetched, ends in.
_FETCHING = (
    ActorDiedError,
    InjectedFault,
    ObjectLostError,
    SharedWriteError,
    TransportError,
    WaitTimeoutError,
)


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause the garbage collector, while many objects are made of which none is garbage. It would look
    through the new objects again and again, and each time that there are a quarter more of them through all
    that the process has."""
    paused = _core.Uncollected()
    try:
        yield
    finally:
        paused.end()


# Not by pthread_atfork: a library may fork without the GIL, and such a child runs no Python.
os.register_at_fork(after_in_child=_core.go_on_collecting)


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
        if len(pickled) < _MANY_OBJECTS:
            return pickle.loads(pickled, buffers=buffers)
        with uncollected():
            return pickle.loads(pickled, buffers=buffers)
    except (SerializationError, MemoryError):  # it may be tried again when there is memory
        raise
    except _FETCHING:
        raise
    except BaseException as error:
        if not is_fault(error):
            raise
        raise SerializationError(cannot_rebuild(error)) from error
    finally:
        del groups


def loads(data: bytes, known: KnownDefinitions | None = None) -> Any:
    """The value of ``dumps_by_value``."""
    return load(DEFINING, data, None, known)


def learn(meta: bytes, known: KnownDefinitions) -> None:
    """Take note of a frame's definitions. Runs no code of the user's."""
    definitions, _, gone, _ = unpack(meta)
    known.learn(definitions, gone)


def cannot_rebuild(error: BaseException) -> str:
    """Say that ``error`` keeps a value from being rebuilt."""
    text = f"a received value cannot be rebuilt here: {type(error).__name__}: {message_of(error)}"
    if isinstance(error, ModuleNotFoundError):
        text += (
            f"; the sender could import {error.name!r} and this process cannot: put it on the "
            "actor's PYTHONPATH, or call cloudpickle.register_pickle_by_value on it in the sender"
        )
    return text


#: Module that each thread imports for a value that it decodes.
_importing = threading.local()


def importing() -> str:
    """The module that this thread imports for a value that it decodes; empty: none."""
    name: str = getattr(_importing, "name", "")
    return name


class _Imports:
    """A finder of modules that finds what those behind it find, and has the process's status name the module
    that is imported for a value. It is asked only for modules that are not there yet."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not _core.note_import(name):
            return None
        shown = False
        try:
            spec = cls._find(name, path, target)
            shown = spec is not None and _end_with(spec.loader, name)
        finally:
            if not shown:
                _core.end_import()
        return spec

    @classmethod
    def _find(
        cls, name: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        for finder in sys.meta_path:
            if finder is not cls and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    return spec
        return None


def _end_with(loader: Any, name: str) -> bool:
    """Have the status name no module any more when this loader's has been executed; whether it will."""
    execute = getattr(loader, "exec_module", None)
    if execute is None or isinstance(loader, type):  # a loader of many modules, which are built in
        return False

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module  # the class has its own
        _importing.name = name
        try:
            execute(module)
        finally:
            _importing.name = ""
            _core.end_import()

    try:
        loader.exec_module = exec_module
    except AttributeError:
        return False
    return True


def show_imports() -> None:
    """Have this process's status name what is imported for values that it decodes."""
    sys.meta_path.insert(0, _Imports)
