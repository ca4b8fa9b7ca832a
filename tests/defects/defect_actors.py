"""The actor that most of these tests use, and how they wait."""

import asyncio
import os
import sys
import threading
import time

import cloudpickle

import conveyor
from conveyor.dag import InputNode

cloudpickle.register_pickle_by_value(sys.modules[__name__])

# How long anything may take that is not held up on purpose.
WAIT = 60


@conveyor.remote
class Recorder:
    """Remembers what its methods were given, and can be held up."""

    def __init__(self, name=""):
        self.name = name
        self.seen = []

    def take(self, x):
        self.seen.append(x)
        return f"{self.name}{x}"

    def take_when(self, x, path):
        """Like ``take``, but not before there is a file at ``path``."""
        end = time.monotonic() + 60
        while not os.path.exists(path):
            if time.monotonic() > end:
                raise TimeoutError(path)
            time.sleep(0.002)
        return self.take(x)

    def enter(self, inside, go):
        """Say that the method runs, and stay in it until ``go``."""
        open(inside, "w").close()
        return self.take_when("left", go)

    def die(self, x):
        if x == "die":
            os._exit(7)
        return x

    def fail(self, x):
        raise LookupError(x)

    def take_seen(self):
        """What was given since the last time this was asked."""
        seen, self.seen = self.seen, []
        return seen

    def pid(self):
        return os.getpid()


def seen(actor):
    return conveyor.get(actor.take_seen.remote(), timeout=WAIT)


def single(method, *args):
    """A graph of one task; ``args`` are constants after the input."""
    with InputNode() as inp:
        return method.bind(inp, *args)


def room(graph, *args):
    """How many more executions the graph accepts now, and their refs."""
    refs = []
    while True:
        try:
            refs.append(graph.try_execute(*args))
        except conveyor.exceptions.CapacityError:
            return len(refs), refs


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


class Background:
    """A call on a thread of its own."""

    def __init__(self, function, *args, **kwargs):
        self._outcome = []
        self._thread = threading.Thread(target=self._run, args=(function, args, kwargs))
        self._thread.start()

    def _run(self, function, args, kwargs):
        try:
            self._outcome.append((function(*args, **kwargs), None))
        except BaseException as error:
            self._outcome.append((None, error))

    @property
    def running(self):
        return self._thread.is_alive()

    def result(self, timeout=WAIT):
        self._thread.join(timeout)
        assert not self.running, "the call has not returned"
        value, error = self._outcome.pop()
        if error is not None:
            raise error
        return value
