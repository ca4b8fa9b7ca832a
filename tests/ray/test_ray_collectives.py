"""Collective groups over nodes that share no memory."""

import os
import re
import signal
import sys

import cloudpickle
import numpy as np
import pytest
import torch
from ray_nodes import HERE, THERE, WAIT, get

import conveyor
from conveyor import collective
from conveyor.exceptions import (
    CollectiveBrokenError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
)
from conveyor.experimental.collective import ReduceOp

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@conveyor.remote
class Rank:
    def pid(self):
        return os.getpid()

    def all_operations(self, count):
        return all_operations(count)

    def all_shared(self):
        return all_shared()

    def late(self):
        """What is not for this rank may still be on its way when the next operation has begun."""
        me = collective.get_rank()
        found = collective.gather.shared(np.full(1 << 22, me), 2)
        assert found is None or [int(one[-1]) for one in found] == [0, 1, 2, 3]
        return collective.allgather.shared(me)

    def meet(self, path, timeout=None):
        if path:
            open(path, "w").close()
        collective.barrier(timeout=timeout)
        return "met"

    def reduce(self, size, dtype="float32"):
        own = torch.ones(size, dtype=getattr(torch, dtype))
        try:
            collective.allreduce(own)
        except CollectiveMismatchError as error:
            assert own.eq(1).all()
            return str(error)
        return own.tolist()

    def fail(self):
        raise ValueError("no step")

    def group_of(self, *actors):
        group = collective.create_collective_group(actors)
        met = conveyor.get([actor.meet.remote(None) for actor in actors])
        collective.destroy_collective_group(group)
        return met


def all_operations(count):
    """What each operation has come to, as numbers, at this rank."""
    me, ranks = collective.get_rank(), collective.get_collective_group_size()
    own = np.arange(count, dtype=np.float64) + me
    got = {}
    # Hosts reduce what their ranks have before, but 16-bit floats.
    halves = torch.full((count,), float(me), dtype=torch.bfloat16)
    collective.allreduce(halves)
    got["allreduce bfloat16"] = halves.float().numpy()
    for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.AVG):
        tensor = torch.from_numpy(own.copy())
        collective.allreduce(tensor, op=op)
        got[f"allreduce {op.name}"] = tensor.numpy()
    collective.reduce(to := own.copy(), 1)
    got["reduce"] = to
    parts = [own + 100 * to for to in range(ranks)]
    collective.reducescatter(to := np.empty(count), parts)
    got["reducescatter"] = to
    many = [np.empty(count) for _ in range(ranks)]
    collective.allgather(many, own)
    got["allgather"] = np.concatenate(many)
    many = [np.zeros(count) for _ in range(ranks)]
    collective.gather(own, many if me == 1 else None, 1)
    got["gather"] = np.concatenate(many)
    collective.broadcast(to := own.copy(), 2)
    got["broadcast"] = to
    collective.scatter(to := np.empty(count), parts if me == 2 else None, 2)
    got["scatter"] = to
    collective.all_to_all(many, parts)
    got["all_to_all"] = np.concatenate(many)
    return got


def expected(count, me, ranks):
    own = [np.arange(count, dtype=np.float64) + r for r in range(ranks)]
    nothing = [np.zeros(count)] * ranks
    return {
        "allreduce bfloat16": np.full(count, sum(range(ranks))),
        "allreduce SUM": sum(own),
        "allreduce MAX": own[-1],
        "allreduce AVG": sum(own) / ranks,
        "reduce": sum(own) if me == 1 else own[me],
        "reducescatter": sum(own) + ranks * 100 * me,
        "allgather": np.concatenate(own),
        "gather": np.concatenate(own if me == 1 else nothing),
        "broadcast": own[2],
        "scatter": own[2] + 100 * me,
        "all_to_all": np.concatenate([one + 100 * me for one in own]),
    }


def all_shared():
    me, ranks = collective.get_rank(), collective.get_collective_group_size()
    own = {"rank": me, "array": np.full(100_000 * (me + 1), me)}
    lists = [f"{me} for {to}" for to in range(ranks)]
    everybody = collective.allgather.shared(own)
    return (
        [(one["rank"], one["array"].size, int(one["array"].sum())) for one in everybody],
        collective.broadcast.shared(lists if me == 3 else None, 3),
        collective.gather.shared(me, 2),
        collective.scatter.shared(lists if me == 1 else None, 1),
        collective.all_to_all.shared(lists),
        # One that is small behind one that is large, which is still on its way.
        collective.allgather.shared(me),
    )


@pytest.fixture(scope="module")
def ranks(far):
    """Actors on both nodes, in turns."""
    return [Rank.options(**where).remote() for where in (HERE, THERE, HERE, THERE)]


