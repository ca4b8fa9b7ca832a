"""``python -m benchmarks.compare A.json B.json``: every figure of B as a ratio to A's."""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path

from benchmarks.report import markdown_table
from benchmarks.results import Results
from benchmarks.units import show, times

SKIP = ("samples", "watched_s")


def compare(a: Results, b: Results, threshold: float, system: str | None) -> list[list[str]]:
    """Rows of the figures that both have and whose ratio is off 1 by ``threshold`` or more."""
    before = {(case, name): value for case, name, value in a.measured()}
    lines = []
    for case, name, value in b.measured():
        old = before.get((case, name))
        if not old or name in SKIP or (system and case.system != system):
            continue
        ratio = value / old
        if max(ratio, 1 / ratio if ratio else float("inf")) < 1 + threshold:
            continue
        place = [case.workload, case.system, case.placement, name]
        lines.append([*place, show(old, name), show(value, name), times(ratio)])
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("a", type=Path)
    parser.add_argument("b", type=Path)
    parser.add_argument("--system", help="only this one")
    parser.add_argument(
        "--threshold", type=float, default=0.0, help="leave out ratios closer to 1 (0.1: 10 %%)"
    )
    options = parser.parse_args()
    lines = compare(
        Results.load(options.a), Results.load(options.b), options.threshold, options.system
    )
    header = ["workload", "system", "placement", "figure", "A", "B", "B / A"]
    text = markdown_table(header, lines) if lines else "no figure in common, or none that differs"
    with suppress(BrokenPipeError):
        print(text, flush=True)


if __name__ == "__main__":
    main()
