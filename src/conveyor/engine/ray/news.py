"""What an agent tells the driver."""

from __future__ import annotations

from msgspec import Struct

from conveyor.codec import Reader
from conveyor.engine.net.carrier import Parcel
from conveyor.runtime.driver.hosts.protocol import Page
from conveyor.runtime.waiting.inquiry import Frames


class Arrived(Struct, frozen=True):
    """A process that was expected under that number is there; or why it cannot be taken."""

    number: int
    pid: int
    refused: str = ""


class Asked(Struct, frozen=True):
    """A process asks the driver for something."""

    process: Reader
    data: bytes


class Ended(Struct, frozen=True):
    """A process has ended: its wait status, what its slot said of it, whether it was left by ``sys.exit``,
    the last lines that it has written, and whether it had to be killed, since it went on without its main
    thread. ``due``: the frames that the driver's host is to have before it takes the process for ended, since
    its last results are among them."""

    number: int
    status: int
    page: Page
    left: bool
    tail: str
    went_on: bool
    due: Frames


class LostHost(Struct, frozen=True):
    """Another host is lost for this one."""

    number: int
    reason: str


class Reached(Struct, frozen=True):
    """It is connected to another host, as it was to, or why it cannot be."""

    number: int
    error: Exception | None


class Come(Struct, frozen=True):
    """What was to be told of under that number has come to this host, or does not come any more: see
    :class:`conveyor.runtime.driver.hosts.far_host.TellWhenCome`."""

    number: int


class Sent(Struct, frozen=True):
    """What goes to the driver's host over connections of processes."""

    parcel: Parcel


class Unclaimed(Struct, frozen=True):
    """That process has left before a frame came: what the frame's header claims is not claimed by it."""

    header: bytes
    process: Reader


News = Arrived | Asked | Come | Ended | LostHost | Reached
