"""Getting several refs: what a long wait for one of them looks at before it sleeps."""

from __future__ import annotations

from typing import Any

import pytest

from conveyor.refs.ref import EMPTY
from conveyor.refs.together import get_or_wait, get_together


class Inbox:
    def __init__(self) -> None:
        self.slept: list[tuple[int, float | None]] = []

    def wait(self, seen: int, timeout: float | None) -> bool:
        self.slept.append((seen, timeout))
        return True


class Gate:
    def __init__(self) -> None:
        self.gets: list[tuple[int, int, float | None, int]] = []

    def take(self, number: int, reader: int) -> Any:
        return EMPTY

    def get(self, number: int, reader: int, timeout: float | None, deaths: int) -> Any:
        self.gets.append((number, reader, timeout, deaths))
        return EMPTY


class Part:
    def __init__(self, failed: bool = False) -> None:
        self._gate = Gate()
        self._number = 1
        self._reader = 0
        self._outcome: Any = EMPTY
        self.failed = failed

    def parts(self) -> tuple[Part, ...]:
        return (self,)

    def has_failed(self) -> bool:
        return self.failed

    def get(self, timeout: float | None = None) -> Any:
        if self.failed:
            raise KeyError("failed")
        return None


def _wait(refs: list[Any], ref: Any, inbox: Any, timeout: float | None = None) -> Any:
    return get_together(refs, lambda: get_or_wait(ref, inbox, 7, timeout, 3))


def test_it_sleeps_on_what_had_rung_before_the_caller_looked():
    # A death that was counted in between has rung already: it must not be slept over.
    inbox, refs = Inbox(), [Part(), Part()]
    assert _wait(refs, refs[0], inbox) is EMPTY
    assert inbox.slept == [(7, None)]


def test_it_does_not_sleep_once_the_ref_has_its_outcome():
    inbox, refs = Inbox(), [Part(), Part()]
    refs[0]._outcome = "cancelled"
    assert _wait(refs, refs[0], inbox) is EMPTY
    assert inbox.slept == []


def test_one_that_has_failed_ends_the_wait():
    inbox, refs = Inbox(), [Part(), Part(failed=True)]
    with pytest.raises(KeyError):
        _wait(refs, refs[0], inbox)
    assert inbox.slept == []


def test_what_is_not_among_them_is_waited_for_alone():
    inbox, refs, other = Inbox(), [Part(), Part(failed=True)], Part()
    assert _wait(refs, other, inbox) is EMPTY
    assert other._gate.gets == [(1, 0, None, 3)]
    assert _wait(refs[:1], refs[0], inbox) is EMPTY
    assert refs[0]._gate.gets == [(1, 0, None, 3)]
    assert inbox.slept == []
