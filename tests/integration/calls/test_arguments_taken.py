"""Arguments are taken when the call is made, wherever it waits before it is sent."""

import asyncio
import gc
import threading

import numpy as np
import pytest
from integration_helpers import WAIT, get, hold

import conveyor
from conveyor import channel
from conveyor.dag import InputNode
from conveyor.exceptions import ActorDiedError, ExecutionCancelledError, SerializationError

MIB = 1 << 20


def first_of(x):
    while hasattr(x, "__len__"):
        x = x["first"] if isinstance(x, dict) else x[0]
    return float(x)


@conveyor.remote
class Latch:
    def __init__(self):
        self.is_open = asyncio.Event()

    async def wait(self):
        await self.is_open.wait()

    async def open(self):
        self.is_open.set()


@conveyor.remote
class Actor:
    def __init__(self, x=None, *rest):
        self.x = x

    def mine(self):
        return first_of(self.x)

    def hold(self, path):
        hold(path)

    def see(self, x, *rest, **named):
        return first_of(x)

    def see_named(self, *, x, rest=None):
        return first_of(x)

    def same(self, one, two, *rest):
        return one is two

    @conveyor.method(num_returns=2)
    def see_two(self, x, *rest):
        return first_of(x), 0

    def items(self, x, *rest):
        yield first_of(x)

    def calls(self, other, latch):
        x = np.ones(20_000)
        seen = other.see.remote(x, latch.wait.remote())
        x[0] = 99
        latch.open.remote()
        return get(seen)

    def got(self, refs, *rest):
        return get(refs[0])

    def receive(self, ends, *rest):
        return ends[0].receive(timeout=WAIT)


@conveyor.remote
def see(x, *rest):
    return first_of(x)


@conveyor.remote
def items(x, *rest):
    yield first_of(x)


def eager(actor, x, pending):
    with InputNode() as inp:
        dag = actor.see.bind(inp[0], inp[1])
    return dag.execute(x, pending)


def behind_one(actor, x, pending):
    actor.see.remote([0], pending)
    return actor.see.remote(x)


WAYS = {
    "call": lambda a, x, p: a.see.remote(x, p),
    "keyword": lambda a, x, p: a.see_named.remote(x=x, rest=p),
    "inside": lambda a, x, p: a.see.remote([[x]], p),
    "beside an inner ref": lambda a, x, p: a.see.remote([x, conveyor.put(1)], p),
    "several results": lambda a, x, p: a.see_two.remote(x, p)[0],
    "retries": lambda a, x, p: a.see.options(max_task_retries=1).remote(x, p),
    "ray call": lambda a, x, p: a.__ray_call__.remote(lambda self, x, p: first_of(x), x, p),
    "closure": lambda a, x, p: a.__ray_call__.remote(lambda self, p: first_of(x), p),
    "generator": lambda a, x, p: a.items.remote(x, p),
    "function": lambda a, x, p: see.remote(x, p),
    "function here": lambda a, x, p: see.options(on=a).remote(x, p),
    "generator function": lambda a, x, p: items.remote(x, p),
    "eager": eager,
    "behind one": behind_one,
}
KINDS = {
    "list": lambda: [1.0],
    "dict": lambda: {"first": 1.0},
    "bytearray": lambda: bytearray([1]),
    "small": lambda: np.ones(3),
    "large": lambda: np.ones(100_000),
}


def change(x):
    if isinstance(x, dict):
        x["first"] = 99.0
    else:
        x[0] = 99


@pytest.mark.usefixtures("engine")
def test_arguments_that_change_after_the_call():
    actor, latch, seen = Actor.remote(), Latch.remote(), {}
    pending = latch.wait.remote()
    for way, call in WAYS.items():
        for kind, make in KINDS.items():
            x = make()
            ref = call(actor, x, pending)
            change(x)
            seen[way, kind] = ref
    get(latch.open.remote())
    values = {
        key: next(ref) if isinstance(ref, conveyor.StreamRef) else get(ref)
        for key, ref in seen.items()
    }
    assert {key: value for key, value in values.items() if value != 1} == {}


