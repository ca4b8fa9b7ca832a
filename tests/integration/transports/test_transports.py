"""Transports pass the checks that are there for all of them, and what goes wrong in one is told."""

import re
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
from integration_helpers import hold
from nodes_apart import APART

import conveyor
from conveyor import testing, transport
from conveyor.dag import InputNode, MultiOutputNode, TransportHint
from conveyor.exceptions import (
    ActorDiedError,
    DeadlineExceededError,
    ExecutionCancelledError,
    GraphError,
    SerializationError,
    TaskError,
    TransportError,
    WaitTimeoutError,
)
from conveyor.plan.channels import choose
from conveyor.testing import FaultyTransport
from conveyor.testing.conformance import RemotePeer

PRELOAD = ["torch"]
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
@pytest.mark.parametrize("name", ["shm", "gloo", "nixl"])
def test_ours(name, check):
    why_not = transport.get(name).viable()
    if why_not is not None:
        pytest.skip(f"{name}: {why_not}")
    check.run(name)


@conveyor.remote
class Freer:
    def make(self, left):
        import torch

        made = torch.zeros(1_000_000)
        made.untyped_storage().resize_(left)
        return made


@pytest.mark.parametrize("name", ["shm", "gloo", "nixl"])
def test_a_tensor_whose_storage_was_freed_is_refused(name, pair):
    why_not = transport.get(name).viable()
    if why_not is not None:
        pytest.skip(f"{name}: {why_not}")
    freer = Freer.remote()
    with InputNode() as inp:
        freed = freer.make.bind(inp).with_tensor_transport(name)
        graph = pair[0].mean.bind(freed).compile()
    with graph:
        for left in (0, 4000):
            with pytest.raises(
                SerializationError, match=f"has {left} bytes and the tensor needs 4000000"
            ):
                conveyor.get(graph.execute(left), timeout=60)
        assert conveyor.get(graph.execute(4_000_000), timeout=60) == 0
    conveyor.kill(freer)


@pytest.mark.parametrize("check", testing.transport_checks(), ids=str)
def test_one_that_delays_and_reorders(check, registered):
    check.run(registered(delay=(0.0, 0.004), reorder=True))


def test_what_a_transport_does_wrong_is_found(registered, monkeypatch):
    name = registered(sends=range(3, 100))
    known = {check.name: check for check in testing.transport_checks()}
    some = [known[one].run.args[1] for one in ("many_under_way", "errors_are_values")]
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
                ref.get(timeout=60)
            assert isinstance(told.value, TaskError)
            assert re.search(
                r"edge #1 \(.*make_big\): tensors .* by the transport 'faulty'", str(told.value)
            )
        else:
            assert ref.get(timeout=60) == (number, number, number)
    graph.teardown()


def test_who_waits_for_tensors_is_told_for_which(pair, registered, wait_until):
    graph = total_over(registered(stuck=[1]), *pair)
    assert graph.execute(0).get(timeout=60)[0] == 0
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
    assert graph.execute(3).get(timeout=60)[0] == 3
    graph.teardown()


def test_an_actor_serves_others_while_tensors_are_on_their_way(pair, registered):
    a, b = pair
    graph = total_over(registered(stuck=[0]), a, b)
    graph.execute(0)
    assert conveyor.get(b.held_totals.remote(), timeout=60) == []
    other = total_over("shm", a, b)
    assert other.execute(1).get(timeout=60)[0] == 1
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
    # Between hosts it says from where to where before that.
    assert re.search(r"faulty, (depth 16: )?asked for by with_tensor_transport", told)
    if not APART:  # there it says from where to where instead
        assert "shm, depth 16: the executor takes no part in faulty" in told
    graph.teardown()


def test_what_goes_beside_the_frames_is_counted(pair, registered):
    a, b = pair
    graph = total_over(registered(delay=(0.3, 0.3)), a, b)
    for number in range(3):
        graph.execute(number).get(timeout=60)
    edge = graph.stats().edges[1]
    assert edge.frames == 3
    assert 3 * 4 * (1 << 20) < edge.bytes < 3 * 4 * (1 << 20) + 10_000
    (wait,) = edge.waits
    assert wait.waiting.count == 3
    # Its reader may come to the wait some time after the transfer has begun.
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
        GraphError, match=r"a\.f: .*transport='first'.* and .*transport='auto'.*transport='second'"
    ):
        choose("a.f", hints)


def test_a_transport_of_another_device(registered):
    transport.get(registered("far")).capabilities = transport.Capabilities(frozenset({"cuda"}))
    assert choose("a.f", [TransportHint("far")]).name == "far"
    assert choose("a.f", [TransportHint("far", "cuda")]).name == "far"
    with pytest.raises(GraphError, match="asks for tensors on the device 'cpu'"):
        choose("a.f", [TransportHint("far", "cpu")])


