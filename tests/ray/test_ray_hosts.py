"""Actors of nodes that share no memory: calls and graphs between them go over the network.

Both nodes are on this machine. ``shared_memory="node"`` has each of them count as a host of its own.
"""

import os
import re
import signal
import sys
import threading

import cloudpickle
import inside
import numpy as np
import pytest
import ray
import torch
from ray_nodes import HERE, THERE, WAIT, Adds, get

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import ActorDiedError, WaitTimeoutError

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@conveyor.remote
class Stage(Adds):
    def node(self):
        return ray.get_runtime_context().get_node_id()

    def both(self, x, y):
        return x, y

    @conveyor.method(tensor_transport="auto")
    def keep(self, x):
        return x + 0

    def total(self, x):
        return float(x.sum())

    def start_another(self, options):
        self.other = Stage.options(**options).remote(100)
        return conveyor.get(self.other.run.remote(1)), conveyor.get(self.other.node.remote())

    def graph_over(self, *stages):
        with InputNode() as inp:
            node = inp
            for stage in stages:
                node = stage.run.bind(node)
        with node.compile() as graph:
            return conveyor.get([graph.execute(i) for i in range(20)])

    def fail(self, x):
        raise ValueError(f"no {x}")

    def count(self, n):
        for i in range(n):
            yield np.full(1000, i)

    def stay(self, path):
        open(path, "w").close()
        threading.Event().wait()

    def leave(self, how):
        how()


@conveyor.remote
class Doomed:
    def __init__(self):
        os._exit(3)

    def run(self):
        pass


def stage(where, add, **options):
    return Stage.options(**where, **options).remote(add)


def name_of(actor):
    return re.escape(actor._id.name)


@conveyor.remote
class Late:
    def __init__(self, x=None):
        self.x = x

    def kept(self):
        return self.x.nbytes

    def size(self, x):
        return x.nbytes


def test_the_last_handle_overtakes_no_argument(far):
    large = np.ones(120 << 20, np.uint8)  # as much as is still on its way when the handle goes
    made = Late.options(**THERE).remote(large)
    refs = [made.size.remote(large[: 1 << 20]) for _ in range(80)]  # more than there is room for
    kept = made.kept.remote()
    del made
    called = Late.options(max_concurrency=4, **THERE).remote().size.remote(large)
    assert get([kept, called]) == [large.nbytes, large.nbytes]
    assert get(refs) == [1 << 20] * 80


def test_calls_go_over_the_network(far):
    here, there = stage(HERE, 1), stage(THERE, 10)
    assert get(here.node.remote()) != get(there.node.remote())
    before = inside.pump().counts(1)[:2]
    assert get([there.run.remote(i) for i in range(200)]) == [i + 10 for i in range(200)]
    sent, received, *_ = inside.pump().counts(1)
    assert sent - before[0] == received - before[1] == 200
    big = np.arange(1 << 20, dtype=np.int64)
    assert get(there.total.remote(big)) == float(big.sum())
    assert np.array_equal(get(there.run.remote(big)), big + 10)
    with pytest.raises(ValueError, match="no reason"):
        get(there.fail.remote("reason"))
    # From one actor to the other, in both directions, and from one to another of its own node.
    out_of_band = Stage.options(**THERE).remote(20)
    assert get(here.ask.remote(there, 1)) == 11
    assert get(there.ask.remote(here, 1)) == 2
    assert get(there.ask.remote(out_of_band, 1)) == 21
    assert get(there.run.remote(here.run.remote(5))) == 16


def test_graphs_over_nodes(far):
    here = [stage(HERE, i) for i in (1, 2)]
    there = [stage(THERE, i) for i in (10, 20)]
    first_here, first_there = name_of(here[0]), name_of(there[0])
    with InputNode() as inp:
        first = there[0].run.bind(here[0].run.bind(inp))
        # One value for readers of both nodes; one input for all.
        parts = [actor.run.bind(first) for actor in (here[1], there[1])]
        dag = MultiOutputNode([here[0].both.bind(*parts), there[0].both.bind(inp, parts[0])])
    with dag.compile(depth=4) as graph:
        for i in range(100):
            assert get(graph.execute(i)) == [(i + 13, i + 31), (i, i + 13)]
        links = [line for line in graph.explain().splitlines() if "network link" in line]
        route = rf"{first_here} → {first_there} +network link, .*from the driver's node to "
        assert re.search(route, links[1])
        assert len(links) == 6  # of 7: one result is from the node of the driver
        is_remote = [actor.name for actor in graph.status().actors if actor.host is not None]
        assert sorted(is_remote) == sorted(actor._id.name for actor in there)
        refs = [graph.execute(i) for i in range(4)]
        assert [get(ref)[0] for ref in refs] == [(i + 13, i + 31) for i in range(4)]
        big = np.ones(3 << 20)
        (one, two), (same, _) = get(graph.execute(big))
        assert (one[0], two[-1], same.sum()) == (14.0, 32.0, big.size)


def test_an_error_goes_the_way_of_values(far):
    here, there = stage(HERE, 1), stage(THERE, 10)
    with InputNode() as inp:
        dag = here.run.bind(there.fail.bind(inp))
    with dag.compile() as graph:
        for i in range(3):
            with pytest.raises(ValueError, match=f"no {i}"):
                get(graph.execute(i))


def test_an_actor_of_another_node_places_actors_and_executes_graphs(far):
    here, there = stage(HERE, 1), stage(THERE, 10)
    value, node = get(there.start_another.remote(HERE))
    assert (value, node) == (101, get(here.node.remote()))
    assert get(there.start_another.remote(THERE))[1] == get(there.node.remote())
    other = Stage.options(**THERE).remote(20)
    assert get(there.graph_over.remote(here, other)) == [i + 21 for i in range(20)]
    assert get(here.graph_over.remote(there, other)) == [i + 30 for i in range(20)]


