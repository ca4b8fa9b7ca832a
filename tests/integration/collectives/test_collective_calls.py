"""Collective operations called in methods of actors."""

import os
import signal
import time
import zlib

import inside
import numpy as np
import pytest
from integration_collectives import await_rank, rests
from integration_helpers import WAIT, get, hold

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import (
    ActorDiedError,
    CollectiveBrokenError,
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    RuntimeStateError,
)
from conveyor.experimental import collective
from conveyor.experimental.collective import ReduceOp

PRELOAD = ["torch"]
#: s; what a failure may take to free the others, here where much else runs. Commonly a few milliseconds.
SOON = 10


@conveyor.remote
class Rank:
    def rank(self, group="default"):
        return collective.get_rank(group), collective.get_collective_group_size(group)

    def run(self, function, *args):
        return function(collective.get_rank(), *args)

    def apart(self, function, *args):
        return function(self, *args)

    def fail(self):
        raise LookupError("no batch")

    def idle(self):
        pass

    def pid(self):
        return os.getpid()


@pytest.fixture
def ranks(local):
    def make(count, **options):
        actors = [Rank.remote() for _ in range(count)]
        collective.create_collective_group(actors, **options)
        return actors

    return make


def everywhere(actors, function, *args):
    refs = [actor.run.remote(function, *args) for actor in actors]
    return [get(ref) for ref in refs]


def failures(refs):
    errors = []
    for ref in refs:
        with pytest.raises(CollectiveError) as caught:
            get(ref)
        errors.append(caught.value)
    return errors


_pids = {}


def get_pid(actor):
    return _pids[actor]


@pytest.fixture
def pair(ranks):
    actors = ranks(2)
    _pids.update({actor: get(actor.pid.remote()) for actor in actors})
    yield actors
    _pids.clear()


def waiting(actor):
    """An actor that waits in a barrier."""
    ref = actor.run.remote(lambda _: collective.barrier())
    await_rank(actor, ref)
    return ref


# What operations do


def reduced(rank, count, dtype, op, size):
    own = (np.arange(count) % 5 + rank + 1).astype(dtype)
    collective.allreduce(own, op=op)
    all_ranks = [(np.arange(count) % 5 + r + 1).astype(dtype) for r in range(size)]
    want = {
        ReduceOp.SUM: lambda: sum(all_ranks[1:], all_ranks[0]),
        ReduceOp.PRODUCT: lambda: np.prod(all_ranks, axis=0, dtype=dtype),
        ReduceOp.MIN: lambda: np.min(all_ranks, axis=0),
        ReduceOp.MAX: lambda: np.max(all_ranks, axis=0),
        ReduceOp.AVG: lambda: sum(all_ranks[1:], all_ranks[0]) / dtype(size),
    }[op]()
    np.testing.assert_array_equal(own, want)
    return own


def reduced_in_all_ways(rank, size):
    bits = []
    for count in (0, 1, 1000, 300_001):
        for dtype in (np.float32, np.float64, np.int32, np.int64, np.uint8):
            for op in (ReduceOp.SUM, ReduceOp.MAX) if count > 1000 else ReduceOp:
                if op is not ReduceOp.AVG or issubclass(dtype, np.floating):
                    bits.append(zlib.crc32(reduced(rank, count, dtype, op, size)))
    return bits


@pytest.mark.parametrize("size", [1, 2, 3])
def test_allreduce_of_arrays(ranks, size):
    got = everywhere(ranks(size), reduced_in_all_ways, size)
    assert all(bits == got[0] for bits in got)  # the same at each rank


