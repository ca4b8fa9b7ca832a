"""Transports pass the checks that are there for all of them, and what goes wrong in one is told."""

import re

import pytest

import conveyor
from conveyor import testing, transport
from conveyor.dag import InputNode, MultiOutputNode, TransportHint
from conveyor.exceptions import GraphError, TaskError, TransportError, WaitTimeoutError
from conveyor.plan.route import choose
from conveyor.testing import FaultyTransport
from conveyor.testing.peers import RemotePeer

pytestmark = pytest.mark.usefixtures("session")


@pytest.fixture
def registered():
    """Registers transports for one test."""
    made = []

    def register(*args, **options):
        one = FaultyTransport(*args, **options)
        transport.register(one)
        made.append(one.name)
        return one.name

    yield register
    for name in made:
        transport.unregister(name)


@pytest.fixture(scope="module")
def pair(session):
    made = RemotePeer.remote(), RemotePeer.remote()
    yield made
    for peer in made:
        conveyor.kill(peer)


@pytest.mark.parametrize("check", testing.transport_checks(), ids=str)
def test_shared_memory(check):
    check.run("shm")


@pytest.mark.parametrize("check", testing.transport_checks(), ids=str)
def test_one_that_delays_and_reorders(check, registered):
    check.run(registered(delay=(0.0, 0.004), reorder=True))


def test_what_a_transport_does_wrong_is_found(registered, monkeypatch):
    name = registered(sends=range(3, 100))
    known = {check.name: check for check in testing.transport_checks()}
    some = [known["many_under_way"].run, known["errors_are_values"].run]
    monkeypatch.setattr("conveyor.testing.conformance._CHECKS", some)
    with pytest.raises(
        AssertionError, match=r"'faulty' fails 2 checks:\nmany_under_way: TaskError"
    ):
        testing.check_transport(name)
    testing.check_transport("shm")
    with pytest.raises(ValueError, match="no transport is registered as 'pigeon'"):
        testing.check_transport("pigeon")


def total_over(name, a, b, **options):
    with InputNode() as inp:
        made = a.make_big.bind(inp).with_tensor_transport(name)
        return b.total.bind(made).compile(**options)


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ({"offers": [2]}, "could not be sent .*: InjectedFault: transfer 2 is not offered"),
        ({"sends": [2]}, "could not be sent .*: InjectedFault: transfer 2 is not sent"),
        ({"receives": [2]}, "could not be received .*: InjectedFault: transfer 2 is not received"),
    ],
)
def test_a_transfer_that_fails_is_an_error_of_its_execution(faults, said, pair, registered):
    graph = total_over(registered(**faults), *pair, depth=4)
    refs = [graph.execute(number) for number in range(6)]
    for number, ref in enumerate(refs):
        if number == 2:
            with pytest.raises(TransportError, match=said) as told:
                ref.get(timeout=20)
            assert isinstance(told.value, TaskError)
            assert re.search(
                r"edge #1 \(.*make_big\): tensors .* by the transport 'faulty'", str(told.value)
            )
        else:
            assert ref.get(timeout=20) == (number, number, number)
    graph.teardown()


def test_who_waits_for_tensors_is_told_for_which(pair, registered, wait_until):
    graph = total_over(registered(stuck=[1]), *pair)
    assert graph.execute(0).get(timeout=20)[0] == 0
    ref = graph.execute(1)

    def awaited():
        waits = graph.status().actors[1].waits_for
        return waits if waits is not None and "tensors" in waits.source else None

    writer, reader = graph.status().actors
    waits = wait_until(awaited)
    assert waits.source == f"the tensors of {writer.name}.make_big"
    assert (waits.writer, waits.execution) == (writer.name, 1)
    with pytest.raises(
        WaitTimeoutError, match=f"{reader.name} is idle, waiting for the tensors of"
    ):
        ref.get(timeout=0.05)
    graph.teardown()
    # The actors are as good as before.
    graph = total_over("shm", *pair)
    assert graph.execute(3).get(timeout=20)[0] == 3
    graph.teardown()


def test_an_actor_serves_others_while_tensors_are_on_their_way(pair, registered):
    a, b = pair
    graph = total_over(registered(stuck=[0]), a, b)
    graph.execute(0)
    assert conveyor.get(b.kept_totals.remote(), timeout=20) == []
    other = total_over("shm", a, b)
    assert other.execute(1).get(timeout=20)[0] == 1
    other.teardown()
    graph.teardown()


