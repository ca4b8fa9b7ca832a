"""The order of an actor's tasks in a graph."""

import pytest
from defect_actors import WAIT, Recorder, seen

import conveyor
from conveyor.dag import InputNode, MultiOutputNode

pytestmark = pytest.mark.usefixtures("session")


@conveyor.remote
class PassOn:
    def handle(self, handles):
        return handles[0]


@pytest.fixture(scope="module")
def handles(session):
    """Four handles of one actor, by every way to come by one."""
    first = Recorder.options(name="of four handles").remote("a")
    again = conveyor.get_actor("of four handles")
    back = conveyor.get(PassOn.remote().handle.remote([first]), timeout=WAIT)
    once_more = conveyor.get_actor("of four handles")
    made = [first, again, back, once_more]
    assert len({id(handle) for handle in made}) == 4
    assert len({conveyor.get(h.pid.remote(), timeout=WAIT) for h in made}) == 1
    return made


def test_d18_tasks_bound_through_several_handles_run_in_bind_order(handles):
    """Elsewhere each handle counts on its own what was bound through it, so that tasks of one actor
    bound through two handles have no order. Here they must run in the order of the bind calls."""
    for turn in range(4):
        order = handles[turn:] + handles[:turn]
        with InputNode() as inp:
            # An uneven number through each handle: counting by handle would mix them up.
            binders = [order[i * i % 4 if i % 3 else i % 4] for i in range(12)]
            nodes = [handle.take.bind(inp[i]) for i, handle in enumerate(binders)]
            # What is computed first does not depend on where it stands among the outputs.
            dag = MultiOutputNode(nodes[::-1])
        with dag.compile() as graph:
            for start in (0, 100):
                numbers = list(range(start, start + 12))
                expected = [f"a{i}" for i in reversed(numbers)]
                assert conveyor.get(graph.execute(*numbers), timeout=WAIT) == expected
                assert seen(handles[0]) == numbers


def test_d18_a_ping_pong_through_several_handles_does_not_block(handles, b):
    """Elsewhere that collision can put a task before what it waits for. Here a value that goes to
    and fro between two actors must arrive, whichever handles it was bound through."""
    with InputNode() as inp:
        node = inp
        for handle in handles * 2:
            node = b.take.bind(handle.take.bind(node))
    with node.compile(depth=2) as graph:
        refs = [graph.execute(str(i)) for i in range(5)]
        for i, ref in enumerate(refs):
            assert conveyor.get(ref, timeout=WAIT) == "ba" * 8 + str(i)
    # Each execution as a whole, before the next one.
    assert seen(handles[0]) == ["ba" * n + str(i) for i in range(5) for n in range(8)]
    seen(b)
