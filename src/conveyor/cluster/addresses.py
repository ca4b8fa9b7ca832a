"""Addresses and ports at which the nodes of a session listen."""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from msgspec import Struct

T = TypeVar("T")

#: The request for an interface's IPv4 address; see netdevice(7).
_SIOCGIFADDR = 0x8915
#: Any port: connecting a datagram socket sends nothing.
_SOME_PORT = 9
#: In /proc/net/if_inet6, addresses that are good beyond one link.
_GLOBAL_SCOPE = "00"


class Listening(Struct, frozen=True):
    """The wish of ``conveyor.init`` for all nodes.

    address: an interface, a network or an address, which each node takes its own of; empty: the one by which
        Ray knows the node. ports: the first and the last; 0: any that is free.
    """

    address: str = ""
    ports: tuple[int, int] = (0, 0)

    def own_address(self, rays: str) -> str:
        """This node's address. ``rays``: the one by which Ray knows it. ``OSError`` if there is none."""
        if not self.address:
            return rays
        network = _network(self.address)
        found = _of_interface(self.address) if network is None else _within(network)
        if found is None:
            raise OSError(
                errno.EADDRNOTAVAIL,
                f"node {rays} has no address to listen at: listen_address={self.address!r} names no "
                f"interface, network or address that it has",
            )
        return found

    def begin(self, rays: str, listen: Callable[[tuple[str, int]], T]) -> T:
        """Call ``listen`` with this node's address and the first free port, and return its result.
        ``OSError`` if all are taken."""
        address = self.own_address(rays)
        first, last = self.ports
        for port in range(first, last + 1):
            try:
                return listen((address, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
        raise OSError(
            errno.EADDRINUSE,
            f"none of the ports {first} to {last} is free at {address} (listen_ports): each node with actors "
            f"needs one, as the driver's does",
        )


def listening(address: object, ports: object) -> Listening:
    """Check the address and the ports that ``init`` was given, and return them as a ``Listening``."""
    if address is not None and (not isinstance(address, str) or not address):
        raise TypeError(
            f"listen_address is the name of an interface, a network or an address, not {address!r}"
        )
    if ports is None:
        return Listening(address or "")
    if (
        isinstance(ports, str)
        or not isinstance(ports, Sequence)
        or [type(port) for port in ports] != [int, int]
        or not 1 <= ports[0] <= ports[1] <= 65535
    ):
        raise ValueError(f"listen_ports is (first, last), two ports from 1 to 65535, not {ports!r}")
    return Listening(address or "", (ports[0], ports[1]))


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None


def _within(network: ipaddress.IPv4Network | ipaddress.IPv6Network) -> str | None:
    """Return the address from which this node sends to that network, or ``None`` if the node is not in it."""
    family = socket.AF_INET6 if network.version == 6 else socket.AF_INET
    somebody = network[
        min(1, network.num_addresses - 1)
    ]  # the first of a network is none of its nodes
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as requested:
        if network.num_addresses == 1:
            requested.bind((str(somebody), 0))
        else:
            requested.connect((str(somebody), _SOME_PORT))
        own: str = requested.getsockname()[0]
        if ipaddress.ip_address(own) in network:
            return own
    return None


def _of_interface(name: str) -> str | None:
    """Return an address of the interface of that name, if there is one."""
    given = struct.pack("256s", name.encode()[:15])
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as requested:
        return socket.inet_ntoa(fcntl.ioctl(requested, _SIOCGIFADDR, given)[20:24])
    with suppress(OSError), open("/proc/net/if_inet6") as lines:
        for line in lines:
            address, _, _, scope, _, interface = line.split()
            if interface == name and scope == _GLOBAL_SCOPE:
                return str(ipaddress.IPv6Address(bytes.fromhex(address)))
    return None
