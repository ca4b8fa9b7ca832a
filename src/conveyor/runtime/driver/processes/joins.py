"""Which of the other hosts are connected with each other."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import InvalidStateError
from contextlib import suppress
from typing import Any

from conveyor.exceptions import RuntimeStateError
from conveyor.futures import Future
from conveyor.runtime.driver.hosts.far_host import FarHost
from conveyor.runtime.driver.hosts.far_orders import Locate, Reach


class Joins:
    """The driver's, which each host has connected to by itself. One thread at a time is in here, but for
    ``reached``."""

    def __init__(self, hosts: Mapping[int, FarHost]) -> None:
        self._hosts = hosts
        # Whoever counts on one of these waits for it, and one that has failed is ordered again.
        self._joined: dict[tuple[int, int], Future[Any]] = {}

    def of(self, lower: int, higher: int) -> Future[Any]:
        """Have these hosts be connected; done when they are, or cannot be."""
        joined = self._joined.get((lower, higher))
        if joined is None or has_failed(joined):
            joined = self._joined[lower, higher] = Future()
            self._hosts[lower].tell(Locate(higher, self._hosts[higher].address))
            # The host goes on meanwhile: one that does not answer may hold up nothing else there.
            sent = self._hosts[higher].send(Reach(lower, self._hosts[lower].address))
            sent.add_done_callback(lambda done: _fail(joined, done.exception()))
        return joined

    def reached(self, higher: int, lower: int, error: Exception | None) -> None:
        """Host ``higher`` tells what has come of that."""
        joined = self._joined.get((lower, higher))
        if joined is None:  # one of them is lost
            return
        if error is not None:
            _fail(joined, error)
        else:
            with suppress(InvalidStateError):
                joined.set_result(None)

    def gone(self, host: int) -> None:
        """That host is lost: who waits for a connection to it waits no longer."""
        for pair in [pair for pair in self._joined if host in pair]:
            name = self._hosts[host].name
            _fail(self._joined.pop(pair), RuntimeStateError(f"node {name} is lost"))


def has_failed(one: Future[Any]) -> bool:
    """Whether it has come to an error."""
    return one.done() and one.exception() is not None


def _fail(joined: Future[Any], error: BaseException | None) -> None:
    if error is not None:
        with suppress(InvalidStateError):  # it is known already
            joined.set_exception(error)
