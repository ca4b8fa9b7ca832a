"""Places of values that have stayed where they were made, from the objects that are sent for their refs."""

from __future__ import annotations

from typing import Any

from conveyor import _core
from conveyor.codec.direct import DIRECT, Located, Unfetched
from conveyor.refs.holding import Holding


def located(sent: Any) -> Located | None:
    """Return the place of a value that has stayed where it was made, from the object that is sent for it.
    ``None`` for any other."""
    if type(sent) is Unfetched:
        return sent.where
    snapshot = sent.snapshot if type(sent) is Holding else sent
    if type(snapshot) is not _core.Snapshot or not snapshot.keeps or snapshot.codec != DIRECT:
        return None
    return Located.unpack(snapshot.meta)


def shared_at(sent: Any) -> tuple[int, int] | None:
    """Return slot and incarnation of the process that a value has stayed in, from the object that is sent
    for it. ``None`` for any other, and for a snapshot, which nobody writes to."""
    if type(sent) is Unfetched:
        where = sent.where
        return None if where.snapshot else (where.slot, where.incarnation)
    snapshot = sent.snapshot if type(sent) is Holding else sent
    return snapshot.shared_at if type(snapshot) is _core.Snapshot else None


def stays_afar(sent: Any) -> bool:
    """Whether ``sent`` is as good on another host: it keeps nothing, or a value of which all can be fetched
    from there."""
    snapshot = sent.snapshot if type(sent) is Holding else sent
    if type(snapshot) is _core.Snapshot and not snapshot.keeps:
        return True
    if type(sent) is not Unfetched and type(snapshot) is not _core.Snapshot:
        return True
    where = located(sent)
    return where is not None and not where.beside
