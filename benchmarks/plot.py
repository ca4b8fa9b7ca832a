"""Results as one picture: latency, paced latency, throughput, payloads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import Results
from benchmarks.workloads import HEADLINE, SIZES, TOPOLOGIES

COLOURS = {
    "conveyor": "#d1495b",
    "floor": "#9a9a9a",
    "memcpy": "#9a9a9a",
    "ray_cg": "#30638e",
    "ray_core": "#6fa3c7",
    "pipe": "#66a182",
    "zmq": "#edae49",
    "handmade": "#8d6a9f",
    "gloo": "#5b8e7d",
}
"""Of the systems that have something in the picture: what is fetched directly is in tables only."""


def draw(results: Results, target: Path) -> list[Path]:
    """Write ``target`` as .png and .svg; nothing without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("agg")
    from matplotlib import patches, pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(14, 9), layout="constrained")
    machine = results.machine
    figure.suptitle(
        f"{machine['cpu']}, {len(machine['cores'])} cores, Linux {machine['kernel']}, "
        f"Python {machine['python']} ({machine['date']}, {machine['commit']})",
        fontsize=10,
    )
    _bars(axes[0, 0], results, "Hot: p50 µs", [f"{name}/hot" for name in TOPOLOGIES], "p50_us")
    paced = [f"{name}/paced{pace}ms" for name in HEADLINE for pace in (1, 20, 100)]
    _bars(axes[0, 1], results, "Paced: p50 µs", paced, "p50_us")
    flights = [f"{name}/flight{n}" for name in ("echo", "chain3") for n in (1, 4, 10)]
    _bars(axes[1, 0], results, "Executions per second", flights, "per_s")
    _payloads(axes[1, 1], results)
    handles = [patches.Patch(color=colour) for colour in COLOURS.values()]
    figure.legend(
        handles, list(COLOURS), loc="outside lower center", ncols=len(COLOURS), frameon=False
    )
    written = [target.with_suffix(suffix) for suffix in (".png", ".svg")]
    for path in written:
        figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return written


def _bars(axes: Any, results: Results, title: str, names: Sequence[str], figure: str) -> None:
    """Groups of bars, one for each workload that was measured."""
    names = [n for n in names if any(results.figure(n, s, figure) is not None for s in COLOURS)]
    present = [s for s in COLOURS if any(results.figure(n, s, figure) is not None for n in names)]
    axes.set_title(title)
    axes.spines[["top", "right"]].set_visible(False)
    if not names:
        axes.set_axis_off()
        return
    axes.set_yscale("log")
    width = 0.8 / len(present)
    for index, system in enumerate(present):
        points = [
            (place + (index - (len(present) - 1) / 2) * width, value)
            for place, name in enumerate(names)
            if (value := results.figure(name, system, figure)) is not None
        ]
        axes.bar([x for x, _ in points], [y for _, y in points], width, color=COLOURS[system])
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=8)


def _payloads(axes: Any, results: Results) -> None:
    """One line for each system, numpy drawn through, torch dashed."""
    axes.set_title("Payload one way, warm: p50 µs (numpy —, torch - -)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for system in COLOURS:
        for device, style in (("numpy", "-"), ("torch", "--")):
            points = [
                (size, value)
                for label, size in SIZES.items()
                if (value := results.figure(f"{device}/{label}/one-way", system, "p50_us"))
                is not None
            ]
            xs, ys = [x for x, _ in points], [y for _, y in points]
            axes.plot(xs, ys, style, marker="o", markersize=3, color=COLOURS[system])
    axes.set_xticks(list(SIZES.values()), list(SIZES))
