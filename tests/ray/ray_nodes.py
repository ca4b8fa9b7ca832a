"""Two nodes that share no memory, and what the tests place on them."""

import os
import sys

import cloudpickle

import conveyor

cloudpickle.register_pickle_by_value(sys.modules[__name__])

#: Seconds that anything may take.
WAIT = 60
#: Connections are not to be lost because the machine has other work.
TIMEOUT = 30
HERE, THERE = {"resources": {"first": 0.01}}, {"resources": {"second": 0.01}}


class Adds:
    """What most actors of these tests are."""

    def __init__(self, add=1):
        self.add = add

    def run(self, x):
        return x + self.add

    def pid(self):
        return os.getpid()

    def ask(self, other, x):
        return conveyor.get(other.run.remote(x))


def get(ref):
    return conveyor.get(ref, timeout=WAIT)
