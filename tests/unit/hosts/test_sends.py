"""Where a value of a user's transport is asked for, in a process that has no descriptor left."""

import logging
import socket
import threading
from types import SimpleNamespace

import pytest
from no_descriptors import none_at_all

from conveyor import local_sockets
from conveyor.direct.managers.transfers import Sender


@pytest.fixture
def told(caplog):
    caplog.set_level(logging.WARNING, "conveyor")
    return lambda: [one for one in caplog.records if "they wait until it can" in one.getMessage()]


def test_who_asks_waits_until_there_is_one_and_that_is_told_once(told, monkeypatch, wait_until):
    tries = []
    next_pause = lambda: tries.append(True) or 0.002  # noqa: E731
    quick = SimpleNamespace(next=next_pause, begin_anew=lambda: None)
    monkeypatch.setattr(local_sockets, "Pauses", lambda: quick)
    sender = Sender()
    name, _ = sender.begin()
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(60)
            with none_at_all():
                sock.connect("\0" + name)
                wait_until(lambda: len(tries) >= 3, 60)
            sock.shutdown(socket.SHUT_WR)  # it asks for nothing
            assert sock.recv(1) == b""
    finally:
        sender.end()
    (one,) = told()
    assert "raise the limit (ulimit -n" in one.getMessage()


def test_it_ends_at_once_while_it_waits_for_one(told, monkeypatch, wait_until):
    long = SimpleNamespace(next=lambda: 600.0, begin_anew=lambda: None)
    monkeypatch.setattr(local_sockets, "Pauses", lambda: long)
    before = threading.active_count()
    sender = Sender()
    name, _ = sender.begin()
    with socket.socket(socket.AF_UNIX) as sock, none_at_all():
        sock.connect("\0" + name)
        wait_until(told, 60)
        # A thread that was in `accept` before there was none had one already, and asks what is wanted.
        sock.shutdown(socket.SHUT_WR)
        sender.end()
        wait_until(lambda: threading.active_count() <= before, 60)
