"""The native core: what must be fast or atomic, and nothing else."""

from collections.abc import Callable
from typing import Any

class Buffer:
    """A window of received (leased) or own memory; exports the buffer protocol.

    Holds the lease of the block it lies in until it is garbage. In a forked child it is inert.
    """

    nbytes: int
    readonly: bool
    address: int

def set_codec(
    encode: Callable[[Any, Any], tuple[int, int, bytes, list[Any] | None]],
    decode: Callable[[int, bytes, list[Buffer] | None, Any], Any],
    announce: Callable[[bytes, Any], None],
) -> None: ...
