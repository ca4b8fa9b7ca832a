"""Calls to oneself, and actors that wait for each other: answered where another call may run, else a
``DeadlockError`` that names the cycle."""

import contextlib
import queue
import random
import sys
import threading
import time

import cloudpickle
import pytest
from integration_helpers import WAIT

import conveyor
from conveyor.dag import InputNode
from conveyor.exceptions import ConveyorError, DeadlineExceededError, DeadlockError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.usefixtures("session")


def steps(*handles):
    with InputNode() as node:
        step = node
        for handle in handles:
            step = handle.walk.bind(step)
        return step.compile()


class Node:
    """Walks along a path of handles: each gets what the next one returns."""

    def meet(self, **peers):
        self.peers = peers
        self.values = queue.SimpleQueue()
        self.begun = threading.Event()
        self.barrier = threading.Barrier(2, timeout=WAIT)

    def ping(self):
        return "pong"

    def big(self, value):
        return value

    def walk(self, path):
        if path in ("", "pong"):  # the end, or what the step before has returned
            return "pong"
        return conveyor.get(self.peers[path[0]].walk.remote(path[1:]))

    def gives_up(self, way, path, graph=None):
        """Wait in some way that has a deadline; return the error, and what may still be got."""
        if graph is not None:
            ref = graph.execute(path[1:], deadline=SOON if way == "deadline" else None)
        elif way == "items":
            ref = self.peers[path[0]].items.remote(path[1:])
            assert ref.next() == "first"
        else:
            ref = self.peers[path[0]].walk.remote(path[1:])
        end = time.monotonic() + SOON
        while True:
            try:
                GIVING_UP[way](ref)
                error = None
            except TimeoutError as timeout:
                error = type(timeout).__name__
            if time.monotonic() >= end:
                return error, [] if way in ("items", "deadline") else [ref]

    def with_wait(self, path):
        ref = self.peers[path[0]].walk.remote(path[1:])
        conveyor.wait([ref])
        return conveyor.get(ref)

    def any_of(self, *paths):
        refs = [self.peers[path[0]].walk.remote(path[1:]) for path in paths]
        (first, *_), _ = conveyor.wait(refs)
        return conveyor.get(first)

    def all_of(self, *paths):
        return conveyor.get([self.peers[path[0]].walk.remote(path[1:]) for path in paths])[-1]

    def items_of(self, path):
        return list(self.peers[path[0]].items.remote(path[1:]))[-1]

    def items(self, path):
        yield "first"
        yield self.walk(path)

    def as_argument(self, path):
        # The call waits for its argument, which waits for this very actor.
        return conveyor.get(self.peers["b"].big.remote(self.peers[path[0]].walk.remote(path[1:])))

    def submit(self, path):
        self.ref = self.peers[path[0]].walk.remote(path[1:])

    def fetch(self):
        return conveyor.get(self.ref)

    def in_a_thread(self, path):
        """A thread of the user's own keeps nobody from anything: this returns, and it is answered."""

        def walk():
            self.peers["b"].reported.remote(self.walk(path))

        threading.Thread(target=walk).start()

    def reported(self, value):
        self.values.put(value)

    def report(self):
        return self.values.get(timeout=WAIT)

    def announced(self):
        self.begun.set()

    def announcement(self):
        return self.begun.wait(WAIT)

    def execute(self, graph, value):
        return conveyor.get(graph.execute(value))

    def execute_and_report(self, value):
        self.reported(self.execute(self.peers["graph"], value))

    def execute_next(self, n):
        return conveyor.get(self.peers["graph"].execute(n - 1)) if n else "pong"

    def fill(self, graph, value):
        return [graph.execute(value) for _ in range(100)]

    def fill_own(self, names, value):
        self.graph = steps(*(self.peers[name] for name in names))
        return len(self.fill(self.graph, value))

    def compile_and_execute(self, names, value):
        with InputNode() as node:
            step = node
            for name in names:
                step = self.peers[name].walk.bind(step)
            graph = step.compile()
        try:
            return conveyor.get(graph.execute(value))
        finally:
            graph.teardown()


class Async(Node):
    async def a_ping(self):
        return "pong"

    async def awaits(self, path):
        return await self.peers[path[0]].awaits.remote(path[1:]) if path else "pong"

    async def awaits_execution(self, path):
        return await self.peers[path].execute_and_report.remote("") if path else "pong"

    async def blocks(self, path):
        return self.walk(path)


