"""What all kinds of rounds have in common."""

from __future__ import annotations

import threading
from random import Random
from typing import Any

from chaos_around import Around, Running
from chaos_faults import Fault, Faults, strike_from_outside
from chaos_graphs import Graph, build
from chaos_pool import Member
from chaos_streams import Call
from chaos_ways import Ways


class Course(Ways):
    """A round with its members, graphs and faults. ``title``: what kind of round it is."""

    title = ""

    def __init__(self, seed: int, around: Around, rng: Random) -> None:
        self.seed = seed
        self.around = around
        self.tally = around.tally
        self.rng = rng
        self.members: list[Member] = []
        self.specs: list[Graph] = []
        self.faults = Faults()
        self.running: list[Running] = []
        self.waiting_since = 0
        self.busy_at = threading.local()
        self.calls: list[Call] = []

    def run(self) -> None:
        raise NotImplementedError

    # What rounds with transports do otherwise

    def _routed(self, spec: Graph) -> Graph:
        """``spec``, with what is said of its tensors."""
        return spec

    def _dag(self, spec: Graph, members: list[Member]) -> Any:
        return build(spec, [member.handle for member in members])

    def _transfers_may_fail(self, spec: Graph) -> bool:
        return False

    def _options(self, spec: Graph) -> dict[str, Any]:
        """What it is compiled with."""
        return {"depth": spec.depth, "name": spec.name, "stream_items": spec.credit}

    def _choose_members(self, least: int = 1) -> None:
        pool = self.around.pool.members
        places = self.rng.sample(range(len(pool)), self.rng.randint(least, min(5, len(pool))))
        self.members = [pool[place] for place in places]

    def _send_out(self, fault: Fault) -> None:
        """Let what strikes from outside strike."""
        victim = self.members[fault.victim]
        self.around.hand.send(
            strike_from_outside(
                fault, victim.pidfd, victim.handle, self.around.clock, self.around.elsewhere.do
            )
        )

    def _count(self) -> None:
        """The round is over: put down what has gone wrong in it."""
        self.tally.rounds += 1
        self.tally.kinds[self.title] += 1
        for fault in self.faults.planned:
            if self.around.clock.read(fault.slot):
                self.tally.faults[fault.name] += 1
        if self.faults.tear_down is not None:
            self.tally.faults["teardown in mid-flight"] += 1
        self.around.watchdog.idle()

    def describe(self) -> str:
        """What this round is about, for people."""
        lines = [f"seed {self.seed}, {self.title}, actors {[m.name for m in self.members]}"]
        lines += [f"  {fault}" for fault in self.faults.planned]
        if self.faults.tear_down is not None:
            lines.append(f"  torn down after {self.faults.tear_down:.0%}")
        for spec in self.specs:
            lines.append(f"  {spec.name}: depth {spec.depth}, {spec.executions} executions")
            lines += [f"    {i}: {task}" for i, task in enumerate(spec.tasks)]
            lines.append(f"    results {spec.outputs}, effects {spec.effects}")
        return "\n".join(lines)

    def state(self) -> str:
        """Where it has got to, in conveyor's own words."""
        lines = []
        for running in self.running:
            lines.append(f"{running.graph!r}: {running.next} executions started")
            lines.append(f"  doing: {running.graph.status().summary()}")
            for number, refs in list(running.pending.items())[:5]:
                lines.append(f"  execution {number}: {refs!r}"[:2000])
        return "\n".join(lines)
