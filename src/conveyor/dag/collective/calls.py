"""Functions that the ranks of a collective run, on values that have come to them over ordinary edges.

Each function is an object that travels with its actor's program. All ranks look at the same inputs. So each
of them finds for itself what is wrong with the inputs, before it computes anything.

Each rank first announces its inputs. When all have announced theirs, each comes to the operation; when all
have done that, each has its result. No communicator is used if all actors are in one process or the graph is
not compiled. Then the announcement is the tensors themselves, and the operation is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

from msgspec import Struct

from conveyor.dag.collective.kernels import (
    TENSORS,
    Arrays,
    ReduceOp,
    arrays_of,
    described,
    more_than_elements,
    reduce,
    reduced,
    refuse,
    seen,
    why_not,
)
from conveyor.later import LaterModule
from conveyor.storages import lacking


class Rank(Struct, frozen=True):
    """Function that one rank of a collective runs.

    operation: its name in messages: ``"allreduce"``.
    names: the names of the actors, in the order of ranks.
    rank: the number of this rank.
    """

    operation: str
    names: tuple[str, ...]
    rank: int = 0

    @property
    def __name__(self) -> str:  # by which calls are known
        return self.operation

    @property
    def only_reads(self) -> bool:
        """Whether the result shares no memory with the inputs, to which the function never writes."""
        return False

    def __call__(self, *inputs: Any) -> Any:
        """Return this rank's result."""
        raise NotImplementedError


class Reducing(Rank, frozen=True):
    """Function of a rank whose collective reduces by ``op``."""

    op: ReduceOp = ReduceOp.SUM

    @property
    def only_reads(self) -> bool:
        return True


class AllReduce(Reducing, frozen=True):
    """Reduction at every rank, each of which gets all inputs.

    at_once: this was asked for, wherever the ranks are.
    """

    at_once: bool = False

    def __call__(self, *inputs: Any) -> Any:
        return reduce_inputs(self, self.op, inputs)


class FusedAllReduce(Reducing, frozen=True):
    """Reduction of a tuple of tensors from each rank, at every rank; see ``AllReduce``."""

    at_once: bool = False

    def __call__(self, *inputs: Any) -> list[Any]:
        tensors = list(zip(*inputs, strict=True))
        for number, ranks in enumerate(tensors):  # all before any is reduced
            _check_reducible(self, self.op, ranks, number)
        return [reduce_inputs(self, self.op, ranks) for ranks in tensors]


class ReducePart(Reducing, frozen=True):
    """First of two rounds: every rank reduces its part of all inputs, and gives it to the others."""

    def __call__(self, *inputs: Any) -> Any:
        arrays, values = _check_reducible(self, self.op, inputs)
        begin, end = bounds(arrays.size(values[0]), self.rank, len(values))
        parts = [arrays.flat(value)[begin:end] for value in values]
        out = arrays.empty((end - begin,), values[0])
        reduce(self.op, arrays, parts, out)
        return out


class JoinParts(Rank, frozen=True):
    """Second round: every rank puts the parts together, in the form of its own input."""

    @property
    def only_reads(self) -> bool:
        return True

    def __call__(self, *inputs: Any) -> Any:
        own, *parts = inputs
        arrays = _arrays(own)
        out = arrays.empty(own.shape, own)
        arrays.join(parts, arrays.flat(out))
        return out


class ReduceScatter(Reducing, frozen=True):
    """Reduction of a rank's share along dimension 0. Every rank gets all inputs."""

    def __call__(self, *inputs: Any) -> Any:
        _, values = _check_reducible(self, self.op, inputs)
        share = share_of(self, values[0])
        return reduce_inputs(self, self.op, [value[share] for value in values])


class AllGather(Rank, frozen=True):
    """Collection of all inputs at every rank: joined along dimension 0, or (``join`` is false) in a list."""

    join: bool = True

    @property
    def only_reads(self) -> bool:
        return self.join

    def __call__(self, *inputs: Any) -> Any:
        arrays, values = _check(self, inputs, computes=self.join)
        return joined(self, arrays, values) if self.join else list(values)


class AllToAll(Rank, frozen=True):
    """Collection of a rank's shares along dimension 0 of all inputs, joined."""

    @property
    def only_reads(self) -> bool:
        return True

    def __call__(self, *inputs: Any) -> Any:
        arrays, values = _check(self, inputs)
        share = share_of(self, values[0])
        return joined(self, arrays, [value[share] for value in values])