@pytest.fixture
def group(ranks):
    """Of all of them."""
    made = collective.create_collective_group(ranks)
    yield made
    collective.destroy_collective_group(made)


@pytest.fixture
def meeting(tmp_path, wait_until):
    """Has actors meet, and returns when their methods run: their calls."""

    def begin(*actors, timeout=None):
        paths = [str(tmp_path / f"{i}") for i in range(len(actors))]
        calls = [
            actor.meet.remote(path, timeout) for actor, path in zip(actors, paths, strict=True)
        ]
        wait_until(lambda: all(map(os.path.exists, paths)), WAIT)
        return calls

    return begin


def name_of(actor):
    return re.escape(actor._id.name)


def test_every_operation_over_nodes(ranks):
    """The driver is a rank, too. Nothing, a little, and several pieces of each tensor."""
    made = collective.create_collective_group(ranks, driver_rank=4)
    for count in (0, 3, 5000, 150_000):
        calls = [actor.all_operations.remote(count) for actor in ranks]
        outcomes = [all_operations(count), *get(calls)]
        for me, got in zip((4, 0, 1, 2, 3), outcomes, strict=True):
            for operation, value in expected(count, me, 5).items():
                assert np.array_equal(got[operation], value), (operation, me, count)
    collective.destroy_collective_group(made)


def test_values_that_are_exchanged_over_nodes(ranks, group):
    for _ in range(3):
        for me, got in enumerate(get([actor.all_shared.remote() for actor in ranks])):
            everybody, broadcast, gathered, scattered, swapped, small = got
            assert everybody == [(r, 100_000 * (r + 1), r * 100_000 * (r + 1)) for r in range(4)]
            assert broadcast == [f"3 for {r}" for r in range(4)]
            assert gathered == ([0, 1, 2, 3] if me == 2 else None)
            assert scattered == f"1 for {me}"
            assert swapped == [f"{r} for {me}" for r in range(4)]
            assert small == [0, 1, 2, 3]


def test_a_value_that_comes_late_is_no_others(ranks, group):
    for _ in range(3):
        assert get([actor.late.remote() for actor in ranks]) == [[0, 1, 2, 3]] * 4


def test_the_driver_says_what_ranks_of_another_node_do(ranks, monkeypatch):
    monkeypatch.setattr("conveyor.driver.remote_processes.BRIEF_TIME_LIMIT", WAIT)
    made = collective.create_collective_group([ranks[0], ranks[1]], driver_rank=2)
    told = rf"rank 0 \({name_of(ranks[0])}\), idle; rank 1 \({name_of(ranks[1])}\), idle"
    with pytest.raises(CollectiveTimeoutError, match=told):
        collective.barrier(timeout=0.05)
    collective.destroy_collective_group(made)


@pytest.mark.parametrize("how", ["raises", "differs"])
def test_a_failure_on_any_node_breaks_the_group_until_it_is_reset(ranks, group, how):
    for failing in (3, 2):
        if how == "raises":
            with pytest.raises(ValueError, match="no step"):
                get(ranks[failing].fail.remote())
            cause = rf"rank {failing} .*not coming.*fail.*no step"
        else:
            get([actor.reduce.remote(3 + (actor is ranks[failing])) for actor in ranks])
            cause = rf"have not called the same before.*rank {failing} \(.*float32\[4\]"
        for _ in range(2):
            for call in [actor.meet.remote(None) for actor in ranks]:
                with pytest.raises(CollectiveBrokenError, match=cause):
                    get(call)
        group.reset()
        assert get([actor.meet.remote(None) for actor in ranks]) == ["met"] * 4


def test_an_actor_makes_groups_of_any_nodes(ranks):
    for maker in (ranks[0], ranks[1]):
        others = [actor for actor in ranks if actor is not maker]
        assert get(maker.group_of.remote(*others)) == ["met"] * 3
    # All of it is on another node than the driver.
    made = collective.create_collective_group([ranks[1], ranks[3]])
    assert get([ranks[1].reduce.remote(1), ranks[3].reduce.remote(1)]) == [[2.0]] * 2
    collective.destroy_collective_group(made)


def test_a_rank_of_another_node_that_dies(ranks, meeting):
    dies = Rank.options(**THERE).remote()
    made = collective.create_collective_group([*ranks, dies])
    waiting = meeting(*ranks)
    os.kill(get(dies.pid.remote()), signal.SIGKILL)
    for call in waiting:
        with pytest.raises(CollectiveBrokenError, match=rf"rank 4 \({name_of(dies)}\) has died"):
            get(call)
    collective.destroy_collective_group(made)
    made = collective.create_collective_group(ranks)
    assert get([actor.meet.remote(None) for actor in ranks]) == ["met"] * 4
    collective.destroy_collective_group(made)
