"""Collective operations that give back what the ranks have, read in place."""

import os
import signal
import threading
import time

import inside
import numpy as np
import pytest
from integration_helpers import WAIT, get
from nodes_apart import APART

import conveyor
from conveyor.exceptions import (
    ActorDiedError,
    ArenaFullError,
    CollectiveBrokenError,
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    RuntimeStateError,
    SerializationError,
)
from conveyor.experimental import collective

PRELOAD = ["torch"]
#: Elements of an array that is large.
MANY = 200_000


@conveyor.remote
class Rank:
    def __init__(self):
        self.kept = []

    def run(self, function, *args):
        return function(self, collective.get_rank(), *args)

    def pid(self):
        return os.getpid()


def grouped(count):
    actors = [Rank.remote() for _ in range(count)]
    collective.create_collective_group(actors)
    return actors


@pytest.fixture(scope="module")
def actors(session):
    return [Rank.remote() for _ in range(2)]


@pytest.fixture
def group(actors):
    made = collective.create_collective_group(actors)
    yield made
    collective.destroy_collective_group(made)


@pytest.fixture
def pair(actors, group):
    """For tests that kill nobody."""
    return actors


@pytest.fixture
def pair_to_break(session):
    return grouped(2)


def everywhere(actors, function, *args):
    return get([actor.run.remote(function, *args) for actor in actors])


def out():
    """Bytes of memory behind what this process has made, and somebody holds."""
    return inside.arena().bytes_touched


def given_back(nbytes):
    """Whether less than so much is left of it. What is on its way to another node may take a moment."""
    end = time.monotonic() + WAIT
    while APART and out() >= nbytes and time.monotonic() < end:
        time.sleep(0.002)
    return out() < nbytes


def made(rank, count=MANY):
    """An array in the arena that only the caller has."""
    array = conveyor.empty(count)
    array[:] = rank
    return array


# At the cap, in a session of its own: so before that of the others


def test_at_the_memory_cap_nothing_is_sent(leaves_nothing):
    with leaves_nothing():
        conveyor.init(arena_bytes=4 << 20)
        at_the_cap(grouped(2))
        conveyor.shutdown()


def at_the_cap(actors):

    def do(actor, rank):
        return collective.allgather.shared(np.zeros(1 << 20) if rank else 0)

    def other(actor, rank):
        return collective.allgather.shared(rank)

    first, second = [actor.run.remote(do) for actor in actors]
    with pytest.raises(ArenaFullError, match="memory cap"):
        get(second)
    with pytest.raises(CollectiveBrokenError, match="memory cap"):
        get(first)
    (group,) = collective.get_collective_groups()
    group.reset()
    assert everywhere(actors, other) == [[0, 1]] * 2


# What operations give


@pytest.mark.parametrize("count", [1, MANY])
def test_what_the_ranks_get(session, count):
    def do(actor, rank, count):
        def value(sender, receiver=0):
            return np.arange(count) + 100 * sender + receiver

        size = collective.get_collective_group_size()
        everybody = range(size)

        def same(got, want):
            assert len(got) == len(want)
            for one, other in zip(got, want, strict=True):
                np.testing.assert_array_equal(one, other)

        same(collective.allgather.shared(value(rank)), [value(r) for r in everybody])
        same([collective.broadcast.shared(value(rank), 1)], [value(1)])
        same([collective.broadcast.shared(value(0) if rank == 0 else None)], [value(0)])
        got = collective.gather.shared(value(rank), dst_rank=2)
        if rank == 2:
            same(got, [value(r) for r in everybody])
        else:
            assert got is None
        lists = [value(rank, r) for r in everybody]
        same([collective.scatter.shared(lists if rank == 1 else None, 1)], [value(1, rank)])
        same(collective.all_to_all.shared(lists), [value(r, rank) for r in everybody])
        total = value(rank)
        collective.allreduce(total)  # the others go on between them
        same([total], [sum(value(r) for r in everybody)])
        return True

    assert everywhere(grouped(3), do, count) == [True] * 3


def test_values_may_be_anything_and_differ(pair):
    def do(actor, rank):
        own = {"rank": rank, "rows": np.full((rank + 1, 3), rank)} if rank else "none"
        first, second = collective.allgather.shared(own)
        return first, second["rows"].shape, collective.broadcast.shared([rank, None], 1)

    assert everywhere(pair, do) == [("none", (2, 3), [1, None])] * 2


def test_arrays_are_ones_own(pair):
    def do(actor, rank):
        got = collective.allgather.shared(np.full(MANY, float(rank)))
        for array in got:
            array += 10 * (rank + 1)
        collective.barrier()
        return [float(array.max()) for array in got]

    assert everywhere(pair, do) == [[10.0, 11.0], [20.0, 21.0]]


