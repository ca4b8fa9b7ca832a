"""Messages of the driver and a process that Ray has started, over a Unix socket on which both have proved
themselves.

Each message is one datagram of msgpack of a few fields, and nothing in it is ever unpickled.
"""

from __future__ import annotations

import os
import platform
import pwd
from collections.abc import Sequence
from typing import TypeVar

import msgspec
from msgspec import Struct

from conveyor import __version__, descriptors
from conveyor.engine.surroundings import Surroundings
from conveyor.runtime.messages.message import PROTOCOL
from conveyor.runtime.process import close_all, dup_all

#: More than any message takes.
MESSAGE_BYTES = 4096


class Locality(Struct, frozen=True):
    """Where a process runs, as far as it decides whose memory it can share: the boot of the machine, the
    network and the PID namespace, and the user."""

    boot: str
    network: str
    pids: str
    user: int

    @classmethod
    def own(cls) -> Locality:
        """Return this process's. A part that the system does not tell is empty."""
        try:
            with open("/proc/sys/kernel/random/boot_id") as file:
                boot = file.read().strip()
        except OSError:
            boot = ""
        return cls(
            boot,
            _linked("/proc/thread-self/ns/net"),
            _linked("/proc/thread-self/ns/pid"),
            os.geteuid(),
        )

    def is_local(self, other: Locality) -> bool:
        """Whether two processes can share memory, if they are of one user."""
        return (self.boot, self.network, self.pids) == (other.boot, other.network, other.pids)

    @property
    def user_name(self) -> str:
        """The user, for messages."""
        try:
            return f"{pwd.getpwuid(self.user).pw_name} ({self.user})"
        except KeyError:
            return str(self.user)


def _linked(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


class Birth(Struct, frozen=True):
    """What a process is given by Ray, with the call that makes it an actor: where the driver waits for it,
    and by what the driver knows it. ``environ`` are the variables that it gets before anything of the
    user's is imported. ``waits``: where who waits for it runs. ``stay``: it is known to be on that node;
    else it says if it is on another. ``node``: the only node of Ray's that counts as that one; none: all
    whose processes can share memory with who waits do."""

    address: str
    number: int
    key: bytes
    environ: dict[str, str]
    waits: Locality
    stay: bool = False
    node: str = ""


class Elsewhere(Struct, frozen=True):
    """Where a process is that is not on the driver's host: the node's id, and its address."""

    node: str
    address: str


class Here(Struct, frozen=True):
    """What the process is. ``stderr``: the file that it writes to, as far as it is one."""

    version: str
    stderr: str


class Welcome(Struct, frozen=True):
    """The answer, with the descriptors: the birth's file, the driver's pidfd, and what the driver hands over.
    With ``refused`` there are none: it says why."""

    refused: str = ""


class Farewell(Struct, frozen=True):
    """The process ends in good order, with this exit code."""

    code: int


class Leave(Struct, frozen=True):
    """The driver says, to a process that is not its own to end: leave the session."""


T = TypeVar("T", Here, Welcome, Farewell)


def write(message: Struct) -> bytes:
    return msgspec.msgpack.encode(message)


def read(data: bytes, kind: type[T]) -> T | None:
    """The message, or ``None`` if it is none of that kind."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError:
        return None


def version() -> str:
    """What both have to have in common."""
    return f"Conveyor {__version__} (protocol {PROTOCOL}) on Python {platform.python_version()}"


class Told(Struct, frozen=True):
    """What the birth's file holds: whatever its size, it is no message."""

    name: str
    around: Surroundings
    payload: bytes


def write_file(told: Told) -> int:
    """A file that holds it; the caller closes it."""
    fd = descriptors.memory_file("conveyor-birth")
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(write(told))
    except BaseException:
        os.close(fd)
        raise
    return fd


def made_for(told: Told, fds: Sequence[int]) -> list[int]:
    """What a process is given with its welcome: the birth's file, the pidfd of this one, and ``fds``. All are
    duplicates, since whoever waits may be interrupted, and close his own, while they are sent. The caller
    closes them."""
    made = [write_file(told)]
    try:
        made.append(descriptors.own(os.pidfd_open(os.getpid())))
        made += dup_all(fds)
    except BaseException:
        close_all(made)
        raise
    return made


def read_file(fd: int) -> Told:
    """What it holds, by who trusts it."""
    with open(fd, "rb", closefd=False) as file:
        file.seek(0)
        return msgspec.msgpack.decode(file.read(), type=Told)
