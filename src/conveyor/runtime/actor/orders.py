"""What the driver tells an actor's process: at its birth, and what it is to do later."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from conveyor.runtime.messages.message import Message
from conveyor.runtime.process import ArenaSize

if TYPE_CHECKING:
    from conveyor.codec import Reader
    from conveyor.runtime.graph.edges.layout import Assignment


class Hello(Struct, frozen=True):
    """What an actor's process is told at birth, after the greeting. With it come descriptors, in this order:
    board, own arena, own eventfd, driver's arena, driver's eventfd, control socket, request socket, call
    segment, control segment."""

    #: Its place on the board, which of the processes that have had it, and what it is called.
    slot: int
    incarnation: int
    name: str
    #: The actor's number in the session.
    number: int
    session: str
    arena: ArenaSize
    driver_slot: int
    #: The bits of its bell that say that the driver calls it, or orders something.
    mailbox_bit: int
    control_bit: int
    max_concurrency: int | None
    has_async: bool
    #: Seconds that it has to end in good order.
    grace: float
    #: Whether there is more than one place for the actors that it starts.
    places: bool


#: Processes that come with their descriptors: slot and incarnation.
NewPeers = tuple[tuple[int, int], ...]


class Order(Message, frozen=True):
    """What an actor has to do. It acknowledges each of them; they come in order, and never behind calls."""


class Load(Order, frozen=True):
    """Take a part in a graph. The segment and the new peers' descriptors come with ``ticket``."""

    assignment: Assignment
    new_peers: NewPeers
    ticket: int


class Unload(Order, frozen=True):
    """Leave a graph."""

    graph: int


class Accept(Order, frozen=True):
    """Take calls of the ``incarnation``-th process of ``slot``, which ring ``bit``. The segment and that
    process's descriptors come with ``ticket``: always, since the actor may know it no more, or its successor
    in its place."""

    slot: int
    incarnation: int
    bit: int
    ticket: int


class HangUp(Order, frozen=True):
    """A caller, whose calls ring ``bit``, is gone."""

    bit: int


class Settle(Order, frozen=True):
    """Say question ``question`` to be answered, at the rendezvous of pickled refs, once nothing is left here
    of what these processes have sent, which are dead: nothing more of theirs comes."""

    question: int
    writers: tuple[Reader, ...]


class End(Order, frozen=True):
    """The actor ends now: what runs is done first, what is queued is not begun."""
