"""Getting several results: the first error that comes is raised, wherever it stands among them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from conveyor import _core
from conveyor.refs.ref import EMPTY, Ref

T = TypeVar("T")


class Companion(Protocol):
    """Member of a group of things that are waited for together: a ref, or something that can only fail."""

    def has_failed(self) -> bool:
        """Whether ``get`` would raise. A failure notifies the process that waits."""

    def get(self, timeout: float | None) -> Any:
        """Raise the failure, if there is one."""

    def parts(self) -> Sequence[Companion]:
        """Return the members that this is made of: itself, as a rule."""


class CompanionFailed(Exception):
    """Raised to end the wait for one of several because ``companion``, another of them, has failed."""

    def __init__(self, companion: Companion) -> None:
        self.companion = companion


class _Together(threading.local):
    """Refs that the thread gets together, and all parts that they are made of, by identity. The parts are
    collected when a wait is long."""

    refs: Sequence[Companion] = ()
    parts: dict[int, Companion] | None = None


_together = _Together()


def get_together(refs: Sequence[Companion], get: Callable[[], T]) -> T:
    """Return the result of ``get()``, which gets all refs of ``refs`` one after the other."""
    before = _together.refs, _together.parts
    while True:
        _together.refs, _together.parts = refs, None
        try:
            return get()
        except CompanionFailed as failed:
            first = failed.companion
        finally:
            _together.refs, _together.parts = before
        first.get(0)  # raises, unless its value has come just now


def get_or_wait(
    ref: Ref,
    inbox: _core.Inbox,
    seen: int,
    timeout: float | None,
    deaths: int,
    every_notification: bool = False,
) -> Any:
    """Call ``InFlightWindow.get`` for ``ref``; the wait also ends when a ref that is got with it has failed.
    Not called before a wait has lasted so long that it may cost something to be woken.

    ``every_notification``: it ends whenever this process is notified. ``seen`` is the inbox's count before
    the caller looked whether anything else has ended the wait.
    """
    window = ref._window
    parts = _parts() if timeout != 0 else {}
    # Otherwise it is got by code that runs while one of them is decoded.
    if id(ref) not in parts and not every_notification:
        return window.get(ref, timeout, deaths)
    value = window.take(ref._number, ref._reader)
    if value is not EMPTY or ref._outcome is not EMPTY:
        return value
    for part in parts.values():
        if part is not ref and part.has_failed():
            raise CompanionFailed(part)
    inbox.wait(seen, timeout)
    return window.take(ref._number, ref._reader)


def look_at_others(ref: Ref) -> None:
    """End the wait for ``ref``, which is not done, if another that is got with it has failed."""
    parts = _parts()
    if id(ref) not in parts and all(ref is not other for other in _together.refs):
        return  # it is got by code that runs while one of them is decoded
    for part in parts.values():
        if part is not ref and part.has_failed():
            raise CompanionFailed(part)


def _parts() -> dict[int, Companion]:
    refs, parts = _together.refs, _together.parts
    if len(refs) < 2:
        return {}
    if parts is None:
        _together.parts = parts = {id(part): part for ref in refs for part in ref.parts()}
    return parts