def test_the_other_operations(ranks):
    def do(rank, size, count):
        def made(sender, receiver):
            return np.arange(count) + 100 * sender + receiver

        own = made(rank, 0)
        root = size - 1
        out = [np.zeros_like(own) for _ in range(size)]
        collective.allgather(out, own)
        for r in range(size):
            np.testing.assert_array_equal(out[r], made(r, 0))

        one = np.zeros_like(own)
        collective.reducescatter(one, [made(rank, r) for r in range(size)], op=ReduceOp.MAX)
        np.testing.assert_array_equal(one, made(root, rank))

        one = made(rank, 0)
        collective.broadcast(one, src_rank=1)
        np.testing.assert_array_equal(one, made(1, 0))

        one = made(rank, 0)
        collective.reduce(one, dst_rank=root)
        total = sum(made(r, 0) for r in range(size))
        np.testing.assert_array_equal(one, total if rank == root else made(rank, 0))

        out = [np.zeros_like(own) for _ in range(size)] if rank == 1 else None
        collective.gather(own, out, dst_rank=1)
        for r, got in enumerate(out or ()):
            np.testing.assert_array_equal(got, made(r, 0))

        one = np.zeros_like(own)
        lists = [made(rank, r) for r in range(size)]
        collective.scatter(one, lists if rank == 0 else None)
        np.testing.assert_array_equal(one, made(0, rank))

        out = [np.zeros_like(own) for _ in range(size)]
        collective.all_to_all(out, lists)
        for r in range(size):
            np.testing.assert_array_equal(out[r], made(r, rank))
        collective.barrier()
        return True

    actors = ranks(3)
    for count in (1, 70_000):
        assert everywhere(actors, do, 3, count) == [True] * 3


def test_arrays_that_are_not_in_one_row(ranks):
    def do(rank):
        whole = np.full((40, 30), rank + 1.0)
        collective.allreduce(whole[:, ::2])
        assert (whole[:, ::2] == 3).all()
        assert (whole[:, 1::2] == rank + 1).all()
        out = np.zeros((2, 5, 4))
        collective.allgather([out[0].T, out[1].T], np.full((4, 5), rank).T.copy().T * 1.0)
        assert (out[0] == 0).all()
        assert (out[1] == 1).all()
        return True

    assert everywhere(ranks(2), do) == [True, True]


@pytest.mark.torch
def test_torch_tensors(ranks):
    torch = pytest.importorskip("torch")

    def do(rank):
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool):
            for count in (1, 5, 100_000):
                own = (torch.arange(count) % 7 + rank).to(dtype)
                others = [(torch.arange(count) % 7 + r).to(dtype) for r in range(2)]
                collective.allreduce(own)
                want = others[0] + others[1]
                assert torch.equal(own, want), (dtype, count)
        # A parameter, a view, a view that is not in one row, and a scalar.
        weight = torch.nn.Parameter(torch.full((4, 4), float(rank)))
        collective.allreduce(weight, op=ReduceOp.AVG)
        assert (weight == 0.5).all()
        whole = torch.full((6, 8), float(rank))
        collective.broadcast(whole[:, 2:5], src_rank=1)
        assert (whole[:, 2:5] == 1).all()
        assert (whole[:, :2] == rank).all()
        scalar = torch.tensor(rank + 1)
        collective.allreduce(scalar)
        assert scalar.item() == 3
        nans = torch.tensor([1.0, float("nan") if rank else 2.0])
        collective.allreduce(nans, op=ReduceOp.MAX)
        assert nans[0] == 1
        assert nans[1].isnan()
        # Several as one.
        several = [torch.full((3, 2), float(rank)), torch.zeros(0), torch.ones(8, 2)[:, 1]]
        collective.allreduce(several)
        assert (several[0] == 1).all()
        assert (several[2] == 2).all()
        return True

    assert everywhere(ranks(2), do) == [True, True]


def test_lists_of_arrays_are_reduced_as_one(ranks):
    def do(rank):
        several = [np.full((2, 3), rank), np.full(70_000, rank + 1)[::2]]
        collective.allreduce(several, op=ReduceOp.MAX)
        assert (several[0] == 1).all()
        assert (several[1] == 2).all()
        return True

    assert everywhere(ranks(2), do) == [True, True]


# Ranks that differ


