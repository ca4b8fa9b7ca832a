"""Lookup of the network interface that has an address: libraries take a name, and sessions know addresses."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import os
import socket
import struct

#: Linux's name of the loopback interface.
LOOPBACK = "lo"
#: Lists the IPv4 addresses of all interfaces; how large one entry is, where its name ends, and where its
#: address lies.
_SIOCGIFCONF = 0x8912
_ENTRY, _NAME = 40, 16
_ADDRESS = slice(20, 24)
#: Largest number of entries to make room for.
_MOST = 256
#: Devices of RDMA and their ports, which sockets know nothing of.
_RDMA = "/sys/class/infiniband"


def interface_of(address: str) -> str | None:
    """Find the interface with an IP address. ``None``: this machine has none with it."""
    ip = ipaddress.ip_address(address)
    if ip.is_loopback:
        return LOOPBACK
    found = _v4() if ip.version == 4 else _v6()
    return found.get(ip.packed)


def rdma_ports() -> list[str]:
    """List the ports of devices for RDMA, as UCX names them: ``"mlx5_0:1"``."""
    ports = []
    for device in _listed(_RDMA):
        ports += [f"{device}:{port}" for port in _listed(f"{_RDMA}/{device}/ports")]
    return ports


def _listed(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []


def _v4() -> dict[bytes, str]:
    entries = array.array("B", bytes(_MOST * _ENTRY))
    requested = struct.pack("iL", len(entries), entries.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        size, _ = struct.unpack("iL", fcntl.ioctl(any_socket, _SIOCGIFCONF, requested))
    data = entries.tobytes()
    found = {}
    for at in range(0, size, _ENTRY):
        entry = data[at : at + _ENTRY]
        name = entry[:_NAME].partition(b"\0")[0].decode()
        found[entry[_ADDRESS]] = name.partition(":")[0]  # a second address may have a label
    return found


def _v6() -> dict[bytes, str]:
    try:
        with open("/proc/self/net/if_inet6") as table:
            lines = [line.split() for line in table]
    except FileNotFoundError:  # a kernel without it
        return {}
    return {bytes.fromhex(fields[0]): fields[-1] for fields in lines}
