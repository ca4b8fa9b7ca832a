"""A run over nodes: rounds, and between them nothing may be left, here or with the agents."""

from __future__ import annotations

import faulthandler
import os
import sys
import time
import traceback
from collections import Counter
from random import Random

import chaos_nodes_actors
import chaos_nodes_faults
import chaos_nodes_left
import cloudpickle
import ray
from chaos_nodes import RAYS_SETTINGS, WINDOW, Nodes
from chaos_nodes_left import Before, check_round
from chaos_nodes_round import NodesRound

import conveyor

#: Rounds in one session.
ROUNDS = 25


class _Run:
    """What has been done so far."""

    def __init__(self, nodes: Nodes, end: float, rounds: int, hang: float) -> None:
        self._nodes, self._end, self._most, self._hang = nodes, end, rounds, hang
        self.rounds = self.sessions = self.executions = 0
        self.faults: Counter[str] = Counter()
        self.found: Counter[str] = Counter()
        self.longest = 0.0

    def goes_on(self) -> bool:
        return time.monotonic() < self._end and self.rounds < self._most

    def session(self, seeds: Random, alone: int | None) -> None:
        """Some rounds; ``alone``: one, of that seed. Raises what is wrong."""
        before = Before()
        conveyor.init(engine="ray", shared_memory="node", node_timeout=WINDOW, log_to_driver=False)
        try:
            for _ in range(ROUNDS if alone is None else 1):
                if not self.goes_on():
                    break
                self._round(seeds.randrange(1 << 48) if alone is None else alone)
            before.check_memory(self._nodes)
        finally:
            faulthandler.dump_traceback_later(self._hang * 4, exit=True)
            conveyor.shutdown()
            self._nodes.forget()
            faulthandler.cancel_dump_traceback_later()
        before.check_end(self._nodes)
        self.sessions += 1

    def _round(self, seed: int) -> None:
        faulthandler.dump_traceback_later(self._hang * 8, exit=True)
        rng = Random(seed)
        self._nodes.fill(rng, rng.randint(2, 7))
        course = NodesRound(seed, self._nodes)
        try:
            course.run()
            check_round(self._nodes)
        except BaseException:
            print(course.describe(), file=sys.stderr)
            raise
        self.rounds += 1
        self.executions += course.executions
        self.found.update(course.judge.found)
        self.faults.update(fault.kind for fault in course.faults.planned)
        self.longest = max(self.longest, course.took)
        faulthandler.cancel_dump_traceback_later()


def run(seed: int, seconds: float, rounds: int | None, hang: float, replay: int = 0) -> int:
    """As ``chaos_run.run``. What a seed stands for depends on which actors are there: ``replay`` does it in a
    session of its own."""
    os.environ.update(RAYS_SETTINGS)
    for module in (chaos_nodes_actors, chaos_nodes_faults, chaos_nodes_left):
        # Ray's processes do not find them.
        cloudpickle.register_pickle_by_value(module)
        ray.cloudpickle.register_pickle_by_value(module)
    seeds = Random(seed)
    nodes = Nodes(2)
    good = True
    done = _Run(nodes, time.monotonic() + seconds, replay or rounds or 1 << 60, hang)
    try:
        while done.goes_on() and good:
            try:
                done.session(seeds, seed if replay else None)
            except Exception:
                traceback.print_exc()
                good = False
    finally:
        nodes.close()
    print(
        f"{done.rounds} rounds over nodes in {done.sessions} sessions, {done.executions} executions, the "
        f"longest round {done.longest:.1f} s\nfaults: {dict(done.faults)}\nfound: {dict(done.found)}"
    )
    print(f"wrong results, hangs, leaks: {'none' if good else 'SEE ABOVE'} (seed {seed})")
    return 0 if good else 1
