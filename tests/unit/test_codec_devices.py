"""Tensors of devices come by way of the host: all copies of a value at once, and a reader does not wait.

In processes whose bus is so slow that one sees it.
"""

import pytest

pytest.importorskip("torch")
pytest.importorskip("numpy")
pytestmark = pytest.mark.alone

PRELUDE = """
import torch
from conveyor.codec import dumps_by_value, frames, loads
from conveyor.testing import accelerator

sim = accelerator.install(accelerator.Settings(bandwidth=(1 << 20) / 0.2))
made = [torch.full((1 << 20,), 1 + i, dtype=torch.uint8, device=f"sim:{i}") for i in range(2)]
sim.synchronize(0), sim.synchronize(1)
"""


@pytest.fixture
def run(scripts):
    return lambda program: scripts.run(PRELUDE + program)


def test_the_copies_of_a_value_are_under_way_together(run):
    run(
        """
with accelerator.watching() as works:
    codec, _, meta, buffers = frames.encode(made)
assert [work.name for work in works] == ["copy to host"] * 2, works
assert max(work.begin for work in works) < min(work.end for work in works), works
assert [bytes(b[:2]) for b in buffers] == [b"\\1\\1", b"\\2\\2"]
with accelerator.watching() as works:
    got = frames.decode(codec, meta, buffers)
assert not works  # the reader goes on
assert not sim.current_stream(0).query()
assert [t.device for t in got] == [t.device for t in made]
assert all(t.eq(1 + i).all().item() for i, t in enumerate(got))
"""
    )


def test_what_the_reader_enqueues_comes_behind(run):
    run(
        """
codec, _, meta, buffers = frames.encode(made)
first, second = frames.decode(codec, meta, buffers)
doubled = first * 2
assert not sim.current_stream(0).query()
assert doubled.eq(2).all().item()
"""
    )


def test_memory_that_is_read_at_once_has_its_values(run):
    run(
        """
assert loads(dumps_by_value(made))[1].eq(2).all().item()
class Local:  # defined by value, with what it refers to
    tensor = made[1]
codec, _, meta, buffers = frames.encode([Local(), made[0]])
assert frames.decode(codec, meta, buffers)[1].eq(1).all().item()
"""
    )
