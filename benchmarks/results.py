"""What came out: every round of every case, medians over rounds, JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

from benchmarks.model import Case, Placement

Status = Literal["ok", "failed", "hung", "unavailable"]
VERSION = 1


@dataclass(frozen=True)
class Outcome:
    """One case in one round."""

    case: Case
    status: Status
    figures: dict[str, Any] = field(default_factory=dict)
    reason: str = ""


@dataclass
class Row:
    """One case over all rounds."""

    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def good(self) -> list[dict[str, Any]]:
        return [outcome.figures for outcome in self.outcomes if outcome.status == "ok"]

    @property
    def status(self) -> Status:
        """``ok`` if any round was."""
        return "ok" if self.good else self.outcomes[-1].status

    @property
    def reason(self) -> str:
        """Why a round was not ok; empty if all were."""
        return next((o.reason for o in reversed(self.outcomes) if o.status != "ok"), "")

    @property
    def figures(self) -> dict[str, float]:
        """The median over the rounds of each number."""
        names = {name for figures in self.good for name in figures}
        values = {n: [f[n] for f in self.good if isinstance(f.get(n), int | float)] for n in names}
        return {name: median(numbers) for name, numbers in sorted(values.items()) if numbers}

    @property
    def cores(self) -> list[list[int]]:
        return [sample for figures in self.good for sample in figures.get("cores", [])]


@dataclass
class Results:
    machine: dict[str, Any]
    settings: dict[str, Any]
    rows: dict[Case, Row] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.rows.setdefault(outcome.case, Row()).outcomes.append(outcome)

    def row(self, workload: str, system: str, placement: Placement = "free") -> Row | None:
        return self.rows.get(Case(workload, system, placement))

    def figure(
        self, workload: str, system: str, name: str, placement: Placement = "free"
    ) -> float | None:
        row = self.row(workload, system, placement)
        return None if row is None else row.figures.get(name)

    def measured(self) -> Iterator[tuple[Case, str, float]]:
        """Every median: case, name of the figure, value."""
        for case, row in self.rows.items():
            for name, value in row.figures.items():
                yield case, name, value

    def to_json(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "machine": self.machine,
            "settings": self.settings,
            "warnings": self.warnings,
            "results": [
                {
                    "workload": case.workload,
                    "system": case.system,
                    "placement": case.placement,
                    "status": row.status,
                    "reason": row.reason,
                    "figures": row.figures,
                    "rounds": [
                        {"status": o.status, "reason": o.reason, "figures": o.figures}
                        for o in row.outcomes
                    ],
                }
                for case, row in self.rows.items()
            ],
        }

    @classmethod
    def load(cls, path: Path) -> Results:
        data = json.loads(path.read_text())
        if data.get("version") != VERSION:
            raise ValueError(f"{path} is not a result of version {VERSION}")
        results = cls(data["machine"], data["settings"], warnings=data["warnings"])
        for entry in data["results"]:
            case = Case(entry["workload"], entry["system"], entry["placement"])
            for r in entry["rounds"]:
                results.add(Outcome(case, r["status"], r["figures"], r["reason"]))
        return results
