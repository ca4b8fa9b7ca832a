"""Where the two ends of a connection listen, and which of them calls the other."""

from __future__ import annotations

import ipaddress
from typing import NamedTuple

from conveyor.transport.base import Wire

#: Where the writer and the reader listen whose processes are on one machine.
_ON_ONE = "127.0.0.1", "127.0.0.2"


class Way(NamedTuple):
    """The way, as one end has it.

    addresses: where rank 0 and rank 1 of the pair listen, each at its own node's address alone. Gloo has the
        end with the greater address call the other one, so it is always rank 1 that calls.
    rank: which of them this end is.
    """

    addresses: tuple[str, str]
    rank: int


def way_to(wire: Wire, other: int) -> Way:
    """Find the way from this end of ``wire`` to the one whose rank there is ``other``.

    Raises:
        ValueError: there is none.
    """
    own = wire.rank
    if not wire.hosts or wire.hosts[own].address == wire.hosts[other].address:
        return Way(_ON_ONE, 0 if own == 0 else 1)
    here = ipaddress.ip_address(wire.hosts[own].address)
    there = ipaddress.ip_address(wire.hosts[other].address)
    if here.version != there.version:
        raise ValueError(
            f"{wire.members[own]} is on a node with the address {here}, and {wire.members[other]} on one "
            f"with {there}: gloo connects two of one version of IP"
        )
    if here.packed < there.packed:
        return Way((str(here), str(there)), 0)
    return Way((str(there), str(here)), 1)
