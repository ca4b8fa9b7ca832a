"""Tensors of devices come by way of the host: all copies of a value at once, and a reader does not wait.

Streams are held up by kernels that wait until the test lets them go.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("numpy")

import accelerator  # noqa: E402
from conveyor.codec import dumps_by_value, frames, loads  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::UserWarning")]

LONG = 30  # seconds in which all comes that nothing holds up


@pytest.fixture
def sim():
    found = accelerator.install()
    yield found
    found.synchronize(0), found.synchronize(1)


@pytest.fixture
def made(sim):
    tensors = [
        torch.full((1 << 16,), 1 + i, dtype=torch.uint8, device=f"sim:{i}") for i in range(2)
    ]
    sim.synchronize(0), sim.synchronize(1)
    return tensors


@pytest.fixture
def gate(sim):
    opened = threading.Event()
    yield opened
    opened.set()
    sim.synchronize(0), sim.synchronize(1)


def hold(gate, tensor):
    """Hold up the stream of a tensor's device."""
    accelerator.kernel(0, lambda _: gate.wait(LONG), tensor)


@pytest.mark.parametrize("held", [0, 1])
def test_the_copies_of_a_value_are_under_way_together(made, gate, held, wait_until):
    """The copy of either is made while the other's waits, so none is waited for before all are under way."""
    hold(gate, made[held])
    with accelerator.watching() as works, ThreadPoolExecutor(1) as pool:
        encoding = pool.submit(frames.encode, made)
        wait_until(lambda: works, LONG)
        assert [(work.name, work.stream) for work in works] == [
            ("copy to host", f"sim:{1 - held} default stream")
        ]
        assert not encoding.done()
        gate.set()
        buffers = encoding.result(LONG)[3]
    assert [bytes(b[:2]) for b in buffers] == [b"\1\1", b"\2\2"]


def test_a_reader_does_not_wait(sim, made, gate):
    codec, _, meta, buffers = frames.encode(made)
    for tensor in made:
        hold(gate, tensor)
    with accelerator.watching() as works:
        got = frames.decode(codec, meta, buffers)
        doubled = got[0] * 2  # what the reader enqueues comes behind
        assert not works
    assert not sim.current_stream(0).query()
    assert not sim.current_stream(1).query()
    gate.set()
    assert [t.device for t in got] == [t.device for t in made]
    assert doubled.eq(2).all().item()
    assert all(t.eq(1 + i).all().item() for i, t in enumerate(got))


def test_memory_that_is_read_at_once_has_its_values(made):
    assert loads(dumps_by_value(made))[1].eq(2).all().item()

    class Local:  # defined by value, with what it refers to
        tensor = made[1]

    codec, _, meta, buffers = frames.encode([Local(), made[0]])
    assert frames.decode(codec, meta, buffers)[1].eq(1).all().item()
