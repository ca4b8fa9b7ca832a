"""Refs inside of values whose reader dies: they are let go of, and the living still load theirs."""

import os
import signal
import sys
import threading

import cloudpickle
import inside
import numpy as np
import pytest
from integration_helpers import WAIT, compiled, get, hold, large

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import (
    ActorDiedError,
    ConveyorError,
    GraphTornDownError,
    SerializationError,
)
from conveyor.graph.handles import GraphService
from conveyor.runtime import context

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Fatal:
    """Ends the process that decodes it, if that has the file ``path``."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return end_if_there, (self.path,)


def end_if_there(path):
    if os.path.exists(path):
        os._exit(3)


class Member:
    def __init__(self, *args):
        self.kept = list(args)
        self.calls = []

    def hold(self, _, go):
        hold(go)

    def values(self, refs):
        return [conveyor.get(ref) for ref in refs]

    def keep(self, refs):
        self.kept += refs

    def values_kept(self):
        return self.values(self.kept)

    def echo(self, x):
        return x

    def puts(self, value, *_):
        return [conveyor.put(value)]

    def puts_later(self, value, go):
        hold(go)
        return [conveyor.put(value)]

    def send(self, other, size):
        """Calls with refs of this actor's, and with its copies of others'."""
        own, result = conveyor.put(np.ones(size)), other_result(size)
        self.calls += [other.values.remote([own, result, *self.kept]) for _ in range(3)]

    def outcomes(self):
        """What has become of these calls."""
        return [failure(call) for call in self.calls]

    def drop(self):
        self.kept.clear()
        self.calls.clear()

    def execute(self, graph, value):
        """Of a graph of the driver's; its result stays here."""
        self.kept.append(graph.execute([conveyor.put(large(value))]))

    def count(self):
        yield from range(2)

    def pid(self):
        return os.getpid()


def other_result(size):
    return conveyor.put(np.zeros(size))


def wait_for_room():
    """How many executions of handles of the driver's graphs do. What an actor that dies has not sent yet is
    not among them, and nobody can give it up."""
    served = [one._on_message.__self__ for one in context.running()._connections._open]
    services = [service for service in served if type(service) is GraphService]
    return sum(len(service._queue) + service._busy for service in services)


def failure(ref):
    try:
        ref.get(timeout=WAIT)
    except ConveyorError as error:
        return type(error).__name__


@pytest.fixture(scope="module", autouse=True)
def session(leaves_nothing):
    with leaves_nothing():
        conveyor.init()
        yield
        conveyor.shutdown()


@pytest.fixture(autouse=True)
def nothing_is_kept(session, wait_until):
    yield
    wait_until(lambda: inside.kept() == 0, WAIT, "the end of all exported results")
    assert not context.running().exports._borrows


@pytest.fixture
def members():
    return [conveyor.remote(Member).remote() for _ in range(3)]


@pytest.fixture
def go(latches):
    return latches()


@pytest.fixture
def busy(go):
    """Has an actor read nothing more before ``go``; for it must have begun."""

    def make(*actors):
        for actor in actors:
            actor.hold.remote(None, go.path)

    return make


@pytest.mark.parametrize("size", [1_000, 200_000])
def test_calls_that_a_killed_actor_has_not_read(members, busy, wait_until, size):
    a, b, _ = members
    busy(a)
    ref, put = b.echo.remote(np.ones(size)), conveyor.put(np.ones(size))
    calls = [a.values.remote([ref, put, ref]) for _ in range(3)]
    del ref, put
    assert inside.kept() == 2
    conveyor.kill(a)
    for call in calls:
        with pytest.raises(ActorDiedError):
            get(call)
    wait_until(lambda: inside.kept() == 0)


def test_who_sends_to_the_dead_keeps_nothing(members, wait_until):
    a, b, _ = members
    get(a.echo.remote(0))
    os.kill(get(a.pid.remote()), signal.SIGKILL)
    calls = []
    for _ in range(20):  # some of them before its death is known
        try:
            calls.append(a.values.remote([conveyor.put(large(1))]))
        except ActorDiedError:
            break
    for call in calls:
        with pytest.raises(ActorDiedError):
            get(call)
    wait_until(lambda: inside.kept() == 0)
    assert get(b.values.remote([conveyor.put(large(1))])) == [large(1)]


@pytest.mark.parametrize("size", [1_000, 200_000])
def test_of_two_readers_one_is_killed_and_the_other_still_loads_it(
    members, busy, go, wait_until, size
):
    a, b, _ = members
    with InputNode() as inp:
        graph = MultiOutputNode([a.keep.bind(inp), b.keep.bind(inp)]).compile()
    busy(a, b)
    results = graph.execute([conveyor.put(np.ones(size))])
    conveyor.kill(b)
    with pytest.raises(ActorDiedError):
        get(results[1])
    wait_until(lambda: inside.kept() == 1)
    go.open()
    wait_until(lambda: [value.sum() for value in get(a.values_kept.remote())] == [size])
    get(a.drop.remote())
    wait_until(lambda: inside.kept() == 0)
    graph.teardown()


@pytest.mark.parametrize("method", ["keep", "echo"])
def test_a_reader_that_dies_when_it_has_loaded_it_takes_nothing_from_the_other(
    members, busy, go, wait_until, method
):
    """Its load and its death are one use."""
    a, b, c = members
    with InputNode() as inp:
        dag = MultiOutputNode([a.keep.bind(inp), getattr(b, method).bind(inp)])
    graph = dag.compile(fail_fast=False)
    busy(a)
    results = graph.execute([conveyor.put(large("there"))])
    get(results[1])
    conveyor.kill(b)
    with pytest.raises(ActorDiedError):
        get(results[0])
    del results
    assert get(c.values.remote([conveyor.put(large(1))])) == [large(1)]
    wait_until(lambda: inside.kept() == 1)
    go.open()
    wait_until(lambda: get(a.values_kept.remote()) == [large("there")])
    get(a.drop.remote())
    wait_until(lambda: inside.kept() == 0)
    graph.teardown()


