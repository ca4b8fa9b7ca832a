"""Leases: what holding values does to whom, and the error that says who fills an arena."""

import gc
import os
import re
import signal
import sys

import cloudpickle
import inside
import numpy as np
import pytest
from integration_helpers import WAIT

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import ArenaFullError, TaskError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.usefixtures("session")

MB = 1 << 20
CAP = 16 * MB
N = 1 << 17  # float64 of one MiB


def mapping_of(address):
    """Permissions and name of what is mapped at ``address``."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            place, permissions, *rest = line.split()
            start, _, end = place.partition("-")
            if int(start, 16) <= address < int(end, 16):
                return permissions, " ".join(rest[3:])
    raise AssertionError(f"nothing is mapped at {address:#x}")


@conveyor.remote
class Actor:
    def __init__(self):
        self.kept = []

    def pid(self):
        return os.getpid()

    def echo(self, x):
        return x

    def make(self, i):
        return np.full(N, float(i))

    def in_place(self, i):
        made = conveyor.empty(N)
        made[:] = i
        return made

    def make_tensor(self, i):
        import torch

        return torch.full((N,), float(i), dtype=torch.float64)

    def keep(self, x):
        self.kept.append(x)
        return len(self.kept)

    def forget(self):
        self.kept.clear()
        gc.collect()

    def write_and_look(self, x):
        """The sum after adding one, and how the argument's memory is mapped."""
        address = x.ctypes.data if isinstance(x, np.ndarray) else x.data_ptr()
        x += 1
        return float(x.sum()), mapping_of(address)

    def total(self, x):
        return float(x.sum())


@pytest.fixture(scope="module")
def session(leaves_nothing):
    with leaves_nothing():
        conveyor.init(arena_bytes=CAP)
        yield
        conveyor.shutdown()


@pytest.fixture(scope="module")
def other(session):
    return Actor.remote()


@pytest.fixture
def maker():
    # One for each test: a full arena is nobody else's.
    actor = Actor.remote()
    yield actor
    conveyor.kill(actor)


def one(method, **options):
    with InputNode() as inp:
        return method.bind(inp).compile(**options)


def until_full(step):
    """The error, without what its traceback would hold."""
    for i in range(100):
        try:
            step(i)
        except ArenaFullError as error:
            return error.with_traceback(None)
    pytest.fail("the arena was never full")


def fill(graph):
    """Results held until the arena is full, and the error."""
    held = []
    error = until_full(lambda i: held.append(conveyor.get(graph.execute(i), timeout=WAIT)))
    return held, error


# The cap


@pytest.mark.parametrize("method", ["make", pytest.param("make_tensor", marks=pytest.mark.torch)])
def test_holding_blocks_nothing_until_the_cap_and_the_error_names_what_is_held(maker, method):
    if method == "make_tensor":
        pytest.importorskip("torch")
    with one(getattr(maker, method), depth=2, name="frames") as graph:
        held, error = fill(graph)
        assert len(held) >= CAP // MB * 3 // 4
        assert [float(x[0]) for x in held] == [float(x[-1]) for x in held] == list(range(len(held)))
        assert isinstance(error, MemoryError)
        assert isinstance(error, TaskError)
        assert "Actor" in error.actor
        [by_driver] = error.held
        assert by_driver.process == "driver"
        assert by_driver.executions == tuple(range(len(held)))
        assert by_driver.bytes >= len(held) * MB
        assert by_driver.graph == inside.number_of(graph)
        assert graph.plan.edges[by_driver.edge].source in by_driver.channel
        text = str(error)
        assert f"driver holds {len(held)} values" in text
        assert "frames, edge #" in text
        assert f"executions 0-{len(held) - 1}" in text
        # The graph is as it was: what is dropped can be used again.
        del held[3:], by_driver
        assert float(conveyor.get(graph.execute(7), timeout=WAIT)[0]) == 7
        assert [float(x[0]) for x in held] == [0, 1, 2]


