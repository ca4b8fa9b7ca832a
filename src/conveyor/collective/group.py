"""A collective group, as the process of one of its ranks has it."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from conveyor import _core
from conveyor.checks import check_timeout, in_seconds
from conveyor.dag.collective.kernels import ELEMENT_TYPES, FLOATS, ReduceOp
from conveyor.exceptions import (
    CollectiveBrokenError,
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    RuntimeStateError,
)
from conveyor.runtime import ending
from conveyor.runtime.broker import DEAD_RANK, FAILED_IN, Joined, in_words
from conveyor.runtime.protocol import ActorId, Runtime
from conveyor.storages import lacking
from conveyor.worker.instance import Abandoned

#: torch's and numpy's types, once each of them was seen.
_numbers: dict[Any, int] = {}
_known: set[str] = set()


class Operand:
    """Tensor or array that is an argument of a call.

    address: of its elements, as a number or as an object with a buffer. They are contiguous there.
    staged: a contiguous copy, if the elements of the tensor itself are not contiguous.
    """

    __slots__ = ("address", "count", "number", "shape", "staged", "tensor")

    def __init__(
        self,
        tensor: Any,
        number: int,
        shape: tuple[int, ...],
        count: int,
        address: Any,
        staged: Any,
    ) -> None:
        self.tensor = tensor
        self.number = number
        self.shape = shape
        self.count = count
        self.address = address
        self.staged = staged

    def written(self) -> None:
        """Copy the elements that were written into the tensor."""
        if self.staged is None:
            return
        if isinstance(self.address, int):
            import torch

            with torch.no_grad():
                self.tensor.copy_(self.staged)
        else:
            self.tensor[...] = self.staged


def operand(tensor: Any, writes: bool, what: str = "the tensor") -> Operand:
    """``writes``: the tensor's elements are written. ``what`` it is, for errors."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return _of_torch(torch, tensor, writes, what)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(tensor, numpy.ndarray):
        return _of_numpy(numpy, tensor, writes, what)
    raise TypeError(
        f"{what} is a {type(tensor).__name__}: collective operations take torch tensors of the CPU and "
        "numpy arrays"
    )


def _of_torch(torch: Any, tensor: Any, writes: bool, what: str) -> Operand:
    number = _numbers.get(tensor.dtype)
    if number is None:
        number = _look_up(torch, "torch", tensor.dtype, what)
    if not tensor.is_cpu or tensor.layout is not torch.strided:
        where = f"on {tensor.device}" if not tensor.is_cpu else f"of layout {tensor.layout}"
        raise ValueError(f"{what} is {where}: collective operations take dense tensors of the CPU")
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        raise TypeError(
            f"{what} is a {type(tensor).__name__}, which may mean more than its elements: pass a plain "
            "torch.Tensor"
        )
    words = lacking(tensor)
    if words is not None:
        raise ValueError(f"{what} {words}")
    if tensor.is_contiguous() and not tensor.is_neg():
        return Operand(tensor, number, tensor.shape, tensor.numel(), tensor.data_ptr(), None)
    if writes:
        _check_no_overlap(tensor.shape, tensor.stride(), what)
    staged = tensor.detach().resolve_neg().contiguous()
    return Operand(tensor, number, staged.shape, staged.numel(), staged.data_ptr(), staged)


def _of_numpy(numpy: Any, array: Any, writes: bool, what: str) -> Operand:
    number = _numbers.get(array.dtype)
    if number is None:
        number = _look_up(numpy, "numpy", array.dtype, what)
    if type(array) is not numpy.ndarray and type(array) is not numpy.memmap:
        raise TypeError(
            f"{what} is a {type(array).__name__}, which may mean more than its elements: pass a plain "
            "numpy.ndarray (numpy.asarray(x))"
        )
    if writes and not array.flags.writeable:
        raise ValueError(f"{what} is read-only, and the operation writes to it")
    if array.flags.c_contiguous:
        return Operand(array, number, array.shape, array.size, array, None)
    if writes:
        _check_no_overlap(array.shape, array.strides, what)
    staged = numpy.ascontiguousarray(array)
    return Operand(array, number, staged.shape, staged.size, staged, staged)