@pytest.mark.usefixtures("local")
def test_arguments_of_calls_that_wait_behind_many(latches):
    actor, go, x = Actor.remote(), latches(), np.ones(3)
    actor.hold.remote(go.path)
    seen = [actor.see.remote(x if i == 70 else [0]) for i in range(71)]
    x[0] = 99
    go.open()
    assert get(seen[-1]) == 1


@pytest.mark.usefixtures("local")
def test_arguments_of_constructors():
    latch, x = Latch.remote(), np.ones(100_000)
    made = Actor.remote(x, latch.wait.remote())
    x[0] = 99
    get(latch.open.remote())
    assert get(made.mine.remote()) == 1


@pytest.mark.usefixtures("engine")
def test_arguments_of_an_actors_calls():
    caller, callee, latch = Actor.remote(), Actor.remote(), Latch.remote()
    assert get(caller.calls.remote(callee, latch)) == 1


@pytest.mark.usefixtures("engine")
def test_an_argument_that_is_given_twice_arrives_as_one():
    actor, latch, x = Actor.remote(), Latch.remote(), [1]
    at_once = actor.same.remote(x, x)
    later = actor.same.remote(x, x, latch.wait.remote())
    get(latch.open.remote())
    assert get([at_once, later]) == [True, True]


@pytest.mark.usefixtures("engine")
def test_what_cannot_be_sent_is_told_when_the_call_is_made():
    actor, latch = Actor.remote(), Latch.remote()
    pending = latch.wait.remote()
    for call in actor.see, see.options(on=actor), actor.items:
        with pytest.raises(SerializationError, match=r"argument 0 of .*lock"):
            call.remote(threading.Lock(), pending)
    after = actor.see.remote([1], pending)
    get(latch.open.remote())
    assert get(after) == 1


@pytest.mark.usefixtures("engine")
def test_what_arguments_refer_to_lasts_until_they_are_sent():
    actor, latch = Actor.remote(), Latch.remote()
    pending = latch.wait.remote()
    seen = actor.got.remote([conveyor.put(5)], pending)
    by = Actor.remote()
    called = actor.__ray_call__.remote(lambda self, a, p: get(a[0].see.remote([6])), [by], pending)
    del by
    sender, receiver = channel.open()
    received = actor.receive.remote([receiver], pending)
    del receiver
    gc.collect()
    get(latch.open.remote())
    assert get([seen, called]) == [5, 6]
    sender.send(7, timeout=WAIT)
    assert get(received) == 7


@pytest.mark.usefixtures("local")
def test_memory_of_calls_that_wait_is_given_back(wait_until):
    def memory():
        """But for what the kernel may take at any time."""
        gc.collect()
        with open("/proc/self/smaps_rollup") as file:
            kib = {
                line.split(":")[0]: int(line.split()[1]) for line in file if line.endswith("kB\n")
            }
        return (kib["Rss"] - kib["LazyFree"]) << 10

    actor, latch = Actor.remote(), Latch.remote()
    pending = latch.wait.remote()
    get(actor.see.remote([0]))
    x = np.ones(8 * MIB)
    before = memory()

    def waiting():
        made = [actor.see.remote(x, pending) for _ in range(2)]
        assert memory() - before > 100 * MIB
        return made

    for ref in (refs := waiting()):
        assert ref.cancel()
    wait_until(lambda: memory() - before < 32 * MIB)  # it stays warm for some seconds
    with pytest.raises(ExecutionCancelledError):
        get(refs[0])
    refs = waiting()
    conveyor.kill(actor)
    get(latch.open.remote())
    with pytest.raises(ActorDiedError):
        get(refs)
    wait_until(lambda: memory() - before < 32 * MIB)
    actor, pending = Actor.remote(), Latch.remote().wait.remote()
    get(actor.see.remote([0]))
    refs = waiting()
    conveyor.shutdown()
    wait_until(lambda: memory() - before < 32 * MIB)
    assert len(refs) == 2
