"""Graphs and asyncio."""

import asyncio
import gc
import sys
import time
from contextlib import suppress

import pytest
from defect_actors import WAIT, Recorder, room, run, seen, single

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import ActorDiedError, CapacityError, GraphTornDownError

pytestmark = pytest.mark.usefixtures("session")


def held(a, b, path):
    """Two outputs; both actors can be held up by the same latch."""
    with InputNode() as inp:
        return MultiOutputNode([a.take_when.bind(inp, path), b.take_when.bind(inp, path)])


async def get(ref):
    return await ref


def room_is(graph, depth):
    """Room for exactly ``depth`` executions while the actors are held up."""
    accepted, refs = room(graph, "counted")
    assert accepted == depth
    with pytest.raises(CapacityError):
        graph.try_execute("counted")
    return refs


# D8


@pytest.mark.parametrize("together", [True, False])
def test_d08_awaiting_all_outputs_counts_an_execution_once(a, b, latches, tmp_path, together):
    """Elsewhere awaiting the outputs of one execution side by side counts it as finished once for
    each output, and the limit of executions on their way drifts away. Here it must be the same
    after any number of rounds."""
    depth, path = 3, tmp_path / "go"
    path.touch()
    with held(a, b, str(path)).compile(depth=depth) as graph:

        async def one(i):
            refs = await graph.execute_async(i)
            if together:
                return await asyncio.gather(*refs)
            return [await ref for ref in reversed(refs)][::-1]

        async def rounds():
            for start in range(0, 40, 10):
                numbers = range(start, start + 10)
                results = await asyncio.gather(*[one(i) for i in numbers])
                assert results == [[f"a{i}", f"b{i}"] for i in numbers]

        run(rounds())
        path.unlink()
        try:
            refs = room_is(graph, depth)
        finally:
            path.touch()
        for pair in refs:
            assert conveyor.get(pair, timeout=WAIT) == ["acounted", "bcounted"]
    seen(a), seen(b)


# D9


@pytest.mark.parametrize("outputs", [1, 2])
def test_d09_a_death_reaches_every_await_as_what_it_is(b, latches, outputs):
    """Elsewhere the death of an actor shows up in an await as a ``TypeError`` about something that
    cannot be iterated over. Here everybody who awaits must be told who died, and how."""
    victim, go = Recorder.remote("victim"), latches()
    with InputNode() as inp:
        dag = victim.die.bind(victim.take_when.bind(inp, go.path))
        if outputs == 2:
            dag = MultiOutputNode([dag, victim.take_when.bind(inp, go.path)])

    async def main(graph):
        refs = [await graph.execute_async("x") for _ in range(3)]
        if outputs == 2:
            refs = [ref for pair in refs for ref in pair]
        awaits = [asyncio.create_task(get(ref)) for ref in refs]
        await asyncio.sleep(0)
        conveyor.kill(victim)
        errors = await asyncio.gather(*awaits, return_exceptions=True)
        # And whoever asks afterwards, or submits.
        errors += await asyncio.gather(*[get(ref) for ref in refs], return_exceptions=True)
        errors += await asyncio.gather(graph.execute_async("x"), return_exceptions=True)
        for error in errors:
            assert isinstance(error, ActorDiedError), error
            assert not isinstance(error, TypeError)
            assert error.actor.startswith("Recorder")
            assert "Recorder" in str(error)
        assert len(errors) == 2 * 3 * outputs + 1

    graph = dag.compile()
    try:
        run(main(graph))
    finally:
        go.open()
        graph.teardown()


def test_d09_a_death_in_the_middle_of_a_method(b):
    """The same for an actor that ends itself: the execution that it ran, and the node, are named."""
    victim = Recorder.remote("victim")
    with InputNode() as inp:
        dag = MultiOutputNode([victim.die.bind(inp), b.take.bind(inp)])

    async def main(graph):
        good = await graph.execute_async("good")
        assert await asyncio.gather(*good) == ["good", "bgood"]
        first, second = await graph.execute_async("die")
        error, _ = await asyncio.gather(first, second, return_exceptions=True)
        assert isinstance(error, ActorDiedError), error
        assert error.exit_code == 7
        assert "die" in error.node

    graph = dag.compile()
    run(main(graph))
    graph.teardown()
    seen(b)


def test_d09_a_teardown_reaches_every_await_as_what_it_is(a, latches):
    """And for a graph that is taken down while its results are awaited."""
    go = latches()

    async def main(graph):
        refs = [await graph.execute_async(i) for i in range(3)]
        awaits = [asyncio.create_task(get(ref)) for ref in refs]
        await asyncio.sleep(0)
        ending = asyncio.get_running_loop().run_in_executor(None, graph.teardown)
        errors = await asyncio.gather(*awaits, return_exceptions=True)
        assert [type(error) for error in errors] == [GraphTornDownError] * 3
        go.open()
        await ending

    run(main(single(a.take_when, go.path).compile()))
    seen(a)


