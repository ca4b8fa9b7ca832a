"""The end of a session, step by step."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from conveyor.runtime.threads import Background
from conveyor.runtime.uninterrupted import uninterrupted

logger = logging.getLogger("conveyor")


class LastSteps:
    """Steps that are all taken, in order and once, whatever one of them raises, and however often a signal
    handler interrupts the one who waits for them."""

    def __init__(self, *steps: Callable[[], object], hurry: Callable[[], object]) -> None:
        """``hurry()`` is called when whoever waits is interrupted. Each step can be repeated: where no
        thread can be had for them, one that was broken off is begun again."""
        self._steps = deque(steps)
        self._hurry = hurry
        self._turn = threading.RLock()
        self._taking = False
        self._errors: list[Exception] = []

    @property
    def over(self) -> bool:
        return not self._steps

    def take_all(self) -> None:
        """Take what is left of them, and raise the first of what was raised meanwhile: by a signal
        handler, else by a step. Who is asked by one of the steps, or by a thread that they may be waiting
        for, returns at once."""
        if self._taking and isinstance(threading.current_thread(), Background):
            return
        interrupt: BaseException | None = None
        while self._steps:
            try:
                if interrupt is not None:
                    self._hurry()
                if not uninterrupted(self._take, self._hurry):
                    return
            except BaseException as error:
                if interrupt is None:
                    interrupt = error
        errors, self._errors = self._errors, []
        if interrupt is None and errors:
            interrupt = errors.pop(0)
        for other in errors:
            logger.error("a step of the session's end has failed", exc_info=other)
        try:
            if interrupt is not None:
                raise interrupt
        finally:
            del interrupt  # it refers to this frame

    def _take(self) -> bool:
        with self._turn:  # whoever comes second waits for the first
            if self._taking:
                return False
            self._taking = True
            try:
                while self._steps:
                    try:
                        self._steps[0]()
                    except Exception as error:
                        self._errors.append(error)
                    self._steps.popleft()
            finally:
                self._taking = False
            return True
