"""Reports of a session's processes on other nodes, as the session's driver gives them."""

from __future__ import annotations

import socket

import msgspec

from conveyor import _core
from conveyor.cluster.display import PLAIN, WITH_STACKS, NodeSeen
from conveyor.local_sockets import KEY_BYTES, owner, prove

#: Seconds that the driver has to answer; it gives its nodes less. Stacks take longer.
_SECONDS, _STACKS_SECONDS = 5.0, 20.0
#: Bytes that an answer may have. The driver may be another user's.
_MOST_BYTES = 1 << 26


def nodes_of(driver: int, told: bytes, stacks: bool) -> list[NodeSeen]:
    """Return the session's other nodes. Where the driver does not answer, one without a name says why.

    ``told``: what the driver's memory file holds (``display.FILE``); nothing if there are no other nodes.
    """
    if not told:
        return []
    key, name = told[:KEY_BYTES], told[KEY_BYTES:].decode(errors="replace")
    try:
        return _ask(driver, key, name, _STACKS_SECONDS if stacks else _SECONDS, stacks)
    except (OSError, msgspec.MsgspecError) as error:
        why = str(error) or type(error).__name__
        return [NodeSeen("", (), f"the driver does not answer ({why})")]


def _ask(driver: int, key: bytes, name: str, seconds: float, stacks: bool) -> list[NodeSeen]:
    deadline = _core.monotonic() + seconds
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(seconds)
        sock.connect(f"\0{name}")
        pid, user = owner(sock)
        if pid != driver:
            raise OSError("another process has its socket")
        prove(sock, key, user=user)
        sock.sendall(WITH_STACKS if stacks else PLAIN)
        data = bytearray()
        while True:
            sock.settimeout(max(deadline - _core.monotonic(), 0.001))
            some = sock.recv(1 << 16)
            if not some:
                break
            data += some
            if len(data) > _MOST_BYTES:
                raise OSError(f"its answer has more than {_MOST_BYTES} bytes")
            if _core.monotonic() > deadline:
                raise TimeoutError(f"its answer has not ended after {seconds:g} s")
    if not data:
        raise OSError("it has ended the connection")
    return msgspec.msgpack.decode(data, type=list[NodeSeen])