def test_the_error_names_every_holder_and_channel(maker, other):
    with InputNode() as inp:
        made = maker.make.bind(inp)
        dag = MultiOutputNode([made, other.keep.bind(made)])
    calls = [maker.make.remote(i) for i in range(3)]
    called = conveyor.get(calls, timeout=WAIT)
    try:
        with dag.compile(depth=1) as graph:
            held = []

            def step(i):
                both = conveyor.get(graph.execute(i), timeout=WAIT)
                if i % 2:
                    held.append(both[0])

            error = until_full(step)
        found = {(h.process, h.graph): h for h in error.held}
        holder = next(name for name, number in found if name != "driver")
        # The reader in the actor holds them all, the driver every other, and some from calls.
        assert set(found) == {
            ("driver", None),
            ("driver", inside.number_of(graph)),
            (holder, inside.number_of(graph)),
        }
        all_numbers = found[holder, inside.number_of(graph)].executions
        assert all_numbers == tuple(range(len(all_numbers)))
        assert set(found["driver", inside.number_of(graph)].executions) >= {1, 3, 5}
        assert not {0, 2} & set(found["driver", inside.number_of(graph)].executions)
        assert len(found["driver", None].executions) == 3
        assert "results of calls: calls" in str(error)
        assert [x[0] for x in called] == [0, 1, 2]
    finally:
        conveyor.get(other.forget.remote(), timeout=WAIT)


def test_the_drivers_own_arena_names_the_actors(other):
    with one(other.keep) as graph:
        error = until_full(
            lambda i: conveyor.get(graph.execute(np.full(N, float(i))), timeout=WAIT)
        )
        [held] = error.held
        assert held.process.startswith("Actor")
        assert held.graph == inside.number_of(graph)
        conveyor.get(other.forget.remote(), timeout=WAIT)
        assert conveyor.get(graph.execute(np.zeros(N)), timeout=WAIT) == 1
    conveyor.get(other.forget.remote(), timeout=WAIT)


@pytest.mark.parametrize("place", ["results", "arguments"])
def test_a_graph_has_a_cap_of_its_own(maker, other, place):
    cap = 4 * MB
    if place == "results":
        method, arguments = maker.make, range
    else:
        method, arguments = other.keep, lambda n: [np.full(N, float(i)) for i in range(n)]
    with one(method, memory_bytes=cap, name="small") as graph, one(other.echo) as out_of_band:
        held = []

        def step(i):
            held.append(conveyor.get(graph.execute(arguments(100)[i]), timeout=WAIT))

        error = until_full(step)
        assert len(held) == 3  # each takes a page more than a MiB
        assert f"the graph's memory cap of {cap} bytes (memory_bytes)" in str(error)
        [by] = error.held
        assert (by.graph, by.executions) == (inside.number_of(graph), (0, 1, 2))
        # The memory of others is not less by it, not even on the way to the same actor.
        several = [conveyor.get(out_of_band.execute(np.zeros(N)), timeout=WAIT) for _ in range(4)]
        assert len(several) == 4
        held.clear()
        conveyor.get(other.forget.remote(), timeout=WAIT)
        step(0)
        conveyor.get(other.forget.remote(), timeout=WAIT)


def test_values_made_in_place_count_for_the_cap_of_their_graph(maker):
    with one(maker.in_place, memory_bytes=4 * MB) as graph:
        held, error = fill(graph)
        assert len(held) == 3
        assert "memory_bytes" in str(error)
        held.clear()
        assert conveyor.get(graph.execute(5), timeout=WAIT)[0] == 5


