"""How many rounds, and of what, fit into the time given."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.cases import Session, sessions
from benchmarks.model import Case
from benchmarks.results import Outcome, Results

OWN = ("conveyor", "floor", "memcpy")


@dataclass
class Plan:
    """The first round has every case. Later ones shrink, if time is short, to the cases that the
    bars compare, then to Conveyor and its floors, then to these in the bars; a case that hung is
    not repeated."""

    cases: Sequence[Case]
    rounds: int
    minutes: float | None
    in_bars: Collection[tuple[str, str]]
    notes: list[str] = field(default_factory=list)
    _cost_s: dict[Case, float] = field(default_factory=dict)

    def run(
        self,
        results: Results,
        run: Callable[[Session], list[Outcome]],
        report: Callable[[int, int, int, Session, list[Outcome], float], None],
    ) -> None:
        begin = time.monotonic()
        for turn in range(self.rounds):
            chosen = self._choose(results, turn, time.monotonic() - begin)
            for index, session in enumerate(chosen):
                start = time.monotonic()
                outcomes = run(session)
                spent = time.monotonic() - start
                for outcome in outcomes:
                    results.add(outcome)
                    self._cost_s[outcome.case] = spent / len(outcomes)
                report(turn, index, len(chosen), session, outcomes, spent)

    def _choose(self, results: Results, turn: int, spent_s: float) -> list[Session]:
        if turn == 0:
            return sessions(self.cases)
        left_s = self.minutes * 60 - spent_s if self.minutes is not None else float("inf")
        for what, cases in self._scopes(results):
            if cases and sum(self._cost_s[case] for case in cases) <= left_s:
                if what:
                    self.notes.append(f"round {turn + 1}: only {what}, for lack of time")
                return sessions(cases, turn)
        self.notes.append(f"round {turn + 1}: left out, for lack of time")
        return []

    def _scopes(self, results: Results) -> Iterator[tuple[str, list[Case]]]:
        again = [
            case for case in self.cases if results.rows[case].status not in ("hung", "unavailable")
        ]
        yield "", again
        barred = [case for case in again if (case.workload, case.system) in self.in_bars]
        own = [case for case in again if case.system in OWN]
        yield "the cases of the bars", [case for case in again if case in {*barred, *own}]
        yield "Conveyor and its floors", own
        yield "Conveyor and its floors in the bars", [case for case in barred if case in set(own)]
