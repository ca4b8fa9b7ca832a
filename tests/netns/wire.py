"""The cables of hosts in network namespaces: what they delay, lose and reorder, and where they are cut.

All hosts are on one network; each has one cable to it. Where the kernel has netem, ``netem.py`` has it do
this, and ``relay.py`` does where it has not. Both do it to IP packets, so TCP above meets what it meets on a
bad network, reordering too: packets that take differently long overtake each other.
"""

from __future__ import annotations

import abc
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

import namespaces
from namespaces import Namespace

NETWORK = ipaddress.ip_network("10.77.0.0/24")
#: The ways of a cable: what its host sends, and what it gets.
OUT, IN = "out", "in"
WAYS = (OUT, IN)


@dataclass(frozen=True)
class Weather:
    """Of one way of a cable. A packet takes ``delay`` to ``delay + jitter`` seconds, evenly spread, and is
    lost with a probability of ``loss``."""

    delay: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0


FINE, CUT = Weather(), Weather(loss=1.0)


@dataclass(frozen=True)
class Counts:
    """Packets of one way of a cable. ``None``: it is not known."""

    carried: int
    lost: int
    overtaken: int | None


class Network(abc.ABC):
    """All cables."""

    @abc.abstractmethod
    def put(self, host: int, way: str, weather: Weather) -> None:
        """From now on it is so on one way of a host's cable. What is on a way that is cut is lost."""

    @abc.abstractmethod
    def counts(self, host: int, way: str) -> Counts: ...

    @abc.abstractmethod
    def close(self) -> None: ...

    def wire(self, host: int) -> Wire:
        return Wire(self, host)


class Wire:
    """The cable of one host."""

    def __init__(self, network: Network, host: int) -> None:
        self._network, self.host = network, host
        self._weather = FINE
        self._cut: frozenset[str] = frozenset()

    def set(self, delay: float = 0.0, jitter: float = 0.0, loss: float = 0.0) -> None:
        """The weather on both of its ways."""
        self._weather = Weather(delay, jitter, loss)
        self._tell()

    def cut(self, *ways: str) -> None:
        """Nothing gets through on those ways, both if none is said."""
        self._cut = frozenset(ways or WAYS)
        self._tell()

    def heal(self) -> None:
        """It is whole again, in the weather that was set."""
        self._cut = frozenset()
        self._tell()

    def counts(self, way: str) -> Counts:
        return self._network.counts(self.host, way)

    def _tell(self) -> None:
        for way in WAYS:
            self._network.put(self.host, way, CUT if way in self._cut else self._weather)


def address(host: int) -> str:
    return str(NETWORK[host + 1])


def refusal() -> str:
    """Why there can be no hosts in namespaces here; "" where there can."""
    import netem
    import relay

    if (why := namespaces.refusal()) or not (no_netem := netem.refusal()):
        return why
    if no_tun := relay.refusal():
        return (
            f"there is neither netem ({no_netem}) nor a TUN device ({no_tun}): load sch_netem, or run as "
            f"root where there is tun"
        )
    return ""


def network(hosts: Sequence[Namespace], seed: int = 1) -> Network:
    """Connect them. ``OSError`` where this machine cannot do it in either way."""
    import netem
    import relay

    if netem.refusal() == "":
        return netem.NetemNetwork(hosts)
    return relay.RelayNetwork(hosts, seed)
