"""Getting a value into memory that is there."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from conveyor import _core
from conveyor.codec import arrays, tensor_headers
from conveyor.codec.arrays import ARRAY
from conveyor.codec.direct import Located, Unfetched
from conveyor.codec.tensors import TENSOR
from conveyor.direct.fetching import read_into
from conveyor.direct.memory import address_of, is_array, is_plain, is_tensor, lies_at, memory_of
from conveyor.runtime.refs.ref import Ref


def get_into(ref: Ref, into: Any, timeout: float | None) -> Any:
    """The value of ``ref`` in the memory of ``into``: a tensor or an array, or a list of them, one for each
    tensor and array in the value, in the order in which they are found there.

    Returns ``into`` itself for a single one, else the value, whose tensors and arrays lie in that memory
    if it has come from another process.

    Raises:
        TypeError: one of them is neither, or not in the host's memory.
        ValueError: one of them is read-only or not contiguous, or they do not fit the value. Nothing has been
            written then.
        ActorDiedError, ObjectLostError, WaitTimeoutError: as ``get``.
    """
    single = is_tensor(into) or is_array(into)
    if not single and not isinstance(into, (list, tuple)):
        raise TypeError(
            f"into= takes a tensor, an array, or a list of them, not a {type(into).__name__}"
        )
    targets = [into] if single else list(into)
    memories = [memory_of(target) for target in targets]
    ref._settled(timeout)
    value = ref._unfetched()
    if isinstance(value, Unfetched):
        value = _fetch(value, targets, memories)
    else:
        # A part of one element is a scalar, of NumPy's.
        leaves = [value] if single and hasattr(value, "dtype") else list(leaves_of(value))
        _check(leaves, targets)
        _copy(leaves, targets)
    return into if single else value


def _fetch(unfetched: Unfetched, targets: list[Any], memories: list[Any]) -> Any:
    where = unfetched.where
    # A part is less than what is kept, and a snapshot is read as by others.
    here = None if where.joined or where.snapshot else unfetched.here()
    if here is not None:
        leaves = list(leaves_of(here.value))
        _check(leaves, targets)
        _copy(leaves, targets)
        return here.value
    if len(targets) == 1 and not where.joined and _is_like(where, targets[0]):
        read_into(where, memories)
        return targets[0]
    lengths = _core.lengths_of(where.ranges)
    if lengths != [memory.nbytes for memory in memories]:
        # What has no elements has no memory of its own.
        memories = [memory for memory in memories if memory.nbytes]
    if lengths == [memory.nbytes for memory in memories] and _fits(unfetched, lengths, targets):
        read_into(where, memories)
        value = unfetched.decode_with(memories)
        if all(map(lies_at, leaves_of(value), map(address_of, targets))):
            return value
    # It does not fit, parts of it share memory, or it lies in another order: it is put together elsewhere.
    value = unfetched.fetch()
    leaves = list(leaves_of(value))
    _check(leaves, targets)
    _copy(leaves, targets)
    return value


def _is_like(where: Located, target: Any) -> bool:
    """Whether the value is a single tensor, or array, like the target, which is the usual case."""
    if where.codec == TENSOR and is_tensor(target):
        return tensor_headers.describes(where.meta, target)
    return where.codec == ARRAY and is_array(target) and arrays.describes(where.meta, target)


def _fits(unfetched: Unfetched, lengths: Sequence[int], targets: Sequence[Any]) -> bool:
    """Whether what is fetched can be read to the targets as it lies.

    The value is decoded over memory that nobody uses: a ``__setstate__`` may write to it, or fail.
    """
    starts = [*accumulate((length + 63 & ~63 for length in lengths), initial=0)]
    try:
        room = memoryview(mmap.mmap(-1, starts.pop() or 1))
        parts = [room[start : start + n] for start, n in zip(starts, lengths, strict=True)]
        leaves = list(leaves_of(unfetched.decode_with(parts)))
    except Exception:  # there is no room, or the user's code expects what is not there yet
        return False
    _check(leaves, targets)
    return all(map(is_plain, leaves))


def leaves_of(value: Any) -> Iterator[Any]:
    """The tensors and arrays in lists, tuples and dicts."""
    if is_tensor(value) or is_array(value):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from leaves_of(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from leaves_of(one)


def _check(leaves: Sequence[Any], targets: Sequence[Any]) -> None:
    if len(leaves) != len(targets):
        raise ValueError(
            f"the value has {len(leaves)} tensors and arrays, and there are {len(targets)} to take them"
        )
    for number, (leaf, target) in enumerate(zip(leaves, targets, strict=True)):
        which = f"number {number} of " if len(leaves) > 1 else ""
        found, given = _described(leaf), _described(target)
        if found != given:
            raise ValueError(
                f"{which}the value is {_in_words(found)}, and what is to take it is {_in_words(given)}"
            )


def _described(leaf: Any) -> tuple[str, tuple[int, ...]]:
    return str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape)


def _in_words(described: tuple[str, tuple[int, ...]]) -> str:
    dtype, shape = described
    return f"of {dtype} and shape {list(shape)}"


def _copy(leaves: Sequence[Any], targets: Sequence[Any]) -> None:
    for leaf, target in zip(leaves, targets, strict=True):
        if is_tensor(target):
            import torch

            with torch.no_grad():
                target.copy_(leaf if is_tensor(leaf) else torch.as_tensor(leaf))
        else:
            target[...] = leaf.detach().numpy() if is_tensor(leaf) else leaf
