"""Which cases a run has, and which of them share a process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from benchmarks.model import (
    PLACEMENTS,
    TIERS,
    Case,
    Direct,
    Placement,
    Tier,
    Transfer,
    Workload,
)
from benchmarks.workloads import SYSTEMS, workloads


@dataclass(frozen=True)
class Session:
    """Cases of one system and placement that run one after the other in one process."""

    system: str
    placement: Placement
    cases: tuple[Case, ...]

    def __str__(self) -> str:
        return f"{self.cases[0]}" + (f" +{len(self.cases) - 1}" if len(self.cases) > 1 else "")


def _matches(workload: Workload, patterns: Sequence[str]) -> bool:
    return not patterns or any(
        fnmatchcase(workload.name, pattern)
        or pattern in workload.name
        or pattern == workload.section
        for pattern in patterns
    )


def select(
    tier: Tier,
    patterns: Sequence[str] = (),
    systems: Sequence[str] = SYSTEMS,
    placements: Sequence[Placement] = PLACEMENTS,
) -> list[Case]:
    """The cases of a ``tier`` run, those of smaller tiers included, in registry order."""
    included = TIERS[: TIERS.index(tier) + 1]
    return [
        Case(workload.name, system, placement)
        for workload in workloads().values()
        if _matches(workload, patterns)
        for system in SYSTEMS
        if system in systems and workload.tiers.get(system) in included
        for placement in workload.placements_on(system)
        if placement in placements
    ]


def _process_key(case: Case) -> tuple[str, ...]:
    workload = workloads()[case.workload]
    setup = workload.setup
    if case.system.startswith("ray"):  # starting it takes longer than these do
        if isinstance(workload.spec, Transfer):
            setup = f"payload/{workload.spec.device}"
        elif isinstance(workload.spec, Direct):
            setup = "direct"
    return setup, case.system, case.placement


def sessions(cases: Iterable[Case], turn: int = 0) -> list[Session]:
    """Group ``cases``; within a set-up each ``turn`` begins with another system."""
    grouped: dict[tuple[str, ...], list[Case]] = {}
    for case in cases:
        grouped.setdefault(_process_key(case), []).append(case)
    by_setup: dict[str, list[Session]] = {}
    for key, members in grouped.items():
        first = members[0]
        session = Session(first.system, first.placement, tuple(members))
        by_setup.setdefault(key[0], []).append(session)
    return [
        session
        for group in by_setup.values()
        for session in group[turn % len(group) :] + group[: turn % len(group)]
    ]
