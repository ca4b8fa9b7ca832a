"""What happens while a call is failed: each phase is short, and can be run again and again."""

import gc
import os
import signal
import threading
import time
from collections import Counter
from contextlib import suppress

import numpy as np

import conveyor
from conveyor.dag import InputNode
from conveyor.exceptions import ActorDiedError

#: s; a bound for what takes milliseconds.
WAIT = 10
LARGE = 300_000
#: Mapped on its own (native/arena/view.h: kBigBlock).
HUGE = 17 << 20


class Wrong(Exception):
    """A value that should have been another."""


def expect(value, right):
    if not np.array_equal(value, right):
        raise Wrong(f"{str(value)[:60]} is not {str(right)[:60]}")


def get(ref):
    return conveyor.get(ref, timeout=WAIT)


def descriptors():
    """How many this process has of each kind."""
    kinds = Counter()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            kinds[os.readlink(f"/proc/self/fd/{fd}").partition(":[")[0]] += 1
    return {f"descriptors of {kind}": count for kind, count in kinds.items()}


def left_here():
    """What this process has that it would have to give back."""
    from conveyor import _core
    from conveyor.runtime import context

    gc.collect()
    found = {
        **descriptors(),
        # One begins with the first line that an actor prints.
        "threads": sum(one.name != "conveyor-printing" for one in threading.enumerate()),
        "leases": _core.live_leases(),
    }
    runtime = context.running()
    if runtime is not None:
        runtime.process.arena.give_back()
        found["blocks"] = runtime.process.arena.blocks_out
    # Not the allocators' mappings, which come and go.
    with open("/proc/self/maps") as file:
        found["mappings"] = sum("memfd:conveyor" in line for line in file)
    return found


def tables():
    """What the driver keeps of its actors and graphs."""
    from conveyor.runtime import context

    driver = context.running()
    if driver is None:
        return {}
    table = driver.table
    found = {
        # Others may ask for shared ones as long as the session lasts. The last dead ones are remembered.
        "actors known": sum(
            not record.actor.shared and record.id.index not in table._remembered for record in table
        ),
        "processes by number": len(table.pids()),
        "slots": -table.free_slots,
        "graphs": len(driver.deployer),
        "refs": driver.exports.entry_count,
        "sockets of requests": driver.dispatcher.served,
    }
    for record in table:
        if not record.alive:
            continue
        bits = record.bits
        found[f"bits of {record.id.name}"] = bits._next - len(bits._returned)
        found[f"mailboxes of {record.id.name}"] = len(record.mailboxes)
    return found


def wait_until_no_ref_is_kept():
    """What an actor does not make good it gives up on a thread of its own."""
    from conveyor.runtime import context

    end = time.monotonic() + WAIT
    while context.current().exports.entry_count and time.monotonic() < end:
        time.sleep(0.005)


class Point:
    """Of a module that travels by value."""

    def __init__(self, x):
        self.x = x


@conveyor.remote
class Actor:
    def pid(self):
        return os.getpid()

    def left(self):
        return left_here()

    def echo(self, x):
        return x

    def add(self, x, y=1):
        return x + y

    def ones(self, n):
        made = conveyor.empty((n,), np.uint8)
        made[:] = 1
        return made

    def two(self, x):
        return x, x

    @conveyor.method(tensor_transport="auto")
    def stay(self, n):
        return np.ones(n, np.uint8)

    def move(self, point):
        return Point(point.x + 1)

    def ask(self, other, x):
        """Of another actor."""
        return get(other.add.remote(x))

    def open(self, refs):
        return [get(ref) for ref in refs]

    def run(self, graph, x):
        """A graph that somebody else has compiled."""
        return get(graph.execute(x))

    def count(self, n):
        for i in range(n):
            yield np.full(LARGE, i, np.uint8) if i % 2 else i


