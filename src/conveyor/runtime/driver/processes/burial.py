"""What is done when a process of an actor has ended, step by step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from conveyor.runtime.driver.processes.record import ActorRecord

logger = logging.getLogger("conveyor")


class Step(NamedTuple):
    """One of them."""

    #: What it sees to, in words.
    name: str
    #: Does it for one process.
    do: Callable[[ActorRecord], object]
    #: It is also taken for a process that could not be started, or that is left at the session's end.
    unborn: bool = False


class Burial:
    """The steps in their order. Each is taken, whatever the ones before it have raised: others wait for what
    it does."""

    def __init__(self, *steps: Step) -> None:
        self.steps = steps

    def of(self, record: ActorRecord, *, unborn: bool = False) -> None:
        """Take them for ``record``, then raise the first of what they have raised. ``unborn``: only those for
        a process that nobody has known."""
        failed: Exception | None = None
        for step in self.steps:
            if unborn and not step.unborn:
                continue
            try:
                step.do(record)
            except Exception as error:
                if failed is not None:
                    logger.error("%s: %s has failed", record.id.name, step.name, exc_info=error)
                failed = failed or error
        if failed is not None:
            raise failed
