"""An error that an actor has caught keeps nothing of its catcher, as in the driver.

An actor asks the driver for much that the driver itself asks nobody for. One that has nothing to do collects
no garbage.
"""

import gc
import weakref

import numpy as np
import pytest

import conveyor
from conveyor.dag import InputNode
from conveyor.exceptions import ActorDiedError

WAIT = 60


@conveyor.remote
class Maker:
    def same(self, x=None):
        return x

    def items(self):
        yield 1

    def keep(self, size):
        return np.zeros(size)


class Local:
    """What a catcher has."""


def call_of_the_dead(dead, graph):
    return lambda: dead.same.remote(1)


def open_of_the_dead(dead, graph):
    return lambda: dead.items.remote().next()


def compile_of_the_dead(dead, graph):
    def compile():
        with InputNode() as x:
            dead.same.bind(x).compile()

    return compile


def a_name_that_is_taken(dead, graph):
    return lambda: Maker.options(name="taken").remote()


def statistics_of_a_graph_that_is_torn_down(dead, graph):
    return lambda: graph.stats()


CASES = [
    call_of_the_dead,
    open_of_the_dead,
    compile_of_the_dead,
    a_name_that_is_taken,
    statistics_of_a_graph_that_is_torn_down,
]


@conveyor.remote
class Catcher:
    def have(self, graph):
        self._graph = graph

    def catch(self, case, dead):
        """Whether it raises, and leaves nothing, the first time and the second."""
        operation = case(dead, self._graph)
        gc.collect()
        gc.disable()
        try:
            return [self._catch_once(operation) for _ in range(2)]
        finally:
            gc.enable()

    def _catch_once(self, operation):
        raised, kept = self._catch(operation)
        return raised, kept() is None

    def _catch(self, operation):
        local = Local()
        try:
            operation()
        except Exception:
            return True, weakref.ref(local)
        return False, weakref.ref(local)

    def quiet(self):
        gc.collect()
        gc.disable()

    def pass_on(self, other, refs):
        return conveyor.get(other.same.remote(refs))


@pytest.fixture(scope="module")
def dead(session):
    made = Maker.remote()
    conveyor.get(made.same.remote(), timeout=WAIT)
    conveyor.kill(made)
    with pytest.raises(ActorDiedError):
        conveyor.get(made.same.remote(), timeout=WAIT)
    return made


@pytest.fixture(scope="module")
def named(session):
    return Maker.options(name="taken").remote()


@pytest.fixture(scope="module")
def catcher(named):
    """It has a graph that is torn down."""
    made = Catcher.remote()
    with InputNode() as x:
        graph = named.same.bind(x).compile()
    conveyor.get(made.have.remote(graph), timeout=WAIT)
    graph.teardown()
    return made


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_an_error_keeps_nothing_of_an_actor_that_has_caught_it(catcher, dead, case):
    found = conveyor.get(catcher.catch.remote(case, dead), timeout=WAIT)
    assert found == [(True, True)] * 2


def test_what_an_actor_could_not_pass_on_is_let_go_of(catcher, dead, wait_until):
    """The refs among its arguments, too: what is kept for them is memory of another actor's."""
    maker = Maker.remote()
    conveyor.get(catcher.quiet.remote(), timeout=WAIT)
    ref = maker.keep.options(tensor_transport="auto").remote(1000)
    conveyor.get(ref, timeout=WAIT)
    assert len(conveyor.objects()) == 1
    passed = catcher.pass_on.remote(dead, [ref])
    del ref
    with pytest.raises(ActorDiedError):
        conveyor.get(passed, timeout=WAIT)
    del passed
    wait_until(lambda: not conveyor.objects())  # the news of it comes from other processes
