"""Arrays that are made where they will be sent from (``conveyor.empty``), in the corners of a session."""

import sys

import cloudpickle
import numpy as np
import pytest

import conveyor
from conveyor.dag import InputNode
from conveyor.exceptions import ArenaFullError

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@conveyor.remote
class Reader:
    def total(self, x):
        return float(x.sum()), float(x[0]), x.size

    def echo(self, x):
        return x


@pytest.mark.parametrize("shape", [(1 << 50,), (1 << 20, 1 << 20, 1 << 30)])
def test_what_no_arena_can_hold_is_refused(fresh_session, shape):
    with pytest.raises(ArenaFullError, match="is larger than the session's memory cap"):
        conveyor.empty(shape, "f8")


def test_an_array_of_an_earlier_session_is_copied(leaves_nothing):
    with leaves_nothing():
        _send_from_session_to_session(200_000)


def _send_from_session_to_session(size):
    conveyor.init()
    held = [conveyor.empty(size)]
    held[0][:] = 1.0
    conveyor.shutdown()
    conveyor.init()
    reader = Reader.remote()
    with InputNode() as inp:
        dag = reader.total.bind(inp)
    other = np.full(size, 7.0)
    with dag.compile() as graph:
        assert conveyor.get(graph.execute(other)) == (7.0 * size, 7.0, size)
        # Nothing else refers to it: one of this session would move.
        assert conveyor.get(graph.execute(held.pop())) == (size, 1.0, size)
        assert conveyor.get(graph.execute(other)) == (7.0 * size, 7.0, size)
    conveyor.shutdown()


class Proxy:
    asked = 0

    def __reduce__(self):
        return (int, (3,))

    @property
    def base(self):
        Proxy.asked += 1
        raise KeyboardInterrupt


@pytest.mark.usefixtures("fresh_session")
def test_other_values_are_not_asked_for_their_base():
    reader = Reader.remote()
    with InputNode() as inp:
        dag = reader.echo.bind(inp)
    with dag.compile() as graph:
        kept = conveyor.empty(10)
        assert conveyor.get(graph.execute(Proxy())) == 3
        del kept
    assert Proxy.asked == 0


class Maker:
    """What it makes in place, and where that lay."""

    def __init__(self):
        self.kept = None
        self.address = 0

    def let_go(self, size):
        made = conveyor.empty(size)
        made[:] = 1.0
        self.address = made.ctypes.data
        return made

    def keep(self, size):
        self.kept = conveyor.empty(size)
        self.kept[:] = 1.0
        self.address = self.kept.ctypes.data
        return self.kept

    def view_of_kept(self, size):
        return self.keep(size)[1:]

    async def from_coroutine(self, size):
        return self.let_go(size)

    async def kept_from_coroutine(self, size):
        return self.keep(size)

    def write(self):
        self.kept[:] = 5.0

    def lies_there_again(self, size):
        """Whether the next array lies where the last one did: that is nobody's any more."""
        before = self.address
        return conveyor.empty(size).ctypes.data == before


@pytest.mark.usefixtures("fresh_session")
@pytest.mark.parametrize("concurrency", [1, 2])
def test_a_result_that_its_method_lets_go_of_is_not_copied(concurrency, wait_until):
    size = 1 << 17
    maker = conveyor.remote(max_concurrency=concurrency)(Maker).remote()
    for method in (maker.let_go, maker.from_coroutine):
        held = conveyor.get(method.remote(size))
        assert held.sum() == size
        # It has moved: what it was made in is the reader's.
        assert not conveyor.get(maker.lies_there_again.remote(size))
        del held


@pytest.mark.usefixtures("fresh_session")
@pytest.mark.parametrize("concurrency", [1, 2])
def test_a_result_that_its_method_keeps_is_copied(concurrency):
    size = 1 << 17
    maker = conveyor.remote(max_concurrency=concurrency)(Maker).remote()
    for method in (maker.keep, maker.kept_from_coroutine, maker.view_of_kept):
        got = conveyor.get(method.remote(size))
        conveyor.get(maker.write.remote())
        assert set(got) == {1.0}
