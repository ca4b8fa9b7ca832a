"""The operations, called in methods of actors.

Each is an object: it is called in a method, and ``bind`` makes it a task of a graph (``dag.collective``).
Those that reduce nothing have a second form, ``shared``. It returns the values of the ranks, which lie in
shared memory and are read in place. Nothing is copied to a reader, whatever the size. A rank's own value is
copied once, unless it was made with ``conveyor.empty`` or ``conveyor.empty_tensor`` and its maker keeps no
reference to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conveyor.collective.group import (
    ALL_TO_ALL,
    ALLGATHER,
    ALLREDUCE,
    BARRIER,
    BROADCAST,
    GATHER,
    REDUCE,
    REDUCESCATTER,
    SCATTER,
    Fused,
    Group,
    Operand,
    operand,
)
from conveyor.collective.membership import DEFAULT, find
from conveyor.dag.collective import binding
from conveyor.dag.collective.kernels import ELEMENT_TYPES, ReduceOp

#: The name of a call's only tensor in errors.
ONE = "the tensor"

_ADVICE = "what is written to must lie apart: pass a copy, as clone() of torch and copy() of numpy make it"


def check_outputs(to: Sequence[Operand], what: str) -> None:
    """Refuse outputs that share memory with each other: only one of them could be right.

    Raises:
        ValueError: two of them do; ``what`` the list of them is called.
    """
    if len(to) < 2:
        return
    spans = sorted([(*_span(one), i) for i, one in enumerate(to)])
    end = spans[0][1]
    for begin, until, _ in spans[1:]:
        if begin < end:
            break
        end = max(end, until)
    else:
        return
    for place, (_, end, i) in enumerate(spans):
        for begin, _, k in spans[place + 1 :]:
            if begin >= end:
                break
            if _share(to[i], to[k]):
                first, second = sorted((i, k))
                raise ValueError(
                    f"tensors {first} and {second} of {what} share memory, and the operation writes to "
                    f"both: {_ADVICE}"
                )


def check_inputs(to: Sequence[Operand], sources: Sequence[Operand], out: str, what: str) -> None:
    """Refuse inputs that share a part of an output's memory, since writing would change them before they are
    read. An input whose memory is exactly that of an output is fine.

    Raises:
        ValueError: an input does; ``out`` and ``what`` are the names of the outputs and the inputs.
    """
    # A copy was made of what is not in one row, of inputs before and of outputs until after the operation.
    inputs = [(*_span(one), i) for i, one in enumerate(sources) if one.staged is None]
    outputs = [(*_span(one), i) for i, one in enumerate(to) if one.staged is None]
    for begin, end, i in inputs:
        for other, until, k in outputs:
            if other < end and begin < until and begin != other:
                raise ValueError(
                    f"{_named(what, i)} and {_named(out, k)} share a part of their memory, and "
                    f"the operation writes to the latter while it reads the former: {_ADVICE}, or the very "
                    "same tensor"
                )


def _named(what: str, place: int) -> str:
    return what if what == ONE else f"tensor {place} of {what}"


def _span(one: Operand) -> tuple[int, int]:
    """The addresses at which the memory of a tensor begins and ends."""
    address = one.address
    if one.staged is None:
        if isinstance(address, int):
            return address, address + one.count * one.tensor.itemsize
        begin = address.__array_interface__["data"][0]
        return begin, begin + address.nbytes
    if not one.count:
        return 0, 0
    begin, strides = _layout(one)
    reaches = [(n - 1) * s for n, s in zip(one.tensor.shape, strides, strict=True)]
    end = begin + sum(r for r in reaches if r > 0) + one.tensor.itemsize
    return begin + sum(r for r in reaches if r < 0), end


def _layout(one: Operand) -> tuple[int, tuple[int, ...]]:
    """Return the address of a tensor's first element, and its strides in bytes."""
    tensor = one.tensor
    if isinstance(one.address, int):
        return tensor.data_ptr(), tuple([s * tensor.itemsize for s in tensor.stride()])
    return tensor.__array_interface__["data"][0], tensor.strides


def _share(one: Operand, other: Operand) -> bool:
    """Whether two tensors between whose ends there is memory of both have an element in common."""
    if one.staged is None and other.staged is None:
        return True
    try:
        import numpy
    except ImportError:
        return True  # nobody else can tell whether their elements lie between each other's

    return bool(numpy.shares_memory(_Elements(one).seen(), _Elements(other).seen()))


