"""What many tests of behaviour do: chain methods, get with a bound, hold an actor in a call."""

import functools
import os
import signal
import time

import conveyor
from conveyor.dag import InputNode

#: s; a bound for what should take milliseconds.
WAIT = 60


def get(ref):
    return conveyor.get(ref, timeout=WAIT)


def measured(test):
    """Of a test that compares measured times: it may fail up to seven times, for a minute.

    Other work of the machine makes times longer, by chance and for a while. What is wrong fails each time.
    """

    @functools.wraps(test)
    def again_and_again(*args, **kwargs):
        end = time.monotonic() + 60
        for number in range(7):
            try:
                return test(*args, **kwargs)
            except AssertionError:
                if time.monotonic() > end:
                    raise
                time.sleep(number / 2)  # what disturbs it may be over then
        return test(*args, **kwargs)

    return again_and_again


def chain(*methods):
    """Each method gets what the one before it returns."""
    with InputNode() as inp:
        node = inp
        for method in methods:
            node = method.bind(node)
    return node


def compiled(node_of, **options):
    """The graph of the node that ``node_of`` makes of the input."""
    with InputNode() as inp:
        return node_of(inp).compile(**options)


def hold(path):
    """In an actor: do not return before there is a file ``path``."""
    end = time.monotonic() + 60
    while not os.path.exists(path):
        if time.monotonic() > end:
            raise TimeoutError(path)
        time.sleep(0.002)


def freeze(pid):
    """Stop a process. From then on none of its threads takes anything, on whichever processor it ran."""
    import psutil  # not in actors, which import this module

    os.kill(pid, signal.SIGSTOP)
    end = time.monotonic() + WAIT
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < end, f"{pid} is not stopped"
        time.sleep(0.002)


#: A program of the inline engine with an actor whose ``hold`` returns when ``open`` was called; a test adds
#: what it asks of a ref.
INLINE_HOLDING = """
import asyncio, select
import conveyor
from conveyor.dag import InputNode

conveyor.init(engine="inline")

@conveyor.remote
class Actor:
    def __init__(self):
        self.go = asyncio.Event()
    async def hold(self, x):
        await self.go.wait()
        return x
    async def open(self):
        self.go.set()

a = Actor.remote()
with InputNode() as inp:
    dag = a.hold.bind(inp)
"""


def large(value):
    """A text that begins with ``value``, and is too large to travel with a reference to it."""
    return f"{value:<5000}"