@pytest.fixture
def make():
    made = []

    def make(*kinds):
        nodes = {}
        for name, (cls, options) in zip("abcde", kinds, strict=False):
            unique = f"{name}-{random.getrandbits(32):x}"
            nodes[name] = conveyor.remote(cls).options(name=unique, **options).remote()
        made.extend(nodes.values())
        conveyor.get([node.meet.remote(**nodes) for node in nodes.values()], timeout=WAIT)
        return list(nodes.values())

    yield make
    for node in made:
        conveyor.kill(node)


PLAIN, LOOP = (Node, {}), (Async, {})


def threads(n):
    return Node, {"max_concurrency": n}


def deadlocks(ref, *named):
    with pytest.raises(DeadlockError) as caught:
        conveyor.get(ref, timeout=WAIT)
    assert isinstance(caught.value, ConveyorError)
    for name in named:
        assert name in str(caught.value)
    return caught.value


#: How long waits with a deadline last here: much longer than it takes to find a cycle.
SOON = 0.3
GIVING_UP = {
    "get": lambda ref: conveyor.get(ref, timeout=SOON),
    "get of a list": lambda ref: conveyor.get([ref], timeout=SOON),
    "polling": lambda ref: conveyor.get(ref, timeout=0.003),
    "polling with wait": lambda ref: conveyor.wait([ref], timeout=0.003),
    "future": lambda ref: ref.future().result(SOON),
    "derived": lambda ref: ref[0].get(SOON),
    "items": lambda ref: ref.next(SOON),
    "of a graph": lambda ref: ref.get(SOON),
    "deadline": lambda ref: ref.get(),
}


@pytest.mark.parametrize("way", GIVING_UP)
@pytest.mark.parametrize("kind", [PLAIN, threads(1), LOOP], ids=["plain", "thread", "loop"])
def test_a_wait_with_a_deadline_is_part_of_no_cycle(make, way, kind):
    a, b = make(kind, PLAIN)
    graph = steps(b) if way in ("of a graph", "deadline") else None
    with graph or contextlib.nullcontext():
        # What `b` does waits for `a`, without a deadline, and goes on once `a` has given up.
        error, refs = conveyor.get(a.gives_up.remote(way, "ba", graph), timeout=WAIT)
        expected = {"deadline": "DeadlineExceededError", "polling with wait": None}
        assert error == expected.get(way, "WaitTimeoutError")
        assert conveyor.get(refs, timeout=WAIT) == ["pong"] * len(refs)
        assert conveyor.get(b.walk.remote("a"), timeout=WAIT) == "pong"


def test_a_step_whose_execution_has_a_deadline_is_part_of_no_cycle(make):
    a, b = make(LOOP, PLAIN)
    with InputNode() as inp, a.awaits_execution.bind(inp).compile() as graph:
        conveyor.get(b.meet.remote(graph=graph), timeout=WAIT)
        first = graph.execute("b", deadline=SOON)
        # `b` executes the same graph: that begins when the deadline has ended the first execution.
        with pytest.raises(DeadlineExceededError):
            conveyor.get(first, timeout=WAIT)
        assert conveyor.get(b.report.remote(), timeout=WAIT) == "pong"