class _Elements:
    """Layout of a tensor of any library and type, for numpy."""

    def __init__(self, one: Operand) -> None:
        address, strides = _layout(one)
        self.__array_interface__ = {
            "data": (address, True),
            "shape": tuple(one.tensor.shape),
            "strides": strides,
            "typestr": f"|V{one.tensor.itemsize}",
            "version": 3,
        }

    def seen(self) -> Any:
        import numpy

        return numpy.asarray(self)


class AllReduce:
    """Reduce a tensor over all ranks, in place: afterwards each has the result."""

    def __init__(self) -> None:
        # Of the object, since type checkers see but the first form of an overloaded function that is static.
        self.bind = binding.allreduce

    def __call__(
        self,
        tensor: Any,
        group_name: str = DEFAULT,
        op: ReduceOp = ReduceOp.SUM,
        *,
        timeout: float | None = None,
    ) -> None:
        """Reduce a tensor, or a list of tensors of one type as one. The result has the same bits at each
        rank.

        Raises:
            CollectiveMismatchError: the ranks have not called the same; nothing was done.
            CollectiveBrokenError: a rank is not coming, or an operation has failed before; the message says
                which, and why.
            CollectiveTimeoutError: ``timeout`` seconds are over.

        Whatever it raises breaks the group, until that is reset.
        """
        with find(group_name) as group:
            _check(op)
            if isinstance(tensor, (list, tuple)):
                fused = Fused(tensor)
                one = fused.whole
                there = (one.address,)
                group.run(
                    ALLREDUCE,
                    one,
                    there,
                    there,
                    timeout,
                    op,
                    tensors=len(tensor),
                    shapes=fused.shapes,
                )
                fused.written()
                return
            one = operand(tensor, True)
            there = (one.address,)
            group.run(ALLREDUCE, one, there, there, timeout, op)
            if one.staged is not None:
                one.written()


class AllGather:
    """Give each rank the tensors of all."""

    bind = staticmethod(binding.allgather)

    def __call__(
        self,
        tensor_list: Sequence[Any],
        tensor: Any,
        group_name: str = DEFAULT,
        *,
        timeout: float | None = None,
    ) -> None:
        """Collect the tensors of all ranks. ``tensor_list`` has a tensor for each rank, in their order, which
        is written to. All are of one shape and type. Raises as ``allreduce`` does."""
        with find(group_name) as group:
            own = operand(tensor, False)
            to = _list(group, tensor_list, own, True, "tensor_list")
            check_inputs(to, (own,), "tensor_list", ONE)
            group.run(ALLGATHER, own, (own.address,), _addresses(to), timeout)
            _written(to)

    @staticmethod
    def shared(value: Any, group_name: str = DEFAULT, *, timeout: float | None = None) -> list[Any]:
        """Return the values of all ranks, in their order. Any argument of a call can be a value, and they may
        differ.

        What comes is as at the time of the call: what is written to becomes the writer's own, and who writes
        to ``value`` later changes nobody's. Memory is kept as long as somebody has a value that lies in it,
        also if its rank has died. Raises as the call does.
        """
        given = [value]
        del value
        with find(group_name) as group:
            return group.exchange(ALLGATHER, given, timeout)


class ReduceScatter:
    """Reduce a list of tensors over all ranks, each of which gets one of the results."""

    bind = staticmethod(binding.reducescatter)

    def __call__(
        self,
        tensor: Any,
        tensor_list: Sequence[Any],
        group_name: str = DEFAULT,
        op: ReduceOp = ReduceOp.SUM,
        *,
        timeout: float | None = None,
    ) -> None:
        """Reduce ``tensor_list``, which has a tensor for each rank. ``tensor`` is written to: it becomes the
        reduction of the tensors that all ranks have for this one. Raises as ``allreduce`` does."""
        with find(group_name) as group:
            _check(op)
            own = operand(tensor, True)
            sources = _list(group, tensor_list, own, False, "tensor_list")
            check_inputs((own,), sources, ONE, "tensor_list")
            group.run(REDUCESCATTER, own, _addresses(sources), (own.address,), timeout, op)
            own.written()