def test_ranks_that_differ_are_all_told(ranks):
    def differ(rank, how):
        own = np.full(4, 7)
        before = own.copy()
        try:
            if how == "shape":
                collective.allreduce(own if rank else own.reshape(2, 2))
            elif how == "dtype":
                collective.allreduce(own if rank else own.astype(np.float32))
            elif how == "op":
                collective.allreduce(own, op=ReduceOp.MIN if rank else ReduceOp.MAX)
            elif how == "root":
                collective.broadcast(own, src_rank=rank)
            elif how == "operation":
                collective.barrier() if rank else collective.allreduce(own)
            else:
                collective.allreduce([own, own] if rank else [own])
        except CollectiveMismatchError as error:
            assert (own == before).all()
            with pytest.raises(CollectiveBrokenError, match="not called the same before"):
                collective.allreduce(own)
            return str(error)

    actors = ranks(3)
    (group,) = collective.get_collective_groups()
    for how, words in [
        ("shape", ["rank 0 (Rank): allreduce(SUM) of int64[2, 2]", "rank 2 (Rank#3)", "int64[4]"]),
        ("dtype", ["float32[4]", "int64[4]"]),
        ("op", ["allreduce(MAX)", "allreduce(MIN)"]),
        ("root", ["root 0", "root 1", "root 2"]),
        ("operation", ["barrier()", "allreduce(SUM)"]),
        ("list", ["2 tensors"]),
    ]:
        for told in everywhere(actors, differ, how):
            assert told is not None
            for word in words:
                assert word in told
        group.reset()


# Ranks that do not come


def test_a_rank_that_dies_frees_the_others(pair):
    waits = waiting(pair[0])
    begin = time.monotonic()
    os.kill(get_pid(pair[1]), signal.SIGKILL)
    with pytest.raises(CollectiveBrokenError, match=r"rank 1 \(Rank#2\) has died") as caught:
        get(waits)
    assert time.monotonic() - begin < SOON
    assert isinstance(caught.value, RuntimeError)
    # And so it stays, until there is another group.
    again = pair[0].run.remote(lambda _: collective.barrier())
    with pytest.raises(CollectiveBrokenError):
        get(again)
    collective.destroy_all_collective_groups()
    collective.create_collective_group([pair[0], Rank.remote()])


def test_a_rank_that_raises_frees_the_others(pair):
    waits = waiting(pair[0])
    begin = time.monotonic()
    with pytest.raises(LookupError):
        get(pair[1].fail.remote())
    with pytest.raises(CollectiveBrokenError, match=r"rank 1 .* LookupError: no batch"):
        get(waits)
    assert time.monotonic() - begin < SOON


def test_a_task_of_a_graph_that_raises_frees_the_others(pair):
    def come(rank, fails):
        if rank and fails:
            raise LookupError("no batch")
        collective.barrier()
        return rank

    with InputNode() as fails:
        nodes = [actor.run.bind(come, fails) for actor in pair]
        graph = MultiOutputNode(nodes).compile()
    assert get(graph.execute(False)) == [0, 1]
    # Of both errors either may be heard of first; the cause is named in any case.
    with pytest.raises((LookupError, CollectiveBrokenError), match="no batch"):
        get(graph.execute(True))
    # It was in the barrier, and is not any more.
    with pytest.raises(CollectiveBrokenError, match="LookupError"):
        get(pair[0].run.remote(lambda _: collective.barrier()))


def test_a_rank_that_raised_just_before_frees_the_others(pair):
    failed, waits = pair[1].fail.remote(), pair[0].run.remote(lambda _: collective.barrier())
    with pytest.raises(CollectiveBrokenError, match="LookupError"):
        get(waits)
    with pytest.raises(LookupError):
        get(failed)


def test_a_rank_whose_call_was_cancelled_frees_the_others(pair, latches):
    waits, go = waiting(pair[0]), latches()
    ends = pair[1].run.remote(lambda _, path=go.path: hold(path))
    cancelled = pair[1].run.remote(lambda _: collective.barrier())
    conveyor.cancel(cancelled)
    go.open()
    get(ends)
    with pytest.raises(CollectiveBrokenError, match="was cancelled"):
        get(waits)


def test_wrong_arguments_at_one_rank_free_the_others(ranks):
    def do(rank):
        collective.allreduce(np.zeros(3) if rank else "zeros")

    actors = ranks(2)
    first, second = [actor.run.remote(do) for actor in actors]
    with pytest.raises(TypeError, match="is a str"):
        get(first)
    with pytest.raises(CollectiveBrokenError, match="TypeError"):
        get(second)


def test_a_timeout_breaks_the_group_for_all(pair, wait_until):
    def do(_):
        collective.barrier(timeout=0.05)

    wait_until(lambda: rests(pair[1]))
    absent = r"these ranks have not come to it: rank 1 \(Rank#2\), idle\. The group is broken"
    with pytest.raises(CollectiveTimeoutError, match=rf"within 0\.05 s {absent}"):
        get(pair[0].run.remote(do))
    with pytest.raises(
        CollectiveBrokenError,
        match=r"timeout of rank 0 .*; these ranks have not come to it: rank 1",
    ):
        get(pair[1].run.remote(do))