class Scatter(Rank, frozen=True):
    """Share of the input along dimension 0, as a view. Every rank gets the whole input."""

    def __call__(self, *inputs: Any) -> Any:
        (value,) = inputs
        arrays = rows_of(self, value)
        return arrays.plain(value)[share_of(self, value)]


class Pass(Rank, frozen=True):
    """Function that returns its input as it has come."""

    def __call__(self, *inputs: Any) -> Any:
        return inputs[0]


class Arrive(Rank, frozen=True):
    """Announcement that a rank has come to a barrier."""

    def __call__(self, *inputs: Any) -> None:
        return None


class Pack(Rank, frozen=True):
    """Function that puts a rank's tensors into one frame."""

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        return inputs


def bounds(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return where the part of ``rank`` begins and ends among ``size`` elements."""
    return size * rank // ranks, size * (rank + 1) // ranks


def reduce_inputs(rank: Rank, op: ReduceOp, inputs: Sequence[Any]) -> Any:
    """Check the inputs of all ranks, and reduce them."""
    arrays, values = _check_reducible(rank, op, inputs)
    return reduced(op, arrays, values)


def joined(rank: Rank, arrays: Arrays, values: Sequence[Any]) -> Any:
    """Join tensors of one dtype and shape along dimension 0."""
    first = values[0]
    if arrays is TENSORS and first.is_quantized:
        raise TypeError(
            f"{title_of(rank, None)}: {first.dtype} is not joined: quantized tensors may differ in their "
            "scales. Give it x.int_repr() or x.dequantize()"
        )
    check_joinable(rank, first)
    out = arrays.empty((first.shape[0] * len(values), *first.shape[1:]), first)
    arrays.join(values, out)
    return out


def check_joinable(rank: Rank, value: Any) -> None:
    """Raise a ``ValueError`` unless tensors like ``value`` can be joined."""
    if not value.shape:
        raise ValueError(
            f"{rank.operation}: what has no dimensions cannot be joined along the first one: "
            f"give it one (x.reshape(1))"
        )


def share_of(rank: Rank, value: Any) -> slice:
    """Return the part of dimension 0 that is for this rank."""
    ranks = len(rank.names)
    if not value.shape or value.shape[0] % ranks:
        raise ValueError(
            f"{rank.operation} over {ranks} actors ({', '.join(rank.names)}): dimension 0 is divided among "
            f"them, and of shape {tuple(value.shape)} it cannot be: it must be a multiple of {ranks}"
        )
    each = value.shape[0] // ranks
    return slice(each * rank.rank, each * (rank.rank + 1))


def rows_of(rank: Rank, value: Any) -> Arrays:
    """Return the library of a value that is taken apart; ``TypeError``: it is of none."""
    arrays = arrays_of(value)
    if arrays is None:
        raise TypeError(
            f"{rank.operation}: it takes a tensor or an array apart, not a {type(value).__name__}"
        )
    return arrays


def _arrays(value: Any) -> Arrays:
    arrays = arrays_of(value)
    assert arrays is not None, "it has been checked by all ranks"
    return arrays


def _check(
    rank: Rank, inputs: Sequence[Any], number: int | None = None, *, computes: bool = True
) -> tuple[Arrays, Sequence[Any]]:
    """Return the library of the ``inputs`` and these without their notes for autograd. ``computes``: new ones
    are made of their elements.

    Raises:
        TypeError: one is neither a tensor nor an array, or lies where it cannot be read, or may mean more
            than the elements that are computed with.
        ValueError: they differ in kind, dtype or shape, or a tensor's storage was freed.
    """
    arrays = arrays_of(inputs[0])
    if arrays is None or not arrays.alike(inputs):
        _refuse(rank, inputs, number)
    if computes and not all(map(arrays.is_plain, inputs)):
        _refuse(rank, inputs, number)
    if arrays is TENSORS and any(lacking(value) is not None for value in inputs):
        _refuse(rank, inputs, number, computes)
    return arrays, [arrays.plain(value) for value in inputs]


def _refuse(
    rank: Rank, inputs: Sequence[Any], number: int | None, computes: bool = True
) -> NoReturn:
    refuse(title_of(rank, number), rank.names, [seen(value, computes) for value in inputs])


def _check_reducible(
    rank: Rank, op: ReduceOp, inputs: Sequence[Any], number: int | None = None
) -> tuple[Arrays, Sequence[Any]]:
    """Check the ``inputs`` as ``_check`` does. In addition, raise ``TypeError`` for a dtype that ``op`` is
    not for."""
    arrays, values = _check(rank, inputs, number)
    reason = why_not(op, arrays, values[0].dtype)
    if reason is not None:
        raise TypeError(f"{title_of(rank, number)}: {reason}")
    return arrays, values


def title_of(rank: Rank, number: int | None) -> str:
    """Name the operation in messages. ``number``: of the tensor of each list, where there are several."""
    which = "" if number is None else f", tensor {number} of each list"
    return f"{rank.operation} over {len(rank.names)} actors{which}"


torch: Any = LaterModule("torch")


class Announced(NamedTuple):
    """Announcement by a rank of a value that it puts in.

    words: the value in words, for people.
    dtype, shape: of a tensor; ``None``: the value is no tensor.
    """

    words: str
    dtype: str | None
    shape: tuple[int, ...]


class Offer(Rank, frozen=True):
    """Function that offers a rank's inputs to the other ranks."""

    def __call__(self, *inputs: Any) -> Any:
        return inputs

    def announce(self, *inputs: Any) -> tuple[Announced, ...]:
        """Return announcements of the inputs, for ranks that have a communicator."""
        return tuple([_announced(value) for value in inputs])


class Together(Rank, frozen=True, kw_only=True):
    """Part of a rank in the operation.

    communicator: what it is called.
    plain: the same as ours, of one tensor of each rank.
    tensors: how many tensors each rank puts in. They come first among the inputs, then what all ranks have
        offered.
    op: how tensors are reduced.
    join: of ``allgather``, whether its tensors are joined.
    """

    communicator: str
    plain: Callable[..., Any]
    tensors: int = 1
    op: ReduceOp | None = None
    join: bool = True

    def __call__(self, *inputs: Any) -> Any:
        offers = inputs[self.tensors :]
        return [self.plain(*values) for values in zip(*offers, strict=True)], None

    def begin(self, inputs: Sequence[Any]) -> Callable[[Any], Any]:
        """Check the inputs; all ranks find the same. Return what is called with the communicator, on any
        thread, when all ranks are ready; it returns what the task does.

        Raises:
            TypeError: a rank puts in what is no tensor.
            ValueError: the ranks differ, or the tensors have a shape that the operation is not for.
        """
        self._check(inputs[self.tensors :])
        # The actor serves others meanwhile, who may write to the tensors.
        sent = [value.detach().clone().contiguous() for value in inputs[: self.tensors]]
        made = [self._output_for(value) for value in sent]

        def run(communicator: Any) -> Any:
            reduces = () if self.op is None else (self.op,)
            for value, output in zip(sent, made, strict=True):
                getattr(communicator, self.operation)(value, output, *reduces)
            if self.join:
                return made, None
            each = [
                output.reshape(len(self.names), *v.shape)
                for v, output in zip(sent, made, strict=True)
            ]
            return [list(joined.unbind(0)) for joined in each], None

        return run

    def _output_for(self, value: Any) -> Any:
        """Make the tensor for the result."""
        shape = tuple(value.shape)
        if self.operation == "allgather":
            check_joinable(self, value)
            shape = (shape[0] * len(self.names), *shape[1:])
        elif self.operation == "reducescatter":
            share = share_of(self, value)
            shape = (share.stop - share.start, *shape[1:])
        return torch.empty(shape, dtype=value.dtype, device=value.device)

    def _check(self, offers: Sequence[Sequence[Announced]]) -> None:
        for number, ranks in enumerate(zip(*offers, strict=True)):
            seen = ", ".join(
                f"{name} has {said.words}" for name, said in zip(self.names, ranks, strict=True)
            )
            which = "" if self.tensors == 1 else f", tensor {number} of each list"
            title = f"{self.operation} over {len(self.names)} actors{which}"
            if any(said.dtype is None for said in ranks):
                raise TypeError(f"{title}: by the {self.communicator} it takes tensors: {seen}")
            if len({(said.dtype, said.shape) for said in ranks}) > 1:
                raise ValueError(f"{title}: the ranks differ: {seen}")


class Confirmed(Rank, frozen=True):
    """Function that returns a rank's result once all ranks have theirs.

    several: the result is a list of results.
    """

    several: bool = False

    def __call__(self, *inputs: Any) -> Any:
        made: Sequence[Any] = inputs[0]
        return made if self.several else made[0]


def _announced(value: Any) -> Announced:
    if arrays_of(value) is not TENSORS:
        return Announced(described(value), None, ())
    if not TENSORS.is_plain(value):
        raise TypeError(more_than_elements(value))
    words = lacking(value)
    if words is not None:
        raise ValueError(f"{described(value)} {words}")
    return Announced(described(value), str(value.dtype), tuple(value.shape))
