"""Connections that one host makes to others, made again whenever they break."""

from __future__ import annotations

import threading
from collections.abc import Callable

from conveyor.engine.net.handshake import HandshakeError
from conveyor.flag import Flag
from conveyor.runtime import threads

#: Seconds between two attempts.
_PAUSE = 0.05


class _Host:
    """One that is connected to."""

    def __init__(self) -> None:
        #: So often a connection has ended, or the host was lost, and that was not seen to.
        self.ends = threading.Semaphore(0)
        self.lost = Flag()


class Redials:
    """Of one host. For each other one there is a thread from before the first connection on: when that breaks
    there may be none to be had, and without a connection the host would be lost."""

    def __init__(self, dial: Callable[[int], object]) -> None:
        """``dial(host)`` makes a connection, or raises ``OSError`` or ``HandshakeError``."""
        self._dial = dial
        self._hosts: dict[int, _Host] = {}

    def prepare(self, host: int) -> None:
        """It is about to be connected to. ``SystemLimitError`` if there is no thread for that."""
        if host in self._hosts:
            return
        one = _Host()
        threads.start(self._keep, "redial", host, one)
        self._hosts[host] = one

    def broken(self, host: int) -> None:
        """A connection to that host has ended: there is to be another one, if this host makes them."""
        if host in self._hosts:
            self._hosts[host].ends.release()

    def lost(self, host: int) -> None:
        """There will be no other one."""
        if host in self._hosts:
            self._hosts[host].lost.set()
            self._hosts[host].ends.release()

    def _keep(self, host: int, one: _Host) -> None:
        while True:
            one.ends.acquire()
            while not one.lost.is_set():
                try:
                    self._dial(host)
                    break
                except (OSError, HandshakeError):
                    one.lost.wait(_PAUSE)
            if one.lost.is_set():
                return
