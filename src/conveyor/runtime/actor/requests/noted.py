"""Requests that take as long as an actor's restart does, noted as waits of the process that asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from conveyor.runtime.actor.requests.client import RequestClient
from conveyor.runtime.actor.requests.messages import Request
from conveyor.runtime.messages.message import Message
from conveyor.runtime.process import Process
from conveyor.runtime.waiting.works import FOR_THE_DRIVER, STEPS


class NotedRequests:
    """Asks the driver, and has ``conveyor status`` say so when that takes its time. The driver waits for no
    actor's work meanwhile, so these waits are part of no cycle."""

    def __init__(self, requests: RequestClient, process: Process, driver: int) -> None:
        """``driver``: its slot."""
        self._requests, self._process, self._driver = requests, process, driver

    def ask(
        self, request: Request, what: str, unwanted: Callable[[Any], Message] | None = None
    ) -> tuple[Any, list[int]]:
        """As :meth:`RequestClient.ask`. ``what``: what is waited for, to follow "the driver,"."""
        process = self._process
        blockers = ((self._driver, STEPS, f"{FOR_THE_DRIVER}{what}"),)
        with process.lanes.waiting(lambda _: blockers) as wait:

            def look(is_over: Callable[[], bool]) -> float | None:
                asked = process.inbox.asked
                return None if wait is None or is_over() else wait.look(asked)

            return self._requests.ask(request, unwanted, look)
