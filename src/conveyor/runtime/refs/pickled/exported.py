"""What the driver keeps of one exported ref."""

from __future__ import annotations

from typing import Protocol

from conveyor.codec import Reader
from conveyor.runtime.messages.connection import Connection, Node
from conveyor.runtime.refs.pickled.exchange import ExportId
from conveyor.runtime.refs.pickled.imports import Outcome
from conveyor.runtime.refs.ref import Ref
from conveyor.runtime.waiting.works import Blockers


class Holder(Protocol):
    """An actor's process, which has made the ref, or has a copy of it, or has pickled one."""

    connection: Connection
    #: The actor's number.
    number: int
    #: The process, as others know it.
    reader: Reader
    #: Its host, where that is not the driver's.
    node: Node | None
    #: All that it has said was heard.
    ended: bool

    def push(self, export: ExportId, outcome: Outcome) -> None:
        """Tell it what a ref has come to."""
        ...

    def answer(self, export: ExportId, question: int, said: Blockers) -> None:
        """Tell it who has to do something before a ref is done."""
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
