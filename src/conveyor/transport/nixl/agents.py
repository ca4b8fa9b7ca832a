"""NIXL's agents: a process has one that offers memory, and one that reads what others offer.

They are two, so that who offers something never waits for what is being read. Neither has NIXL's own thread,
which would keep a core busy as long as there is an agent. What goes between hosts has two more: which network
an agent can use is settled when it starts, and one that has none but loopback is all that a host needs.
"""

from __future__ import annotations

import ipaddress
import itertools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from conveyor.transport.base import Wire
from conveyor.transport.interfaces import LOOPBACK, interface_of, rdma_ports

_numbers = itertools.count()

_DEVICES = "UCX_NET_DEVICES"
#: What UCX and NIXL are told, unless the environment says something else: that a process dies is for
#: Conveyor's handlers to tell; no notices of what goes well. Where sockets listen is said beside them.
_SETTINGS = {"UCX_ERROR_SIGNALS": "", "NIXL_LOG_LEVEL": "WARN"}


def address_of(wire: Wire) -> str:
    """Return the IP address at which this end of a wire has to be reached. Empty: all ends are on this
    node."""
    addresses = [host.address for host in wire.hosts]
    # Nodes at loopback addresses are on one machine, and UCX takes loopback and other interfaces for two
    # networks.
    loopback = next((one for one in addresses if ipaddress.ip_address(one).is_loopback), None)
    return loopback or (addresses[wire.rank] if addresses else "")


def make_agent(purpose: str, address: str = "") -> Any:
    """Start an agent that any thread may use, under a name that no other process has. It takes half a
    second. ``address``: where other hosts reach it; empty: none do.

    Raises:
        ConnectionError: this machine has no network interface with that address.

    And whatever NIXL raises.
    """
    with _settings({**_SETTINGS, _DEVICES: _devices(address)}) as ours:
        from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t

        if "NIXL_LOG_LEVEL" in ours:  # it may have been imported before, and knows one by then
            logging.getLogger("nixl").setLevel(logging.WARNING)
        name = f"{purpose}-{os.getpid()}-{next(_numbers)}-{os.urandom(4).hex()}"
        config = nixl_agent_config(
            enable_prog_thread=False,
            backends=["UCX"],
            sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        agent = nixl_agent(name, config)
    if "UCX" not in agent.backends:
        raise RuntimeError("this build of NIXL has no UCX")
    return agent


def _devices(address: str) -> str:
    """Return the network devices that UCX may use: the interface with the address, on which it listens, and
    all for RDMA, which have no sockets. UCX may always use host memory, which is not such a device."""
    if not address:
        return LOOPBACK
    name = interface_of(address)
    if name is None:
        raise ConnectionError(f"no network interface of this machine has the address {address}")
    return ",".join([name, *rdma_ports()])


@contextmanager
def _settings(wanted: dict[str, str]) -> Iterator[dict[str, str]]:
    """UCX reads the environment when it is loaded, and when an agent starts."""
    ours = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield ours
    finally:
        for name in ours:
            os.environ.pop(name, None)