def test_a_death_there_is_a_death_here(far, tmp_path, wait_until):
    here, there = stage(HERE, 1), stage(THERE, 10)
    with InputNode() as inp:
        dag = here.run.bind(there.run.bind(inp))
    with dag.compile() as graph:
        assert get(graph.execute(1)) == 12
        pid = get(there.pid.remote())
        ref = there.stay.remote(str(tmp_path / "there"))
        wait_until((tmp_path / "there").exists, WAIT)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ActorDiedError, match=rf"actor {name_of(there)} \(pid {pid} on .*\)"):
            get(ref)
        with pytest.raises(ActorDiedError, match=name_of(there)):
            get(graph.execute(1))
    assert get(here.run.remote(1)) == 2
    # Its slot is another process's, on the other host.
    assert get(Stage.options(**HERE).remote(5).run.remote(1)) == 6
    again = Stage.options(**THERE).remote(6)
    assert get(again.run.remote(1)) == 7
    with pytest.raises(ActorDiedError, match=r"left by sys\.exit: it exited with code 7"):
        get(again.leave.remote(lambda: sys.exit(7)))


def test_one_that_dies_as_soon_as_it_has_come(far):
    with pytest.raises(ActorDiedError, match=r"Doomed.* while running __init__"):
        get(Doomed.options(**THERE).remote().run.remote())
    agent = inside.agents()[0].agent
    assert ray.get(agent.__ray_call__.remote(lambda self: len(self._expected)), timeout=WAIT) == 0


def test_memory_of_values_from_there_goes_back(far, wait_until):
    """Also of a process that has died: what is held of it lies in an arena of this host."""
    there = stage(THERE, 1)
    value = get(there.run.remote(np.ones(1 << 20)))
    assert inside.session_memory() >= value.nbytes
    conveyor.kill(there)
    again = stage(THERE, 2)
    assert get(again.run.remote(1)) == 3
    assert value.sum() == 2 << 20
    del value
    wait_until(lambda: inside.session_memory() < 1 << 20, WAIT)


def test_started_again_on_its_node(far):
    here, there = stage(HERE, 1, max_restarts=1), stage(THERE, 10, max_restarts=1)
    with InputNode() as inp:
        dag = there.both.bind(here.run.bind(there.run.bind(inp)), inp)
    with dag.compile() as graph:
        assert get(graph.execute(1)) == (12, 1)
        for actor in there, here:
            pid = get(actor.pid.remote())
            conveyor.kill(actor, no_restart=False)
            graph.restart()
            assert get(graph.execute(2)) == (13, 2)
            assert get(actor.pid.remote()) != pid
    assert get(there.ask.remote(here, 1)) == 2


@ray.remote(num_cpus=0, resources={"stage": 4})
class Rival:
    pass


def test_what_is_called_while_ray_has_no_place_for_it_waits(far, wait_until):
    actor = Stage.options(resources={"stage": 4}, max_restarts=1).remote(1)
    get(actor.run.remote(1))
    rival = Rival.remote()  # gets the place as soon as that is free
    conveyor.kill(actor, no_restart=False)
    wait_until(lambda: not inside.record_of(actor).alive, WAIT)
    refs = [actor.run.remote(i) for i in range(100)]
    with pytest.raises(WaitTimeoutError, match=r"Stage.* is starting"):
        conveyor.get(refs[0], timeout=0.1)
    ray.kill(rival)
    assert get(refs) == list(range(1, 101))


def test_a_connection_that_breaks_is_made_again(far):
    here, there = stage(HERE, 1), stage(THERE, 10)
    with InputNode() as inp:
        dag = here.run.bind(there.run.bind(inp))
    with dag.compile(depth=8) as graph:
        refs = []
        for i in range(600):
            if i % 200 == 100:
                inside.pump().disconnect(1, "by the test")
            refs.append(graph.execute(i))
            if len(refs) == 8:
                assert get(refs.pop(0)) == i - 7 + 11
        assert get(refs) == [i + 11 for i in range(593, 600)]
    assert inside.pump().counts(1)[4] > 1


def test_references_stand_for_their_values(far):
    here, there = stage(HERE, 1), stage(THERE, 10)
    ref = conveyor.put(np.arange(10))
    assert get(there.total.remote(ref)) == 45.0
    assert get(there.total.remote(here.run.remote(ref))) == 55.0
    with InputNode() as inp:
        dag = here.run.bind(there.run.bind(inp))
    with dag.compile() as graph:
        assert get(graph.execute(ref)).sum() == 45 + 110


def test_values_that_stay_are_fetched(far):
    here, there = stage(HERE, 1), stage(THERE, 10)
    array = np.arange(1 << 16)
    kept, other = here.keep.remote(array), there.keep.remote(array)
    assert get(there.total.remote(kept)) == float(array.sum())
    assert get(here.total.remote(other)) == float(array.sum())
    assert np.array_equal(get(other), array)


@pytest.mark.parametrize("transport", ["auto", "shm"])
def test_hints_of_tensors_between_nodes(far, transport):
    """Tensors that lie in the frames go with them. What goes beside them: test_ray_transports.py."""
    here, there = stage(HERE, 1), stage(THERE, 10)
    with InputNode() as inp:
        made = there.run.bind(inp).with_tensor_transport(transport, device="cpu")
        dag = here.run.bind(made)
    with dag.compile() as graph:
        for size in (1, 1 << 20):
            assert torch.equal(get(graph.execute(torch.ones(size))), torch.full((size,), 12.0))