class Phase:
    """``open`` once for a session, then ``run`` again and again."""

    pids = ()
    #: Whether its actors are there from one run to the next.
    lasting = True

    def open(self):
        conveyor.init()
        self.actors = [Actor.remote() for _ in range(2)]
        self.pids = [get(actor.pid.remote()) for actor in self.actors]

    def close(self):
        self.actors = []
        conveyor.shutdown()

    def left(self):
        found = tables()
        for i, actor in enumerate(self.actors):
            left = get(actor.left.remote())
            found.update({f"{name} of actor {i}": count for name, count in left.items()})
        return found


class Graph(Phase):
    """Executions with small and large values, a value made in place, two results, and an effect."""

    name = "graph"

    def open(self):
        super().open()
        a, b = self.actors
        with InputNode() as inp:
            self.graph = b.add.bind(a.echo.bind(inp)).compile()
        with InputNode() as inp:
            self.made = b.echo.bind(a.ones.bind(inp)).compile()
        with InputNode() as inp:
            left, right = a.two.options(num_returns=2).bind(inp)
            self.both = conveyor.dag.MultiOutputNode([b.echo.bind(left), right]).compile()
        self.array = np.arange(LARGE, dtype=np.uint8)
        self.huge = np.ones(HUGE, np.uint8)

    def close(self):
        self.graph = self.made = self.both = None
        super().close()

    def run(self):
        refs = [self.graph.execute(i) for i in range(3)]
        expect([get(ref) for ref in refs], [1, 2, 3])
        expect(get(self.graph.execute(self.array)), self.array + np.uint8(1))
        expect(get(self.made.execute(LARGE)).sum(), LARGE)
        first, second = self.both.execute((1, "x"))
        expect(get(first)[1], "x")
        expect(get(second)[0], 1)
        del first, second
        expect(get(self.graph.execute(self.huge))[-1], 2)
        self.graph.execute(self.array)  # dropped


class Call(Phase):
    """Calls with small and large values, of a class by value, and to an actor by an actor's argument."""

    name = "call"

    def open(self):
        super().open()
        self.array = np.arange(LARGE, dtype=np.uint8)
        self.huge = np.ones(HUGE, np.uint8)

    def run(self):
        a, b = self.actors
        refs = [a.add.remote(i) for i in range(3)]
        expect([get(ref) for ref in refs], [1, 2, 3])
        expect(get(a.echo.remote(self.array)), self.array)
        expect(get(b.add.remote(a.ones.remote(LARGE)))[0], 2)
        expect(get(a.echo.remote(self.huge))[-1], 1)
        expect(get(a.move.remote(Point(1))).x, 2)
        one, two = a.two.options(num_returns=2).remote("x")
        expect(get([one, two]), ["x", "x"])
        a.echo.remote(self.array)  # dropped


class Stream(Phase):
    """The items of a graph's generator and of a call's, small and large."""

    name = "stream"

    def open(self):
        super().open()
        with InputNode() as inp:
            self.graph = self.actors[0].count.bind(inp).compile()

    def close(self):
        self.graph = None
        super().close()

    def run(self):
        next(self.graph.execute(5))  # and dropped; what had come is skipped below
        for stream in (self.graph.execute(5), self.actors[0].count.remote(5)):
            items = stream.get(timeout=WAIT)
            expect(len(items), 5)
            expect([int(np.max(item)) for item in items], [0, 1, 2, 3, 4])


class Refs(Phase):
    """Refs inside of values, made here and in an actor, and a graph's handle; an actor calls another."""

    name = "refs"

    def open(self):
        super().open()
        self.array = np.arange(LARGE, dtype=np.uint8)
        with InputNode() as inp:
            self.graph = self.actors[1].add.bind(inp).compile()

    def close(self):
        self.graph = None
        super().close()

    def run(self):
        a, b = self.actors
        expect(get(a.ask.remote(b, 1)), 2)
        small, large = b.add.remote(1), b.echo.remote(self.array)
        opened = get(a.open.remote([small, large]))
        expect(opened[0], 2)
        expect(opened[1], self.array)
        expect(get(a.run.remote(self.graph, 1)), 2)
        expect(get(self.graph.execute(1, timeout=WAIT)), 2)


