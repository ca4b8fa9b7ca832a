"""Arrays that are made where they will be sent from (``conveyor.empty``), in the corners of a session."""

import ctypes
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


@pytest.mark.parametrize("count", [1 << 50, 10**18, (1 << 63) - 1, 1 << 63, 10**30])
def test_the_number_of_bytes_that_are_too_many_is_said(fresh_session, count):
    for make in (
        lambda: conveyor.empty(count, "f8"),
        lambda: conveyor.empty((2, count), "f4"),
        lambda: conveyor.empty_tensor(count, _torch().float64),
    ):
        with pytest.raises(ArenaFullError, match=f"a value of {8 * count} bytes is larger than"):
            make()


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
    requested = 0

    def __reduce__(self):
        return (int, (3,))

    @property
    def base(self):
        Proxy.requested += 1
        raise KeyboardInterrupt


@pytest.mark.usefixtures("fresh_session")
def test_other_values_are_not_requested_for_their_base():
    reader = Reader.remote()
    with InputNode() as inp:
        dag = reader.echo.bind(inp)
    with dag.compile() as graph:
        kept = conveyor.empty(10)
        assert conveyor.get(graph.execute(Proxy())) == 3
        del kept
    assert Proxy.requested == 0


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


# Memory that something else than the value itself reaches as well

SIZE = 1 << 14


def _torch():
    import torch

    return torch


def _storages(tensor):
    return tensor, tensor.untyped_storage()


#: What a method returns of an array that it keeps, and of a tensor, with what it keeps of that.
OF_AN_ARRAY = {
    "a view": lambda a: a[5:],
    "an array over a memoryview": lambda a: np.asarray(memoryview(a)),
    "numpy.frombuffer": lambda a: np.frombuffer(a),
    "numpy.from_dlpack": lambda a: np.from_dlpack(a),
    "torch.from_numpy": lambda a: _torch().from_numpy(a),
    "torch.as_tensor": lambda a: _torch().as_tensor(a),
    "torch.frombuffer": lambda a: _torch().frombuffer(a, dtype=_torch().float64),
    "torch.from_dlpack": lambda a: _torch().from_dlpack(a),
    "a slice of torch.from_numpy": lambda a: _torch().from_numpy(a)[10:],
    "a view of torch.from_numpy": lambda a: _torch().from_numpy(a).view(2, -1),
    "a detached torch.from_numpy": lambda a: _torch().from_numpy(a).detach(),
    "a tensor over a storage over it": lambda a: (
        _torch()
        .tensor([], dtype=_torch().float64)
        .set_(_torch().from_numpy(a).untyped_storage(), 0, (SIZE,))
    ),
    "a tensor in a dict": lambda a: {"x": _torch().from_numpy(a)}["x"],
    "a buffer of ctypes": lambda a: np.ctypeslib.as_array((ctypes.c_double * SIZE).from_buffer(a)),
}
OF_A_TENSOR = {
    "its numpy()": lambda t: (t, t.numpy()),
    "its storage": _storages,
    "a tensor over its storage": lambda t: (t, t.new_empty(0).set_(t.untyped_storage())),
    "a view": lambda t: (t, t[3:]),
    "a detached one": lambda t: (t, t.detach()),
    "numpy.from_dlpack": lambda t: (t, np.from_dlpack(t)),
    "torch.from_dlpack": lambda t: (t, _torch().from_dlpack(t)),
    "itself, and gives a tensor over its array": lambda t: (_torch().from_numpy(t.numpy()), t),
    "its array, and gives a tensor over that": lambda t: (lambda n: (_torch().from_numpy(n), n))(
        t.numpy()
    ),
    "a memoryview": lambda t: (t, memoryview(t.numpy())),
}


class Keeper:
    def __init__(self):
        self.kept = None
        self.address = 0

    def of_an_array(self, how):
        self.kept = conveyor.empty(SIZE)
        self.kept[:] = 1.0
        return OF_AN_ARRAY[how](self.kept)

    def of_a_tensor(self, how):
        made = conveyor.empty_tensor(SIZE, _torch().float64).fill_(1.0)
        made, self.kept = OF_A_TENSOR[how](made)
        return made

    def write(self):
        kept = self.kept
        if isinstance(kept, _torch().UntypedStorage):
            kept = _torch().tensor([], dtype=_torch().float64).set_(kept)
        np.asarray(kept)[...] = 9.0

    # What it lets go of, and of all that it has looked at of it.

    def let_go(self, looks):
        made = conveyor.empty_tensor((SIZE, 2), _torch().float64).fill_(1.0)
        self.address = made.data_ptr()
        if looks:
            assert made.untyped_storage().nbytes() == made.numpy().nbytes
        return made

    def lies_there_again(self):
        return conveyor.empty_tensor((SIZE, 2), _torch().float64).data_ptr() == self.address


@pytest.fixture(scope="module")
def holder(session):
    return conveyor.remote(Keeper).remote()


@pytest.mark.torch
@pytest.mark.parametrize(
    ("method", "how"),
    [
        *(("of_an_array", how) for how in OF_AN_ARRAY),
        *(("of_a_tensor", how) for how in OF_A_TENSOR),
    ],
)
def test_what_its_maker_can_still_write_to_is_copied(holder, method, how):
    pytest.importorskip("torch")
    bound = getattr(holder, method)
    with InputNode() as inp:
        dag = bound.bind(inp)
    with dag.compile() as graph:
        for got in (conveyor.get(bound.remote(how)), conveyor.get(graph.execute(how))):
            assert set(np.asarray(got).ravel()) == {1.0}
            conveyor.get(holder.write.remote())
            assert set(np.asarray(got).ravel()) == {1.0}


@pytest.mark.torch
@pytest.mark.parametrize("looks", [False, True])
def test_a_tensor_that_its_method_lets_go_of_is_not_copied(holder, looks):
    pytest.importorskip("torch")
    for _ in range(3):
        got = conveyor.get(holder.let_go.remote(looks))
        assert float(got.sum()) == 2 * SIZE
        assert not conveyor.get(holder.lies_there_again.remote())


class Splitter:
    """Sends a part of what it has fetched, and keeps the other."""

    @conveyor.method(tensor_transport="auto")
    def make(self):
        return {"first": np.full(SIZE, 1.0), "second": np.full(SIZE, 2.0)}

    def split(self, refs):
        fetched = conveyor.get(refs[0])
        self.kept = fetched["second"]
        return fetched.pop("first")

    def other(self, size):
        return np.full(size, 7.0)

    def total(self):
        return float(self.kept.sum())


def test_a_part_of_what_was_fetched_leaves_the_other_where_it_is(session):
    maker, splitter = (conveyor.remote(Splitter).remote() for _ in range(2))
    ref = maker.make.remote()
    got = conveyor.get(splitter.split.remote([ref]))
    assert set(got) == {1.0}
    del got
    for size in (2 * SIZE, 2 * SIZE + 8, 3 * SIZE):  # they lie where there is room
        conveyor.get(splitter.other.remote(size))
        assert conveyor.get(splitter.total.remote()) == 2.0 * SIZE
