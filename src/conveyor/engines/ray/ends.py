"""Wait status of a process that is not this one's child.

Its parent, Ray's daemon, reaps the process. From Linux 6.15 on the kernel tells the wait status to any
process that has a pidfd; see ``PIDFD_GET_INFO`` in the kernel's ``include/uapi/linux/pidfd.h``.
"""

from __future__ import annotations

import fcntl
import select
import struct

_SIZE = 64  # of the structure's first version
_GET_INFO = 3 << 30 | _SIZE << 16 | 0xFF << 8 | 11  # _IOWR(0xFF, 11, struct pidfd_info)
_EXIT = 1 << 3
_MASK = struct.Struct("=Q")
_CODE = struct.Struct("=i")
_CODE_AT = 60


def exit_status(pidfd: int) -> int | None:
    """Return the wait status of a process that has been reaped. ``None``: it has not been reaped, or the
    kernel does not tell."""
    info = bytearray(_SIZE)
    _MASK.pack_into(info, 0, _EXIT)
    try:
        fcntl.ioctl(pidfd, _GET_INFO, info)
    except OSError:  # an older kernel
        return None
    (said,) = _MASK.unpack_from(info)
    (status,) = _CODE.unpack_from(info, _CODE_AT)
    return status & 0xFFFF if said & _EXIT else None


def status_once_reaped(pidfd: int, seconds: float) -> int | None:
    """Return the wait status of a process that has ended, or ``None``. Wait up to ``seconds`` for its parent
    to reap it. A kernel that does not tell the status does not tell the moment either: then wait in full."""
    poll = select.poll()
    poll.register(pidfd, 0)
    poll.poll(int(seconds * 1000))
    return exit_status(pidfd)
