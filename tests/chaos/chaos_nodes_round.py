"""One round over nodes: graphs, calls and streams, while connections break and processes end."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
from chaos_nodes import WINDOW, Member, Node, Nodes, ask, go_on, kill, made_of, pid_of, stop

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import ActorDiedError, ConveyorError
from conveyor.runtime import context

#: s for what must come.
PATIENCE = 60.0
#: Harmless ones, and those after which somebody is dead.
_BREAKS = ["cut", "cut", "cut between others", "agent stopped", "actor stopped"]
_ENDS = ["actor killed", "agent killed", "node lost", "agent silent"]


class WrongError(AssertionError):
    """Something that must not happen has happened."""


@dataclass
class Task:
    """One task of a graph: a number, a size, and which tasks' results it takes; -1 is the input."""

    place: int
    number: int
    size: int
    takes: list[int]


@dataclass
class Fault:
    """What happens, after so many seconds."""

    kind: str
    after: float
    node: Node | None
    member: Member | None
    seconds: float

    def __str__(self) -> str:
        where = self.node.resource if self.node is not None else ""
        whom = f"actor {self.member.pid} on {self.member.node.resource}" if self.member else ""
        return f"{self.kind} {where}{whom} after {self.after:.2f} s ({self.seconds:.2f} s)"


