"""Every ``get`` gives a value of its own, and a ref passes on what it received. On both engines."""

import asyncio
import copy
import sys
import threading
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
import pytest
from integration_helpers import WAIT, compiled, get

import conveyor
from conveyor.dag import MultiOutputNode

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@dataclass
class Record:
    rows: Any


class Maker:
    def echo(self, x):
        return x

    def pair(self, x):
        return x, x

    def length(self, x):
        return len(x)

    def raises(self, _):
        raise KeyError("k")

    def ones(self, n, library):
        if library == "torch":
            import torch

            return torch.ones(n)
        return np.ones(n)

    def total(self, x):
        return float(x.sum())


@pytest.fixture(scope="module", params=["local", "inline"], autouse=True)
def engine(request, leaves_nothing):
    with leaves_nothing():
        conveyor.init(engine=request.param)
        yield request.param
        conveyor.shutdown()


@pytest.fixture
def maker():
    return conveyor.remote(Maker).remote()


MUTABLE = [[1, 2], {"k": [1]}, {1, 2}, bytearray(b"ab"), Record([1]), ([1], 2)]


def spoil(value):
    if isinstance(value, Record):
        value.rows.append("spoilt")
    elif isinstance(value, dict):
        value["spoilt"] = 1
    elif isinstance(value, tuple):
        value[0].append("spoilt")
    else:
        (value.add if isinstance(value, set) else value.append)(7)


def refs_to(maker, value):
    graph = compiled(lambda inp: maker.echo.bind(inp))
    both = compiled(lambda inp: MultiOutputNode([maker.echo.bind(inp), inp]))
    yield maker.echo.remote(value)
    yield conveyor.put(value)
    yield graph.execute(value)
    yield from both.execute(value)
    yield maker.pair.options(num_returns=2).remote(value)[1]


def test_a_reference_is_not_taken_for_its_value(maker):
    refs = list(refs_to(maker, 3))
    assert conveyor.get(refs[0]) == 3
    for ref in refs:
        for use in (
            bool,
            lambda ref: ref + 1,
            lambda ref: 1 - ref,
            lambda ref: ref @ ref,
            lambda ref: -ref,
            lambda ref: ref < 1,
            lambda ref: max(ref, ref),
        ):
            with pytest.raises(TypeError, match=r"conveyor\.get\(ref\)"):
                use(ref)
        assert ref == ref
        assert ref in refs
        assert len({ref, *refs}) == len(refs)


@pytest.mark.parametrize("value", MUTABLE, ids=lambda v: type(v).__name__)
def test_what_is_done_to_one_value_is_not_seen_in_another(maker, value):
    for ref in refs_to(maker, value):
        as_sent = copy.deepcopy(value)
        first = get(ref)
        assert first == as_sent
        spoil(first)
        assert first != as_sent
        for again in (get(ref), get([ref])[0], get({"k": ref})["k"], get(maker.echo.remote(ref))):
            assert again == as_sent
            assert again is not first


def test_put_takes_the_value_as_it_is_now(maker):
    value = [1]
    ref = conveyor.put(value)
    value.append(2)
    assert get(ref) == [1]


@pytest.mark.parametrize("size", [10, 200_000])
def test_arrays(maker, size):
    for ref in (maker.ones.remote(size, "numpy"), conveyor.put(np.ones(size))):
        array = get(ref)
        if array.flags.writeable:
            array[:] = 5
        else:
            assert size > 10
            with pytest.raises(ValueError, match="read-only"):
                array[:] = 5
        assert get(ref).sum() == size
        assert get(maker.total.remote(ref)) == size
        inside = get(maker.echo.remote([array]))
        assert inside[0].shape == (size,)


@pytest.mark.torch
@pytest.mark.parametrize("size", [10, 200_000])
def test_tensors(maker, size):
    torch = pytest.importorskip("torch")
    for ref in (maker.ones.remote(size, "torch"), conveyor.put(torch.ones(size))):
        get(ref).fill_(5)
        assert get(ref).sum() == size
        assert get(maker.total.remote(ref)) == size


def test_a_held_value_stays_when_its_ref_is_gone(maker):
    ref = maker.ones.remote(300_000, "numpy")
    first, second = get(ref), get(ref)
    del ref
    for _ in range(5):
        assert get(maker.ones.remote(300_000, "numpy")).sum() == 300_000
    assert first.sum() == second.sum() == 300_000


def test_awaited_twice(maker):
    graph = compiled(lambda inp: maker.echo.bind(inp))

    async def main():
        for ref in (maker.echo.remote([1]), await graph.execute_async([1])):
            first = await ref
            first.append(2)
            assert await ref == [1]
            one, other = await asyncio.gather(*[asyncio.wait_for(ref, WAIT) for _ in range(2)])
            assert one == other == [1]
            assert one is not other

    asyncio.run(main())


def test_got_in_many_threads(maker):
    ref = maker.echo.remote([1])
    values = []
    threads = [threading.Thread(target=lambda: values.append(ref.get(WAIT))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert values == [[1]] * 8
    assert len(set(map(id, values))) == 8


def test_errors_are_of_each_gets_own(maker):
    graph = compiled(lambda inp: maker.raises.bind(inp))
    for ref in (maker.raises.remote(0), graph.execute(0)):
        errors = []
        for _ in range(3):
            with pytest.raises(KeyError) as caught:
                get(ref)
            errors.append(caught.value)
        assert len(set(map(id, errors))) == 3
        assert len({str(error) for error in errors}) == 1


def test_classes_sent_by_value_are_passed_on(maker):
    """A frame of theirs is understood in its own channel only."""

    class Mine:
        def __init__(self, x):
            self.x = x

        def __len__(self):
            return self.x

    other = conveyor.remote(Maker).remote()
    ref, put = maker.echo.remote(Mine(3)), conveyor.put(Mine(4))
    assert get(ref).x == 3
    ref = maker.echo.remote(Mine(5))  # its channel has the class already
    assert get(other.length.remote(ref)) == get(maker.length.remote(ref)) == 5
    assert get(other.length.remote(put)) == get(maker.length.remote(put)) == 4
    graph = compiled(lambda inp: other.length.bind(inp))
    assert get([graph.execute(ref), graph.execute(put)]) == [5, 4]
    assert get(ref).x == 5


def test_other_values_are_passed_on_as_they_came(engine, maker, monkeypatch):
    ref = maker.echo.remote({"k": [1, 2]})
    put = conveyor.put({"k": [3]})
    array = maker.ones.remote(100_000, "numpy")
    conveyor.wait([ref, array], num_returns=2, timeout=WAIT)
    graph = compiled(lambda inp: maker.echo.bind(inp))

    def refuse(*_args):
        raise AssertionError("it was decoded")

    with monkeypatch.context() as patched:
        if engine == "local":  # inline the actor decodes it in this process
            patched.setattr("conveyor.codec.pickling.unpickler.load", refuse)
        sent = [maker.echo.remote(ref), maker.echo.remote(put), graph.execute(ref)]
        total = maker.total.remote(array)
    assert get(sent) == [{"k": [1, 2]}, {"k": [3]}, {"k": [1, 2]}]
    assert get(total) == 100_000
