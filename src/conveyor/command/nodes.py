"""What processes of a session on other nodes are doing, as the session's driver tells."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

import msgspec

from conveyor.engine.net.display import PLAIN, PREFIX, WITH_STACKS, NodeSeen, owner

#: Seconds that the driver has to answer; it gives its nodes less. Stacks take longer.
_SECONDS, _STACKS_SECONDS = 5.0, 20.0


def nodes_of(driver: int, stacks: bool) -> list[NodeSeen]:
    """The session's other nodes. Where the driver does not answer, one without a name says why."""
    try:
        name = _socket_of(driver)
        return [] if name is None else _ask(driver, name, stacks)
    except (OSError, msgspec.MsgspecError) as error:
        why = str(error) or type(error).__name__
        return [NodeSeen("", (), f"the driver does not answer ({why})")]


def _socket_of(driver: int) -> str | None:
    """The name of the socket at which it answers, if there are other nodes."""
    own = set(_sockets(driver))
    lines = Path(f"/proc/{driver}/net/unix").read_text(errors="replace").splitlines()
    for line in lines:
        words = line.split()
        if len(words) == 8 and words[7].startswith(f"@{PREFIX}") and words[6] in own:
            return words[7][1:]
    return None


def _sockets(driver: int) -> Sequence[str]:
    found = []
    folder = f"/proc/{driver}/fd"
    for entry in os.listdir(folder):
        try:
            what = os.readlink(f"{folder}/{entry}")
        except FileNotFoundError:  # closed meanwhile
            continue
        if what.startswith("socket:["):
            found.append(what[len("socket:[") : -1])
    return found


def _ask(driver: int, name: str, stacks: bool) -> list[NodeSeen]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(_STACKS_SECONDS if stacks else _SECONDS)
        sock.connect(f"\0{name}")
        if owner(sock)[0] != driver:
            raise OSError("another process has its socket")
        sock.sendall(WITH_STACKS if stacks else PLAIN)
        data = b""
        while some := sock.recv(1 << 16):
            data += some
    if not data:
        raise OSError("it has ended the connection")
    return msgspec.msgpack.decode(data, type=list[NodeSeen])