@pytest.mark.torch
def test_tensors_are_ones_own_and_not_copied_when_they_are_let_go(pair):
    torch = pytest.importorskip("torch")

    def do(actor, rank):
        def fresh():
            return conveyor.empty_tensor(MANY, torch.float64).fill_(rank)

        before = out()
        got = collective.allgather.shared(fresh())
        assert out() - before < 1.5 * 8 * MANY
        got[0] += 5  # nobody else sees it
        collective.barrier()
        sums = [float(each.sum()) for each in got]
        again = collective.broadcast.shared(got[0] if rank == 0 else None)
        return sums, float(again.sum())

    assert everywhere(pair, do) == [([5.0 * MANY, MANY], 5.0 * MANY)] * 2


def test_what_is_let_go_is_not_copied_and_what_is_held_is(pair):
    def do(actor, rank):
        before = out()
        held = made(rank)
        values = [collective.allgather.shared(held)]
        for_copy = out() - before
        held[:] = 77  # nobody sees it
        collective.barrier()
        del held
        before = out()
        values.append(collective.allgather.shared(made(rank)))
        values.append([collective.broadcast.shared(made(rank), 0)] * 2)
        for_none = out() - before
        for first, second in values[:2]:
            assert (first == 0).all()
            assert (second == 1).all()
        assert (values[2][0] == 0).all()
        return for_copy > 1.9 * 8 * MANY, for_none < (2.5 if rank == 0 else 1.5) * 8 * MANY

    assert everywhere(pair, do) == [(True, True)] * 2


# How long they last


def test_values_stay_as_they_are_as_long_as_they_are_held(pair):
    def do(actor, rank):
        for step in range(20):
            actor.kept.append(collective.allgather.shared(made(10 * step + rank)))
        for step, got in enumerate(actor.kept):
            for r, array in enumerate(got):
                assert (array == 10 * step + r).all()
        held = out()
        actor.kept.clear()
        got = None
        del array
        collective.barrier()  # nobody holds any more
        return held > 19 * 8 * MANY, given_back(8 * MANY)

    assert everywhere(pair, do) == [(True, True)] * 2


def test_values_outlast_the_rank_that_gave_them(pair_to_break):
    def share(actor, rank):
        actor.kept = collective.allgather.shared(made(rank + 1))

    everywhere(pair_to_break, share)
    os.kill(get(pair_to_break[1].pid.remote()), signal.SIGKILL)
    with pytest.raises(ActorDiedError):
        get(pair_to_break[1].run.remote(share))
    successor = Rank.remote()
    fresh = [pair_to_break[0], successor]
    collective.destroy_collective_group(collective.get_collective_groups(pair_to_break)[0])
    collective.create_collective_group(fresh)

    def more(actor, rank):
        for _ in range(5):
            collective.allgather.shared(made(9))
        return [float(each.sum()) for each in actor.kept]

    assert everywhere(fresh, more)[0] == [1.0 * MANY, 2.0 * MANY]


def test_what_a_dead_rank_held_goes_back(pair_to_break, wait_until):
    def share(actor, rank):
        actor.kept = collective.allgather.shared(made(rank))
        if rank == 0:
            actor.kept = []

    everywhere(pair_to_break, share)
    conveyor.kill(pair_to_break[1])

    def empty(actor, rank):
        return out() == 0

    wait_until(lambda: get(pair_to_break[0].run.remote(empty)))


# Ranks that differ, and what goes wrong


def test_ranks_that_differ_are_told_and_hold_nothing(pair, group):
    def differ(actor, rank, how):
        try:
            if how == "root":
                collective.broadcast.shared(made(rank), rank)
            elif how == "form":
                (collective.gather if rank else collective.allgather).shared(made(rank))
            elif rank:
                collective.allgather.shared(made(rank))
            else:
                collective.allreduce(np.zeros(3))
        except CollectiveMismatchError as error:
            return str(error)

    def holds_nothing(actor, rank):
        assert given_back(8 * MANY)  # nobody holds what was given
        return collective.allgather.shared(rank)

    for how, words in [
        ("root", ["broadcast.shared with root 0; rank 1 (Rank", "broadcast.shared with root 1"]),
        ("form", ["): allgather.shared; rank 1", "gather.shared with root 0"]),
        ("operation", ["allreduce(SUM) of float64[3]", "): allgather.shared"]),
    ]:
        for _ in range(6):  # more often than a ring has slots
            for told in everywhere(pair, differ, how):
                assert told is not None
                for word in words:
                    assert word in told
            group.reset()
        assert everywhere(pair, holds_nothing) == [[0, 1]] * 2


class Unsendable:
    def __reduce__(self):
        raise LookupError("not today")


WRONG = [
    (lambda: collective.broadcast.shared(1, 2), ValueError, "src_rank must be a rank"),
    (lambda: collective.gather.shared(1, "0"), TypeError, "dst_rank must be an integer"),
    (lambda: collective.scatter.shared([1, 2], 0), ValueError, "only rank 0"),
    (lambda: collective.scatter.shared([1], 1), ValueError, "each of the group's 2 ranks"),
    (lambda: collective.all_to_all.shared("ab"), TypeError, "not a str"),
    (lambda: collective.allgather.shared(1, timeout="soon"), TypeError, "timeout"),
    (lambda: collective.allgather.shared(threading.Lock()), SerializationError, "lock"),
]


