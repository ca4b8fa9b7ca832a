"""What the system has refused to the native core, as an exception that says so."""

from __future__ import annotations

import errno

from conveyor.exceptions import OutOfMemoryError, SerializationError


def refused(number: int, what: str) -> Exception:
    """What to raise for the error ``number`` of a system call; ``what`` names the call and the error."""
    if number == errno.ENOMEM:
        return OutOfMemoryError(
            f"this process has no memory, or no addresses, left for a value ({what}). Let go of values "
            "that are held, or raise its limit: of addresses (ulimit -v), of mappings "
            "(vm.max_map_count), or of its cgroup"
        )
    if number in (errno.EPROTO, errno.EFAULT):
        return SerializationError(f"{what} (was shared memory overwritten?)")
    return OSError(number, what)