def test_results_nobody_has_got_are_named_too(maker):
    with one(maker.make, depth=4) as graph:
        refs = [graph.execute(i) for i in range(CAP // MB + 8)]
        outcomes = []
        for ref in refs:
            try:
                outcomes.append(conveyor.get(ref, timeout=WAIT)[0])
            except ArenaFullError as error:
                outcomes.append(error)
    errors = [o for o in outcomes if isinstance(o, ArenaFullError)]
    assert errors
    assert all(error.held[0].process == "driver" for error in errors)
    assert all(o == i for i, o in enumerate(outcomes) if not isinstance(o, ArenaFullError))


def test_arrays_made_in_place_and_kept_are_told_of():
    arrays = []
    error = until_full(lambda i: arrays.append(conveyor.empty(N)))
    assert "made in place" in str(error)
    assert len(arrays) >= CAP // MB * 3 // 4


def test_an_error_larger_than_a_slot_gets_through_at_the_cap(maker):
    with InputNode() as inp:
        dag = MultiOutputNode([maker.make.bind(inp)] * 2 + [maker.echo.bind(inp)])
    with dag.compile(name="long name " * 500, fail_fast=False) as graph:
        held, caught = [], None
        for i in range(100):
            refs = graph.execute(i)
            try:
                held.append(conveyor.get(refs[0], timeout=WAIT))
            except ArenaFullError as error:
                caught = error
                assert conveyor.get(refs[2], timeout=WAIT) == i
                break
        assert len(str(caught)) > 4000
        held.clear()
        assert conveyor.get(graph.execute(1), timeout=WAIT)[0][0] == 1


def test_debug_says_where_in_the_program_results_were_got(maker):
    with one(maker.make, depth=2, debug=True) as graph:
        held = [conveyor.get(graph.execute(i), timeout=WAIT) for i in range(3)]  # here
        here = sys._getframe().f_lineno - 1
        ref = graph.execute(3)
        more, error = fill(graph)
        text = str(error)
        assert f"{__file__}:{here} in" in text
        assert f"in <lambda>: {len(more)}" in text
        assert "not got yet, or long ago: 1" in text
        assert ref.get()[0] == 3
        del held, more


def test_debug_can_be_had_from_the_environment(scripts):
    program = """
        import asyncio
        import numpy as np
        import conveyor
        from conveyor.dag import InputNode

        @conveyor.remote
        class Maker:
            def make(self, i):
                return np.full(1 << 17, float(i))

        maker = Maker.remote()
        with InputNode() as inp:
            graph = maker.make.bind(inp).compile()

        async def hold(i):
            return await (await graph.execute_async(i))

        held = [asyncio.run(hold(i)) for i in range(2)]
        try:
            for i in range(100):
                held.append(conveyor.get(graph.execute(i)))
        except conveyor.exceptions.ArenaFullError as error:
            print(error)
    """
    env = {"CONVEYOR_DEBUG": "1", "CONVEYOR_ARENA_BYTES": str(8 * MB)}
    out = scripts.run(program, env=env)
    assert re.search(r"program.py:\d+ in hold: 2\n", out)
    assert re.search(r"program.py:\d+ in <module>: \d\n", out)


# Who may write


@pytest.mark.torch
def test_a_sole_consumer_writes_a_tensor_where_it_lies(maker, other):
    torch = pytest.importorskip("torch")
    with InputNode() as inp:
        dag = other.write_and_look.bind(maker.make_tensor.bind(inp))
    with dag.compile() as graph:
        for i in range(3):
            total, (permissions, name) = conveyor.get(graph.execute(i), timeout=60)
            assert total == N * (i + 1)
            assert "conveyor-arena" in name
            assert permissions == "rw-s"  # no private pages: the memory itself
    given = torch.zeros(N, dtype=torch.float64)
    with one(other.write_and_look) as graph:
        total, (permissions, _) = conveyor.get(graph.execute(given), timeout=WAIT)
        assert (total, permissions) == (N, "rw-s")
        assert float(given.sum()) == 0


@pytest.mark.torch
def test_shared_consumers_of_a_tensor_write_on_private_pages(maker, other):
    pytest.importorskip("torch")
    third = Actor.remote()
    with InputNode() as inp:
        made = maker.make_tensor.bind(inp)
        dag = MultiOutputNode(
            [made, other.write_and_look.bind(made), third.write_and_look.bind(made)]
        )
    with dag.compile() as graph:
        for i in range(3):
            mine, *looks = conveyor.get(graph.execute(i), timeout=60)
            for total, (permissions, name) in looks:
                assert total == N * (i + 1)
                assert "conveyor-arena" in name
                assert permissions == "rw-p"
            assert float(mine.sum()) == N * i
            assert mapping_of(mine.data_ptr())[0] == "rw-p"
            mine -= 5
            assert float(mine.sum()) == N * (i - 5)


def test_shared_consumers_of_an_array_write_on_pages_of_their_own(maker, other):
    third = Actor.remote()
    with InputNode() as inp:
        made = maker.make.bind(inp)
        dag = MultiOutputNode([other.write_and_look.bind(made), third.total.bind(made)])
    with dag.compile() as graph:
        for i in range(3):
            written, read = conveyor.get(graph.execute(i), timeout=WAIT)
            assert written[0] == N * (i + 1)
            assert read == i * N


# Readers that end


@pytest.mark.parametrize(
    ("method", "how"),
    [
        ("make", signal.SIGKILL),
        ("make", signal.SIGSEGV),
        pytest.param("make_tensor", signal.SIGKILL, marks=pytest.mark.torch),
    ],
)
def test_a_reader_killed_while_it_holds_gives_the_memory_back(maker, method, how):
    if method == "make_tensor":
        pytest.importorskip("torch")
    reader = Actor.remote()
    with InputNode() as inp:
        dag = reader.keep.bind(getattr(maker, method).bind(inp))
    count = CAP // MB // 2
    graph = dag.compile(depth=2)
    assert conveyor.get([graph.execute(i) for i in range(count)], timeout=60)[-1] == count
    os.kill(conveyor.get(reader.pid.remote(), timeout=WAIT), how)
    with pytest.raises(conveyor.exceptions.ActorDiedError):
        conveyor.get(graph.execute(0), timeout=WAIT)
    graph.teardown()
    # All of the arena is to be had again, more than what the dead one left.
    with one(getattr(maker, method)) as again:
        held = [conveyor.get(again.execute(i), timeout=WAIT) for i in range(count + count // 2)]
        assert [float(x[0]) for x in held] == list(range(len(held)))


def test_what_one_reader_keeps_stays_when_another_dies(maker, other):
    reader = Actor.remote()
    with InputNode() as inp:
        made = maker.make.bind(inp)
        dag = MultiOutputNode([made, reader.keep.bind(made)])
    graph = dag.compile(depth=2)
    held = [conveyor.get(graph.execute(i), timeout=WAIT)[0] for i in range(5)]
    conveyor.kill(reader)
    graph.teardown()
    with one(maker.make) as again:
        for i in range(100, 150):  # writes over whatever is free
            assert conveyor.get(again.execute(i), timeout=WAIT)[0] == i
    assert [(x.min(), x.max()) for x in held] == [(i, i) for i in range(5)]


# Forks


@pytest.mark.parametrize("method", ["make", pytest.param("make_tensor", marks=pytest.mark.torch)])
def test_a_forked_child_that_drops_values_ends_no_lease(maker, method):
    if method == "make_tensor":
        pytest.importorskip("torch")
    with one(getattr(maker, method), depth=2) as graph:
        held = [conveyor.get(graph.execute(i), timeout=60) for i in range(4)]
        child = os.fork()
        if child == 0:
            code = 1
            try:
                held.clear()
                gc.collect()
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        for i in range(100, 140):
            assert float(conveyor.get(graph.execute(i), timeout=WAIT)[-1]) == i
        assert [(float(x.min()), float(x.max())) for x in held] == [(i, i) for i in range(4)]


def test_what_a_forked_child_still_reads_counts_as_held(maker, wait_until):
    with one(maker.make, depth=2) as graph:
        held = [conveyor.get(graph.execute(i), timeout=WAIT) for i in range(4)]
        wait_end, child_end = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(child_end)
            os.read(wait_end, 1)  # until the parent has used the memory as far as it may
            right = all((x == i).all() for i, x in enumerate(held))
            os._exit(0 if right else 1)
        os.close(wait_end)
        del held
        more, error = fill(graph)
        assert {0, 1, 2, 3} <= set(error.held[0].executions)
        os.close(child_end)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        del more
        # The child's end is noticed though nobody sleeps; on a busy machine it may take more than the second
        # that a send at the cap waits.
        wait_until(lambda: len(fill(graph)[0]) >= CAP // MB * 3 // 4, what="the child's end")
