"""Graphs that are compiled and executed inside an actor."""

from __future__ import annotations

import gc
import os
import signal
from dataclasses import dataclass
from typing import Any

import inside
import numpy as np
import pytest
from integration_helpers import hold

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import ActorDiedError, GraphError, GraphTornDownError, WaitTimeoutError


@conveyor.remote
class Stage:
    def __init__(self, step: int = 1) -> None:
        self.step = step

    def add(self, x: Any) -> Any:
        return x + self.step

    def scale(self, x: Any, by: Any) -> Any:
        return x * by.factor

    def fail(self, x: Any) -> Any:
        raise ValueError(f"no {x}")

    def pid(self) -> int:
        return os.getpid()

    def end(self, x: Any) -> Any:
        os._exit(3)

    def hold_and_end(self, path: str) -> Any:
        open(path + "-inside", "w").close()
        hold(path)
        os._exit(3)

    def ask(self, other: Any, timeout: float) -> Any:
        return conveyor.get(other.pid.remote(), timeout=timeout)


@dataclass
class Factor:
    factor: int


@conveyor.remote
class Controller:
    """Executes a graph over other actors."""

    def compile(self, stages: list[Any], method: str = "add", **options: Any) -> str:
        with InputNode() as x:
            for stage in stages:
                x = getattr(stage, method).bind(x)
        self.graph = x.compile(**options)
        return self.graph.explain()

    def run(self, values: list[Any]) -> list[Any]:
        refs = [self.graph.execute(value) for value in values]
        return conveyor.get(refs)

    def stats(self) -> dict[str, Any]:
        counted: dict[str, Any] = self.graph.stats().as_dict()
        return counted

    def scaled(self, stage: Any, value: Any) -> Any:
        inp = InputNode()
        with MultiOutputNode(
            {"all": stage.scale.bind(inp, Factor(3)), "in": inp}
        ).compile() as graph:
            return conveyor.get(graph.execute(value))

    def create_and_run(self, value: int) -> int:
        stages = [Stage.remote(10), Stage.remote(100)]
        self.compile(stages)
        return self.run([value])[0]

    def drop(self) -> None:
        self.graph = None
        gc.collect()

    def collect(self) -> None:
        gc.collect()

    def teardown(self) -> str:
        self.graph.teardown()
        with pytest.raises(GraphTornDownError):
            self.graph.execute(1)
        return repr(self.graph)

    def own(self, me: Any) -> None:
        me.run.bind(InputNode()).compile()


@conveyor.remote
class Collector:
    """Executes several graphs that lead to the same actor."""

    def maps(self, stage: Any, graphs: int) -> list[int]:
        """How many parts of arenas are mapped here after each of ``graphs`` graphs."""
        kept, maps = [], []
        for _ in range(graphs):
            graph = stage.add.bind(InputNode()).compile()
            kept.append((graph, graph.execute(np.zeros(300_000)).get()))
            with open("/proc/self/maps") as lines:
                # Values have pages of their own.
                shared = [line for line in lines if "conveyor-arena" in line and "s " in line]
                maps.append(len(shared))
        return maps


@conveyor.remote
class AsyncController:
    async def run(self, stages: list[Any], values: list[Any]) -> list[Any]:
        with InputNode() as x:
            for stage in stages:
                x = stage.add.bind(x)
        with x.compile() as graph:
            refs = [await graph.execute_async(value) for value in values]
            return [await ref for ref in refs]


def test_an_actor_executes_a_graph_over_others(engine):
    stages = [Stage.remote(i) for i in (1, 10, 100)]
    controller = Controller.remote()
    plan = conveyor.get(controller.compile.remote(stages))
    assert plan.count("add") >= 3
    assert conveyor.get(controller.run.remote(list(range(50)))) == [i + 111 for i in range(50)]
    big = np.arange(1_000_000)
    (result,) = conveyor.get(controller.run.remote([big]))
    assert (result == big + 111).all()
    # The stages are everybody's.
    assert conveyor.get(stages[0].add.remote(1)) == 2
    with stages[0].add.bind(stages[1].add.bind(InputNode())).compile() as graph:
        assert conveyor.get(graph.execute(1)) == 12
        assert conveyor.get(controller.run.remote([5])) == [116]
    assert "torn down" in conveyor.get(controller.teardown.remote())
    assert conveyor.get(stages[0].add.remote(1)) == 2


def test_it_counts_what_goes_over_the_channels(engine):
    controller = Controller.remote()
    conveyor.get(controller.compile.remote([Stage.remote(), Stage.remote()]))
    assert conveyor.get(controller.run.remote([1, 2, 3])) == [3, 4, 5]
    stats = conveyor.get(controller.stats.remote())
    assert (stats["submitted"], stats["completed"]) == (3, 3)
    assert [task["running"]["count"] for task in stats["tasks"]] == [3, 3]
    assert [edge["frames"] for edge in stats["edges"]] == [3, 3, 3]
    assert [[wait["waiting"]["count"] for wait in edge["waits"]] for edge in stats["edges"]] == [
        [3]
    ] * 3


def test_constants_of_classes_that_only_these_two_know(engine):
    stage, controller = Stage.remote(), Controller.remote()
    assert conveyor.get(controller.scaled.remote(stage, 5)) == {"all": 15, "in": 5}


def test_a_graph_over_actors_that_the_actor_made(engine):
    assert conveyor.get(Controller.remote().create_and_run.remote(1)) == 111


