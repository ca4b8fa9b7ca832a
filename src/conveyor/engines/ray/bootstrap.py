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
from conveyor.engines.surroundings import Surroundings
from conveyor.runtime.messages import MESSAGES_VERSION
from conveyor.runtime.process import close_all, dup_all

#: More than any message takes.
MESSAGE_BYTES = 4096


class Locality(Struct, frozen=True):
    """Identity of the place where a process runs, which decides whose memory it can share: the boot of the
    machine, the network and the PID namespace, and the user."""

    boot: str
    network: str
    pids: str
    user: int

    @classmethod
    def own(cls) -> Locality:
        """Return the locality of this process. A part that the system does not tell is empty."""
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
        """Name and number of the user, for messages."""
        try:
            return f"{pwd.getpwuid(self.user).pw_name} ({self.user})"
        except KeyError:
            return str(self.user)


def _linked(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


class Bootstrap(Struct, frozen=True):
    """Bootstrap that a process gets with Ray's call that makes it an actor. The driver or a node agent waits
    for the process at ``address``, and knows it by ``number`` and ``key``.

    environ: variables that the process gets before anything of the user's is imported.
    waits: the locality of the process that waits for it.
    stay: the process is known to be on that node; otherwise it says if it is on another one.
    node: the only node of Ray's that counts as that one; empty: all nodes whose processes can share memory
        with the one that waits.
    """

    address: str
    number: int
    key: bytes
    environ: dict[str, str]
    waits: Locality
    stay: bool = False
    node: str = ""


class NodeOfProcess(Struct, frozen=True):
    """Node of a process that is not on the driver's node: Ray's id of the node, and its address."""

    node: str
    address: str


class Here(Struct, frozen=True):
    """First message of a process: its versions, and the path of its stderr, as far as that is a file."""

    version: str
    stderr: str


class Welcome(Struct, frozen=True):
    """Answer to :class:`Here`. With it come the descriptors of :func:`made_for`. ``refused``: why the process
    is refused; then there are no descriptors."""

    refused: str = ""


class Farewell(Struct, frozen=True):
    """Notice that the process ends, or an attached actor leaves, in good order, with this exit code."""

    code: int


class Leave(Struct, frozen=True):
    """Order to an attached actor to leave the session."""


T = TypeVar("T", Here, Welcome, Farewell)


def write(message: Struct) -> bytes:
    return msgspec.msgpack.encode(message)


def read(data: bytes, kind: type[T]) -> T | None:
    """Return the decoded message, or ``None`` if ``data`` is none of that kind."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError:
        return None


def version() -> str:
    """Return the versions that both ends have to have in common."""
    return f"Conveyor {__version__} (protocol {MESSAGES_VERSION}) on Python {platform.python_version()}"


class BootstrapFile(Struct, frozen=True):
    """Contents of the bootstrap file. They may be of any size, so they are not sent as a message."""

    name: str
    around: Surroundings
    payload: bytes


def write_file(boot_file: BootstrapFile) -> int:
    """Make a file with these contents, and return its descriptor. The caller closes it."""
    fd = descriptors.memory_file("conveyor-birth")
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(write(boot_file))
    except BaseException:
        os.close(fd)
        raise
    return fd


def made_for(boot_file: BootstrapFile, fds: Sequence[int]) -> list[int]:
    """Make the descriptors that a process gets with its welcome: the bootstrap file, the pidfd of this
    process, and duplicates of ``fds``. Duplicates, since the owner of ``fds`` may be interrupted, and close
    them, while they are sent. The caller closes the returned descriptors."""
    made = [write_file(boot_file)]
    try:
        made.append(descriptors.own(os.pidfd_open(os.getpid())))
        made += dup_all(fds)
    except BaseException:
        close_all(made)
        raise
    return made


def read_file(fd: int) -> BootstrapFile:
    """Return the contents of a bootstrap file, which come from a trusted process."""
    with open(fd, "rb", closefd=False) as file:
        file.seek(0)
        return msgspec.msgpack.decode(file.read(), type=BootstrapFile)
