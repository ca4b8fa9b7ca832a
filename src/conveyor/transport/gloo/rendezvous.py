"""Addresses of the two ends of a connection: which end listens where, which calls, and how they learn of each
other."""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import Store

from conveyor.transport.base import Wire

#: Addresses at which a writer and a reader on one machine listen.
_ON_ONE = "127.0.0.1", "127.0.0.2"


class Way(NamedTuple):
    """Addresses of a pair of ends, as one end has them.

    addresses: where rank 0 and rank 1 of the pair listen, each at its own node's address alone. Gloo has the
        end with the greater address call the other one, so it is always rank 1 that calls.
    rank: this end's.
    """

    addresses: tuple[str, str]
    rank: int


def way_to(wire: Wire, other: int) -> Way:
    """Find the way from this end of ``wire`` to the one whose rank there is ``other``.

    Raises:
        ValueError: there is none.
    """
    own = wire.rank
    if not wire.hosts or wire.hosts[own].address == wire.hosts[other].address:
        return Way(_ON_ONE, 0 if own == 0 else 1)
    here = ipaddress.ip_address(wire.hosts[own].address)
    there = ipaddress.ip_address(wire.hosts[other].address)
    if here.version != there.version:
        raise ValueError(
            f"{wire.members[own]} is on a node with the address {here}, and {wire.members[other]} on one "
            f"with {there}: gloo connects two of one version of IP"
        )
    if here.packed < there.packed:
        return Way((str(here), str(there)), 0)
    return Way((str(there), str(here)), 1)


#: Seconds to wait for gloo's entries. They come within milliseconds, unless the thread is not scheduled.
_PATIENCE = 30.0


class Rendezvous(Store):  # type: ignore[misc]
    """Store that keeps gloo's entries to be sent to the other end, and waits for the other end's entries.

    Gloo calls it on the thread that makes the group, without the GIL in between. The other methods are called
    on the conduit's thread.
    """

    def __init__(self, looks: Callable[[], object] = lambda: None) -> None:
        """``looks`` is called on gloo's thread when gloo has written all of its entries."""
        super().__init__()
        self._on_looks = looks
        # Entered in place of the condition: that would run Python code, and a signal handler that raises in
        # there would leave the lock held.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._ours: dict[str, bytes] = {}
        self._theirs: dict[str, bytes] = {}
        #: Gloo has written all of its entries, and looks for the other end's.
        self._looks = False
        self._ended: BaseException | None = None

    def addresses(self) -> dict[str, bytes]:
        """Return the entries to send to the other end.

        Raises the error that has kept the group from being made.
        """
        with self._lock:
            there = self._changed.wait_for(lambda: self._looks or self._ended, _PATIENCE)
            if self._ended is not None:
                raise self._ended
            if not there:
                raise TimeoutError(f"gloo has given no address within {_PATIENCE:g} s")
            return dict(self._ours)

    def meet(self, theirs: Mapping[str, bytes]) -> None:
        """Add the entries that the other end has sent."""
        with self._lock:
            self._theirs.update(theirs)
            self._changed.notify_all()

    def end(self, reason: BaseException) -> None:
        """Make all waits stop, with an error."""
        with self._lock:
            if self._ended is None:
                self._ended = reason
            self._changed.notify_all()

    def both(self) -> tuple[dict[str, bytes], dict[str, bytes]]:
        """Return this end's entries, and the other end's."""
        with self._lock:
            return dict(self._ours), dict(self._theirs)

    # What gloo calls.

    def set(self, key: str, value: bytes) -> None:
        """Keep ``value`` for the other end."""
        with self._lock:
            self._ours[key] = bytes(value)

    def get(self, key: str) -> bytes:
        """Wait for a value."""
        self.wait([key])
        with self._lock:
            return self._ours.get(key) or self._theirs[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for values, for as long as it takes: the other end opens its conduit when it does."""
        with self._lock:
            first = not self._looks and any(key not in self._ours for key in keys)
            if first:
                self._looks = True
                self._changed.notify_all()
        if first:
            self._on_looks()
        with self._lock:
            self._changed.wait_for(lambda: self._ended is not None or self._has(keys))
            if self._ended is not None:
                raise ConnectionAbortedError("the connection is not wanted any more")

    def check(self, keys: Sequence[str]) -> bool:
        """Say whether all values are there."""
        with self._lock:
            return self._has(keys)

    def set_timeout(self, timeout: timedelta) -> None:
        """Ignore the timeout: waits have none."""

    def has_extended_api(self) -> bool:
        """Say that there is nothing but single keys."""
        return False

    def _has(self, keys: Sequence[str]) -> bool:
        return all(key in self._ours or key in self._theirs for key in keys)
