"""Actors that hold references, on nodes that share no memory."""

import gc
import os
import signal
import sys
import threading

import cloudpickle
import numpy as np

import conveyor

cloudpickle.register_pickle_by_value(sys.modules[__name__])

#: Values that travel in their messages, and in files.
SMALL, LARGE = 10, 1 << 20


class Stalls:
    """Pickling it never ends: what stands before it has been pickled by then, and is not sent."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        open(self.path, "w").close()
        threading.Event().wait()


class Ends:
    """Pickling it ends the process."""

    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()


@conveyor.remote
class Holder:
    def __init__(self, refs=()):
        self.refs = list(refs)

    def pid(self):
        return os.getpid()

    def make(self, size):
        return np.arange(size)

    def put(self, size):
        return [conveyor.put(np.arange(size))]

    def put_to_stay(self, size):
        return [conveyor.put(np.arange(size), tensor_transport="auto")]

    def fail(self):
        raise ValueError("none")

    def keep(self, refs):
        self.refs = list(refs)

    def kept(self):
        return self.refs

    def forget(self):
        self.refs = []
        gc.collect()

    def total(self, refs=None):
        return [float(value.sum()) for value in conveyor.get(self.refs if refs is None else refs)]

    def inner_totals(self):
        return [float(conveyor.get(one["inner"]).sum()) for one in conveyor.get(self.refs)]

    async def awaited(self, refs):
        return [float((await ref).sum()) for ref in refs]

    def pass_on(self, other, refs):
        return conveyor.get(other.total.remote(refs))

    def requested(self, other, size):
        return [other.make.remote(size)]

    def requested_to_stay(self, other, path):
        return [other.stay.remote(path)]

    def stay(self, path):
        if path:
            open(path, "w").close()
        threading.Event().wait()

    def send_half(self, other, refs, path):
        other.total.remote([*refs, Stalls(path)])

    def end_half(self, other, refs):
        other.total.remote(refs)
        other.total.remote([*refs, Ends()])

    def execute(self, graphs, values):
        refs = [graphs[0].execute(value) for value in values]
        return [float(value.sum()) for value in conveyor.get(refs)]

    def explain(self, graphs):
        return graphs[0].explain()

    def refs_of(self, graphs, value):
        return [graphs[0].execute(value)]

    def of_error(self, refs):
        try:
            conveyor.get(refs[0])
        except ValueError as error:
            return str(error)

    def through(self, value):
        return value


def holder(where, *refs):
    return Holder.options(**where).remote(*refs)


def total(size):
    return float(np.arange(size).sum())
