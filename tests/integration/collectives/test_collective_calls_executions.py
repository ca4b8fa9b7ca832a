"""A rank that fails in an execution in which another one waits for it."""

import builtins
import os
import re
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from integration_helpers import WAIT, get, hold

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import (
    ActorDiedError,
    ActorRestartedError,
    CollectiveBrokenError,
    GraphTornDownError,
)
from conveyor.experimental import collective
from conveyor.graph.failures import FailureTeller


class StepError(Exception):
    pass


class NoCauseError(Exception):
    """Whoever asks it what it was raised for gets another error."""

    @property
    def __cause__(self):
        raise KeyError("no cause")


@conveyor.remote
class Rank:
    def step(self, number, fails=""):
        if fails:
            Path(fails).touch()
            raise LookupError("no batch")
        array = np.full(4, float(number))
        collective.allreduce(array, timeout=WAIT)
        return array[0]

    def own(self, number, fails, how):
        """A step that raises an error of its own where the operation has failed."""
        try:
            return self.step(number, fails)
        except CollectiveBrokenError as error:
            if how == "raise from":
                raise StepError("of the step") from error
            if how == "raise":
                raise StepError("of the step")  # noqa: B904 - it is what is tested
            if how == "raise from None":
                raise StepError("of the step") from None
            raise builtins.ExceptionGroup("of the step", [error]) from None

    def dies(self, number, dies):
        if dies:
            os._exit(3)
        return self.step(number)

    def refuses(self, error):
        raise error("of the step")

    def check(self):
        pass

    def tell_late(self, path):
        """What a step raises is told to who executes the graph when the latch is open."""
        tell = FailureTeller.tell

        def late(*args):
            hold(path)
            tell(*args)

        FailureTeller.tell = late

    def hold(self, path):
        hold(path)


@pytest.fixture
def pair(local):
    actors = [Rank.remote(), Rank.remote()]
    collective.create_collective_group(actors)
    get([actor.step.remote(1) for actor in actors])
    return actors


@contextmanager
def told_late(actors, dag, latches, wait_until):
    """A graph, and the results of an execution of it in which the last actor has failed, of which who
    executes it is told when the latch is open; what follows from it, at the first one, is told."""
    go, failed = latches(), latches()
    get(actors[-1].tell_late.remote(go.path))
    with dag.compile() as graph:
        try:
            refs = graph.execute(1, "", failed.path)
            told = "CollectiveBrokenError|StepError|ExceptionGroup"
            wait_until(lambda: re.search(told, str(graph.status())))
            get(actors[0].check.remote())  # by then its step has sent what it has come to
            assert conveyor.wait(refs, timeout=0.1)[0] == []
            yield graph, refs, go
        finally:
            go.open()


def steps(actors):
    with InputNode() as inp:
        return MultiOutputNode([a.step.bind(inp[0], inp[i + 1]) for i, a in enumerate(actors)])


def test_what_has_failed_first_is_raised_though_it_comes_last(pair, latches, wait_until):
    """Who waits in the operation is told before who executes the graph is."""
    with told_late(pair, steps(pair), latches, wait_until) as (_, refs, go):
        go.open()
        for ref in refs:
            with pytest.raises(LookupError, match="no batch") as caught:
                get(ref)
            assert caught.match(r"also failed in this execution: \S*CollectiveBrokenError")


HOW = ["raise from", "raise", "raise from None"]
if sys.version_info >= (3, 11):
    HOW.append("a group")


@pytest.mark.parametrize("how", HOW)
def test_also_where_a_step_has_made_its_own_error_of_what_follows(pair, latches, wait_until, how):
    with InputNode() as inp:
        dag = MultiOutputNode([a.own.bind(inp[0], inp[i + 1], how) for i, a in enumerate(pair)])
    with told_late(pair, dag, latches, wait_until) as (_, refs, go):
        go.open()
        for ref in refs:
            with pytest.raises(LookupError, match="no batch"):
                get(ref)


