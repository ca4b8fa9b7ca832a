"""Memory of devices that stays open from one fetch to the next."""

from contextlib import suppress
from types import SimpleNamespace

import pytest

from conveyor.direct import devices as module
from conveyor.direct.devices import Opened

WHERE = SimpleNamespace(slot=1, incarnation=1)


class Device:
    def __init__(self, refuses=False):
        self.refuses = refuses

    def open_memory(self, handle):
        if self.refuses:
            raise RuntimeError("refused")
        return object()


@pytest.fixture
def opened(monkeypatch):
    monkeypatch.setattr(module, "IDLE", 3600.0)
    made = Opened()
    yield made
    made.close()


class Interrupted:
    """Memory that was used long ago. Whoever looks when that was is interrupted by another thread, whose own
    is refused: that closes what is open."""

    def __init__(self, opened):
        self.memory = object()
        self._opened = opened

    @property
    def used(self):
        with suppress(RuntimeError):
            self._opened.open(Device(refuses=True), b"refused", WHERE)
        return 0.0


def put(opened, entries):
    opened._open = {(1, 1, b"%d" % i): one for i, one in enumerate(entries)}


def test_what_is_idle_is_closed_while_all_is_closed_by_another_thread(opened):
    opened.open(Device(), b"some", WHERE)  # the thread is there
    put(opened, [Interrupted(opened), Interrupted(opened)])
    assert opened._close_idle(opened._closing) is None
    assert not opened._open


def test_one_gives_way_while_all_is_closed_by_another_thread(opened, monkeypatch):
    monkeypatch.setattr(module, "MOST", 2)
    put(opened, [Interrupted(opened), Interrupted(opened)])
    opened.open(Device(), b"another", WHERE)
    assert list(opened._open) == [(1, 1, b"another")]