@pytest.mark.parametrize("size", [1_000, 200_000])
def test_an_actor_that_sends_refs_to_one_that_is_killed(members, busy, wait_until, size):
    a, b, _ = members
    busy(b)
    get(a.keep.remote([conveyor.put(large("a copy"))]))
    get(a.send.remote(b, size))
    wait_until(lambda: inside.kept() == 3)
    conveyor.kill(b)
    assert get(a.outcomes.remote()) == ["ActorDiedError"] * 3
    wait_until(lambda: inside.kept() == 1)
    get(a.drop.remote())
    wait_until(lambda: inside.kept() == 0)


def test_an_actor_that_sends_refs_and_is_killed_with_its_reader(members, busy, wait_until):
    a, b, _ = members
    busy(b)
    get(a.send.remote(b, 1_000))
    wait_until(lambda: inside.kept() == 2)
    conveyor.kill(a)
    conveyor.kill(b)
    wait_until(lambda: inside.kept() == 0)


def test_an_actor_that_is_started_again_loads_what_it_is_sent_then(latches, wait_until):
    actor = conveyor.remote(Member).options(max_restarts=3).remote()
    for _ in range(3):
        go = latches()
        actor.hold.remote(None, go.path)
        calls = [actor.values.remote([conveyor.put(large(1))]) for _ in range(3)]
        conveyor.kill(actor, no_restart=False)
        for call in calls:
            with pytest.raises(ActorDiedError):
                get(call)
        wait_until(lambda: inside.kept() == 0)
        assert get(actor.values.remote([conveyor.put(large(2))])) == [large(2)]
        wait_until(lambda: inside.kept() == 0)


@pytest.mark.parametrize("size", [1_000, 200_000])
def test_a_reader_has_left_and_another_is_killed(members, busy, go, latches, size, wait_until):
    """Of a graph that is torn down: the driver has left when the value comes, its other reader is killed
    before it reads it."""
    a, b, _ = members
    made = latches()
    with InputNode() as inp:
        refs = a.puts_later.bind(inp, made.path)
        graph = MultiOutputNode([refs, b.values.bind(refs)]).compile()
    results = graph.execute(np.ones(size))
    busy(b)
    tearing_down = threading.Thread(target=graph.teardown)
    tearing_down.start()
    wait_until(lambda: graph.status().state == "torn down")
    made.open()
    conveyor.kill(b)
    tearing_down.join(WAIT)
    assert not tearing_down.is_alive()
    for result in results:
        with pytest.raises((GraphTornDownError, ActorDiedError)):
            get(result)
    del results, result
    wait_until(lambda: inside.kept() == 0)


@pytest.mark.parametrize("restarts", [0, 1])
def test_an_actor_that_dies_before_it_has_read_its_constructors_arguments(
    members, go, restarts, wait_until
):
    go.open()
    actor_class = conveyor.remote(Member).options(max_restarts=restarts)
    actor = actor_class.remote(Fatal(go.path), [conveyor.put(large(1))])
    with pytest.raises(ConveyorError):
        get(actor.echo.remote(0))
    del actor
    wait_until(lambda: inside.kept() == 0)


def test_an_actor_whose_process_does_not_start_keeps_no_arguments(monkeypatch, wait_until):
    driver = context.running()

    def refuse(*args):
        raise OSError("no process for you")

    with monkeypatch.context() as patched:
        patched.setattr(driver._engine, "spawn", refuse)
        with pytest.raises(OSError, match="for you"):
            conveyor.remote(Member).remote([conveyor.put(large(1))])
    wait_until(lambda: inside.kept() == 0)


def test_a_submitter_dies_that_waits_for_room(members, go, wait_until):
    """What it wants to execute has not been sent on, and nobody hears of what it has executed."""
    a, _, _ = members
    graph = compiled(lambda inp: a.hold.bind(inp, go.path), depth=1)
    submitter = conveyor.remote(Member).options(max_concurrency=4).remote()
    get(submitter.execute.remote(graph, 1))
    for value in range(2, 5):
        submitter.execute.remote(graph, value)
    wait_until(lambda: wait_for_room() == 3, what="the others to wait for room")
    wait_until(lambda: inside.kept() == 5)  # a result, and all arguments
    conveyor.kill(submitter)
    go.open()
    wait_until(lambda: inside.kept() == 0)
    get(graph.execute([conveyor.put(large(5))]))
    graph.teardown()


def test_a_submitter_dies_before_it_has_heard_what_it_has_executed(members, go, wait_until):
    a, b, _ = members
    graph = compiled(lambda inp: a.hold.bind(inp, go.path), depth=1)
    get(b.execute.remote(graph, 1))
    pid = get(b.pid.remote())
    b.execute.remote(graph, 2)
    wait_until(lambda: wait_for_room() == 1, what="the second to wait for room")
    os.kill(pid, signal.SIGSTOP)
    go.open()
    tickets = context.running().exports._borrows._exports
    wait_until(lambda: any(maker == 0 for maker, _ in list(tickets.values())), what="the answer")
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: inside.kept() == 0)
    graph.teardown()


def test_a_stream_inside_of_a_value_is_refused_and_refs_beside_it_are_let_go_of(members):
    a, b, _ = members
    items = b.count.remote()
    with pytest.raises(SerializationError, match="cannot be pickled: its items come to this"):
        a.echo.remote([conveyor.put(large(1)), items])
    assert list(items) == [0, 1]