def test_what_follows_says_less_than_the_end_of_the_graph(pair, latches, wait_until):
    with told_late(pair, steps(pair), latches, wait_until) as (graph, refs, go):
        ends = threading.Thread(target=graph.teardown)
        ends.start()
        try:
            for ref in refs:
                with pytest.raises(GraphTornDownError):
                    get(ref)
        finally:
            go.open()
            ends.join()


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_death_is_what_get_raises_though_what_follows_is_told(local, wait_until, restarts):
    actors = [Rank.options(max_restarts=restarts).remote() for _ in range(2)]
    collective.create_collective_group(actors)
    with InputNode() as inp:
        dag = MultiOutputNode([a.dies.bind(inp[0], inp[i + 1]) for i, a in enumerate(actors)])
    error = ActorRestartedError if restarts else ActorDiedError
    with dag.compile() as graph:
        refs = graph.execute(1, False, True)
        wait_until(lambda: "CollectiveBrokenError" in str(graph.status()))
        with pytest.raises(error, match=r"Rank#2"):
            get(refs[0])
        with pytest.raises(error, match=r"Rank#2"):
            get(refs[1])


def test_nor_is_it_where_the_graph_has_been_restarted_since(local, wait_until):
    actors = [Rank.options(max_restarts=1).remote() for _ in range(2)]
    collective.create_collective_group(actors)
    with InputNode() as inp:
        dag = MultiOutputNode([a.dies.bind(inp[0], inp[i + 1]) for i, a in enumerate(actors)])
    with dag.compile() as graph:
        refs = graph.execute(1, False, True)
        wait_until(lambda: "CollectiveBrokenError" in str(graph.status()))
        graph.restart()
        for ref in refs:
            with pytest.raises(ActorRestartedError, match=r"Rank#2"):
                get(ref)


def test_what_the_class_of_an_error_says_of_its_cause_is_not_requested(local):
    with InputNode() as inp:
        dag = MultiOutputNode([Rank.remote().refuses.bind(inp) for _ in range(2)])
    with dag.compile() as graph, pytest.raises(NoCauseError, match="of the step"):
        get(graph.execute(NoCauseError))


@conveyor.remote
class Upstream:
    def make(self, number, path):
        if path:
            hold(path)
            raise LookupError("no batch")
        return number


@conveyor.remote
class Waiting:
    def __init__(self, operation):
        self.operation = operation

    def step(self, number, begun="", comes=""):
        if begun:
            Path(begun).touch()
        if comes:
            hold(comes)
        array = np.full(4, float(number))
        if self.operation == "shared":
            return sum(float(got[0]) for got in collective.allgather.shared(array))
        if self.operation == "barrier":
            collective.barrier()
            return 2.0
        collective.allreduce(array)
        return array[0]


@pytest.mark.parametrize("operation", ["allreduce", "shared", "barrier"])
def test_a_rank_whose_step_is_skipped_is_waited_for_no_more(
    local, operation, latches, tmp_path, wait_until
):
    """Its step needs what another actor has failed to make, so it never comes to the operation."""
    upstream, ranks = Upstream.remote(), [Waiting.remote(operation) for _ in range(2)]
    group = collective.create_collective_group(ranks)
    with InputNode() as inp:
        made = upstream.make.bind(inp[0], inp[1])
        dag = MultiOutputNode([ranks[0].step.bind(inp[0], inp[2]), ranks[1].step.bind(made)])
    fails, begun = latches(), tmp_path / "begun"
    with dag.compile() as graph:
        assert get(graph.execute(1, "", "")) == [2.0, 2.0]
        refs = graph.execute(1, fails.path, str(begun))
        wait_until(begun.exists)
        fails.open()
        with pytest.raises(LookupError, match="no batch"):
            get(refs)
        with pytest.raises(
            CollectiveBrokenError, match="interrupted in an operation by the failure"
        ):
            get(graph.execute(1, "", ""))
        group.reset()
        assert get(graph.execute(1, "", "")) == [2.0, 2.0]