def test_a_destroyed_group_lets_go_of_who_waits(pair):
    waits = waiting(pair[0])
    (group,) = collective.get_collective_groups()
    collective.destroy_collective_group(group)
    with pytest.raises(CollectiveBrokenError, match="was destroyed"):
        get(waits)
    with pytest.raises(ValueError, match="is in no collective group"):
        get(pair[0].rank.remote())


def test_what_a_signal_handler_raises_comes_out_and_frees_the_others(pair):
    def wait(_):
        def handler(*_):
            raise KeyError("handled")

        signal.signal(signal.SIGUSR1, handler)
        collective.barrier()

    first = pair[0].run.remote(wait)
    second = pair[1].run.remote(lambda _: collective.barrier())
    get(first)
    get(second)
    first = pair[0].run.remote(wait)
    await_rank(pair[0], first)
    os.kill(get_pid(pair[0]), signal.SIGUSR1)
    with pytest.raises(KeyError, match="handled"):
        get(first)
    with pytest.raises(CollectiveBrokenError, match=r"rank 0 .* KeyError"):
        get(pair[1].run.remote(lambda _: collective.barrier()))


def test_a_session_can_end_while_ranks_wait(leaves_nothing):
    with leaves_nothing():
        conveyor.init()
        actors = [Rank.remote() for _ in range(2)]
        collective.create_collective_group(actors)
        waits = actors[0].run.remote(lambda _: collective.barrier())
        conveyor.shutdown()
        with pytest.raises(Exception, match="session"):
            get(waits)


def test_a_rank_does_one_operation_of_a_group_at_a_time(local, wait_until):
    actors = [Rank.options(max_concurrency=3).remote() for _ in range(2)]
    for name in ("one", "other"):
        collective.create_collective_group(actors, name=name)

    def wait(_, name):
        collective.barrier(name)
        return name

    def again(_):
        with pytest.raises(CollectiveError, match="another thread"):
            collective.barrier("one")
        return True

    # Threads of one actor are in two groups at once, in another order than those of the other.
    first = [actors[0].apart.remote(wait, name) for name in ("one", "other")]
    wait_until(lambda: inside.sleeping().count(actors[0]._id) == 2, what="both to wait")
    second = [actors[1].apart.remote(wait, name) for name in ("other", "one")]
    assert [get(ref) for ref in first + second] == ["one", "other", "other", "one"]
    waits = actors[0].apart.remote(wait, "one")
    await_rank(actors[0], waits)
    assert get(actors[0].apart.remote(again))
    with pytest.raises(CollectiveBrokenError, match="another thread"):
        get(waits)


def test_a_forked_child_is_no_rank(ranks):
    def fork(_):
        child = os.fork()
        if child == 0:
            try:
                collective.barrier()
            except RuntimeStateError:
                os._exit(7)
            finally:
                os._exit(1)
        collective.barrier()
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    (actor,) = ranks(1)
    assert get(actor.run.remote(fork)) == 7


# Groups


def test_groups_are_known_by_name(local):
    one, two, three = [Rank.remote() for _ in range(3)]
    first = collective.create_collective_group([one, two], "gloo", "first")
    second = collective.create_collective_group([three, two], name="second")
    assert get(two.rank.remote("first")) == (1, 2)
    assert get(two.rank.remote("second")) == (1, 2)
    assert get(three.rank.remote()) == (0, 2)  # its only one
    with pytest.raises(ValueError, match="'first', 'second'"):
        get(two.rank.remote())
    assert collective.get_collective_groups([two]) == [first, second]
    assert collective.get_collective_groups([two, three]) == [second]
    assert collective.get_collective_groups([two], "gloo") == [first]
    assert collective.get_collective_groups({two}) == [first, second]
    assert collective.get_collective_groups([]) == [first, second]
    for wrong in (5, "first", two, [two, 5], [None], [first]):
        with pytest.raises(TypeError, match=r"a list of actors is needed|a group is of actors"):
            collective.get_collective_groups(wrong)
    with pytest.raises(ValueError, match="a group's name must have printable characters only"):
        collective.create_collective_group([one, two], name="a\nb")
    assert (first.name, first.backend, first.actors) == ("first", "gloo", [one, two])
    assert (first.get_rank(two), first.get_rank(three)) == (1, -1)
    assert repr(first) == "<collective group 'first' of 2 actors>"
    with pytest.raises(ValueError, match="already"):
        collective.create_collective_group([one], name="first")
    collective.destroy_collective_group("first")
    with pytest.raises(ValueError, match="no collective group named 'first'"):
        collective.destroy_collective_group(first)
    assert get(two.rank.remote()) == (1, 2)
    collective.destroy_all_collective_groups()
    assert collective.get_collective_groups() == []
    collective.create_collective_group([one, two], name="first")


