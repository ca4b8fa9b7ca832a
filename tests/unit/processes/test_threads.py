"""Faults of the library's own threads."""

from __future__ import annotations

import logging
import threading

import pytest

from conveyor.exceptions import SessionEndedError
from conveyor.runtime import threads


@pytest.mark.parametrize("error", [ValueError("no use"), SessionEndedError("over")])
def test_an_exception_that_ends_one_is_logged(error, caplog, monkeypatch):
    hooked = []
    monkeypatch.setattr(threading, "excepthook", lambda args: hooked.append(args.exc_value))

    def fail():
        raise error

    with caplog.at_level(logging.DEBUG, logger="conveyor"):
        threads.start(fail, "worker").join(60)
    logged = [record.getMessage() for record in caplog.records]
    if isinstance(error, ValueError):
        assert logged == [
            "the thread conveyor-worker has ended with ValueError: no use; what it serves does not go on"
        ]
    else:
        assert logged == []
    assert hooked == [error]
