"""Reducing in steps: what has come of some ranks' tensors is combined with what has come of others'."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conveyor.dag.collective.kernels import Arrays, reduce, widens
from conveyor.dag.collective.reduceop import ReduceOp

#: Where one operation follows another, they take so many elements at a time, which stay in the caches.
_CHUNK = 64 << 10


def partial(op: ReduceOp, arrays: Arrays, sources: Sequence[Any]) -> Any:
    """Reduce flat ``sources`` of some ranks into a new array, which ``combine`` takes as one of its own.

    16-bit floats become floats of 32 bits, as they are summed, where there are several.
    """
    first = sources[0]
    wide = len(sources) > 1 and widens(op, arrays, first.dtype)
    out = arrays.empty(first.shape, arrays.single() if wide else first)
    if wide:
        for begin in range(0, arrays.size(first), _CHUNK):
            end = begin + _CHUNK
            _widened(op, arrays, [source[begin:end] for source in sources], out[begin:end])
    else:
        reduce(_without_count(op), arrays, sources, out)
    return out


def combine(op: ReduceOp, ranks: int, arrays: Arrays, sources: Sequence[Any], out: Any) -> None:
    """Reduce flat ``sources``, each of which is of one rank or of several, into ``out``, in their order.
    ``ranks``: so many they are of."""
    wide = widens(op, arrays, out.dtype)
    if not wide and op is not ReduceOp.AVG:
        reduce(op, arrays, sources, out)
        return
    size = arrays.size(out)
    room = arrays.empty((min(size, _CHUNK),), arrays.single()) if wide else None
    for begin in range(0, size, _CHUNK):
        to = out[begin : begin + _CHUNK]
        pieces = [source[begin : begin + _CHUNK] for source in sources]
        total = to if room is None else room[: arrays.size(to)]
        if room is None:
            reduce(_without_count(op), arrays, pieces, total)
        else:
            _widened(op, arrays, pieces, total)
        if op is ReduceOp.AVG:
            total /= ranks
        if room is not None:
            arrays.copy(to, total)


def _widened(op: ReduceOp, arrays: Arrays, sources: Sequence[Any], out: Any) -> None:
    """Reduce ``sources`` into ``out``, which is of the wider type."""
    function = arrays.function(_without_count(op))
    arrays.copy(out, sources[0])
    for source in sources[1:]:
        function(out, source, out=out)


def _without_count(op: ReduceOp) -> ReduceOp:
    """Find what is done before it is divided by how many there are."""
    return ReduceOp.SUM if op is ReduceOp.AVG else op
