"""Place of a ref's value, and the way to get it, for :class:`conveyor.refs.ref.Placed`."""

from __future__ import annotations

import errno
from typing import Any

from conveyor import _core
from conveyor.codec.direct import Beside, Located, Unfetched
from conveyor.direct.afar import is_afar
from conveyor.direct.fetching import check_kept
from conveyor.direct.listing import id_of
from conveyor.direct.table import TABLE
from conveyor.refs.ref import Ref, located
from conveyor.runtime import context


def _where(ref: Ref) -> Located | None:
    found = located(ref.to_send())
    snapshot = ref._outcome
    if found is not None or type(snapshot) is not _core.Snapshot or not snapshot.keeps:
        return found
    # A copy of a ref to one of several results has come as a value that says where its value is.
    value = ref._unfetched()
    return value.where if isinstance(value, Unfetched) else None


def route_of(ref: Ref) -> str:
    """``"frame"``, ``"here"``, ``"read"``, ``"network"``, ``"lost"``, or the name of a route; see
    ``Ref.route``."""
    where = _where(ref)
    if where is None:
        return "frame"
    if not where.snapshot and TABLE.find(where.number) is not None:
        return "here"
    process = context.current().process
    afar = is_afar(where, process)
    if not afar and _is_dead(where, process):
        return "lost"
    if where.beside:
        beside = Beside.unpack(where.beside)
        return beside.route.way(beside.note)
    return "network" if afar else "read"


def _is_dead(where: Located, process: Any) -> bool:
    if process.board.gone(where.slot, where.incarnation):
        return True
    # The session learns of a death a little later than a fetch may have failed by it.
    try:
        check_kept(where)
    except OSError as error:
        # Where reading is refused, or the value is no more, the session knows best.
        return error.errno == errno.ESRCH
    return False


def transport_of(ref: Ref) -> str | None:
    """See ``Ref.tensor_transport``."""
    where = _where(ref)
    return None if where is None else where.transport


def value_id_of(ref: Ref) -> str | None:
    """See ``Ref.value_id``."""
    where = _where(ref)
    return None if where is None else id_of(where.number)
