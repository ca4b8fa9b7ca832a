"""Getting a value into memory that is there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from conveyor import _core
from conveyor.codec.direct import Unfetched
from conveyor.direct.fetching import read_into
from conveyor.direct.memory import is_array, is_tensor, memory_of
from conveyor.runtime.refs.ref import Ref


def get_into(ref: Ref, into: Any, timeout: float | None) -> Any:
    """The value of ``ref`` in the memory of ``into``: a tensor or an array, or a list of them, one for each
    tensor and array in the value, in the order in which they are found there.

    Returns ``into`` itself for a single one, else the value, whose tensors and arrays lie in that memory
    if it has come from another process.

    Raises:
        TypeError: one of them is neither, or cannot be written to.
        ValueError: they do not fit the value. Nothing has been written then.
    """
    single = is_tensor(into) or is_array(into)
    targets = [into] if single else list(into)
    memories = [memory_of(target) for target in targets]
    ref._settled(timeout)
    value = ref._unfetched()
    if isinstance(value, Unfetched):
        value = _fetch(value, targets, memories)
    else:
        _check(list(leaves_of(value)), targets)
        _copy(list(leaves_of(value)), targets)
    return into if single else value


def _fetch(unfetched: Unfetched, targets: list[Any], memories: list[Any]) -> Any:
    where = unfetched.where
    here = None if where.whole else unfetched.here()  # else that is more than is asked for
    if here is not None:
        leaves = list(leaves_of(here.value))
        _check(leaves, targets)
        _copy(leaves, targets)
        return here.value
    lengths = _core.lengths_of(where.ranges)
    if lengths != [memory.nbytes for memory in memories]:
        # What has no elements has no memory of its own.
        memories = [memory for memory in memories if memory.nbytes]
    if lengths == [memory.nbytes for memory in memories]:
        value = unfetched.decode_with(memories)
        _check(list(leaves_of(value)), targets)
    else:  # it does not fit, or parts of it share memory: it is put together elsewhere
        value = unfetched.fetch()
        leaves = list(leaves_of(value))
        _check(leaves, targets)
        _copy(leaves, targets)
        return value
    read_into(where, memories)
    return value


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
                target.copy_(leaf if is_tensor(leaf) else torch.from_numpy(leaf))
        else:
            target[...] = leaf.detach().numpy() if is_tensor(leaf) else leaf