def _check_no_overlap(shape: Sequence[int], strides: Sequence[int], what: str) -> None:
    """Refuse elements that share memory, as those of an expanded tensor do: they cannot all be written."""
    reach = 0
    steps = [(abs(s), n) for s, n in zip(strides, shape, strict=True) if n > 1]
    for stride, length in sorted(steps) if 0 not in shape else ():
        if stride <= reach:
            raise ValueError(
                f"{what} has elements that share memory (shape {tuple(shape)}, strides {tuple(strides)}), "
                "and the operation writes to it: pass a copy, as clone() of torch and copy() of numpy make it"
            )
        reach += stride * (length - 1)


def _look_up(library: Any, name: str, dtype: Any, what: str) -> int:
    if name not in _known:
        for number, element in enumerate(ELEMENT_TYPES):
            theirs = getattr(library, element, None)
            if name == "numpy":
                # bfloat16 is none of its types, and `numpy.bool` is not of all versions.
                if element != "bfloat16":
                    _numbers[library.dtype(element)] = number
            elif theirs is not None:
                _numbers[theirs] = number
        _known.add(name)
    found: int | None = _numbers.get(dtype)
    if found is None:
        raise TypeError(f"{what} is of {dtype}, which collective operations do not take")
    return found


class Fused:
    """Tensors of one type as a single one."""

    __slots__ = ("parts", "shapes", "whole")

    def __init__(self, tensors: Sequence[Any]) -> None:
        parts = [operand(t, True, f"tensor {i} of the list") for i, t in enumerate(tensors)]
        if not parts:
            raise ValueError("the list of tensors is empty")
        first = parts[0]
        for i, part in enumerate(parts):
            if part.number != first.number or isinstance(part.address, int) != isinstance(
                first.address, int
            ):
                raise TypeError(
                    f"tensor {i} of the list is of {part.tensor.dtype}, and tensor 0 of "
                    f"{first.tensor.dtype}: what is reduced as one is of one type, and of one library"
                )
        self.parts = parts
        #: The same number wherever the shapes are the same.
        self.shapes = hash(tuple([tuple(part.shape) for part in parts])) & (2**64 - 1)
        if isinstance(first.address, int):
            import torch

            whole = torch.cat([part.tensor.detach().reshape(-1) for part in parts])
        else:
            import numpy

            whole = numpy.concatenate([part.tensor.reshape(-1) for part in parts])
        self.whole = operand(whole, True)

    def written(self) -> None:
        """Copy the result back into each tensor."""
        begin = 0
        for part in self.parts:
            piece = self.whole.tensor[begin : begin + part.count].reshape(part.shape)
            begin += part.count
            if isinstance(part.address, int):
                part.tensor.detach().copy_(piece)
            else:
                part.tensor[...] = piece


#: The operations, by the numbers that the native core knows them by.
OPERATIONS = (
    "barrier",
    "allreduce",
    "reduce",
    "reducescatter",
    "allgather",
    "gather",
    "broadcast",
    "scatter",
    "all_to_all",
)
BARRIER, ALLREDUCE, REDUCE, REDUCESCATTER, ALLGATHER, GATHER, BROADCAST, SCATTER, ALL_TO_ALL = (
    range(9)
)
#: Operations that reduce, and operations that have a root.
_REDUCING = {ALLREDUCE, REDUCE, REDUCESCATTER}
_ROOTED = {REDUCE, GATHER, BROADCAST, SCATTER}
#: Values of any kind are given to others; which operation that is, is its form.
_EXCHANGE = 9

# Outcomes of an operation in the native core, and the reasons why a group is broken.
_DONE, _MISMATCH, _BROKEN, _TIMED_OUT, _BUSY, _INHERITED, _ABANDONED = range(7)
_DIED, _RAISED, _INTERRUPTED, _GAVE_UP, _DESTROYED, _DIFFERENT, _ENDED = range(1, 8)

#: How many of a tensor's dimensions the ranks compare one by one.
_DIMS = 8
_NO_SHAPE: tuple[int, ...] = ()

#: How many of the absent ranks an error names.
_DESCRIBED = 8

_AFTER = (
    "The group is broken now, until it is reset: call reset() of its handle, or create it again"
)