def test_a_group_may_have_any_of_rays_backends(local):
    torch = pytest.importorskip("torch")

    def reduced(rank):
        ones = np.ones(2)
        collective.allreduce(ones)
        return ones.sum()

    def refused(rank):
        tensor = torch.ones(2, device="meta" if rank == 1 else "cpu")
        collective.allreduce(tensor)

    actors = [Rank.remote(), Rank.remote()]
    for backend in "nccl", "NCCL", "Gloo", "TORCH_GLOO":
        group = collective.create_collective_group(actors, backend=backend)
        assert group.backend == backend
        assert collective.get_collective_groups(backend=backend.lower()) == [group]
        assert get([actor.run.remote(reduced) for actor in actors]) == [4, 4]
        refs = [actor.run.remote(refused) for actor in actors]
        with pytest.raises(
            ValueError, match=r"the tensor is on meta: .* take dense tensors of the CPU"
        ):
            get(refs[1])
        with pytest.raises(CollectiveBrokenError, match="meta"):
            get(refs[0])
        collective.destroy_collective_group(group)


def test_an_actor_can_make_a_group_of_others(local):
    @conveyor.remote
    class Maker:
        def make(self, actors):
            group = collective.create_collective_group(actors, name="made")
            refs = [actor.run.remote(lambda rank: collective.barrier() or rank) for actor in actors]
            ranks = conveyor.get(refs)
            collective.destroy_collective_group(group)
            return ranks, len(collective.get_collective_groups())

    assert get(Maker.remote().make.remote([Rank.remote(), Rank.remote()])) == ([0, 1], 0)


def test_groups_that_cannot_be(local):
    one, two = Rank.remote(), Rank.remote()
    for actors, error, words in [
        ([], ValueError, "one actor"),
        ([one, two, one], ValueError, "listed twice"),
        ([one, 3], TypeError, "3 is none"),
        ("actors", TypeError, "list of actors"),
        ([one] * 65, ValueError, "twice"),
    ]:
        with pytest.raises(error, match=words):
            collective.create_collective_group(actors)
    for backend in ("smoke", None):
        with pytest.raises(ValueError, match=f"unknown backend {backend!r}: there are shm, gloo"):
            collective.create_collective_group([one, two], backend)
    with pytest.raises(TypeError, match="name"):
        collective.create_collective_group([one, two], name=3)
    with pytest.raises(ValueError, match="handle or its name"):
        collective.destroy_collective_group(3)
    with pytest.raises(RuntimeStateError, match="the driver is in none"):
        collective.barrier()
    conveyor.kill(two)
    with pytest.raises(ActorDiedError):
        collective.create_collective_group([one, two])
    collective.create_collective_group([one])  # nothing is left of the attempts
    assert get(one.rank.remote()) == (0, 1)