class NodesRound:
    """All of it follows from the seed, and from who is there."""

    def __init__(self, seed: int, nodes: Nodes) -> None:
        self.seed, self.nodes = seed, nodes
        self.rng = rng = Random(seed)
        self.members = nodes.members
        count = len(self.members)
        self.tasks = [
            Task(
                rng.randrange(count),
                rng.randrange(100),
                rng.choice([0, 0, 0, 10, 5000, 200_000, 2_000_000]),
                sorted({rng.randrange(-1, i) for _ in range(rng.randint(1, 3))}),
            )
            for i in range(rng.randint(2, 9))
        ]
        taken = {i for task in self.tasks for i in task.takes}
        self.outputs = [i for i in range(len(self.tasks)) if i not in taken]
        self.depth = rng.choice([1, 4, 16])
        self.executions = rng.randint(10, 80)
        self.pause = rng.choice([0.0, 0.0, 0.003, 0.02])
        kinds = rng.choices(_BREAKS, k=rng.randint(0, 4))
        if rng.random() < 0.45:
            kinds += rng.choices(_ENDS, [5, 3, 2, 2], k=1)
        self.faults = [self._fault(kind) for kind in kinds]
        self.failed = 0
        self.doing = ""

    def _fault(self, kind: str) -> Fault:
        rng = self.rng
        node = member = None
        seconds = rng.uniform(0.0, 0.3 * WINDOW)
        if kind.startswith("actor"):
            member = rng.choice(self.members)
        else:
            node = rng.choice(self.nodes.nodes)
        return Fault(kind, rng.uniform(0.0, 0.8), node, member, seconds)

    def describe(self) -> str:
        where = [f"{member.pid} on {member.node.resource}" for member in self.members]
        return (
            f"seed {self.seed}: {len(self.tasks)} tasks, {self.executions} executions, depth {self.depth}, "
            f"pause {self.pause}\nactors: {', '.join(where)}\nfaults: "
            + "; ".join(map(str, self.faults))
            + f"\ndoing: {self.doing}"
        )

    # The faults

    def _strikes(self, fault: Fault) -> Any:
        """What is to be called then. All that has to be asked before is asked here. Who may end by it is
        taken for struck from now on."""
        node, member = fault.node, fault.member
        if fault.kind == "actor stopped":
            assert member is not None
            return lambda: self._stop_for(member.pid, fault.seconds)
        if fault.kind == "actor killed":
            assert member is not None
            member.struck = True
            return lambda: kill(member.pid)
        assert node is not None
        agent = self.nodes.agent_of(node)
        if agent is None:  # no actor was ever there
            return lambda: None
        if fault.kind == "cut":
            pump, number = context.running().abroad.pump, agent.number
            return lambda: pump.disconnect(number, "cut by the round")
        if fault.kind == "cut between others":
            others = [a.number for a in self.nodes.agents().values() if a is not agent]
            return lambda: self._cut_between(agent, others)
        pid = pid_of(agent)
        if fault.kind == "agent stopped":
            return lambda: self._stop_for(pid, fault.seconds)
        for one in self.members:
            one.struck |= one.node is node
        if fault.kind == "node lost":
            node.lost = True
            return node.strike
        if fault.kind == "agent silent":
            return lambda: self._stop_for(pid, 2.5 * WINDOW)
        return lambda: kill(pid)

    def _stop_for(self, pid: int, seconds: float) -> None:
        stop(pid)
        try:
            self._over.wait(seconds)
        finally:
            go_on(pid)

    def _cut_between(self, agent: Any, others: list[int]) -> None:
        def cut(its: Any) -> None:
            for number in others:
                its._station.pump.disconnect(number, "cut by the round")

        try:
            ask(agent, cut)
        except Exception:
            if not agent.lost:  # by another fault
                raise

    # The course

    def run(self) -> None:
        self._over = threading.Event()
        raised: list[BaseException] = []

        def strike(fault: Fault, does: Any) -> None:
            try:
                self._over.wait(fault.after)
                does()
            except BaseException as error:
                raised.append(error)

        self.doing = "compile"
        with InputNode() as inp:
            made: list[Any] = []
            for task in self.tasks:
                values = [inp if i < 0 else made[i] for i in task.takes]
                make = self.members[task.place].handle.make
                made.append(make.bind(task.number, task.size, *values))
            dag = MultiOutputNode([made[i] for i in self.outputs])
        graph = dag.compile(depth=self.depth)
        threads = [
            threading.Thread(target=strike, args=(fault, self._strikes(fault)), name=fault.kind)
            for fault in self.faults
        ]
        for thread in threads:
            thread.start()
        try:
            self._execute(graph)
            self._calls()
        finally:
            self.doing = "the faults"
            for thread, fault in zip(threads, self.faults, strict=True):
                if fault.kind != "agent silent":  # which lasts until it is lost
                    thread.join(PATIENCE)
            self._dead_are_dead()
            self._over.set()
            for thread in threads:
                thread.join(PATIENCE)
        if raised:
            raise raised[0]
        self.doing = "teardown"
        graph.teardown()
        self.doing = "survivors"
        for member in self.members:
            if (
                not member.struck
                and conveyor.get(member.handle.pid.remote(), timeout=PATIENCE) != member.pid
            ):
                raise WrongError("another process answers")

    def _execute(self, graph: Any) -> None:
        pending: list[tuple[int, Any]] = []
        for i in range(self.executions):
            self.doing = f"execution {i}"
            try:
                pending.append((i, graph.execute(i, timeout=PATIENCE)))
            except ActorDiedError as error:
                self._died(error)
                break
            self._over.wait(self.pause)
            while len(pending) >= self.depth or (pending and self.rng.random() < 0.3):
                self._check(*pending.pop(0))
        for one in pending:
            self._check(*one)

    def _check(self, i: int, refs: Any) -> None:
        self.doing = f"result {i}"
        try:
            got = conveyor.get(refs, timeout=PATIENCE)
        except ActorDiedError as error:
            self._died(error)
            return
        made: list[Any] = []
        for task in self.tasks:
            values = [i if t < 0 else made[t] for t in task.takes]
            made.append(made_of(task.number, values, task.size))
        for value, output in zip(got, self.outputs, strict=True):
            if not np.array_equal(value, made[output]):
                raise WrongError(f"execution {i}, task {output}: {value} instead of {made[output]}")

    def _calls(self) -> None:
        rng = self.rng
        for i in range(8):
            first, second = rng.choice(self.members), rng.choice(self.members)
            size = rng.choice([0, 100, 300_000])
            self.doing = f"call {i} from {first.pid} to {second.pid}"
            try:
                if first is not second and rng.random() < 0.6:
                    got = conveyor.get(
                        first.handle.ask.remote(second.handle, i, size), timeout=PATIENCE
                    )
                    right = np.array_equal(got, made_of(i, [i], size))
                else:
                    stream = first.handle.items.remote(i, 20)
                    items = list(stream)
                    expected = [made_of(i, [n], 300 if n % 3 == 0 else 0) for n in range(20)]
                    right = len(items) == 20 and all(map(np.array_equal, items, expected))
            except ActorDiedError as error:
                self._died(error)
                continue
            if not right:
                raise WrongError(f"call {i} gives something else")

    def _died(self, error: ActorDiedError) -> None:
        self.failed += 1
        if not any(member.struck for member in self.members):
            raise WrongError(f"nobody was struck, and somebody is dead: {error}") from error

    def _dead_are_dead(self) -> None:
        """Whoever was struck is known to be dead, without end."""
        for member in self.members:
            if not member.struck:
                continue
            self.doing = f"the death of {member.pid}"
            try:
                while True:
                    conveyor.get(member.handle.pid.remote(), timeout=PATIENCE)
            except ActorDiedError:
                pass
            except ConveyorError as error:
                raise WrongError(f"a struck actor fails with something else: {error!r}") from error