def test_wrong_arguments_are_refused_before_anything_is_sent(pair, group):
    def do(actor, rank, case):
        call, error, words = WRONG[case]
        if rank == 0:
            with pytest.raises(CollectiveBrokenError, match=words):
                collective.allgather.shared(0)
        else:
            with pytest.raises(error, match=words):
                call()
        return True

    def in_no_group(actor, rank):
        with pytest.raises(ValueError, match="no collective group"):
            collective.allgather.shared(1, "other")
        return collective.allgather.shared(rank)

    for case in range(len(WRONG)):
        assert everywhere(pair, do, case) == [True, True]
        group.reset()
    assert everywhere(pair, in_no_group) == [[0, 1]] * 2


def test_a_value_that_cannot_be_sent_frees_the_others(pair_to_break):
    def do(actor, rank):
        collective.allgather.shared(Unsendable() if rank else 1)

    first, second = [actor.run.remote(do) for actor in pair_to_break]
    with pytest.raises(SerializationError, match="not today"):
        get(second)
    with pytest.raises(CollectiveBrokenError, match="not today"):
        get(first)


def test_what_encodes_a_value_cannot_be_in_an_operation_of_its_group(pair):
    class Nested:
        def __reduce__(self):
            with pytest.raises(CollectiveError, match="is in an operation of this group"):
                collective.barrier()
            return str, ("it was not",)

    def do(actor, rank):
        with pytest.raises(CollectiveBrokenError, match="is in an operation of this group"):
            collective.allgather.shared(Nested())
        return True

    assert everywhere(pair, do) == [True, True]


def test_a_value_that_cannot_be_loaded_is_an_error_there(pair, group):
    """The operation is done at the other rank, as all have come to it, and the group is broken."""

    def refuse(rank):
        if collective.get_rank() == rank:
            raise LookupError("cannot be loaded here")
        return "loaded"

    class Picky:
        def __reduce__(self):
            return refuse, (0,)

    def do(actor, rank):
        try:
            return collective.allgather.shared(Picky() if rank == 0 else made(5))[0]
        except SerializationError as error:
            return str(error)

    def again(actor, rank):
        return collective.allgather.shared(rank)

    def holds_nothing(actor, rank):
        return given_back(8 * MANY)

    first, second = everywhere(pair, do)
    assert "cannot be loaded here" in first
    assert second == "loaded"
    for actor in pair:
        with pytest.raises(CollectiveBrokenError, match="cannot be loaded here"):
            get(actor.run.remote(again))
    group.reset()
    assert everywhere(pair, again) == [[0, 1]] * 2
    assert everywhere(pair, holds_nothing) == [True, True]


def test_a_rank_that_dies_or_is_late_frees_the_others(pair_to_break):
    def come(actor, rank, timeout):
        return collective.allgather.shared(made(rank), timeout=timeout)

    waits = pair_to_break[0].run.remote(come, None)
    os.kill(get(pair_to_break[1].pid.remote()), signal.SIGKILL)
    with pytest.raises(CollectiveBrokenError, match=r"allgather.shared .* rank 1 .* has died"):
        get(waits)
    others = grouped(2)
    with pytest.raises(CollectiveTimeoutError, match=r"within 0\.05 s"):
        get(others[0].run.remote(come, 0.05))
    with pytest.raises(CollectiveBrokenError, match="timeout of rank 0"):
        get(others[1].run.remote(come, None))


def test_a_forked_child_is_no_rank(pair):
    def do(actor, rank):
        got = collective.allgather.shared(made(rank))
        if rank == 0:
            child = os.fork()
            if child == 0:
                try:
                    collective.allgather.shared(0)
                except RuntimeStateError:
                    os._exit(3 if (got[1] == 1).all() else 4)
                os._exit(5)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        return collective.allgather.shared(rank)

    assert everywhere(pair, do) == [[0, 1]] * 2


def test_the_driver_may_take_part(session):
    actors = [Rank.remote() for _ in range(2)]
    collective.create_collective_group(actors, name="with driver", driver_rank=1)

    def do(actor, rank):
        weights = collective.broadcast.shared(None, 1)
        assert weights.flags.writeable
        assert collective.gather.shared(made(rank), 1) is None
        return float(weights.sum())

    refs = [actor.run.remote(do) for actor in actors]
    weights = np.ones(MANY)
    own = collective.broadcast.shared(weights, 1, "with driver")
    weights[:] = 2
    assert (own == 1).all()
    got = collective.gather.shared(None, 1, "with driver")
    assert got[1] is None
    assert (got[0] == 0).all()
    assert (got[2] == 2).all()
    assert get(refs) == [MANY, MANY]