WAYS = ["walk", "with_wait", "any_of", "all_of", "items_of"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("path", ["a", "ba", "bca"])
def test_plain_actors_in_a_cycle(make, way, path):
    nodes = make(PLAIN, PLAIN, PLAIN)
    deadlocks(getattr(nodes[0], way).remote(path), " waits for ")
    assert conveyor.get([n.ping.remote() for n in nodes], timeout=WAIT) == ["pong"] * 3


def test_the_cycle_is_named_by_methods(make):
    a, _ = make(PLAIN, PLAIN)
    error = deadlocks(a.with_wait.remote("ba"), ".walk waits for ", ".with_wait waits for ")
    assert len(set(error.cycle)) == 2


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("path", ["a", "aa", "ba", "bca"])
def test_with_threads_left_it_is_answered(make, way, path):
    a, *_ = make(threads(4), threads(4), threads(4))
    assert conveyor.get(getattr(a, way).remote(path), timeout=WAIT) == "pong"


def test_a_large_value_from_oneself(make):
    (a,) = make((Large, {"max_concurrency": 2}))
    assert conveyor.get(a.echo.remote(), timeout=WAIT) == 3_000_000


class Large(Node):
    def echo(self):
        return len(conveyor.get(self.peers["a"].big.remote(b"x" * 3_000_000)))


@pytest.mark.parametrize("path", ["aa", "aba"])
def test_when_every_thread_waits_the_cycle_is_named(make, path):
    a, _ = make(threads(2), PLAIN)
    deadlocks(a.walk.remote(path), "max_concurrency")
    assert conveyor.get(a.walk.remote(""), timeout=WAIT) == "pong"


@pytest.mark.parametrize("way", ["walk", "blocks"])
@pytest.mark.parametrize("path", ["a", "ba"])
def test_a_blocked_event_loop_is_named(make, way, path):
    a, b = make(LOOP, PLAIN)
    deadlocks(getattr(a, way).remote(path), "event loop")
    assert conveyor.get([a.ping.remote(), b.ping.remote()], timeout=WAIT) == ["pong"] * 2


@pytest.mark.parametrize("path", ["a", "aaa", "ba"])
def test_awaiting_is_answered(make, path):
    a, _ = make(LOOP, LOOP)
    assert conveyor.get(a.awaits.remote(path), timeout=WAIT) == "pong"


@pytest.mark.parametrize("kind", [PLAIN, LOOP, threads(2)], ids=["plain", "loop", "threads"])
def test_submitted_returned_and_fetched_later(make, kind):
    (a,) = make(kind)
    submitted = a.submit.remote("a")
    if "max_concurrency" in kind[1]:
        conveyor.get(submitted, timeout=WAIT)
        assert conveyor.get(a.fetch.remote(), timeout=WAIT) == "pong"
        return
    fetched = a.fetch.remote()
    # The call to itself was queued behind this one, or had its turn before.
    with contextlib.suppress(DeadlockError):
        assert conveyor.get(fetched, timeout=WAIT) == "pong"


class Slow:
    """Is encoded slowly."""

    def __reduce__(self):
        time.sleep(0.5)
        return Slow, ()


class Giver(Node):
    """Its refs go to others as refs."""

    def lend_encoded_late(self):
        """What is waited for when it is sent: by then it takes its time, and has a ref to pickle."""
        first, inner = self.peers["b"].report.remote(), self.peers["c"].ping.remote()
        return [self.peers["c"].first_of.remote(first, Slow(), [inner])]

    def first_of(self, first, *_):
        return first

    def lend(self, path):
        return [self.peers[path[0]].walk.remote(path[1:])]

    def get_lent(self, refs):
        conveyor.get(self.peers["b"].announced.remote())
        return conveyor.get(refs[0])

    def pass_on(self, name, refs):
        """The call waits here for its argument, which others make."""
        return conveyor.get(self.peers[name].big.remote(refs[0]))

    def slow(self, value, seconds, announce=None):
        if announce is not None:
            conveyor.get(self.peers[announce].announced.remote())
        time.sleep(seconds)
        return value

    def delegate(self, name, refs):
        return conveyor.get(self.peers[name].get_lent.remote(refs))

    def get_lent_by(self, lender, maker, path):
        """What ``lender`` has called with an argument that ``maker`` has called ``path`` for."""
        refs = conveyor.get(self.peers[maker].lend.remote(path))
        (ref,) = conveyor.get(self.peers[lender].lend_with.remote(refs))
        return conveyor.get(ref)

    def lend_for_later(self, name, path):
        return [self.peers[name].walk_later.remote(path)]

    def walk_later(self, path):
        self.report()
        # In a call of its own all threads but this one are left.
        return conveyor.get(self.peers[path[0]].walk.remote(path[1:]))

    def lend_with(self, refs):
        return [self.peers["c"].big.remote(refs[0])]

    def get_what_is_lent(self, name, path):
        # `name` makes the ref of a call that this very actor has to answer.
        (ref,) = conveyor.get(self.peers[name].lend.remote(path))
        return conveyor.get(ref)

    def get_together(self, name, path):
        """Two threads get the same ref, which is made when both are here."""
        if self.barrier.wait() == 0:
            (self.lent,) = conveyor.get(self.peers[name].lend.remote(path))
        self.barrier.wait()
        return conveyor.get(self.lent)

    def wait_for_what_is_lent(self, name, path):
        (ref,) = conveyor.get(self.peers[name].lend.remote(path))
        conveyor.wait([ref])
        return conveyor.get(ref)


GIVER = Giver, {}


@pytest.mark.parametrize("way", ["get_what_is_lent", "wait_for_what_is_lent"])
@pytest.mark.parametrize("path", ["a", "ca"])
def test_a_ref_that_another_actor_has_made(make, way, path):
    a, b, c = make(GIVER, GIVER, GIVER)
    deadlocks(getattr(a, way).remote("b", path), f".{way} waits for ")
    assert conveyor.get([n.ping.remote() for n in (a, b, c)], timeout=WAIT) == ["pong"] * 3
    assert conveyor.get(getattr(a, way).remote("b", "c"), timeout=WAIT) == "pong"


def test_all_threads_wait_for_the_same_ref(make):
    a, _ = make((Giver, {"max_concurrency": 2}), GIVER)
    refs = [a.get_together.remote("b", "a") for _ in range(2)]
    values, errors = [], []
    for ref in refs:
        try:
            values.append(conveyor.get(ref, timeout=WAIT))
        except DeadlockError as error:
            errors.append(str(error))
    # The error of one thread is the turn of the call that the other waits for.
    assert values == ["pong"]
    assert ".get_together waits for " in errors[0]


def test_a_ref_of_the_drivers(make):
    a, b, c = make(GIVER, threads(4), GIVER)
    # Its call has not been sent when `a` begins to wait for it.
    ref = a.big.remote(b.report.remote())
    waiting = c.delegate.remote("a", [ref])
    assert conveyor.get(b.announcement.remote(), timeout=WAIT)
    conveyor.get(b.reported.remote("value"), timeout=WAIT)
    deadlocks(waiting, ".get_lent waits for ")
    assert conveyor.get(ref, timeout=WAIT) == "value"


def test_a_call_that_waits_for_its_argument(make):
    a, b = make(PLAIN, PLAIN)
    deadlocks(a.as_argument.remote("a"), ".as_argument waits for ")
    assert conveyor.get([a.ping.remote(), b.ping.remote()], timeout=WAIT) == ["pong"] * 2


def test_an_argument_that_is_made_by_one_actor_after_the_other(make):
    a, b, c, d = make(GIVER, GIVER, GIVER, (Giver, {"max_concurrency": 2}))
    with InputNode() as node:
        graph = c.slow.bind(b.slow.bind(node, 0.3, "d"), 1.5).compile()
    with graph:
        # At first `a` waits for `b`; when `b` has done its part, and waits for `a`, for `c` alone.
        waits = a.pass_on.remote("d", [graph.execute("pong")])
        assert conveyor.get(d.announcement.remote(), timeout=WAIT)
        back = b.walk.remote("a")
        assert conveyor.get([waits, back], timeout=WAIT) == ["pong"] * 2


def test_an_argument_that_is_made_remote_by_who_waits(make):
    """`a` waits for a call of `b`'s that has not begun: its argument is a call of `c`'s, which waits for
    `a`."""
    a, b, c = make(GIVER, GIVER, GIVER)
    deadlocks(a.get_lent_by.remote("b", "c", "a"), ".get_lent_by waits for ", ".walk")
    assert conveyor.get([n.ping.remote() for n in (a, b, c)], timeout=WAIT) == ["pong"] * 3
    a, b, c = make(GIVER, GIVER, GIVER)
    assert conveyor.get(a.get_lent_by.remote("b", "c", "b"), timeout=WAIT) == "pong"


def test_such_an_argument_where_the_driver_calls(make):
    a, b, c = make(GIVER, (Giver, {"max_concurrency": 4}), GIVER)
    (lent,) = conveyor.get(c.lend_for_later.remote("b", "a"), timeout=WAIT)
    # The driver's call has not begun: `c` has called for its argument, which will wait for `a`.
    ref = c.big.remote(lent)
    waiting = a.get_lent.remote([ref])
    assert conveyor.get(b.announcement.remote(), timeout=WAIT)
    conveyor.get(b.reported.remote("value"), timeout=WAIT)
    deadlocks(waiting, ".get_lent waits for ")
    # Either of the two that wait is told. If it was `b`, the driver's call has failed with its argument.
    conveyor.wait([ref], timeout=WAIT)
    if ref.has_failed():
        deadlocks(ref, ".walk_later waits for ")
    else:
        assert conveyor.get(ref, timeout=WAIT) == "pong"
    assert conveyor.get([n.ping.remote() for n in (a, b, c)], timeout=WAIT) == ["pong"] * 3


def test_who_is_waited_for_is_requested_while_the_call_is_encoded(make):
    """Whoever answers hears of what the encoding needs."""
    a, b, _, d = make(GIVER, (Giver, {"max_concurrency": 4}), GIVER, GIVER)
    waiting = d.get_lent.remote(conveyor.get(a.lend_encoded_late.remote(), timeout=WAIT))
    assert conveyor.get(b.announcement.remote(), timeout=WAIT)
    conveyor.get(b.reported.remote("value"), timeout=WAIT)
    assert conveyor.get(waiting, timeout=WAIT) == "value"


def test_any_of_several_is_enough(make):
    a, *_ = make(PLAIN, PLAIN, PLAIN)
    assert conveyor.get(a.any_of.remote("a", "b"), timeout=WAIT) == "pong"
    deadlocks(a.any_of.remote("ba", "ca"), ".any_of waits for ")
    deadlocks(a.all_of.remote("b", "a"), ".all_of waits for ")


def test_a_thread_of_the_users_own_blocks_nobody(make):
    a, b = make(PLAIN, threads(2))
    conveyor.get(a.in_a_thread.remote("a"), timeout=WAIT)
    assert conveyor.get(a.ping.remote(), timeout=WAIT) == "pong"
    assert conveyor.get(b.report.remote(), timeout=WAIT) == "pong"


class InItsConstructor:
    def __init__(self, name):
        conveyor.get(conveyor.get_actor(name).ping.remote())

    def ping(self):
        return "pong"


@pytest.mark.parametrize("options", [{}, {"max_concurrency": 2}], ids=["plain", "threads"])
def test_a_constructor_that_waits_for_its_own_actor(options):
    name = f"self-{random.getrandbits(32):x}"
    actor = conveyor.remote(InItsConstructor).options(name=name, **options).remote(name)
    with pytest.raises(ConveyorError, match="constructor"):
        conveyor.get(actor.ping.remote(), timeout=WAIT)


# Graphs


@pytest.mark.parametrize("path", ["a", "ba"])
def test_a_step_that_waits_for_its_own_actor(make, path):
    a, b = make(PLAIN, PLAIN)
    with steps(a) as graph:
        deadlocks(graph.execute(path), " waits for ")
        assert conveyor.get(graph.execute(""), timeout=WAIT) == "pong"
        assert conveyor.get(graph.execute("b"), timeout=WAIT) == "pong"
    assert conveyor.get([a.ping.remote(), b.ping.remote()], timeout=WAIT) == ["pong"] * 2


@pytest.mark.parametrize("path", ["a", "aa", "ba"])
def test_with_threads_a_step_may_call_its_own_actor(make, path):
    a, _ = make(threads(3), PLAIN)
    with steps(a) as graph:
        assert conveyor.get(graph.execute(path), timeout=WAIT) == "pong"
        assert conveyor.get(graph.execute(path), timeout=WAIT) == "pong"


def test_an_actor_executes_a_graph_whose_actor_waits_for_it(make):
    a, b, c = make(PLAIN, PLAIN, PLAIN)
    deadlocks(a.compile_and_execute.remote("b", "a"), ".compile_and_execute waits for ", ".walk")
    assert conveyor.get([n.ping.remote() for n in (a, b, c)], timeout=WAIT) == ["pong"] * 3
    assert conveyor.get(a.compile_and_execute.remote("b", "c"), timeout=WAIT) == "pong"


@pytest.mark.parametrize("way", ["execute", "fill"])
@pytest.mark.parametrize("path", ["", "a"])
def test_a_graph_of_the_drivers_that_the_caller_holds_up(make, way, path):
    a, b = make(PLAIN, PLAIN)
    # With `path`, the step on `b` waits for `a`; without, `a` itself has a step.
    with steps(b) if path else steps(b, a) as graph:
        deadlocks(getattr(a, way).remote(graph, path), f".{way} waits for ")
        assert conveyor.get([a.ping.remote(), b.ping.remote()], timeout=WAIT) == ["pong"] * 2
        assert conveyor.get(graph.execute(""), timeout=WAIT) == "pong"


def test_two_graphs_whose_steps_execute_each_other(make):
    a, b = make(PLAIN, PLAIN)
    with (
        InputNode() as n,
        a.execute_next.bind(n).compile() as one,
        InputNode() as m,
        b.execute_next.bind(m).compile() as two,
    ):
        conveyor.get([a.meet.remote(graph=two), b.meet.remote(graph=one)], timeout=WAIT)
        assert conveyor.get(one.execute(1), timeout=WAIT) == "pong"
        error = deadlocks(one.execute(2), " waits for ")
        # An async step would wait as long for its own graph.
        assert "make the method that waits async" not in str(error)
        assert "call an async method, which is no step" in str(error)


def test_more_executions_than_fit_of_ones_own_graph(make):
    a, b = make(PLAIN, PLAIN)
    deadlocks(a.fill_own.remote("b", "a"), ".fill_own waits for ")
    assert conveyor.get([a.ping.remote(), b.ping.remote()], timeout=WAIT) == ["pong"] * 2


def test_with_threads_such_an_actor_answers(make):
    a, *_ = make(threads(2), PLAIN, PLAIN)
    assert conveyor.get(a.compile_and_execute.remote("b", "a"), timeout=WAIT) == "pong"
