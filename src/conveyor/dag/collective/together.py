"""Functions of a collective's ranks where a communicator of the user's does the operation.

Each rank first announces its inputs. When all have announced theirs, each comes to the operation; when all
have done that, each has its result. No communicator is used if all actors are in one process or the graph is
not compiled. Then the announcement is the tensors themselves, and the operation is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from conveyor.dag.collective.calls import (
    Rank,
    check_joinable,
    share_of,
)
from conveyor.dag.collective.kernels import TENSORS, arrays_of
from conveyor.dag.collective.reduceop import ReduceOp
from conveyor.dag.collective.seen import described, more_than_elements
from conveyor.later import LaterModule
from conveyor.storages import lacking

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
        made = [self._room(value) for value in sent]

        def run(communicator: Any) -> Any:
            reduces = () if self.op is None else (self.op,)
            for value, room in zip(sent, made, strict=True):
                getattr(communicator, self.operation)(value, room, *reduces)
            if self.join:
                return made, None
            each = [
                room.reshape(len(self.names), *v.shape) for v, room in zip(sent, made, strict=True)
            ]
            return [list(joined.unbind(0)) for joined in each], None

        return run

    def _room(self, value: Any) -> Any:
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
