"""How values are got that may have stayed where they were made."""

from __future__ import annotations

from conveyor.direct.table import TABLE
from conveyor.runtime.refs.ref import Ref
from conveyor.runtime.refs.values import located


def route_of(ref: Ref) -> str:
    """``"frame"``, ``"here"`` or ``"read"``; see ``Ref.route``."""
    where = located(ref.to_send())
    if where is None:
        return "frame"
    return "read" if where.snapshot or TABLE.find(where.number) is None else "here"


def transport_of(ref: Ref) -> str | None:
    """See ``Ref.tensor_transport``."""
    where = located(ref.to_send())
    return None if where is None else where.transport
