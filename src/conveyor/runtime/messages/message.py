"""Messages between the processes of a session: values whose class says what they mean.

Each connection has one family of messages for each direction, which is a class with a subclass for each
message. Whoever receives them has one table from these subclasses to what is to be done.
"""

from __future__ import annotations

import socket
from typing import TypeVar

from msgspec import Struct

from conveyor.exceptions import RuntimeStateError

#: Version of the messages between processes. It changes with every change of a message's meaning or fields.
PROTOCOL = 8
#: Descriptors that one message on a socket may carry.
MAX_FDS = 250
#: The size of the number that comes with descriptors and tells which frame they belong to.
TICKET_BYTES = 8

M = TypeVar("M", bound="Message")


class Message(Struct, frozen=True):
    """A frozen value with the fields that its class is annotated with; picklable."""


def members(family: type[M]) -> frozenset[type[M]]:
    """Return the messages of a family: all that a receiver has to know."""
    return frozenset(family.__subclasses__())


def send_with_ticket(sock: socket.socket, ticket: int, fds: list[int]) -> None:
    """Send descriptors that belong to the frame which has that ticket."""
    data = ticket.to_bytes(TICKET_BYTES, "little")
    for start in range(0, len(fds), MAX_FDS):
        socket.send_fds(sock, [data], fds[start : start + MAX_FDS])


def greeting() -> bytes:
    """Return the first bytes that this process sends to another one."""
    from conveyor import __version__  # the package is whole by now

    return f"conveyor {__version__} protocol {PROTOCOL}\n".encode()


def check_greeting(said: bytes) -> bytes:
    """Return the bytes behind the greeting that ``said`` begins with. ``RuntimeStateError`` if the greeting
    differs from this process's own."""
    own = greeting()
    if said.startswith(own):
        return said[len(own) :]
    first = said.partition(b"\n")[0][:100].decode(errors="replace")
    raise RuntimeStateError(
        f"this process is of {own.decode().strip()!r}, and the one that has started it of {first!r}: they "
        "do not understand each other. Most likely the package was changed while the program ran: start "
        "the program again"
    )
