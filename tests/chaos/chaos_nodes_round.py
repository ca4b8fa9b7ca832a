"""One round over nodes: all that a program does, at the same time, while links break and processes end."""

from __future__ import annotations

import threading
import time
from random import Random
from typing import Any

from chaos_nodes import Nodes
from chaos_nodes_calls import Calls, Kept
from chaos_nodes_faults import Faults
from chaos_nodes_graphs import Executions, Teardowns
from chaos_nodes_judge import PATIENCE, Judge, WrongError
from chaos_nodes_meetings import Meetings

#: s that all of a round may take: each of its waits has its own limit.
_ALL = 3 * PATIENCE


class NodesRound:
    """All of it follows from the seed, and from who is there."""

    def __init__(self, seed: int, nodes: Nodes, breaks: bool) -> None:
        """``breaks``: nobody is to be lost."""
        self.seed, self._nodes = seed, nodes
        rng = Random(seed)
        self._members = list(nodes.members)
        self.judge = judge = Judge(self._members)
        self.faults = Faults(rng, nodes, breaks)
        mixed = rng.sample(self._members, len(self._members))
        ranks = mixed[: rng.choice([0, 2, 3])] if len(mixed) > 3 else []
        others = mixed[len(ranks) :]
        self._graph = Executions(Random(rng.random()), self._members, judge)
        self._strands: dict[str, Any] = {
            "graph": self._graph,
            "ends of graphs": Teardowns(Random(rng.random()), others, judge),
            "calls": Calls(Random(rng.random()), others, judge),
            "kept": Kept(Random(rng.random()), others, judge),
            "meetings": Meetings(Random(rng.random()), ranks, judge, self._graph.spoils),
        }
        self._doing = ""
        self.took = 0.0

    @property
    def executions(self) -> int:
        return self._graph.executions

    def describe(self) -> str:
        doing = [f"{name}: {strand.doing}" for name, strand in self._strands.items()]
        return (
            f"seed {self.seed}: {self._graph}\nactors: {', '.join(map(str, self._members))}\n"
            f"faults: {'; '.join(map(str, self.faults.planned))}\n"
            f"doing: {self._doing}; {'; '.join(doing)}\nfound: {dict(self.judge.found)}"
        )

    def run(self) -> None:
        began = time.monotonic()
        self._doing = "compile"
        self._graph.compile()
        self._doing = "the faults' preparation"
        self.faults.start()
        try:
            self._doing = "all"
            self._run_strands()
            self.faults.wait(PATIENCE)
            for member in self._members:
                self._doing = f"seeing {member}"
                self.judge.see(member)
        finally:
            self._doing = f"the end of the faults ({self._doing})"
            self.faults.end(PATIENCE)
        self._doing = "teardown"
        self._graph.end()
        self._doing = "looking"
        for member in self._members:
            if not member.struck:
                self._nodes.look(member)
        self.took = time.monotonic() - began

    def _run_strands(self) -> None:
        raised: list[tuple[str, BaseException]] = []

        def run(name: str, strand: Any) -> None:
            try:
                strand.run()
            except BaseException as error:
                raised.append((name, error))

        threads = [
            threading.Thread(target=run, args=one, name=one[0]) for one in self._strands.items()
        ]
        for thread in threads:
            thread.start()
        end = time.monotonic() + _ALL
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                raise WrongError(f"{thread.name} hangs")
        if raised:
            name, error = raised[0]
            others = "".join(f"; {other}: {also!r}" for other, also in raised[1:])
            raise WrongError(f"{name}: {error!r}{others}") from error