def test_an_async_actor_executes_a_graph(engine):
    stages = [Stage.remote(i) for i in (1, 10)]
    run = AsyncController.remote().run.remote(stages, list(range(20)))
    assert conveyor.get(run) == [i + 11 for i in range(20)]


def test_two_actors_execute_graphs_over_the_same_stages(local):
    stages = [Stage.remote(i) for i in (1, 10)]
    controllers = [Controller.remote() for _ in range(2)]
    conveyor.get(
        [c.compile.remote(s) for c, s in zip(controllers, (stages, stages[::-1]), strict=True)]
    )
    runs = [c.run.remote(list(range(100))) for c in controllers for _ in range(5)]
    assert conveyor.get(runs) == [[i + 11 for i in range(100)]] * 10


def test_errors_reach_the_executing_actor_and_its_caller(engine):
    controller = Controller.remote()
    conveyor.get(controller.compile.remote([Stage.remote()], method="fail"))
    with pytest.raises(ValueError, match="no 7"):
        conveyor.get(controller.run.remote([7]))


def test_the_death_of_a_stage_is_told_by_name(local, wait_until):
    stages = [Stage.options(name=f"stage{i}").remote() for i in range(2)]
    controller = Controller.remote()
    conveyor.get(controller.compile.remote(stages))
    os.kill(conveyor.get(stages[1].pid.remote()), signal.SIGKILL)

    def told():  # the exit code may come after the death
        with pytest.raises(ActorDiedError) as death:
            conveyor.get(stages[1].pid.remote())
        return "SIGKILL" in str(death.value)

    wait_until(told)
    with pytest.raises(ActorDiedError, match=r"stage1 .*SIGKILL"):
        conveyor.get(controller.run.remote([1]))
    # The graph can be compiled again without it.
    conveyor.get(controller.compile.remote(stages[:1]))
    assert conveyor.get(controller.run.remote([1])) == [2]


def test_what_a_stage_died_of_names_its_task(local):
    stage = Stage.options(name="fragile").remote()
    controller = Controller.remote()
    conveyor.get(controller.compile.remote([stage], method="end"))
    with pytest.raises(ActorDiedError, match=r"exited with code 3 while running fragile\.end"):
        conveyor.get(controller.run.remote([1]))


def test_an_executing_actor_that_dies_leaves_its_stages_free(local, wait_until):
    stage, controller = Stage.remote(), Controller.remote()
    driver = conveyor.runtime.context.current()
    conveyor.get(controller.compile.remote([stage]))
    assert len(driver.deployer) == 1
    conveyor.kill(controller)
    wait_until(lambda: not driver.deployer)
    with stage.add.bind(InputNode()).compile() as graph:
        assert conveyor.get(graph.execute(1)) == 2


def test_a_graph_that_became_garbage_in_an_actor_is_unloaded(local, wait_until):
    stage, controller = Stage.remote(), Controller.remote()
    driver = conveyor.runtime.context.current()
    conveyor.get(controller.compile.remote([stage]))
    conveyor.get(controller.drop.remote())
    wait_until(lambda: not driver.deployer)
    conveyor.get(controller.compile.remote([stage]))
    assert conveyor.get(controller.run.remote([1])) == [2]


def test_an_actor_cannot_execute_a_graph_that_it_is_in(local):
    controller = Controller.options(name="me").remote()
    with pytest.raises(GraphError, match="me cannot execute a graph that it is itself a part of"):
        conveyor.get(controller.own.remote(controller))


def test_hundreds_of_graphs_in_an_actor_leak_nothing(local, wait_until):
    stage, controller = Stage.remote(), Controller.remote()

    def rounds(count: int) -> None:
        for _ in range(count):
            conveyor.get(controller.scaled.remote(stage, 2))

    def descriptors() -> list[int]:
        pids = [status.pid for status in inside.statuses()]
        conveyor.get(controller.collect.remote())
        return [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids]

    rounds(20)
    before = descriptors()
    rounds(300)
    # Of this process some may be closed, and of all of them what ends by itself takes a moment.
    wait_until(lambda: all(now <= then for now, then in zip(descriptors(), before, strict=True)))


def test_whoever_waits_for_a_member_is_told_what_it_runs_by_name(
    fresh_session: None, tmp_path: Any, wait_until: Any
) -> None:
    controller, member, asker = (
        Controller.remote(),
        Stage.options(name="m").remote(),
        Stage.remote(),
    )
    path = str(tmp_path / "go")
    conveyor.get(controller.compile.remote([member], "hold_and_end", name="elsewhere"))
    run = controller.run.remote([path])
    wait_until(lambda: os.path.exists(path + "-inside"))
    pending = member.pid.remote()
    with pytest.raises(WaitTimeoutError, match=r"running m\.hold_and_end"):
        conveyor.get(pending, timeout=0.05)
    requested = asker.ask.remote(member, 20)
    assert not conveyor.wait([requested], timeout=0.1)[0]
    open(path, "w").close()
    for ref in (pending, requested, run):
        with pytest.raises(ActorDiedError, match=r"while running m\.hold_and_end") as raised:
            conveyor.get(ref, timeout=60)
        assert raised.value.node is not None
        assert "node 0" not in str(raised.value)


def test_another_graph_maps_nothing_of_an_actor_once_more(engine):
    before, *after = conveyor.get(Collector.remote().maps.remote(Stage.remote(), 4))
    assert before > 0
    assert after == [before] * 3