def test_tensors_that_do_not_fit(ranks):
    def refused(_, call, error, words):
        with pytest.raises(error, match=words):
            call()
        return True

    (actor,) = ranks(1)
    for call, error, words in [
        (lambda: collective.allreduce(_frozen()), ValueError, "read-only"),
        (lambda: collective.allreduce(_overlapping()), ValueError, "share memory"),
        (
            lambda: collective.allreduce([np.zeros(2), _overlapping()]),
            ValueError,
            "tensor 1 .* share",
        ),
        (
            lambda: collective.allgather([_overlapping()], np.zeros((3, 2))),
            ValueError,
            "share memory",
        ),
        (
            lambda: collective.allreduce(np.ma.masked_array([1.0, 2.0], [0, 1])),
            TypeError,
            "MaskedArray, which may mean more",
        ),
        (lambda: collective.allreduce(np.zeros(2, complex)), TypeError, "complex128"),
        (lambda: collective.allreduce(np.zeros(2, int), op=ReduceOp.AVG), TypeError, "no average"),
        (lambda: collective.allreduce(np.zeros(2), op="SUM"), TypeError, "ReduceOp"),
        (lambda: collective.allreduce([]), ValueError, "empty"),
        (lambda: collective.allreduce([np.zeros(2), np.zeros(2, int)]), TypeError, "one type"),
        (lambda: collective.allgather([], np.zeros(2)), ValueError, "has 0"),
        (lambda: collective.allgather(np.zeros(2), np.zeros(2)), TypeError, "list of tensors"),
        (lambda: collective.allgather([np.zeros(3)], np.zeros(2)), ValueError, "alike"),
        (lambda: collective.broadcast(np.zeros(2), 1), ValueError, "src_rank"),
        (lambda: collective.broadcast(np.zeros(2), "0"), TypeError, "src_rank"),
        (lambda: collective.gather(np.zeros(2)), ValueError, "tensor_list"),
        (lambda: collective.barrier("other"), ValueError, "'other'"),
        (lambda: collective.barrier(timeout="1"), TypeError, "timeout"),
    ]:
        assert get(actor.run.remote(refused, call, error, words))


def _overlapping():
    return np.lib.stride_tricks.as_strided(np.zeros(4), (3, 2), (8, 8))


@pytest.mark.torch
def test_an_expanded_tensor_cannot_be_written(ranks):
    torch = pytest.importorskip("torch")

    def refused(_):
        with pytest.raises(ValueError, match=r"share memory .* clone\(\)"):
            collective.allreduce(torch.ones(3, 1).expand(3, 2))

    def taken(_):
        # What is only read, or has gaps, may be so.
        collective.allgather([torch.zeros(3, 2)], torch.ones(3, 1).expand(3, 2))
        apart = torch.ones(3, 4)[:, ::2].t()
        collective.allreduce(apart)
        return apart.tolist()

    (actor,) = ranks(1)
    assert get(actor.run.remote(taken)) == [[1.0] * 3] * 2
    get(actor.run.remote(refused))


def test_outputs_that_share_memory_are_refused(pair):
    def refused(rank):
        memory = np.arange(7.0)
        shifted, halves = memory[1:4], [memory[:3], memory[3:6]]
        square = np.zeros((3, 4))
        for words, call in [
            ("tensors 0 and 1 of t", lambda: collective.allgather([shifted, shifted], np.zeros(3))),
            (
                "tensors 0 and 1 of t",
                lambda: collective.allgather([shifted, memory[:3]], np.zeros(3)),
            ),
            (
                "tensors 0 and 1 of output_tensor_list",
                lambda: collective.all_to_all([square[:, 2], square[:, 2]], halves),
            ),
            (
                "tensor 0 of t.* and the tensor sh",
                lambda: collective.reducescatter(shifted, halves),
            ),
            ("the tensor and tensor 0 of t", lambda: collective.allgather(halves, shifted)),
            (
                "tensor 1 of input_tensor_list and tensor 0 of output",
                lambda: collective.all_to_all([memory[4:7], np.zeros(3)], halves),
            ),
            (
                "share",
                lambda: (
                    collective.gather(shifted, halves)
                    if rank == 0
                    else collective.scatter(shifted, halves, 1)
                ),
            ),
        ]:
            with pytest.raises(ValueError, match=words):
                call()
        assert memory.tolist() == list(range(7))

    assert get([actor.run.remote(refused) for actor in pair]) == [None, None]


