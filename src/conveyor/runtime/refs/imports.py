"""Refs that were pickled in another process and loaded here, and what they have come to."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from conveyor import _core
from conveyor.channel import SentDefinitions, decode_error, encode_error
from conveyor.exceptions import RuntimeStateError, SerializationError
from conveyor.runtime import context
from conveyor.runtime.refs.ref import EMPTY, Ref
from conveyor.runtime.refs.wire import SHARE_FROM
from conveyor.runtime.waiting.patience import wait_until

ExportId = tuple[int, int]
"""The process that made the ref (an actor's number, 0 for the driver), and a number there."""


class Table(Protocol):
    """What a process knows of exported refs."""

    session: str

    def export(self, ref: Ref) -> tuple[ExportId, int]:
        """The id of ``ref`` for a new pickle of it, and the pickle's ticket."""
        ...

    def load(self, export: ExportId, ticket: int) -> Ref:
        """The ref that a pickle stands for: the original, or a copy."""
        ...


def pickled(ref: Ref) -> tuple[Callable[..., Ref], tuple[Any, ...]]:
    """What ``__reduce__`` of a ref returns."""
    runtime = context.running()
    if runtime is None:
        raise RuntimeStateError(f"{ref!r} cannot be pickled: its session has ended")
    table = runtime.exports
    if isinstance(ref, ImportedRef) and ref._source is not table:
        raise RuntimeStateError(f"{ref!r} cannot be pickled: it is of an earlier session")
    return load, (table.session, *table.export(ref))


def load(session: str, export: ExportId, ticket: int) -> Ref:
    """Load a pickled ref. ``RuntimeStateError`` outside its session, and when it is not kept any more."""
    runtime = context.running()
    if runtime is None or runtime.exports.session != session:
        raise RuntimeStateError(
            "a pickled ref can only be loaded by the driver and the actors of the session that it "
            "was made in; this process "
            + ("belongs to no session" if runtime is None else "belongs to another session")
            + ": send the value (conveyor.get(ref)) instead"
        )
    return runtime.exports.load(export, ticket)


class ImportedRef(Ref):
    """A copy of a ref whose original is elsewhere, or gone."""

    __slots__ = ("_parcel", "export")

    def __init__(self, table: Imports, export: ExportId) -> None:
        super().__init__(table, -1)
        self.export = export
        self._parcel: Outcome | None = None

    def _settle(self, timeout: float | None) -> Any:
        # Any number of threads may decode it: the first one's counts.
        try:
            value = self._source.wait_for(self, timeout)
            if self._outcome is EMPTY:
                self._arrived(value)
        except SerializationError as error:
            self._fail(error)
        except ImportFailed as ended:
            self._fail(ended.error)
        return self._outcome


class ImportFailed(Exception):
    """The outcome of an imported ref is ``error``."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class Outcome:
    """What a ref has come to, as it travels."""

    __slots__ = ("ok", "snapshot")

    def __init__(self, ok: bool, snapshot: _core.Snapshot) -> None:
        self.ok = ok
        self.snapshot = snapshot

    @classmethod
    def of(cls, ref: Ref) -> Outcome:
        """Of a ref that is done."""
        try:
            return cls(True, _core.Snapshot(ref.get(), SentDefinitions(), SHARE_FROM))
        except Exception as error:
            return cls.failed(error)

    @classmethod
    def failed(cls, error: BaseException) -> Outcome:
        error = error.with_traceback(None)
        try:
            snapshot = _core.Snapshot(error, SentDefinitions(), SHARE_FROM)
        except SerializationError:
            carried = decode_error(encode_error(error, "", ""))
            snapshot = _core.Snapshot(carried, SentDefinitions(), SHARE_FROM)
        return cls(False, snapshot)

    def get(self) -> Any:
        value = self.snapshot.decode()
        if not self.ok:
            raise ImportFailed(value)
        return value


class Imports:
    """The copies that this process has loaded, each once; the source of them."""

    #: For `Ref`: what it waits for comes by messages.
    gate: Any = None

    def __init__(self, session: str, inbox: _core.Inbox, ring: Callable[[], object]) -> None:
        self.session = session
        self._inbox = inbox
        self.ring = ring
        # Reentrant: a copy may become garbage in the middle of anything.
        self.lock = threading.RLock()
        self._copies: weakref.WeakValueDictionary[ExportId, ImportedRef] = (
            weakref.WeakValueDictionary()
        )
        self._originals: weakref.WeakValueDictionary[ExportId, Ref] = weakref.WeakValueDictionary()
        self._ids: weakref.WeakKeyDictionary[Ref, ExportId] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count(1)

    @property
    def known_count(self) -> int:
        """Refs that were pickled or loaded here and still exist."""
        return len(self._originals) + len(self._copies)

    def known(self, export: ExportId) -> Ref | None:
        return self._originals.get(export) or self._copies.get(export)

    def identify(self, ref: Ref, process: int) -> tuple[ExportId, bool]:
        """The id of a ref, and whether it is new."""
        if isinstance(ref, ImportedRef):
            return ref.export, False
        found = self._ids.get(ref)
        if found is not None:
            return found, False
        export = (process, next(self._numbers))
        self._ids[ref] = export
        self._originals[export] = ref
        return export, True

    def copy(self, export: ExportId) -> ImportedRef:
        ref = ImportedRef(self, export)
        self._copies[export] = ref
        weakref.finalize(ref, self.dropped, export).atexit = False
        return ref

    def dropped(self, export: ExportId) -> None:
        """A ref is garbage here. Called from finalizers, which may run in the middle of anything:
        takes no lock."""
        raise NotImplementedError

    def arrived(self, export: ExportId, outcome: Outcome) -> None:
        with self.lock:
            ref = self._copies.get(export)
        if ref is not None and ref._parcel is None:
            ref._parcel = outcome
            self.ring()

    def all_fail(self, error: BaseException) -> None:
        """Nothing will come any more."""
        with self.lock:
            waiting = [ref for ref in self._copies.values() if ref._parcel is None]
        if waiting:
            outcome = Outcome.failed(error)
            for ref in waiting:
                ref._parcel = outcome
            self.ring()

    # Source of the copies

    def wait_for(self, ref: Ref, timeout: float | None) -> Any:
        assert isinstance(ref, ImportedRef)
        wait_until(
            self._inbox,
            lambda: ref._parcel is not None,
            timeout,
            lambda: self.describe(ref),
            lambda: "it is made in another process",
        )
        assert ref._parcel is not None
        return ref._parcel.get()

    def is_ready(self, ref: Ref) -> bool:
        return ref._parcel is not None  # type: ignore[attr-defined]

    def cancel(self, ref: Ref) -> bool:
        raise RuntimeStateError(f"{ref!r} can only be cancelled in the process that made it")

    def stopped(self, ref: Ref, overdue: bool) -> BaseException:
        raise AssertionError("errors of imported refs come as they are")

    def describe(self, ref: Ref) -> str:
        process, number = ref.export  # type: ignore[attr-defined]
        return (
            f"a pickled ref (number {number} of {f'actor {process}' if process else 'the driver'})"
        )

    def doing(self) -> str:
        return "the process that pickled it does not have it yet"


def gone() -> RuntimeStateError:
    return RuntimeStateError(
        "this pickled ref cannot be loaded any more: a result is kept as long as its ref, a loaded "
        "copy, or a pickle that was never loaded exists, and all of them are gone"
    )
