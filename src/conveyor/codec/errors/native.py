"""Failures of the native core as exceptions that explain them: at an arena's cap, who holds which values."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from typing import TYPE_CHECKING

from conveyor.exceptions import ArenaFullError, Held, OutOfMemoryError, SerializationError

if TYPE_CHECKING:
    from conveyor._core import Holding

#: Lines of the message, at most.
_LINES = 20

#: Cap of an error whose value is larger than any cap (``ArenaFull::Cap``).
_NOTHING_WOULD_DO = 0


def refused(number: int, what: str) -> Exception:
    """Make the exception for the error ``number`` of a system call; ``what`` names the call and the error."""
    if number == errno.ENOMEM:
        return OutOfMemoryError(
            f"this process has no memory, or no addresses, left for a value ({what}). Let go of values "
            "that are held, or raise its limit: of addresses (ulimit -v), of mappings "
            "(vm.max_map_count), or of its cgroup"
        )
    if number in (errno.EPROTO, errno.EFAULT):
        return SerializationError(f"{what} (was shared memory overwritten?)")
    return OSError(number, what)


def arena_full(message: str, holdings: list[Holding], cap: int) -> ArenaFullError:
    """Make the error of the cap. ``holdings``, ``cap``: as the native core has found them."""
    held = [
        Held(process, graph or None, edge if graph else None, channel, tuple(sorted(numbers)), size)
        for process, graph, edge, channel, size, numbers in holdings
    ]
    held.sort(key=lambda one: -one.bytes)
    lines = [_line(one) for one in held[:_LINES]]
    if len(held) > _LINES:
        rest = sum(one.bytes for one in held[_LINES:])
        lines.append(f"  and {len(held) - _LINES} more channels, {in_mib(rest)}")
    if not held and cap != _NOTHING_WOULD_DO:
        lines.append(
            "Others hold their values: a program the results that it has got, or has not got yet, "
            "actors what they have received and keep"
        )
    if held or cap != _NOTHING_WOULD_DO:
        lines.append(
            "Let go of what is not needed, copy what is kept for long, or raise the cap (of a graph: "
            "memory_bytes, of the session: CONVEYOR_ARENA_BYTES). CONVEYOR_DEBUG=1 says where in the "
            "program results were got"
        )
    error = ArenaFullError("\n".join([message, *lines]), tuple(held))
    error._cap = cap
    return error


def _line(held: Held) -> str:
    what = "calls" if held.graph is None else "executions"
    count = len(held.executions)
    return (
        f"  {held.process} holds {count} value{'s' * (count != 1)} ({in_mib(held.bytes)}) of "
        f"{held.channel}: {what} {ranges(held.executions)}"
    )


def in_mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"


def ranges(numbers: Iterable[int], most: int = 12) -> str:
    """``0-3, 7``: numbers in order, neighbours together; ``most`` of them, then dots."""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    parts = [f"{first}" if first == last else f"{first}-{last}" for first, last in found]
    return ", ".join(parts[:most] + ["..."] * (len(parts) > most))
