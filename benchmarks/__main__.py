"""The command line of the benchmarks."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from benchmarks.bars import compared
from benchmarks.cases import Session, select
from benchmarks.machine import ROOT, facts
from benchmarks.model import PLACEMENTS, Placement, Tier
from benchmarks.output import announce, print_list, save
from benchmarks.processes import become_subreaper
from benchmarks.report import render
from benchmarks.results import Outcome, Results
from benchmarks.rounds import Plan
from benchmarks.runner import Runner
from benchmarks.workloads import SYSTEMS

RESULTS = ROOT / "benchmarks" / "results"

# rounds, minutes, effort
LEVELS: dict[Tier, tuple[int, float | None, float]] = {
    "quick": (1, None, 0.4),
    "default": (3, 30.0, 1.0),
    "full": (5, None, 1.0),
}


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _systems(text: str) -> list[str]:
    names = _names(text)
    for name in names:
        if name not in SYSTEMS:
            raise argparse.ArgumentTypeError(f"unknown system {name!r} (of {', '.join(SYSTEMS)})")
    return names


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Conveyor beside its peers and beside the floor.",
    )
    level = parser.add_mutually_exclusive_group()
    level.add_argument("--quick", action="store_true", help="the headlines, in a few minutes")
    level.add_argument("--full", action="store_true", help="every case, five rounds, over an hour")
    parser.add_argument(
        "--only",
        type=_names,
        default=[],
        metavar="PATTERN,...",
        help="workloads by section, part of the name, or glob; of the full registry, "
        "unless with --quick",
    )
    parser.add_argument(
        "--systems", type=_systems, default=list(SYSTEMS), metavar="A,B", help=", ".join(SYSTEMS)
    )
    parser.add_argument(
        "--placement", choices=PLACEMENTS, help="only this one (all cores, or all on one)"
    )
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--minutes", type=float, help="later rounds shrink to fit into it")
    parser.add_argument("--effort", type=float, help="scales times and counts of each case")
    parser.add_argument("--limits", type=float, default=1.0, help="scales the time limits")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results here as well")
    parser.add_argument("--list", action="store_true", help="the cases of this run, and no run")
    parser.add_argument("--show", type=Path, metavar="PATH", help="the page of a saved result")
    return parser.parse_args()


def _run(options: argparse.Namespace) -> Results:
    level: Tier = "quick" if options.quick else "full" if options.full else "default"
    rounds, minutes, effort = LEVELS[level]
    tier: Tier = "full" if options.only and level == "default" else level
    placements: Sequence[Placement] = [options.placement] if options.placement else PLACEMENTS
    if len(os.sched_getaffinity(0)) == 1:
        placements = ["free"]
    cases = select(tier, options.only, options.systems, placements)
    if options.list:
        print_list(cases)
        raise SystemExit
    if not cases:
        raise SystemExit("no case matches")
    rounds = options.rounds or rounds
    effort = options.effort or effort
    settings = {"level": level, "rounds": rounds, "effort": effort, "arguments": sys.argv[1:]}
    results = Results(facts(), settings)
    plan = Plan(cases, rounds, options.minutes or minutes, compared())
    stamp = time.strftime("%Y%m%d-%H%M%S")
    RESULTS.mkdir(parents=True, exist_ok=True)
    runner = Runner(RESULTS / f"{stamp}.log", effort, options.limits)
    begin = time.monotonic()

    def report(
        turn: int, index: int, count: int, session: Session, outcomes: list[Outcome], spent: float
    ) -> None:
        elapsed = time.monotonic() - begin
        announce(f"{turn + 1}/{rounds} {index + 1}/{count}", elapsed, session, outcomes, spent)

    try:
        with runner.running():
            plan.run(results, runner.run, report)
    except KeyboardInterrupt:
        plan.notes.append("interrupted")
    finally:
        settings["minutes_taken"] = (time.monotonic() - begin) / 60
        settings["notes"] = plan.notes
        results.warnings += runner.warnings
        save(results, RESULTS / stamp, options.json)
    return results


def _stop(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def main() -> None:
    options = _parse()
    if options.show is not None:
        print(render(Results.load(options.show)))
        return
    signal.signal(signal.SIGTERM, _stop)
    become_subreaper()
    print(render(_run(options)))


if __name__ == "__main__":
    main()