@pytest.mark.parametrize("operation", ["allreduce", "shared", "barrier"])
def test_a_rank_that_comes_when_its_execution_has_failed_meets_nobody_of_the_next(
    local, operation, latches, tmp_path, wait_until
):
    """The other rank's step was skipped, so that one is in the next execution's operation by then."""
    upstream, ranks = Upstream.remote(), [Waiting.remote(operation) for _ in range(2)]
    group = collective.create_collective_group(ranks)
    with InputNode() as inp:
        made = upstream.make.bind(inp[0], inp[1])
        dag = MultiOutputNode(
            [ranks[0].step.bind(inp[0], inp[2], inp[3]), ranks[1].step.bind(made, inp[4])]
        )
    fails, comes, begun, next_begun = latches(), latches(), tmp_path / "begun", tmp_path / "next"
    with dag.compile() as graph:
        late = graph.execute(1, fails.path, str(begun), comes.path, "")
        wait_until(begun.exists)
        fails.open()
        with pytest.raises(LookupError, match="no batch"):
            get(late[1])
        refs = graph.execute(5, "", "", "", str(next_begun))
        wait_until(next_begun.exists)
        comes.open()
        with pytest.raises(
            CollectiveBrokenError, match="interrupted in an operation by the failure"
        ):
            get(refs)
        group.reset()
        assert get(graph.execute(1, "", "", "", "")) == [2.0, 2.0]


@conveyor.remote
class Skewed:
    """A rank whose part of an execution meets that of another one's of the other."""

    def step(self, number, first, end):
        if not first <= number < end:
            return None
        array = np.full(4, float(number))
        collective.allreduce(array)
        return array[0]

    def in_the_background(self, count):
        def work():
            for number in range(count):
                array = np.full(4, float(number))
                collective.allreduce(array)
                self.sums.append(array[0])

        self.sums = []
        self.thread = threading.Thread(target=work)
        self.thread.start()

    def plus_one(self, number):
        return number + 1

    def ended(self):
        self.thread.join()
        return self.sums


def test_ranks_may_mean_to_meet_in_different_executions(local):
    ranks = [Skewed.remote() for _ in range(2)]
    collective.create_collective_group(ranks)
    with InputNode() as inp:
        dag = MultiOutputNode([ranks[0].step.bind(inp, 1, 6), ranks[1].step.bind(inp, 0, 5)])
    with dag.compile(depth=8) as graph:
        refs = [graph.execute(number) for number in range(6)]
        sums = [1.0, 3.0, 5.0, 7.0, 9.0]
        assert get(refs) == [[None, 1.0], *map(list, zip(sums, [*sums[1:], None], strict=True))]


def test_a_thread_of_its_own_meets_others_whatever_steps_run_meanwhile(local):
    ranks = [Skewed.remote() for _ in range(2)]
    collective.create_collective_group(ranks)
    get([rank.in_the_background.remote(200) for rank in ranks])
    with InputNode() as inp:
        dag = ranks[1].plus_one.bind(ranks[0].plus_one.bind(inp))
    with dag.compile() as graph:
        for number in range(100):
            assert get(graph.execute(number)) == number + 2
    sums = [2.0 * number for number in range(200)]
    assert get([rank.ended.remote() for rank in ranks]) == [sums, sums]


def test_a_group_whose_ranks_are_all_skipped_is_as_before(local, latches):
    upstream, ranks = Upstream.remote(), [Waiting.remote("allreduce") for _ in range(2)]
    collective.create_collective_group(ranks)
    with InputNode() as inp:
        made = upstream.make.bind(inp[0], inp[1])
        dag = MultiOutputNode([rank.step.bind(made) for rank in ranks])
    fails = latches()
    fails.open()
    with dag.compile() as graph:
        with pytest.raises(LookupError, match="no batch"):
            get(graph.execute(1, fails.path))
        assert get(graph.execute(1, "")) == [2.0, 2.0]