def test_what_cannot_be_registered(registered):
    with pytest.raises(TypeError, match=r"a conveyor\.transport\.Transport is registered, not 3"):
        transport.register(3)
    nameless = FaultyTransport("")
    with pytest.raises(TypeError, match="has no name"):
        transport.register(nameless)
    for unshown in ("two\nlines", " spaced"):
        with pytest.raises(ValueError, match="is shown to people"):
            transport.register(FaultyTransport(unshown))
    unable = FaultyTransport("unable")
    unable.capabilities = ("cpu",)
    with pytest.raises(
        TypeError, match=r"the capabilities of 'unable' are a conveyor\.transport\.Capabilities"
    ):
        transport.register(unable)
    with pytest.raises(ValueError, match="delay is"):
        FaultyTransport(delay=(-1, -5))
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


def test_a_transport_that_cannot_be_sent_is_named(pair):
    locked = FaultyTransport("locked")
    locked.lock = threading.Lock()
    transport.register(locked)
    try:
        with pytest.raises(
            SerializationError,
            match=r"^the transport 'locked', for actor Peer\S*, cannot be sent: its part \.lock is of type "
            r"_thread\.lock",
        ):
            total_over("locked", *pair)
    finally:
        transport.unregister("locked")
    total_over("shm", *pair).teardown()


class Odd(FaultyTransport):
    """Over shared memory; one of its methods does what ``does`` says, on transfer 1."""

    def __init__(self, name, does):
        super().__init__(name)
        self.does = does

    def open(self, wire):
        if self.does == "open returns nothing":
            return None
        return OddEndpoint(self.does, super().open(wire), wire)


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no words")


class OddEndpoint(transport.Endpoint):
    def __init__(self, does, inner, wire):
        self.does = does
        self.inner = inner
        self.wire = wire
        self.raised = False

    def send(self, tensors, number):
        now = number == 1
        if now and self.does == "send returns nothing":
            return None
        if now and self.does == "the backlog cannot be sent":
            for _ in range(200):
                self.wire.send(b"padding")
            self.wire.send(
                lambda: (yield),
            )  # which cannot be pickled
        inner = self.inner.send(tensors, number)

        def begin():
            future = Future()
            match self.does:
                case "its future is cancelled":
                    future.cancel()
                case "begin is interrupted":
                    raise GeneratorExit
                case "it fails without words":
                    future.set_exception(Unspeakable())
                case _:
                    return inner.begin()
            return future

        return transport.Sending(begin if now else inner.begin)

    def receive(self, specs, note, number):
        now = number == 1
        if now and self.does == "receive returns nothing":
            return None
        if now and self.does == "the wrong tensors come":
            came = Future()
            came.set_result([17])
            return came
        if now and self.does == "its reading is cancelled":
            came = Future()
            came.cancel()
            return came
        return self.inner.receive(specs, note, number)

    def drop(self, number):
        self.inner.drop(number)

    def progress(self):
        self.inner.progress()

    def abort(self, reason):
        self.inner.abort(reason)

    def close(self):
        self.inner.close()


@conveyor.remote
class Holder:
    def hold(self, _tensors, path, runs):
        Path(runs).touch()
        hold(path)


class LastWord(FaultyTransport):
    """Its writer says something at its end, when there is no room; its reader notes whether that has come."""

    def __init__(self, name, path):
        super().__init__(name)
        self.path = path

    def open(self, wire):
        return LastWordEndpoint("", super().open(Quiet(wire)), wire, self.path)


class Quiet:
    """A wire without what is not its transport's."""

    def __init__(self, wire):
        self._wire = wire

    def __getattr__(self, name):
        return getattr(self._wire, name)

    def receive(self):
        return [one for one in self._wire.receive() if type(one[1]) is not bytes]


class LastWordEndpoint(OddEndpoint):
    def __init__(self, does, inner, wire, path):
        super().__init__(does, inner, wire)
        self.path = path

    def abort(self, reason):
        super().abort(reason)
        if self.wire.rank == 0:
            for _ in range(200):  # the reader runs a method, and takes none of them
                self.wire.send(b"padding")

    def close(self):
        if self.wire.rank == 0:
            self.wire.send(b"the last word")
            Path(f"{self.path}.left").touch()
        else:
            told = any(word == b"the last word" for _, word in self.wire.receive())
            Path(self.path).write_text(str(told))
        self.inner.close()


