"""Ctrl-C in the middle of what the main thread waits for."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class CtrlC(KeyboardInterrupt):
    """What the handler raises."""


class Interrupted(NamedTuple):
    """Something was broken off. ``ms``: from the signal to its end."""

    ms: float


def interrupt(delay: float, work: Callable[[], T]) -> T | Interrupted:
    """Call ``work()`` on the main thread, which gets a SIGINT ``delay`` s after it has begun."""
    main = threading.get_ident()
    inside = False
    sent = 0

    def on_signal(number: int, frame: FrameType | None) -> None:
        if inside:
            raise CtrlC

    def send() -> None:
        nonlocal sent
        sent = time.monotonic_ns()
        signal.pthread_kill(main, signal.SIGINT)

    timer = threading.Timer(delay, send)
    before = signal.signal(signal.SIGINT, on_signal)
    try:
        timer.start()
        try:
            inside = True
            return work()
        finally:
            inside = False
    except CtrlC:  # perhaps in the clause above
        inside = False
        return Interrupted((time.monotonic_ns() - sent) / 1e6)
    finally:
        timer.cancel()
        timer.join()
        signal.signal(signal.SIGINT, before)
