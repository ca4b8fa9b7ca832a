"""Getting several results: the first error that comes is raised, wherever it stands among them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from conveyor import _core
from conveyor.runtime.refs.ref import EMPTY, Ref

T = TypeVar("T")


class Companion(Protocol):
    """What may stand among several that are waited for: a ref, or what can only fail."""

    def has_failed(self) -> bool:
        """Whether ``get`` would raise. What makes it so rings the bell of who waits."""

    def get(self, timeout: float | None) -> Any:
        """Raise what has failed, if anything has."""

    def parts(self) -> Sequence[Companion]:
        """Return those that it is made of: itself, as a rule."""


class CompanionFailed(Exception):
    """Who waits for one of several need not go on: ``companion``, which is among them, has failed."""

    def __init__(self, companion: Companion) -> None:
        self.companion = companion


class _Company(threading.local):
    """What the thread gets, of several at once: every ref that they are made of, by its identity; made when
    a wait is long."""

    refs: Sequence[Companion] = ()
    parts: dict[int, Companion] | None = None


_company = _Company()


def get_together(refs: Sequence[Companion], get: Callable[[], T]) -> T:
    """What ``get()`` returns, which gets all refs of ``refs`` one after the other."""
    before = _company.refs, _company.parts
    while True:
        _company.refs, _company.parts = refs, None
        try:
            return get()
        except CompanionFailed as failed:
            first = failed.companion
        finally:
            _company.refs, _company.parts = before
        first.get(0)  # raises, unless its value has come just now


def get_or_wait(
    ref: Ref,
    inbox: _core.Inbox,
    seen: int,
    timeout: float | None,
    deaths: int,
    every_ring: bool = False,
) -> Any:
    """``Gate.get`` of what ``ref`` stands for, which also ends when one that is got with it has failed.
    Not called before a wait has lasted so long that it may cost something to be woken.

    ``every_ring``: it ends whenever the bell rings. ``seen`` is the inbox's count before the caller
    looked whether anything else has ended the wait."""
    gate = ref._gate
    parts = _parts() if timeout != 0 else {}
    # Otherwise it is got by code that runs while one of them is decoded.
    if id(ref) not in parts and not every_ring:
        return gate.get(ref._number, ref._reader, timeout, deaths)
    value = gate.take(ref._number, ref._reader)
    if value is not EMPTY or ref._outcome is not EMPTY:
        return value
    for part in parts.values():
        if part is not ref and part.has_failed():
            raise CompanionFailed(part)
    inbox.wait(seen, timeout)
    return gate.take(ref._number, ref._reader)


def look_at_company(ref: Ref) -> None:
    """End the wait for ``ref``, which is not done, if another that is got with it has failed."""
    parts = _parts()
    if id(ref) not in parts and all(ref is not other for other in _company.refs):
        return  # it is got by code that runs while one of them is decoded
    for part in parts.values():
        if part is not ref and part.has_failed():
            raise CompanionFailed(part)


def _parts() -> dict[int, Companion]:
    refs, parts = _company.refs, _company.parts
    if len(refs) < 2:
        return {}
    if parts is None:
        _company.parts = parts = {id(part): part for ref in refs for part in ref.parts()}
    return parts