def test_the_plan_says_what_travels_beside_its_frames(pair, registered):
    a, b = pair
    name = registered()
    with InputNode() as inp:
        made = a.make_big.bind(inp).with_tensor_transport(name)
        graph = MultiOutputNode([b.total.bind(made), made]).compile()
    told = graph.explain()
    assert re.search(r"wait +tensors of .*make_big +← ", told)
    assert "faulty, depth 16: asked for by with_tensor_transport" in told
    assert "shm, depth 16: the executor takes no part in faulty" in told
    graph.teardown()


def test_what_goes_beside_the_frames_is_counted(pair, registered):
    a, b = pair
    graph = total_over(registered(delay=(0.05, 0.05)), a, b)
    for number in range(3):
        graph.execute(number).get(timeout=20)
    edge = graph.stats().edges[1]
    assert edge.frames == 3
    assert 3 * 4 * (1 << 20) < edge.bytes < 3 * 4 * (1 << 20) + 10_000
    (wait,) = edge.waits
    assert wait.waiting.count == 3
    assert wait.waiting.max_s >= 0.05
    graph.teardown()


def test_only_actors_take_part_in_a_transport(pair, registered):
    a, b = pair
    name = registered()
    with InputNode() as inp:
        result = a.make_big.bind(inp).with_tensor_transport(name)
        with pytest.raises(GraphError, match="only actors take part"):
            result.compile()
    with InputNode() as inp:
        given = inp.with_tensor_transport(name)
        with pytest.raises(GraphError, match="only actors take part"):
            b.keep.bind(given).compile()


def test_readers_that_ask_for_different_transports(registered):
    hints = [
        TransportHint(registered("first")),
        TransportHint(),
        TransportHint(registered("second")),
    ]
    with pytest.raises(
        GraphError, match=r"a\.f: its readers ask for the transports 'first' and 'second'"
    ):
        choose("a.f", hints)


def test_what_cannot_be_registered(registered):
    with pytest.raises(TypeError, match=r"a conveyor\.transport\.Transport is registered, not 3"):
        transport.register(3)
    nameless = FaultyTransport("")
    with pytest.raises(TypeError, match="has no name"):
        transport.register(nameless)
    for taken in ("shm", "auto", registered("mine")):
        with pytest.raises(ValueError, match="already"):
            transport.register(FaultyTransport(taken))
    with pytest.raises(ValueError, match="no transport was registered as 'pigeon'"):
        transport.unregister("pigeon")
    with pytest.raises(ValueError, match="no transport 'pigeon'"):
        FaultyTransport(over="pigeon")


def test_a_transport_that_cannot_be_used_here(pair):
    class Missing(FaultyTransport):
        def viable(self):
            return "libpigeon.so is not installed"

    transport.register(Missing("missing"))
    try:
        with pytest.raises(
            GraphError, match=r"which cannot be used: libpigeon\.so is not installed"
        ):
            total_over("missing", *pair)
    finally:
        transport.unregister("missing")


@conveyor.remote
class Yielder:
    def items(self, count):
        yield from range(count)


def test_items_of_a_generator_travel_in_frames(registered):
    actor = Yielder.remote()
    with InputNode() as inp:
        items = actor.items.bind(inp).with_tensor_transport(registered())
        with pytest.raises(
            GraphError, match="is about a generator, whose items the executor reads"
        ):
            items.compile()
    with InputNode() as inp:
        graph = actor.items.bind(inp).with_tensor_transport("shm").compile()
    assert list(graph.execute(3)) == [0, 1, 2]
    graph.teardown()
    conveyor.kill(actor)


class Unopened(FaultyTransport):
    def open(self, wire):
        if wire.rank == 1:
            raise OSError("no pigeons")
        return super().open(wire)


def test_an_end_that_cannot_be_opened_is_the_compiles_error(pair):
    total_over("shm", *pair).teardown()  # they know each other now
    before = conveyor.get([peer.holdings.remote() for peer in pair])
    transport.register(Unopened("unopened"))
    try:
        for _ in range(3):
            with pytest.raises(
                TransportError,
                match=r"edge #1 \(.*\): .*'s end could not be opened by the "
                r"transport 'unopened': OSError: no pigeons",
            ):
                total_over("unopened", *pair)
    finally:
        transport.unregister("unopened")
    assert conveyor.get([peer.holdings.remote() for peer in pair]) == before


def test_a_name_is_known_as_long_as_it_is_registered(registered):
    assert registered("soon") in transport.names()
    assert transport.get("soon").name == "soon"
    assert transport.get("later") is None
    with InputNode() as inp:
        inp.with_tensor_transport("soon")
        with pytest.raises(
            ValueError, match=r"unknown transport 'later'; known are auto, .*, soon"
        ):
            inp.with_tensor_transport("later")
