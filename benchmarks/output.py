"""What a run says while it runs, and the files it leaves."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.bars import evaluate
from benchmarks.cases import Session
from benchmarks.model import Case
from benchmarks.plot import draw
from benchmarks.report import render
from benchmarks.results import Outcome, Results
from benchmarks.units import show
from benchmarks.workloads import workloads

MAIN_FIGURES = (
    "p50_us",
    "per_s",
    "compile_ms",
    "start_ms",
    "import_ms",
    "idle_percent",
    "pss_mib",
    "death_ms",
)


def _say(outcome: Outcome) -> str:
    if outcome.status != "ok":
        return f"{outcome.status} ({outcome.reason})"
    return next(
        (show(outcome.figures[name], name) for name in MAIN_FIGURES if name in outcome.figures),
        "ok",
    )


def announce(
    where: str, elapsed_s: float, session: Session, outcomes: Sequence[Outcome], spent_s: float
) -> None:
    """One line on stderr for each session that has ended."""
    clock = f"{int(elapsed_s) // 60}:{int(elapsed_s) % 60:02d}"
    head = f"[{where} {clock}] {session.system} {session.placement} {spent_s:.1f} s: "
    said = ", ".join(f"{outcome.case.workload} {_say(outcome)}" for outcome in outcomes)
    print(head + said, file=sys.stderr, flush=True)


def print_list(cases: Sequence[Case]) -> None:
    """Every workload of a run, with the systems (and placements) that run it."""
    by_workload: dict[str, list[str]] = {}
    for case in cases:
        systems = by_workload.setdefault(case.workload, [])
        systems.append(case.system if case.placement == "free" else f"{case.system}@pinned")
    for name, systems in by_workload.items():
        print(f"{workloads()[name].section:11} {name:20} {' '.join(systems)}")
    print(f"{len(by_workload)} workloads, {len(cases)} cases")


def save(results: Results, target: Path, also: Path | None) -> None:
    """``target``.json, .md, .png and .svg, the same as ``latest.*``, and the JSON as ``also``."""
    data = results.to_json() | {"bars": [asdict(verdict) for verdict in evaluate(results)]}
    text = json.dumps(data, indent=1) + "\n"
    written = [target.with_suffix(".json"), target.with_suffix(".md")]
    written[0].write_text(text)
    written[1].write_text(render(results))
    written += draw(results, target)
    for path in written:
        shutil.copyfile(path, path.with_stem("latest"))
    if also is not None:
        also.write_text(text)
    print(f"saved {', '.join(str(path) for path in written)}", file=sys.stderr)