def test_an_input_may_be_an_output_and_outputs_may_lie_between_each_other(pair):
    def done(rank):
        memory = np.arange(6.0)
        halves = [memory[:3], memory[3:]]
        collective.reducescatter(halves[1 - rank], halves)
        assert halves[1 - rank].tolist() == [2 * (3 * rank + i) for i in range(3)]
        slots = [np.zeros(3), np.zeros(3)]
        slots[1 - rank][:] = rank
        collective.allgather(slots, slots[1 - rank])
        assert [one.tolist() for one in slots] == [[0.0] * 3, [1.0] * 3]
        slots = [np.full(3, 2.0 * rank + i) for i in range(2)]
        collective.all_to_all(slots, slots)
        assert [one.tolist() for one in slots] == [[rank] * 3, [rank + 2.0] * 3]
        square = np.zeros((3, 2))
        collective.allgather([square[:, 0], square[::-1, 1]], np.arange(3.0) + rank)
        return square.tolist()

    wanted = [[0.0, 3.0], [1.0, 2.0], [2.0, 1.0]]
    assert get([actor.run.remote(done) for actor in pair]) == [wanted, wanted]


@pytest.mark.torch
def test_torch_tensors_that_share_memory_are_refused(pair):
    torch = pytest.importorskip("torch")

    def run(rank):
        memory = torch.zeros(7)
        with pytest.raises(ValueError, match="tensors 0 and 1 of tensor_list share memory"):
            collective.allgather([memory[:3], memory[:3]], torch.ones(3))
        with pytest.raises(ValueError, match="share a part of their memory"):
            collective.reducescatter(memory[1:4], [memory[:3], memory[3:6]])
        square = torch.zeros(3, 2, dtype=torch.bfloat16)
        with pytest.raises(ValueError, match="tensors 0 and 1 of tensor_list share memory"):
            collective.allgather([square[:, 0], square[:, 0]], square[:, 0])

    def apart(rank):
        square = torch.zeros(3, 2, dtype=torch.bfloat16)
        own = torch.full((3,), rank + 1.0, dtype=torch.bfloat16)
        collective.allgather(list(square.unbind(1)), own)
        return square.tolist()

    assert get([actor.run.remote(apart) for actor in pair]) == [[[1.0, 2.0]] * 3] * 2
    get([actor.run.remote(run) for actor in pair])


@pytest.mark.torch
def test_a_tensor_whose_storage_was_freed_is_refused(ranks):
    torch = pytest.importorskip("torch")

    def freed(left):
        tensor = torch.ones(1_000_000)
        tensor.untyped_storage().resize_(left)
        return tensor

    def refused(_, left):
        fine = torch.ones(1_000_000)
        for call in (
            lambda: collective.allreduce(freed(left)),
            lambda: collective.allreduce([fine, freed(left)]),
            lambda: collective.broadcast(freed(left)),
            lambda: collective.allgather([fine], freed(left)),
            lambda: collective.allgather([freed(left)], fine),
        ):
            with pytest.raises(ValueError, match=f"has {left} bytes and the tensor needs 4000000"):
                call()
        return True

    (actor,) = ranks(1)
    assert get(actor.run.remote(refused, 0))
    assert get(actor.run.remote(refused, 4000))


def test_what_breaks_a_second_group_is_said_once(pair):
    two, three = pair
    one = Rank.remote()
    first = collective.create_collective_group([one, two], name="first")

    def wait(_, group):
        collective.barrier(group)

    ref = waiting(three)
    between = two.apart.remote(wait, first.name)
    await_rank(two, between)
    with pytest.raises(LookupError):
        get(one.fail.remote())
    for error in failures([between, ref]):
        assert str(error.__cause__).count("The group is broken now") == 1, error


def _frozen():
    array = np.zeros(3)
    array.flags.writeable = False
    return array


def test_another_process_of_an_actor_is_in_no_group(local):
    one, two = Rank.options(max_restarts=1).remote(), Rank.remote()
    collective.create_collective_group([one, two])
    before = get(one.pid.remote())
    os.kill(before, signal.SIGKILL)
    end = time.monotonic() + WAIT
    while time.monotonic() < end:
        try:
            if get(one.pid.remote()) != before:
                break
        except ActorDiedError:
            continue
    with pytest.raises(ValueError, match="is in no collective group"):
        get(one.rank.remote())
    with pytest.raises(CollectiveBrokenError, match="has died"):
        get(two.run.remote(lambda _: collective.barrier()))


def test_the_inline_engine_has_none(leaves_nothing):
    with leaves_nothing():
        conveyor.init(engine="inline")
        with pytest.raises(RuntimeStateError, match="inline engine"):
            collective.create_collective_group([Rank.remote()])
        assert collective.get_collective_groups() == []
        conveyor.shutdown()