# D10


class Unpicklable:
    def __reduce__(self):
        raise RuntimeError("this does not travel")


def test_d10_a_bad_input_concerns_only_who_gave_it(a, b):
    """Elsewhere one input that cannot be pickled ends the task that writes inputs, and all later
    executions wait for ever. Here the caller must get the error, and everybody else their results."""
    with InputNode() as inp:
        dag = MultiOutputNode([a.take.bind(inp[0]), b.take.bind(inp[1])])

    async def one(graph, i):
        second = Unpicklable() if i % 3 == 1 else i
        return await asyncio.gather(*await graph.execute_async(i, second))

    async def main(graph):
        outcomes = await asyncio.gather(*[one(graph, i) for i in range(30)], return_exceptions=True)
        for i, outcome in enumerate(outcomes):
            if i % 3 == 1:
                assert isinstance(outcome, TypeError | RuntimeError), outcome
                assert "does not travel" in str(outcome)
            else:
                assert outcome == [f"a{i}", f"b{i}"]
        for args in ((), (1,), (1, 2, 3)):
            with pytest.raises(TypeError, match="positional"):
                await graph.execute_async(*args)
        assert await one(graph, 30) == ["a30", "b30"]

    with dag.compile(depth=2) as graph:
        run(main(graph))
        assert conveyor.get(graph.execute(33, 33), timeout=WAIT) == ["a33", "b33"]
    sent = sorted(seen(a))
    assert sent == sorted(seen(b)) == [*(i for i in range(31) if i % 3 != 1), 33]


# D11


@pytest.fixture
def unraisable(monkeypatch):
    """What is raised where nobody can catch it, in ``__del__`` for one."""
    caught = []
    monkeypatch.setattr(sys, "unraisablehook", lambda info: caught.append(str(info.exc_value)))
    yield caught
    assert caught == []


def test_d11_results_dropped_unawaited_leave_their_room(a, b, tmp_path, unraisable):
    """Elsewhere a result that is dropped without being awaited fails in its destructor and keeps its
    place: after as many as the graph is deep, nothing runs any more. Here dropped results, before
    or after they come, and awaits that were given up must leave all of the room."""
    depth, path = 2, tmp_path / "go"
    with held(a, b, str(path)).compile(depth=depth, cancel_with_await=False) as graph:

        async def main():
            for i in range(4 * depth):
                path.unlink(missing_ok=True)
                refs = await graph.execute_async(i)
                if i % 3 == 0:  # dropped before it is there
                    del refs
                    path.touch()
                elif i % 3 == 1:  # dropped when it is there
                    path.touch()
                    assert await refs[0] == f"a{i}"
                    del refs
                else:  # awaited, and given up
                    task = asyncio.create_task(get(refs[1]))
                    await asyncio.sleep(0)
                    task.cancel()
                    with suppress(asyncio.CancelledError):
                        await task
                    del refs, task
                    path.touch()
                gc.collect()
                # Only these two executions are on their way; both need the latch.
                last = await graph.execute_async(f"last{i}")
                assert await asyncio.gather(*last) == [f"alast{i}", f"blast{i}"]

        run(main())
        path.unlink()
        try:
            refs = room_is(graph, depth)
        finally:
            path.touch()
        for pair in refs:
            assert conveyor.get(pair, timeout=WAIT) == ["acounted", "bcounted"]
    assert len(seen(a)) == len(seen(b)) == 9 * depth


# D15


@pytest.mark.parametrize("parts", [False, True])
def test_d15_a_submission_that_waits_for_room_delivers_once(a, b, latches, parts):
    """Elsewhere an asynchronous submission that finds no room at one of several actors is repeated
    as a whole, every second, and the actors that had room get their input once more each time.
    Here every actor must get every input once, and all actors in the same order."""
    go, count, depth = latches(), 12, 2
    with InputNode() as inp:
        first, second = (inp[0], inp[1]) if parts else (inp, inp)
        dag = MultiOutputNode([a.take.bind(first), b.take_when.bind(second, go.path)])

    async def main(graph):
        async def one(i):
            refs = await graph.execute_async(*((i, i) if parts else (i,)))
            return await asyncio.gather(*refs)

        results = [asyncio.create_task(one(i)) for i in range(count)]
        # Longer than any interval at which something might be tried again.
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            await asyncio.sleep(0.05)
        assert not any(task.done() for task in results)
        go.open()
        assert await asyncio.gather(*results) == [[f"a{i}", f"b{i}"] for i in range(count)]

    with dag.compile(depth=depth) as graph:
        run(main(graph))
    at_a, at_b = seen(a), seen(b)
    assert at_a == at_b
    assert sorted(at_a) == list(range(count))