def test_what_a_writer_says_at_its_end_comes_to_a_reader_that_was_busy(
    pair, latches, tmp_path, wait_until
):
    """Memory that it lets go of, say."""
    path, go, runs = tmp_path / "told", latches(), latches()
    transport.register(LastWord("last", str(path)))
    try:
        maker, holder = pair[0], Holder.remote()
        with InputNode() as inp:
            made = maker.make_big.bind(inp).with_tensor_transport("last")
            graph = holder.hold.bind(made, go.path, runs.path).compile()
        graph.execute(4)
        wait_until(lambda: runs.is_open)
        ends = threading.Thread(target=graph.teardown)
        ends.start()
        try:
            wait_until(Path(f"{path}.left").exists)
        finally:
            go.open()
            ends.join()
        assert path.read_text() == "True"
    finally:
        transport.unregister("last")


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("send returns nothing", "could not be sent .*: TypeError: send.. has returned a NoneType"),
        ("its future is cancelled", "could not be sent .* was cancelled"),
        ("begin is interrupted", "could not be sent .*: GeneratorExit"),
        (
            "it fails without words",
            "could not be sent .*: Unspeakable .whose message cannot be made",
        ),
        (
            "receive returns nothing",
            "could not be received .*: TypeError: receive.. has returned a NoneType, no Future",
        ),
        ("the wrong tensors come", "could not be received .*was announced, and a int came"),
        ("its reading is cancelled", "could not be received .* was cancelled"),
    ],
)
def test_whatever_a_transport_does_its_readers_are_told(does, said, pair):
    transport.register(Odd("odd", does))
    try:
        with total_over("odd", *pair, depth=4) as graph:
            refs = [graph.execute(number) for number in range(4)]
            for number, ref in enumerate(refs):
                if number == 1:
                    with pytest.raises(TransportError, match=said):
                        ref.get(timeout=60)
                else:
                    assert ref.get(timeout=60)[0] == number
    finally:
        transport.unregister("odd")


def test_an_end_that_is_none_is_the_compiles_error(pair):
    transport.register(Odd("odd", "open returns nothing"))
    try:
        with pytest.raises(
            TransportError, match=r"could not be opened .*open\(\) has returned a NoneType"
        ):
            total_over("odd", *pair)
    finally:
        transport.unregister("odd")
    conveyor.get([peer.holdings.remote() for peer in pair], timeout=60)


def test_who_waits_behind_a_message_that_cannot_be_sent_is_told(pair):
    transport.register(Odd("odd", "the backlog cannot be sent"))
    try:
        with total_over("odd", *pair, depth=4) as graph:
            assert graph.execute(0).get(timeout=60)[0] == 0
            for number in (1, 2):
                with pytest.raises(TransportError):
                    graph.execute(number).get(timeout=60)
    finally:
        transport.unregister("odd")


@pytest.mark.parametrize("how", ["cancelled", "late"])
def test_tensors_that_nobody_waits_for_hold_nobody_up(how, pair, registered):
    with total_over(registered(stuck=[1]), *pair, depth=4) as graph:
        assert graph.execute(0).get(timeout=60)[0] == 0
        if how == "late":
            with pytest.raises(DeadlineExceededError):
                graph.execute(1, deadline=0.2).get(timeout=60)
        else:
            ref = graph.execute(1)
            ref.cancel()
            with pytest.raises(ExecutionCancelledError):
                ref.get(timeout=60)
        assert graph.execute(2).get(timeout=60)[0] == 2


def test_a_late_execution_that_nobody_looks_at_holds_nobody_up(pair, registered):
    with total_over(registered(stuck=[1]), *pair, depth=4) as graph:
        late = graph.execute(1, deadline=0.2) if graph.execute(0).get(timeout=60) else None
        assert graph.execute(2).get(timeout=60)[0] == 2
        with pytest.raises(DeadlineExceededError):
            late.get(timeout=60)


def test_a_graph_keeps_a_transport_that_is_registered_no_more():
    a, b = (RemotePeer.options(max_restarts=1).remote() for _ in range(2))
    transport.register(FaultyTransport("gone"))
    graph = total_over("gone", a, b)
    transport.unregister("gone")
    assert graph.execute(1).get(timeout=60)[0] == 1
    with pytest.raises(ActorDiedError):
        a.die.remote().get(timeout=60)
    graph.restart()
    assert graph.execute(2).get(timeout=60)[0] == 2
    graph.teardown(kill_actors=True)


def test_nothing_of_a_transfer_waits_for_the_collector(pair, registered):
    """Else large tensors would pile up in the arena of their writer."""
    name = registered(delay=(0.0001, 0.001), reorder=True, receives=[5])
    a, b = pair
    graph = total_over(name, a, b, depth=2, memory_bytes=40 << 20)
    for number in range(30):
        ref = graph.execute(number)
        if number == 5:
            with pytest.raises(TransportError):
                ref.get(timeout=60)
        else:
            assert ref.get(timeout=60)[0] == number
    graph.teardown()


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