def _references_of_a_moved_value() -> int:
    # How many references the value in the list has that Group.exchange is given, if the caller has let go of
    # it: measured, because it differs between versions of Python. From 3.14 on an argument may be borrowed
    # from the caller's variable; the list has a reference of its own in any case.
    def allgather(value: Any) -> int:
        given = [value]
        del value
        return _core.refcount(given[0]) - 1  # the look's own

    return allgather(object())


_MOVED_REFS = _references_of_a_moved_value()


class Group:
    """Collective group, as the process of one of its ranks has it."""

    def __init__(
        self, runtime: Runtime, name: str, number: int, creator: ActorId | None, joined: Joined
    ) -> None:
        """``number``: the session's, of the group; a later group has a larger one."""
        self.name = name
        self.number = number
        self.creator = creator
        self.joined = joined
        self.rank = joined.membership.rank
        self.size = len(joined.membership.members)
        self._runtime = runtime
        self._inbox = runtime.inbox
        self._group = joined.group
        self._all = tuple(range(self.size))
        self._writer, self._readers = joined.writer, joined.readers
        self._writer.moved_refs = _MOVED_REFS

    def __enter__(self) -> Group:
        """Begin a call of an operation. Whatever it raises breaks the group: other ranks may wait for it."""
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is not None:
            self._group.raised(f"its operation {in_words(error)}", True)

    def run(
        self,
        operation: int,
        tensor: Operand | None,
        sources: tuple[Any, ...],
        to: tuple[Any, ...],
        timeout: float | None,
        op: ReduceOp = ReduceOp.SUM,
        root: int = -1,
        tensors: int = 1,
        shapes: int = 0,
    ) -> None:
        """Run one operation. ``tensor`` describes each tensor of it. ``sources`` and ``to`` are the addresses
        of the tensors that are read and written here."""
        timeout = _limit(timeout)
        if tensor is None:
            number, shape, count = 8, _NO_SHAPE, 0
        else:
            number, shape, count = tensor.number, tensor.shape, tensor.count
            if op is ReduceOp.AVG and number >= FLOATS:
                raise TypeError(
                    f"integers have no average: ReduceOp.AVG is for floating point numbers, and the tensor "
                    f"is of {ELEMENT_TYPES[number]}. Reduce with SUM, and divide as you want it to be rounded"
                )
            if len(shape) > _DIMS:
                shapes = hash((shapes, tuple(shape))) & (2**64 - 1)
        outcome = self._group.run(
            self._inbox,
            operation,
            op.value,
            number,
            count,
            shape,
            tensors,
            shapes,
            root,
            sources,
            to,
            timeout,
            self._runtime.collectives.until,
        )
        if outcome != _DONE:
            self._raise(outcome, OPERATIONS[operation], timeout)

    def exchange(
        self,
        form: int,
        given: list[Any],
        timeout: float | None,
        root: int = -1,
        *,
        gives: bool = True,
        takes: Sequence[int] | None = None,
    ) -> list[Any]:
        """Send the value in the list ``given``, if this rank ``gives`` one. Returns the values of the ranks
        ``takes`` (``None``: of all), which lie in shared memory. A value that was made in place is not copied
        if only the list refers to it. ``form``: the operation as its callers know it."""
        timeout = _limit(timeout)
        outcome = self._group.exchange(
            self._inbox,
            form,
            root,
            gives,
            given,
            self._all if takes is None else takes,
            self._writer,
            self._readers,
            timeout,
            self._runtime.collectives.until,
        )
        if isinstance(outcome, int):
            self._raise(outcome, f"{OPERATIONS[form]}.shared", timeout)
        return outcome

    def root(self, rank: Any, what: str) -> int:
        """Check a rank that the caller has named in the argument ``what``, and return it as an integer."""
        try:
            number = operator.index(rank)
        except TypeError:
            raise TypeError(f"{what} must be an integer, not {rank!r}") from None
        if not 0 <= number < self.size:
            raise ValueError(
                f"{what} must be a rank of the group, 0 to {self.size - 1}, and is {number}"
            )
        return number

    def who(self, rank: int) -> str:
        """A rank in words."""
        return f"rank {rank} ({self.joined.membership.actors[rank].name})"

    def _absent(self, ranks: Sequence[int]) -> str:
        """Describe what is known now of the ranks that have not come."""
        if not ranks:
            return " not all ranks have come to it, the last one of them just too late"
        shown = ranks[:_DESCRIBED]
        doing = self._runtime.collectives.doing(self.joined, shown)
        described = [f"{self.who(rank)}{does}" for rank, does in zip(shown, doing, strict=True)]
        if len(ranks) > _DESCRIBED:
            described.append(f"{len(ranks) - _DESCRIBED} more")
        return f" these ranks have not come to it: {'; '.join(described)}"

    def _raise(self, outcome: int, operation: str, timeout: float | None) -> NoReturn:
        what = f"{operation} of collective group {self.name!r}"
        if outcome == _MISMATCH:
            self._group.forget(self._readers)
            raise CollectiveMismatchError(
                f"{what}: the ranks have not called the same, so nothing was done. {_AFTER}. {self._views()}"
            )
        if outcome == _TIMED_OUT:
            raise CollectiveTimeoutError(
                f"{what}: within {in_seconds(timeout)}{self._absent(self._group.absent)}. {_AFTER}"
            )
        if outcome == _BUSY:
            raise CollectiveError(
                f"{what}: another thread of this actor, or what a signal handler has interrupted, is in an "
                "operation of this group. A rank does one at a time"
            )
        if outcome == _INHERITED:
            raise RuntimeStateError(
                f"{what}: the group belongs to the process this one was forked from"
            )
        if outcome == _ABANDONED:
            raise Abandoned(
                f"{what}: what this method runs for was cancelled, or has failed elsewhere, or its deadline "
                f"is over, while it waited for other ranks. {_AFTER}"
            )
        self._raise_broken(what)

    def _views(self) -> str:
        """Describe what each rank that came to the last barrier has called."""
        absent = set(self._group.absent)
        ranks = [rank for rank in range(self.size) if rank not in absent]
        return "; ".join([f"{self.who(rank)}: {self._view(rank)}" for rank in ranks])

    def _view(self, rank: int) -> str:
        operation, op, number, _, shape, tensors, root = self._group.called(rank)
        if operation == BARRIER:
            return "barrier()"
        if operation == _EXCHANGE:
            words = f"{OPERATIONS[tensors % len(OPERATIONS)]}.shared"
            return f"{words} with root {root}" if root >= 0 else words
        words = OPERATIONS[operation]
        if operation in _REDUCING:
            words += f"({ReduceOp(op).name})"
        many = f"{tensors} tensors with " if tensors > 1 else ""
        words += f" of {many}{ELEMENT_TYPES[number]}{list(shape)}"
        return f"{words} with root {root}" if operation in _ROOTED else words

    def _raise_broken(self, what: str) -> NoReturn:
        broken = self._group.broken
        assert broken is not None
        cause, rank, why = broken
        # A method may have raised this very error, of an earlier operation or of another group.
        why = why.partition(". The group is broken now")[0]
        if cause == _DIED:
            death = self._runtime.collectives.death(self.joined, rank)
            text = f"{what}: {self.who(rank)} has died. {_AFTER}. {death}"
            error = CollectiveBrokenError(text)
            error.__dict__[DEAD_RANK] = self.joined.membership.members[rank]
            raise error from death
        if cause == _RAISED:
            text = f"{what}: {self.who(rank)} is not coming: {why}. {_AFTER}"
        elif cause == _DIFFERENT:
            text = f"{what}: the ranks have not called the same before. {_AFTER}. {self._views()}"
        elif cause == _INTERRUPTED:
            text = f"{what}: {self.who(rank)} was interrupted in an operation by {why}. {_AFTER}"
        elif cause == _GAVE_UP:
            absent = self._absent([int(number) for number in why.split()])
            text = f"{what}: the timeout of {self.who(rank)} is over in an operation;{absent}. {_AFTER}"
        elif cause == _ENDED:
            if self._runtime.own_actor is None:
                raise ending.ended()
            text = f"{what}: the session ends, and some rank does not come to it any more"
        else:
            text = f"{what}: the group was destroyed or reset"
        error = CollectiveBrokenError(text)
        if failed_in := self._group.failed_in_execution:
            error.__dict__[FAILED_IN] = failed_in
        raise error


def _limit(timeout: float | None) -> float | None:
    """Convert a timeout for the native core: ``None`` is no limit."""
    seconds = check_timeout(timeout)
    return None if seconds == math.inf else seconds
