"""What a run has seen, and the table of it."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple


class MemorySizes(NamedTuple):
    """Bytes of a process that are in memory, bytes that malloc has given out, blocks of Python's."""

    private: int
    shared: int
    given_out: int
    blocks: int


@dataclass
class Tally:
    started: float = field(default_factory=time.monotonic)
    rounds: int = 0
    graphs: int = 0
    executions: int = 0
    results: int = 0
    errors: int = 0
    timeouts: int = 0
    dropped: int = 0
    held: int = 0
    eager: int = 0
    torn_down: int = 0
    cancelled: int = 0
    late: int = 0  # results that a deadline has cut off
    interrupts: list[float] = field(default_factory=list)  # ms from a Ctrl-C to the end of a wait
    transports: int = 0  # errors of transfers
    routes: Counter[str] = field(default_factory=Counter)  # graphs that have used each
    forks: int = 0  # by the driver
    started_actors: int = 0
    unknown_ends: int = 0
    kinds: Counter[str] = field(default_factory=Counter)  # of rounds
    sessions: int = 0
    restarts: int = 0  # of actors
    fulls: int = 0  # ArenaFullError
    streams: int = 0  # of ordinary calls
    items: int = 0
    streams_dropped: int = 0
    failed_as_one: int = 0  # executions whose results were all looked at once one had failed
    siblings: int = 0  # errors told with the first one
    idle: list[tuple[float, int]] = field(
        default_factory=list
    )  # s until memory was back; bytes left
    faults: Counter[str] = field(default_factory=Counter)
    #: By kind of fault, in ms: how long somebody waited on after it; when a pidfd told of it.
    latencies: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    floors: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    excused: int = 0  # reports after more than 100 ms where the machine itself was late
    memory: list[MemorySizes] = field(default_factory=list)  # of the driver

    def table(self) -> str:
        seconds = time.monotonic() - self.started
        lines = [
            f"{self.rounds} rounds in {seconds:.0f} s ({self.rounds / seconds:.1f}/s) "
            f"in {self.sessions} sessions: {dict(self.kinds)}",
            f"{self.graphs} graphs, {self.executions} executions, {self.results} results right, "
            f"{self.errors} exceptions right",
            f"{self.eager} eager calls, {self.dropped} refs dropped, {self.held} results held, "
            f"{self.timeouts} timeouts, {self.torn_down} graphs torn down in mid-flight, "
            f"{self.cancelled} executions cancelled, {self.late} results cut off by deadlines, "
            f"{self.transports} errors of transfers",
            f"{len(self.interrupts)} waits broken off by Ctrl-C, "
            f"each within {max(self.interrupts, default=0):.1f} ms",
            f"{self.started_actors} actors started, {self.restarts} started again, "
            f"{self.forks} forks of the driver, {self.fulls} times no memory",
            f"{self.items} items of streams, {self.streams} streams of calls, "
            f"{self.streams_dropped} streams dropped; {self.failed_as_one} executions failed as one, "
            f"with {self.siblings} other errors told",
            f"graphs with tensors beside their frames: {dict(self.routes)}",
            "",
            "ms from the fault (or from the wait, if that began later) to the error, "
            "and to what a pidfd tells",
            f"{'fault':26}{'number':>8}{'seen':>7}{'p50':>8}{'p99':>8}{'max':>8}"
            f"{'| pidfd p50':>13}{'p99':>8}{'max':>8}",
        ]
        every: list[float] = []
        floors: list[float] = []
        for kind, count in sorted(self.faults.items()):
            seen, floor = sorted(self.latencies[kind]), sorted(self.floors[kind])
            every += seen
            floors += floor
            lines.append(f"{kind:26}{count:>8}{len(seen):>7}{_three(seen)}{_three(floor):>29}")
        lines.append(
            f"{'all':26}{sum(self.faults.values()):>8}{len(every):>7}"
            f"{_three(sorted(every))}{_three(sorted(floors)):>29}"
        )
        late = sum(ms > 100 for ms in every)
        lines += [
            "",
            f"later than 100 ms: {late} ({self.excused} of them while this machine was as late itself)",
            f"ends of actors whose signal or exit code was not known yet: {self.unknown_ends}",
        ]
        if self.memory:
            first, last = self.memory[len(self.memory) // 10], self.memory[-1]
            lines.append(
                "driver's memory after a tenth and at the end, MiB: "
                f"private {first.private >> 20} and {last.private >> 20}, "
                f"shared {first.shared >> 20} and {last.shared >> 20}, "
                f"given out {first.given_out / (1 << 20):.2f} and {last.given_out / (1 << 20):.2f}; "
                f"Python's blocks {first.blocks} and {last.blocks}"
            )
        if self.idle:
            seconds = [seconds for seconds, _ in self.idle]
            lines.append(
                f"{len(self.idle)} times all was idle: shared memory was back after at most "
                f"{max(seconds):.1f} s, but for {max(left for _, left in self.idle) >> 10} KiB"
            )
        return "\n".join(lines)


def _three(values: list[float]) -> str:
    if not values:
        return f"{'-':>8}" * 3
    return "".join(f"{_quantile(values, q):>8.1f}" for q in (0.5, 0.99, 1.0))


def _quantile(values: list[float], q: float) -> float:
    return values[min(len(values) - 1, int(q * len(values)))]
