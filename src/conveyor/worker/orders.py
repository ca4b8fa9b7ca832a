"""Messages of the driver to an actor's process: the bootstrap of a new process, and orders later."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from conveyor.runtime.messages.message import Message
from conveyor.runtime.process import ArenaSize

if TYPE_CHECKING:
    from conveyor.codec import Reader
    from conveyor.graph.edges.layout import Assignment


class Hello(Struct, frozen=True):
    """The bootstrap of an actor's process, sent after the greeting. Descriptors come with it, in this order:
    board, own arena, own eventfd, driver's arena, driver's eventfd, control socket, request socket, call
    segment, control segment."""

    #: The process's slot in the process table, its incarnation, and the actor's name.
    slot: int
    incarnation: int
    name: str
    #: The actor's number in the session.
    number: int
    session: str
    arena: ArenaSize
    driver_slot: int
    #: The doorbell bits for the driver's calls and for its orders.
    mailbox_bit: int
    control_bit: int
    max_concurrency: int | None
    has_async: bool
    #: Seconds that the actor has for an orderly end.
    grace: float
    #: Whether there is more than one node for the actors that it starts.
    places: bool


#: Processes that come with their descriptors: slot and incarnation.
NewPeers = tuple[tuple[int, int], ...]


class Order(Message, frozen=True):
    """An order to an actor, which acknowledges each. Orders come in order, and never behind calls."""


class Load(Order, frozen=True):
    """Take a part in a graph. The segment and the new peers' descriptors come with ``ticket``."""

    assignment: Assignment
    new_peers: NewPeers
    ticket: int


class Unload(Order, frozen=True):
    """Leave a graph."""

    graph: int


class Accept(Order, frozen=True):
    """Take calls of the ``incarnation``-th process of ``slot``, which ring ``bit``. The segment and the
    process's descriptors always come, with ``ticket``: the actor may have forgotten the process, or know its
    successor."""

    slot: int
    incarnation: int
    bit: int
    ticket: int


class HangUp(Order, frozen=True):
    """Forget a caller, whose calls ring ``bit``: it is gone."""

    bit: int


class Settle(Order, frozen=True):
    """Say that question ``question`` is answered, at the rendezvous of pickled refs, once nothing is left
    here that ``writers`` have sent. These processes are dead, so nothing more of theirs comes."""

    question: int
    writers: tuple[Reader, ...]


class End(Order, frozen=True):
    """End now: the running call is finished, queued ones are not begun."""
