"""Timeouts: what they mean, and what is left after one."""

import asyncio

import pytest
from defect_actors import WAIT, Background, room, run, seen, single

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import CapacityError, WaitTimeoutError

pytestmark = pytest.mark.usefixtures("session")


@pytest.mark.parametrize("limit", [-1, None])
def test_d02_no_limit_on_submission_means_no_limit(a, latches, waits_for, limit):
    """Elsewhere -1, documented as "for ever", makes a submission try once and give up. Here a graph
    compiled so must wait for room for as long as it takes."""
    go = latches()
    graph = single(a.take_when, go.path).experimental_compile(
        _submit_timeout=limit, _max_inflight_executions=1
    )
    first = graph.execute(1)
    with pytest.raises(CapacityError):
        graph.try_execute("no room")
    waiting = Background(graph.execute, 2)
    waits_for("room for another execution")
    assert waiting.running
    go.open()
    assert conveyor.get([first, waiting.result()], timeout=WAIT) == ["a1", "a2"]
    graph.teardown()
    assert seen(a) == [1, 2]


@pytest.mark.parametrize("way", ["get", "get of a list", "method"])
def test_d02_a_get_without_limit_waits(a, latches, waits_for, way):
    """Elsewhere -1, None and 0 mean different things from one function to the next. Here -1 and
    None must both wait for a result, however it is asked for, and 0 must look once."""
    go = latches()
    with single(a.take_when, go.path).compile() as graph:
        ref = graph.execute(1)

        def get(timeout):
            if way == "get":
                return conveyor.get(ref, timeout=timeout)
            if way == "method":
                return ref.get(timeout)
            return conveyor.get([ref], timeout=timeout)[0]

        with pytest.raises(WaitTimeoutError):
            get(0)
        waiting = Background(get, -1)
        waits_for("execution 0")
        other = Background(get, None)
        assert waiting.running
        go.open()
        assert waiting.result() == other.result() == "a1"
        assert get(0) == "a1"
    assert seen(a) == [1]


def test_d03_a_get_that_timed_out_can_be_tried_again(a, latches):
    """Elsewhere a get that runs into its timeout uses the reference up: the next one says that it
    can only be got once. Here any number of them must do no harm, and the value can be got again."""
    go = latches()
    with single(a.take_when, go.path).compile() as graph:
        refs = [graph.execute(i) for i in range(3)]
        for ref in [*refs, *reversed(refs)]:
            for timeout in (0, 0.01):
                with pytest.raises(WaitTimeoutError):
                    conveyor.get(ref, timeout=timeout)
                with pytest.raises(WaitTimeoutError):
                    ref.get(timeout)
                with pytest.raises(WaitTimeoutError):
                    conveyor.get(refs, timeout=timeout)
                assert conveyor.wait(refs, timeout=timeout) == ([], refs)
        go.open()
        for _ in range(2):
            assert conveyor.get(refs, timeout=WAIT) == ["a0", "a1", "a2"]
            assert [ref.get(0) for ref in refs] == ["a0", "a1", "a2"]
    assert seen(a) == [0, 1, 2]


def test_d03_an_await_that_timed_out_can_be_tried_again(a, latches):
    """The same where the reference is awaited: giving up an await must not cost the result."""
    go = latches()

    async def get(ref):
        return await ref

    async def main(graph):
        ref = await graph.execute_async(1)
        for _ in range(5):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(get(ref), 0.01)
        go.open()
        assert await ref == "a1"
        assert await ref == "a1"

    with single(a.take_when, go.path).compile(cancel_with_await=False) as graph:
        run(main(graph))
    assert seen(a) == [1]


@pytest.mark.parametrize("late", [0, 1])
def test_d04_a_timeout_between_outputs_keeps_them_together(a, b, latches, late):
    """Elsewhere a read of several outputs that times out after the first of them drops what it had,
    and from then on pairs one output's result with another execution's. Here the outputs of every
    execution must stay together, whichever of them was late and however often it was asked for."""
    go = latches()
    with InputNode() as inp:
        dag = MultiOutputNode(
            [
                actor.take_when.bind(inp, go.path) if i == late else actor.take.bind(inp)
                for i, actor in enumerate((a, b))
            ]
        )
    with dag.compile(fail_fast=False) as graph:
        rounds = [graph.execute(i) for i in range(4)]
        # The other output is there before anybody asks for both.
        early = "ba"[late]
        assert conveyor.get(rounds[0][1 - late], timeout=WAIT) == f"{early}0"
        for refs in rounds:
            for timeout in (0, 0.01):
                with pytest.raises(WaitTimeoutError):
                    conveyor.get(refs, timeout=timeout)
        assert conveyor.get(rounds[3][1 - late], timeout=WAIT) == f"{early}3"
        go.open()
        expected = [[f"a{i}", f"b{i}"] for i in range(4)]
        assert [conveyor.get(refs, timeout=WAIT) for refs in rounds] == expected
        # And again; and for executions that start afterwards, asked for in any order.
        assert [conveyor.get(refs, timeout=0) for refs in rounds] == expected
        later = [graph.execute(i) for i in range(4, 8)]
        for i, refs in reversed(list(enumerate(later, 4))):
            assert conveyor.get(refs, timeout=WAIT) == [f"a{i}", f"b{i}"]
    assert seen(a) == seen(b) == list(range(8))


def test_d05_the_same_node_twice_as_an_output(a, b):
    """Elsewhere a graph that lists one node twice among its outputs compiles, and its results can
    never be got. Here each place in the list must have its value."""
    with InputNode() as inp:
        x, y = a.take.bind(inp), b.take.bind(inp)
        mixed = MultiOutputNode([x, y, x, y, x])
    with InputNode() as inp:
        alone = MultiOutputNode([a.take.bind(inp)] * 3)
    assert conveyor.get(alone.execute(0), timeout=WAIT) == ["a0"] * 3
    with alone.compile() as graph:
        for i in range(3):
            assert conveyor.get(graph.execute(i), timeout=WAIT) == [f"a{i}"] * 3

        async def main():
            return await asyncio.gather(*await graph.execute_async("async"))

        assert run(main()) == ["aasync"] * 3
    with mixed.compile() as graph:
        for i in range(3):
            assert conveyor.get(graph.execute(i), timeout=WAIT) == [
                f"a{i}",
                f"b{i}",
                f"a{i}",
                f"b{i}",
                f"a{i}",
            ]
    assert seen(a) == [0, 0, 1, 2, "async", 0, 1, 2]
    assert seen(b) == [0, 1, 2]


def test_d05_a_timeout_holds_for_the_same_node_twice(a, latches):
    """Elsewhere such a get also ignores its timeout and uses a whole core for ever. Here it must
    end when it says, and work once the value is there."""
    go = latches()
    with InputNode() as inp:
        x = a.take_when.bind(inp, go.path)
        dag = MultiOutputNode([x, x])
    with dag.compile(depth=2) as graph:
        refs = graph.execute(1)
        waiting = Background(conveyor.get, refs, timeout=0.05)
        with pytest.raises(WaitTimeoutError):
            waiting.result()
        go.open()
        assert conveyor.get(refs, timeout=WAIT) == ["a1", "a1"]
        # One of the two places is enough; the other one holds nothing up.
        for i in range(10):
            first, second = graph.execute(i)
            assert conveyor.get((first, second)[i % 2], timeout=WAIT) == f"a{i}"
            del first, second
        assert room(graph, 1)[0] >= 1
    seen(a)
