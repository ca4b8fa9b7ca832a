"""Between two nodes of a Ray cluster that share no memory: `make bench-cluster`.

    python -m benchmarks.cluster                 # three rounds, a few minutes
    python -m benchmarks.cluster --rounds 1 --effort 0.3

Both nodes are Ray's on this machine. Ours count as two hosts (``init(shared_memory="node")``), so each value
goes over a TCP connection of the loopback; the route is printed. Ray's go its own way between two raylets.
Each system has a driver of its own, and the systems take turns. *stream* is one TCP connection with nothing
around it, which carries the same bytes from one process's memory to another's.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from benchmarks.machine import facts
from benchmarks.ray_nodes import SETTINGS, cluster_of, measured_apart

os.environ.update(SETTINGS, RAY_CGRAPH_get_timeout="3600", RAY_CGRAPH_submit_timeout="3600")

SIZES = {"echo": 0, "1 MB": 1 << 20, "64 MB": 1 << 26}
IN_FLIGHT = 4
SYSTEMS = ("conveyor", "ray_cg", "stream")
#: (row, its peer's row divided by ours is at least this).
BARS = {"echo p50": 10.0, "1 MB p50": 2.0, "64 MB p50": 2.0, "1 MB, 4 in flight": 3.0}
_OF_A_STREAM = 0.7


class Stage:
    """Reads all that it gets."""

    def echo(self, x: Any) -> Any:
        return x

    def total(self, x: Any) -> float:
        return float(x[:: 512 // 8].sum())


def _value(size: int) -> Any:
    return np.ones(size // 8) if size else 1


def _calls(size: int, effort: float) -> int:
    return max(10, int(effort * (3000 if not size else (2 << 30) / size)))


def _measure(
    execute: Callable[[Any], Any], get: Callable[[Any], Any], size: int, effort: float
) -> dict[str, float]:
    """Seconds of an execution, at the median and the 99th percentile, and with four in flight."""
    value, calls = _value(size), _calls(size, effort)
    for _ in range(5):
        get(execute(value))
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        get(execute(value))
        times.append(time.perf_counter() - start)
    under_way = []
    start = time.perf_counter()
    for _ in range(calls):
        if len(under_way) == IN_FLIGHT:
            get(under_way.pop(0))
        under_way.append(execute(value))
    for one in under_way:
        get(one)
    each = (time.perf_counter() - start) / calls
    times.sort()
    return {"p50": median(times), "p99": times[int(len(times) * 0.99)], "in flight": each}


def _conveyor(address: str, effort: float) -> dict[str, Any]:
    import conveyor
    from conveyor.dag import InputNode

    figures: dict[str, Any] = {}
    remote = conveyor.remote(Stage)
    conveyor.init(engine="ray", address=address, shared_memory="node")
    far = remote.options(resources={"second": 1}).remote()
    for name, size in SIZES.items():
        with InputNode() as node:
            dag = (far.total if size else far.echo).bind(node)
        with dag.compile() as graph:
            if not size:
                figures["route"] = graph.explain()
            figures[name] = _measure(graph.execute, conveyor.get, size, effort)
    near = [remote.options(resources={"first": 1}).remote() for _ in range(2)]
    figures["same host"] = _chain(near, effort)
    conveyor.shutdown()
    conveyor.init(engine="local")
    figures["same host, local engine"] = _chain([remote.remote() for _ in range(2)], effort)
    conveyor.shutdown()
    return figures


def _chain(actors: Sequence[Any], effort: float) -> dict[str, float]:
    import conveyor
    from conveyor.dag import InputNode

    with InputNode() as node:
        dag = actors[1].echo.bind(actors[0].echo.bind(node))
    with dag.compile() as graph:
        return _measure(graph.execute, conveyor.get, 0, effort)


def _ray_cg(address: str, effort: float) -> dict[str, Any]:
    import ray
    from ray.dag import InputNode

    ray.init(address=address, log_to_driver=False)
    far = ray.remote(Stage).options(num_cpus=0, resources={"second": 1}).remote()
    figures: dict[str, Any] = {}
    for name, size in SIZES.items():
        with InputNode() as node:
            dag = (far.total if size else far.echo).bind(node)
        graph = dag.experimental_compile(
            _buffer_size_bytes=size + (1 << 20), _max_inflight_executions=IN_FLIGHT + 1
        )
        figures[name] = _measure(graph.execute, ray.get, size, effort)
        graph.teardown()
    ray.shutdown()
    return figures


def _send(sock: socket.socket, others: Sequence[socket.socket], size: int) -> None:
    for other in others:  # of the parent: it would never be seen to close them
        other.close()
    data = np.ones(size // 8)
    while sock.recv(1):
        sock.sendall(memoryview(data).cast("B"))


def _stream(_address: str, effort: float) -> dict[str, Any]:
    """The reader asks with a byte, and has the value when all of it has come."""
    figures: dict[str, Any] = {}
    for name, size in SIZES.items():
        if not size:
            continue
        listener = socket.create_server(("127.0.0.1", 0))
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
        maker = multiprocessing.get_context("fork").Process(
            target=_send, args=(far, (near, listener), size)
        )
        maker.start()
        far.close()
        into = memoryview(bytearray(size))

        def ask(_: Any, near: socket.socket = near, into: memoryview = into) -> None:
            near.sendall(b"?")
            got = 0
            while got < len(into):
                got += near.recv_into(into[got:])

        figures[name] = _measure(ask, lambda _: None, size, effort)
        near.close()
        listener.close()
        maker.join()
    return figures


def _rows(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, float]]:
    """Seconds, by what is measured and by system."""
    rows: dict[str, dict[str, float]] = {}
    for system, rounds in found.items():
        for name, first in rounds[0].items():
            if not isinstance(first, dict):
                continue
            for kind in first:
                row = f"{name}, {IN_FLIGHT} in flight" if kind == "in flight" else f"{name} {kind}"
                rows.setdefault(row, {})[system] = median(one[name][kind] for one in rounds)
    return rows


def _print(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    for fact, value in facts().items():
        print(f"{fact}: {value}")
    print("\nThe graph between the nodes:\n")
    print(found["conveyor"][0]["route"])
    rows = _rows(found)
    print("\nus at the median of the rounds; in parentheses, how many times ours\n")
    print(f"| | {' | '.join(SYSTEMS)} |\n|---|" + "---|" * len(SYSTEMS))
    for row, times in rows.items():
        ours = times.get("conveyor")
        cells = []
        for system in SYSTEMS:
            seconds = times.get(system)
            cell = "" if seconds is None else f"{seconds * 1e6:.4g}"
            if seconds is not None and ours is not None and system != "conveyor":
                cell += f" ({seconds / ours:.2f}x)"
            cells.append(cell)
        print(f"| {row} | {' | '.join(cells)} |")
    print()
    for row, least in BARS.items():
        times = rows[row]
        ratio = times["ray_cg"] / times["conveyor"]
        print(_verdict(f"{row}: Ray's is {ratio:.1f}x ours, at least {least:g}x", ratio >= least))
    ratio = rows["64 MB p50"]["stream"] / rows["64 MB p50"]["conveyor"]
    print(_verdict(f"64 MB: {ratio:.0%} of a stream, at least 70 %", ratio >= _OF_A_STREAM))
    near, local = (rows[f"same host{kind} p50"]["conveyor"] for kind in ("", ", local engine"))
    ratio = near / local
    print(
        _verdict(
            f"two actors of one node: {ratio:.2f}x the local engine, at most 1.1x", ratio <= 1.1
        )
    )


def _verdict(text: str, met: bool) -> str:
    return f"{'met   ' if met else 'missed'} {text}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--effort", type=float, default=1.0)
    parser.add_argument("--system", choices=SYSTEMS, help=argparse.SUPPRESS)
    parser.add_argument("--address", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.system:
        measure = {"conveyor": _conveyor, "ray_cg": _ray_cg, "stream": _stream}[given.system]
        print(json.dumps(measure(given.address, given.effort)))
        return
    found: dict[str, list[dict[str, Any]]] = {system: [] for system in SYSTEMS}
    with cluster_of([{"first": 4}, {"second": 4}], cpus=2, store=2 << 30) as address:
        told = ["--address", address, "--effort", str(given.effort)]
        for turn in range(given.rounds):
            for system in SYSTEMS if turn % 2 == 0 else SYSTEMS[::-1]:
                found[system].append(
                    measured_apart("benchmarks.cluster", "--system", system, *told)
                )
    _print(found)


if __name__ == "__main__":
    main()