class Broadcast:
    """Give each rank the tensor of one."""

    bind = staticmethod(binding.broadcast)

    def __call__(
        self,
        tensor: Any,
        src_rank: int = 0,
        group_name: str = DEFAULT,
        *,
        timeout: float | None = None,
    ) -> None:
        """Send ``tensor`` from ``src_rank``; at all other ranks it is written to. Raises as ``allreduce``
        does."""
        with find(group_name) as group:
            root = group.root(src_rank, "src_rank")
            if group.rank == root:
                own = operand(tensor, False)
                group.run(BROADCAST, own, (own.address,), (), timeout, root=root)
            else:
                own = operand(tensor, True)
                group.run(BROADCAST, own, (), (own.address,), timeout, root=root)
                own.written()

    @staticmethod
    def shared(
        value: Any = None,
        src_rank: int = 0,
        group_name: str = DEFAULT,
        *,
        timeout: float | None = None,
    ) -> Any:
        """Return the value of ``src_rank``; the values that other ranks pass are ignored. See
        ``allgather.shared``."""
        with find(group_name) as group:
            root = group.root(src_rank, "src_rank")
            given = [value]
            del value
            gives = group.rank == root
            return group.exchange(BROADCAST, given, timeout, root, gives=gives, takes=(root,))[0]


class Reduce:
    """Reduce a tensor over all ranks, for one of them."""

    bind = staticmethod(binding.reduce)

    def __call__(
        self,
        tensor: Any,
        dst_rank: int = 0,
        group_name: str = DEFAULT,
        op: ReduceOp = ReduceOp.SUM,
        *,
        timeout: float | None = None,
    ) -> None:
        """Reduce into the tensor of ``dst_rank``; the others stay as they are. Raises as ``allreduce``
        does."""
        with find(group_name) as group:
            _check(op)
            root = group.root(dst_rank, "dst_rank")
            own = operand(tensor, group.rank == root)
            there = (own.address,)
            group.run(REDUCE, own, there, there if group.rank == root else (), timeout, op, root)
            if group.rank == root:
                own.written()


class Gather:
    """Give one rank the tensors of all."""

    bind = staticmethod(binding.gather)

    def __call__(
        self,
        tensor: Any,
        tensor_list: Sequence[Any] | None = None,
        dst_rank: int = 0,
        group_name: str = DEFAULT,
        *,
        timeout: float | None = None,
    ) -> None:
        """Send ``tensor`` to ``dst_rank``. There, ``tensor_list`` has a tensor for each rank, to be written;
        other ranks have none. Raises as ``allreduce`` does."""
        with find(group_name) as group:
            root = group.root(dst_rank, "dst_rank")
            own = operand(tensor, False)
            to = _root_list(group, tensor_list, own, root, True)
            check_inputs(to, (own,), "tensor_list", ONE)
            group.run(GATHER, own, (own.address,), _addresses(to), timeout, root=root)
            _written(to)

    @staticmethod
    def shared(
        value: Any, dst_rank: int = 0, group_name: str = DEFAULT, *, timeout: float | None = None
    ) -> list[Any] | None:
        """Return the values of all ranks, at ``dst_rank``; ``None`` at the others. See
        ``allgather.shared``."""
        with find(group_name) as group:
            root = group.root(dst_rank, "dst_rank")
            given = [value]
            del value
            if group.rank != root:
                group.exchange(GATHER, given, timeout, root, takes=())
                return None
            return group.exchange(GATHER, given, timeout, root)


class Scatter:
    """Give each rank one tensor of a list that one rank has."""

    bind = staticmethod(binding.scatter)

    def __call__(
        self,
        tensor: Any,
        tensor_list: Sequence[Any] | None = None,
        src_rank: int = 0,
        group_name: str = DEFAULT,
        *,
        timeout: float | None = None,
    ) -> None:
        """Receive ``tensor`` from ``src_rank``. There, ``tensor_list`` has a tensor for each rank; other
        ranks have none. Raises as ``allreduce`` does."""
        with find(group_name) as group:
            root = group.root(src_rank, "src_rank")
            own = operand(tensor, True)
            sources = _root_list(group, tensor_list, own, root, False)
            check_inputs((own,), sources, ONE, "tensor_list")
            group.run(SCATTER, own, _addresses(sources), (own.address,), timeout, root=root)
            own.written()

    @staticmethod
    def shared(
        values: Sequence[Any] | None = None,
        src_rank: int = 0,
        group_name: str = DEFAULT,
        *,
        timeout: float | None = None,
    ) -> Any:
        """Return this rank's value from the list of ``src_rank``, which has a value for each rank; other
        ranks have no list. A part keeps the memory of the whole list. See ``allgather.shared``."""
        with find(group_name) as group:
            root = group.root(src_rank, "src_rank")
            if group.rank == root:
                _check_values(group, values)
            elif values is not None:
                raise ValueError(
                    f"only rank {root} of this operation has a list of values, and this is {group.rank}"
                )
            gives = group.rank == root
            (got,) = group.exchange(SCATTER, [values], timeout, root, gives=gives, takes=(root,))
            return got[group.rank]


