"""Messages of a node agent to the driver."""

from __future__ import annotations

from msgspec import Struct

from conveyor.cluster.carrier import Parcel
from conveyor.codec import Reader
from conveyor.driver.hosts import Page
from conveyor.runtime.deadlock_detector import Frames


class Arrived(Struct, frozen=True):
    """Notice that the process expected under that number has come. ``refused``: why it cannot be taken."""

    number: int
    pid: int
    refused: str = ""


class Asked(Struct, frozen=True):
    """Request of a process to the driver."""

    process: Reader
    data: bytes


class Ended(Struct, frozen=True):
    """Notice that a process has ended.

    number: the number under which it came.
    status: its wait status.
    page: its last process snapshot.
    left: whether a method ended it by ``sys.exit``.
    tail: the last lines that it has written to stderr.
    went_on: whether it had to be killed, since it went on without its main thread.
    due: the frames that the driver's node must have before it takes the process for ended: the last results
        of the process are among them.
    """

    number: int
    status: int
    page: Page
    left: bool
    tail: str
    went_on: bool
    due: Frames


class LostHost(Struct, frozen=True):
    """Notice that the agent's node has lost another node."""

    number: int
    reason: str


class Reached(Struct, frozen=True):
    """Notice that the agent's node is connected to another one, as ordered. ``error``: why it cannot be."""

    number: int
    error: Exception | None


class Come(Struct, frozen=True):
    """Notice that the frames of an order have come to the agent's node, or will not come any more. See
    :class:`conveyor.driver.hosts.TellWhenCome`, which has the same number."""

    number: int


class Sent(Struct, frozen=True):
    """Message to the driver's node that belongs to a connection between two processes."""

    parcel: Parcel


class Unclaimed(Struct, frozen=True):
    """Notice that a process has left before a frame came, and will not make good the claims of its header."""

    header: bytes
    process: Reader


News = Arrived | Asked | Come | Ended | LostHost | Reached
