"""What the driver keeps of one exported ref."""

from __future__ import annotations

from typing import Protocol

from conveyor.runtime.refs.connection import Connection, Node
from conveyor.runtime.refs.exchange import ExportId
from conveyor.runtime.refs.imports import Outcome
from conveyor.runtime.refs.ref import Ref


class Holder(Protocol):
    """An actor's process, which has made the ref, or a copy of it."""

    connection: Connection
    #: Its host, where that is not the driver's.
    node: Node | None

    def push(self, export: ExportId, outcome: Outcome) -> None:
        """Tell it what a ref has come to."""
        ...


class Exported:
    """One of them."""

    __slots__ = ("holders", "outcome", "owner", "ref", "subscribers", "tickets", "watched")

    def __init__(self, owner: Holder | None, ref: Ref | None) -> None:
        self.owner = owner
        self.ref = ref  # the original, if it is the driver's, until the outcome is here
        self.outcome: Outcome | None = None
        self.holders: set[Holder | None] = set()  # None: the driver
        self.tickets: set[int] = set()
        self.subscribers: list[Holder] = []
        self.watched = False