class AllToAll:
    """Give each rank one tensor of each rank's list."""

    bind = staticmethod(binding.all_to_all)

    def __call__(
        self,
        output_tensor_list: Sequence[Any],
        input_tensor_list: Sequence[Any],
        group_name: str = DEFAULT,
        *,
        timeout: float | None = None,
    ) -> None:
        """Send a tensor to each rank and receive one from each. ``output_tensor_list`` has a tensor for each
        rank, to write that rank's value to. ``input_tensor_list`` has the tensor that each rank gets. Raises
        as ``allreduce`` does."""
        with find(group_name) as group:
            if len(input_tensor_list) == 0:
                raise ValueError("input_tensor_list is empty")
            like = operand(input_tensor_list[0], False, "tensor 0 of input_tensor_list")
            sources = _list(group, input_tensor_list, like, False, "input_tensor_list")
            to = _list(group, output_tensor_list, like, True, "output_tensor_list")
            check_inputs(to, sources, "output_tensor_list", "input_tensor_list")
            group.run(ALL_TO_ALL, like, _addresses(sources), _addresses(to), timeout)
            _written(to)

    @staticmethod
    def shared(
        values: Sequence[Any], group_name: str = DEFAULT, *, timeout: float | None = None
    ) -> list[Any]:
        """Return each rank's value for this rank, from lists that have a value for each rank. A part keeps
        the memory of the whole list. See ``allgather.shared``."""
        with find(group_name) as group:
            _check_values(group, values)
            return [got[group.rank] for got in group.exchange(ALL_TO_ALL, [values], timeout)]


class Barrier:
    """Wait until all ranks have come here."""

    bind = staticmethod(binding.barrier)

    def __call__(self, group_name: str = DEFAULT, *, timeout: float | None = None) -> None:
        """Wait until all ranks of the group have called it. Raises as ``allreduce`` does."""
        with find(group_name) as group:
            group.run(BARRIER, None, (), (), timeout)


allreduce = AllReduce()
allgather = AllGather()
reducescatter = ReduceScatter()
broadcast = Broadcast()
reduce = Reduce()
gather = Gather()
scatter = Scatter()
all_to_all = AllToAll()
barrier = Barrier()


def get_rank(group_name: str = DEFAULT) -> int:
    """The rank that this actor has in the group."""
    return find(group_name).rank


def get_collective_group_size(group_name: str = DEFAULT) -> int:
    """How many ranks the group has."""
    return find(group_name).size


def _check(op: Any) -> None:
    if not isinstance(op, ReduceOp):
        raise TypeError(f"op must be a ReduceOp, not {op!r}")


def _list(
    group: Group, tensors: Any, like: Operand, writes: bool, what: str
) -> tuple[Operand, ...]:
    """A tensor for each rank, all like ``like``."""
    if not isinstance(tensors, (list, tuple)):
        raise TypeError(f"{what} must be a list of tensors, not a {type(tensors).__name__}")
    if len(tensors) != group.size:
        raise ValueError(
            f"{what} must have a tensor for each of the group's {group.size} ranks, and has {len(tensors)}"
        )
    made = tuple([operand(t, writes, f"tensor {i} of {what}") for i, t in enumerate(tensors)])
    for i, one in enumerate(made):
        if one.number != like.number or tuple(one.shape) != tuple(like.shape):
            raise ValueError(
                f"tensor {i} of {what} is {_words(one)}, where all tensors of the operation must be "
                f"alike, and another is {_words(like)}"
            )
    if writes:
        check_outputs(made, what)
    return made


def _check_values(group: Group, values: Any) -> None:
    if not isinstance(values, (list, tuple)):
        raise TypeError(f"a list of values is needed, not a {type(values).__name__}")
    if len(values) != group.size:
        raise ValueError(
            f"a value for each of the group's {group.size} ranks is needed, and the list has {len(values)}"
        )


def _root_list(
    group: Group, tensors: Any, like: Operand, root: int, writes: bool
) -> tuple[Operand, ...]:
    if group.rank == root:
        if tensors is None:
            raise ValueError(f"rank {root} of this operation needs a tensor_list")
        return _list(group, tensors, like, writes, "tensor_list")
    if tensors is not None:
        raise ValueError(
            f"only rank {root} of this operation has a tensor_list, and this is {group.rank}"
        )
    return ()


def _words(one: Operand) -> str:
    return f"{ELEMENT_TYPES[one.number]}{list(one.shape)}"


def _addresses(operands: tuple[Operand, ...]) -> tuple[Any, ...]:
    return tuple([one.address for one in operands])


def _written(operands: tuple[Operand, ...]) -> None:
    for one in operands:
        one.written()
