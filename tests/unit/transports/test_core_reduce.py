"""The reduction of buffers by the native core."""

import numpy as np
import pytest

from conveyor import _core
from conveyor.collective.group import OPERATIONS
from conveyor.dag.collective.kernels import ELEMENT_TYPES, FLOATS, ReduceOp


@pytest.mark.parametrize("name", [name for name in ELEMENT_TYPES if name != "bfloat16"])
def test_every_type_has_its_number(name):
    dtype = np.dtype(name)
    sources = [np.array([1, 0, 1, 0]).astype(dtype), np.array([1, 1, 0, 0]).astype(dtype)]
    for op, want in [
        (ReduceOp.SUM, sources[0] + sources[1]),
        (ReduceOp.PRODUCT, sources[0] * sources[1]),
        (ReduceOp.MIN, np.minimum(*sources)),
        (ReduceOp.MAX, np.maximum(*sources)),
    ]:
        to = np.empty_like(sources[0]), np.empty_like(sources[0])
        _core.reduce(to, tuple(sources), ELEMENT_TYPES.index(name), op.value)
        for got in to:
            np.testing.assert_array_equal(got, want)


def test_the_average_is_of_floats():
    sources = tuple(np.full(3, x, np.float32) for x in (1, 2, 6))
    to = np.empty(3, np.float32)
    _core.reduce((to,), sources, 0, ReduceOp.AVG.value)
    assert to.tolist() == [3, 3, 3]
    for number in range(FLOATS, len(ELEMENT_TYPES)):
        with pytest.raises(ValueError, match="average"):
            _core.reduce((bytearray(8),), (bytes(8),), number, ReduceOp.AVG.value)


def test_a_source_can_be_written_to():
    one, two = np.arange(5.0), np.ones(5)
    _core.reduce((one,), (one, two), 1, ReduceOp.SUM.value)
    assert one.tolist() == [1, 2, 3, 4, 5]


def test_what_does_not_fit_is_refused():
    for to, sources, number, op, words in [
        ((bytearray(8),), (bytes(4), bytes(4)), 0, 0, "another size"),
        ((bytearray(4),), (bytes(4), bytes(8)), 0, 0, "another size"),
        ((bytearray(6),), (bytes(6),), 0, 0, "whole elements"),
        ((bytearray(4),), (), 0, 0, "nothing"),
        ((bytearray(4),), (bytes(4),), len(ELEMENT_TYPES), 0, "type"),
        ((bytearray(4),), (bytes(4),), 0, len(ReduceOp), "reduction"),
    ]:
        with pytest.raises(ValueError, match=words):
            _core.reduce(to, sources, number, op)
    with pytest.raises(BufferError):
        _core.reduce((bytes(4),), (bytes(4),), 0, 0)


def test_a_group_has_some_ranks_at_least_and_at_most():
    for ranks in (0, _core.MOST_RANKS + 1):
        with pytest.raises(ValueError, match="ranks"):
            _core.CollectiveGroup.bytes([0] * ranks)
    most = [0] * _core.MOST_RANKS
    segment = _core.Segment.create(_core.CollectiveGroup.bytes(most))
    _core.CollectiveGroup.prepare(segment, most)
    for none in ([], [0, 2]):
        with pytest.raises(ValueError, match="ranks"):
            _core.CollectiveGroup.prepare(segment, none)
    assert len(OPERATIONS) == 9
