"""A network of veth pairs whose ends have netem, where the kernel has it.

Each host has one end of a pair; the others are in a namespace between them, which forwards. netem is on the
way out of a device: the host's end has it for what the host sends, the other end for what the host gets.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence

import wire
from namespaces import Namespace
from wire import Counts, Weather

DEVICE = "wire"
#: Packets that may be on their way, far more than there are: netem would drop the rest.
_LIMIT = 100_000


def refusal() -> str:
    """Why netem is not to be had; "" where it is."""
    tried = subprocess.run(
        ["unshare", "-n", "tc", "qdisc", "add", "dev", "lo", "root", "netem"],
        capture_output=True,
        text=True,
        check=False,
    )
    return tried.stderr.strip() if tried.returncode else ""


def netem(weather: Weather) -> list[str]:
    """The words of that weather. netem spreads a delay evenly around its middle."""
    words = ["netem", "limit", str(_LIMIT)]
    if weather.delay or weather.jitter:
        middle = weather.delay + weather.jitter / 2
        words += ["delay", f"{middle * 1e6:.0f}us", f"{weather.jitter / 2 * 1e6:.0f}us"]
    if weather.loss:
        words += ["loss", f"{weather.loss * 100:g}%"]
    return words


class NetemNetwork(wire.Network):
    def __init__(self, hosts: Sequence[Namespace]) -> None:
        self._hosts = hosts
        self._between = Namespace()
        try:
            with self._between.entered(), open("/proc/sys/net/ipv4/ip_forward", "w") as forward:
                forward.write("1")
            for i, host in enumerate(hosts):
                self._connect(i, host)
        except BaseException:
            self.close()
            raise

    def _connect(self, number: int, host: Namespace) -> None:
        end, at = f"{DEVICE}{number}", wire.address(number)
        pid = host.path.split("/")[2]
        self._between.run(
            *("ip", "link", "add", end, "type", "veth", "peer", "name", DEVICE, "netns", pid)
        )
        self._between.run("ip", "link", "set", end, "up")
        self._between.run("ip", "route", "add", f"{at}/32", "dev", end)
        host.run("ip", "address", "add", f"{at}/32", "dev", DEVICE)
        host.run("ip", "link", "set", DEVICE, "up")
        host.run("ip", "route", "add", str(wire.NETWORK), "dev", DEVICE, "scope", "link")
        # Who asks for another host's hardware address is told the forwarder's.
        with self._between.entered(), open(f"/proc/sys/net/ipv4/conf/{end}/proxy_arp", "w") as file:
            file.write("1")

    def _end(self, host: int, way: str) -> tuple[Namespace, str]:
        if way == wire.OUT:
            return self._hosts[host], DEVICE
        return self._between, f"{DEVICE}{host}"

    def put(self, host: int, way: str, weather: Weather) -> None:
        where, device = self._end(host, way)
        if weather == wire.CUT:  # with a new one what is on its way is gone, too
            subprocess.run(
                where.command("tc", "qdisc", "del", "dev", device, "root"),
                capture_output=True,
                check=False,
            )
        where.run("tc", "qdisc", "replace", "dev", device, "root", *netem(weather))

    def counts(self, host: int, way: str) -> Counts:
        where, device = self._end(host, way)
        (found,) = json.loads(where.run("tc", "-s", "-j", "qdisc", "show", "dev", device))
        return Counts(found["packets"], found["drops"], None)

    def close(self) -> None:
        self._between.close()
