"""Graphs over nodes: executions with deadlines and cancellations, restarts, ends while values travel."""

from __future__ import annotations

import time
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
from chaos_nodes import Member
from chaos_nodes_actors import kept_of, made_of, number_of
from chaos_nodes_judge import PATIENCE, Judge

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import (
    ActorDiedError,
    DeadlineExceededError,
    ExecutionCancelledError,
    GraphTornDownError,
)
from conveyor.experimental import collective

#: How often a graph is restarted in one round.
_RESTARTS = 4


@dataclass
class Task:
    """One task of a graph: a number, a size, and which tasks' results it takes; -1 is the input."""

    member: Member
    number: int
    size: int
    takes: list[int]


class Executions:
    """A graph of random tasks, some of whose results are summed over actors, and its executions."""

    def __init__(self, rng: Random, members: list[Member], judge: Judge) -> None:
        self._rng, self._judge = rng, judge
        self._tasks = [
            Task(
                rng.choice(members),
                rng.randrange(100),
                rng.choice([0, 0, 0, 10, 5000, 200_000, 2_000_000]),
                sorted({rng.randrange(-1, i) for _ in range(rng.randint(1, 3))}),
            )
            for i in range(rng.randint(2, 9))
        ]
        self._summed: list[int] = []
        if len(members) > 1 and rng.random() < 0.5:
            size = rng.choice([7, 5000, 300_000])
            for member in rng.sample(members, rng.randint(2, min(4, len(members)))):
                takes = [rng.randrange(-1, len(self._tasks))]
                self._tasks.append(Task(member, rng.randrange(100), size, takes))
                self._summed.append(len(self._tasks) - 1)
        taken = {i for task in self._tasks for i in task.takes}
        self._outputs = [i for i in range(len(self._tasks)) if i not in taken]
        self._depth = rng.choice([1, 4, 16])
        self._count = rng.randint(10, 80)
        self._pause = rng.choice([0.0, 0.0, 0.003, 0.02])
        self.members = {id(task.member): task.member for task in self._tasks}.values()
        #: Some executions may fail by what the program does.
        self.spoils = rng.random() < 0.4
        self.doing = ""
        self.executions = 0

    def __str__(self) -> str:
        return (
            f"{len(self._tasks)} tasks ({len(self._summed)} summed), {self._count} executions, "
            f"depth {self._depth}, pause {self._pause}"
        )

    def compile(self) -> None:
        with InputNode() as inp:
            made: list[Any] = []
            for task in self._tasks:
                values = [inp if i < 0 else made[i] for i in task.takes]
                made.append(task.member.handle.make.bind(task.number, task.size, *values))
            if self._summed:
                sums = collective.allreduce.bind([made[i] for i in self._summed])
                for i, node in zip(self._summed, sums, strict=True):
                    made[i] = node
            dag = MultiOutputNode([made[i] for i in self._outputs])
        self._graph = dag.compile(depth=self._depth)

    def run(self) -> None:
        restarts = 0
        pending: list[tuple[int, Any, tuple[type[BaseException], ...]]] = []
        for i in range(self._count):
            self.doing = f"execution {i}"
            alive = self._execute(i, pending)
            time.sleep(self._pause)
            while alive and (len(pending) >= self._depth or (pending and self._rng.random() < 0.3)):
                alive = self._check(*pending.pop(0))
            if alive:
                continue
            while pending:
                self._check(*pending.pop(0))
            if restarts == _RESTARTS or not self._restart():
                return
            restarts += 1
        while pending:
            self._check(*pending.pop(0))

    def _execute(self, i: int, pending: list[Any]) -> bool:
        """Whether nobody is dead."""
        chance = self._rng.random() if self.spoils else 1.0
        deadline = self._rng.uniform(0.0, 0.2) if chance < 0.15 else None
        try:
            refs = self._graph.execute(i, timeout=PATIENCE, deadline=deadline)
        except ActorDiedError as error:
            self._judge.check_death(error, self.doing)
            return False
        except DeadlineExceededError:
            if deadline is None:
                raise
            return True  # over before there was room
        self.executions += 1
        others: tuple[type[BaseException], ...] = ()
        if deadline is not None:
            others = (DeadlineExceededError,)
        elif chance < 0.3:
            if refs[0].cancel():
                others = (ExecutionCancelledError,)
        elif chance < 0.4:
            return True  # nobody wants it
        pending.append((i, refs, others))
        return True

    def _check(self, i: int, refs: Any, others: tuple[type[BaseException], ...]) -> bool:
        self.doing = f"result {i}"
        made: list[Any] = []
        for task in self._tasks:
            values = [i if t < 0 else made[t] for t in task.takes]
            made.append(made_of(task.number, values, task.size))
        total = sum((made[t] for t in self._summed), np.uint8(0))
        expected = [total if t in self._summed else made[t] for t in self._outputs]
        before = self._judge.found.total()
        good = self._judge.get(f"execution {i}", refs, expected, *others)
        assert self._judge.found.total() > before
        return good or bool(others)

    def _restart(self) -> bool:
        """Whether all of it is there again."""
        self.doing = "restart"
        for member in self.members:
            ends = member.struck or member.shaken
            if ends and (member.guest is not None or (not member.returns and member.node.lost)):
                return False
        for member in self.members:
            if not member.returns and (member.struck or member.shaken):
                member.revived = True
        try:
            self._graph.restart()
        except ActorDiedError as error:
            self._judge.check_death(error, self.doing)
            return True  # another one has died meanwhile
        self._judge.found["restarts"] += 1
        return True

    def end(self) -> None:
        self.doing = "teardown"
        self._graph.teardown()


class Teardowns:
    """Graphs that end while values with references are on their way."""

    def __init__(self, rng: Random, members: list[Member], judge: Judge) -> None:
        self._rng, self._members, self._judge = rng, members, judge
        self._times = rng.choice([0, 1, 1, 2])
        self.doing = ""

    def run(self) -> None:
        for turn in range(self._times):
            rng = self._rng
            first, second = (rng.choice(self._members).handle for _ in range(2))
            stays = rng.random() < 0.5
            size = rng.choice([10, 30_000, 1_000_000])
            self.doing = f"graph {turn}, whose values have references"
            with InputNode() as inp:
                dag = second.numbers_of.bind(first.through.bind(inp))
            try:
                graph = dag.compile(depth=8)
            except ActorDiedError as error:
                self._judge.check_death(error, self.doing)
                return
            try:
                self._execute(graph, size, stays, rng.random() < 0.6)
            finally:
                graph.teardown()

    def _execute(self, graph: Any, size: int, stays: bool, early: bool) -> None:
        options = {"tensor_transport": "auto"} if stays else {}
        refs = []
        for i in range(self._rng.randint(1, 8)):
            self.doing += "."
            try:
                given = conveyor.put(kept_of(i, size), **options)
                refs.append((i, graph.execute([given], timeout=PATIENCE)))
            except ActorDiedError as error:
                self._judge.check_death(error, self.doing)
                return
        if early:
            graph.teardown()
        for i, ref in refs:
            expected = [number_of(kept_of(i, size))]
            others = (GraphTornDownError,) if early else ()
            self._judge.get(f"numbers {i}", ref, expected, *others)