class Direct(Phase):
    """Values that stay are fetched, passed on and listed; then nothing of them is kept."""

    name = "direct"

    def run(self):
        a, b = self.actors
        theirs, mine = a.stay.remote(LARGE), conveyor.put(np.ones(5), tensor_transport="auto")
        expect(get(theirs)[0], 1)
        expect([get(b.add.remote(one))[0] for one in (mine, theirs)], [2, 2])
        mine = theirs = None
        end = time.monotonic() + WAIT
        while conveyor.objects():
            expect(time.monotonic() < end, True)


class Compile(Phase):
    """A graph is compiled, used once and torn down."""

    name = "compile"

    def run(self):
        a, b = self.actors
        with InputNode() as inp:
            graph = b.add.bind(a.ones.bind(inp)).compile()
        try:
            expect(get(graph.execute(LARGE))[0], 2)
        finally:
            graph.teardown()


class Start(Phase):
    """An actor is started, used by a call, by another actor and in a graph, and killed."""

    name = "start"
    lasting = False

    def open(self):
        conveyor.init()
        self.actors = []  # who stays keeps descriptors of those who were there, until others come

    def run(self):
        actors = []
        try:
            a, b = [actors.append(Actor.remote()) or actors[-1] for _ in range(2)]
            expect(get(a.add.remote(1)), 2)
            expect(get(b.echo.remote(a.ones.remote(LARGE))).sum(), LARGE)
            expect(get(a.ask.remote(b, 1)), 2)
            opened = a.open.remote([b.add.remote(1)])
            try:
                expect(get(opened), [2])
            finally:  # the refs of an argument that an actor dies with unread are kept (docs/limits.md)
                with suppress(Exception):
                    get(opened)
                wait_until_no_ref_is_kept()
            with InputNode() as inp:
                graph = b.add.bind(a.ones.bind(inp)).compile()
            expect(get(graph.execute(LARGE))[0], 2)
            graph.teardown()
        finally:
            for actor in actors:
                conveyor.kill(actor)


class Restart(Phase):
    """An actor of a graph dies, and the graph is restarted."""

    name = "restart"

    def open(self):
        super().open()
        a, b = self.actors
        with InputNode() as inp:
            self.graph = b.add.bind(a.ones.bind(inp)).compile()

    def close(self):
        self.graph = None
        super().close()

    def run(self):
        with suppress(ActorDiedError):  # it is dead already, if a restart has failed before
            os.kill(get(self.actors[0].pid.remote()), signal.SIGKILL)
            get(self.graph.execute(LARGE))
        self.graph.restart()
        self.pids = [get(actor.pid.remote()) for actor in self.actors]
        expect(get(self.graph.execute(LARGE))[0], 2)


class Session(Phase):
    """A whole session: nothing is there yet that could be used again."""

    name = "session"
    lasting = False

    def open(self):
        self.actors = []

    def run(self):
        conveyor.init()
        try:
            a, b = Actor.remote(), Actor.remote()
            array, huge = np.arange(LARGE, dtype=np.uint8), np.ones(HUGE, np.uint8)
            expect(get(a.echo.remote(array)), array)
            expect(get(b.echo.remote(a.ones.remote(LARGE))).sum(), LARGE)
            with InputNode() as inp:
                graph = b.add.bind(a.echo.bind(inp)).compile()
            expect(get(graph.execute(1)), 2)
            expect(get(graph.execute(huge))[-1], 2)
            expect(next(b.count.remote(3)), 0)
        finally:
            conveyor.shutdown()


PHASES = {
    phase.name: phase
    for phase in (Graph, Call, Stream, Refs, Direct, Compile, Start, Restart, Session)
}
