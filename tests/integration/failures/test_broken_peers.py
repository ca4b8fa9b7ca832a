"""A process that writes where it should not: others get an error that says so, and none of them hangs."""

import re
import struct
import sys

import cloudpickle
import inside
import pytest
from integration_helpers import WAIT, chain, get, hold

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import ActorDiedError, SerializationError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.usefixtures("fresh_session")

RING_MAGIC = 0x474E4952
HEAD = 64  # of a ring: where its head is


def write_over_head(offset, head):
    """Of the ring at ``offset`` in every segment that this process has mapped."""
    with open("/proc/self/maps") as maps:
        found = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) .*memfd:conveyor-segment", maps.read(), re.M)
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        for start, end in ((int(start, 16), int(end, 16)) for start, end in found):
            if start + offset + HEAD + 8 > end:
                continue
            memory.seek(start + offset)
            if struct.unpack("<I", memory.read(4))[0] == RING_MAGIC:
                memory.seek(start + offset + HEAD)
                memory.write(struct.pack("<Q", head))


@conveyor.remote
class Actor:
    def echo(self, x):
        return x

    def late(self, x, path):
        hold(path)
        return x

    def breaks(self, x):
        write_over_head(*x)
        return "broken"

    def join(self, *args):
        return args


@pytest.fixture
def actors():
    return [Actor.options(name=name).remote() for name in "abc"]


def offset_of(graph, writer):
    """Where the ring is that this actor writes."""
    number = next(i for i, info in enumerate(graph.plan.actors) if info.name == writer)
    edge = next(edge for edge in graph.plan.edges if edge.writer == number)
    return inside.supervision_of(graph).epoch.offsets[edge.id]


@pytest.mark.parametrize("head", [2**40, 2**64 - 1])
def test_a_ring_that_the_driver_reads(actors, latches, head):
    """``b`` writes over the head of the ring in which the driver waits for ``a``."""
    a, b, c = actors
    go = latches()
    with InputNode() as inp:
        graph = MultiOutputNode([a.late.bind(inp, go.path), b.breaks.bind(inp)]).compile(
            name="mixed", fail_fast=False
        )
    other = chain(c.echo).compile()
    first, second = graph.execute((offset_of(graph, "a"), head))
    assert get(second) == "broken"
    said = r"mixed, edge #\d+ \(a.late.*\), written by a, is broken"
    with pytest.raises(SerializationError, match=said):
        conveyor.wait([first], timeout=WAIT)
    for _ in range(2):
        with pytest.raises(SerializationError, match=said):
            get(first)
    assert get(other.execute(3)) == 3
    go.open()
    graph.teardown()
    assert [get(actor.echo.remote(4)) for actor in actors] == [4, 4, 4]


def test_a_ring_that_an_actor_reads(actors, latches):
    """``b`` cannot tell any more which execution it is in, and ends."""
    a, b, c = actors
    go = latches()
    with InputNode() as inp:
        node = b.join.bind(a.late.bind(inp, go.path), c.breaks.bind(inp))
        graph = node.compile(name="joined")
    ref = graph.execute((offset_of(graph, "a"), 2**40))
    said = r"(?s)actor b .*joined, edge #\d+ \(a.late.*\), written by a, is broken"
    with pytest.raises(ActorDiedError, match=said):
        get(ref)
    go.open()
    assert [get(actor.echo.remote(4)) for actor in (a, c)] == [4, 4]
