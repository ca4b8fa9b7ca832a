"""Added tasks for collectives with ranks on several nodes, so that less is sent between the nodes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from conveyor.dag.collective.calls import (
    AllReduce,
    AllToAll,
    FusedAllReduce,
    Rank,
    ReducePart,
    ReduceScatter,
    Reducing,
    Scatter,
    bounds,
    joined,
    reduce_inputs,
    rows_of,
    share_of,
    title_of,
)
from conveyor.dag.collective.kernels import (
    Arrays,
    ReduceOp,
    Seen,
    arrays_of,
    check_seen,
    reduce,
    reduced,
    seen,
    why_not,
    widens,
)
from conveyor.dag.inputs import InputAttributeNode, InputNode
from conveyor.dag.methods import Collective, Function, MethodNode, OutputElementNode
from conveyor.dag.node import ActorRef, DAGNode, record_of


class RowsForHosts(Rank, frozen=True, kw_only=True):
    """Function that takes a rank's tensor apart for ranks of other nodes, along dimension 0.

    targets: of each of these nodes, the ranks.
    """

    targets: Hosts

    @property
    def only_reads(self) -> bool:
        return True

    def __call__(self, *inputs: Any) -> Any:
        ranks, arrays = look(inputs)
        (value,) = inputs
        made = [Piece(ranks, None)] * len(self.targets)
        if arrays is not None and value.shape and value.shape[0] % len(self.names) == 0:
            made = [Piece(ranks, rows_for(self, arrays, value, to)) for to in self.targets]
        return made if len(made) > 1 else made[0]


class AllToAllByHost(Rank, frozen=True, kw_only=True):
    """Function that joins a rank's shares of all tensors.

    Its inputs are the tensors of the ranks of its own node, and the values that ranks of other nodes have
    made for its node, in the order of ranks.

    local_ranks: the ranks of its own node.
    position: its position among those of them that get anything.
    """

    local_ranks: tuple[int, ...]
    position: int

    @property
    def only_reads(self) -> bool:
        return True

    def __call__(self, *inputs: Any) -> Any:
        is_local = [rank in self.local_ranks for rank in range(len(inputs))]
        looks = [
            seen(given) if here else given.ranks[0]
            for given, here in zip(inputs, is_local, strict=True)
        ]
        own = inputs[self.rank]
        arrays = check(self, looks, own, None)
        share = share_of(self, own)
        return joined(
            self,
            arrays,
            [
                arrays.plain(given)[share] if here else given.value[self.position]
                for given, here in zip(inputs, is_local, strict=True)
            ],
        )


class ScatterRows(Rank, frozen=True, kw_only=True):
    """Function of the actor that has a tensor: takes it apart for ranks of other nodes.

    targets: of each of these nodes, the ranks.
    """

    targets: Hosts

    def __call__(self, *inputs: Any) -> Any:
        (value,) = inputs
        arrays = rows_of(self, value)
        share_of(self, value)  # says what is wrong
        made = [rows_for(self, arrays, value, to) for to in self.targets]
        return made if len(made) > 1 else made[0]


class Taken(Rank, frozen=True, kw_only=True):
    """Function that takes a rank's own part of a value that has come to its node.

    position: the position of that part.
    """

    position: int

    def __call__(self, *inputs: Any) -> Any:
        return inputs[0][self.position]


def rows_for(rank: Rank, arrays: Arrays, value: Any, targets: Sequence[int]) -> list[Any]:
    """Return the shares of ``targets``, which are views."""
    plain, each = arrays.plain(value), value.shape[0] // len(rank.names)
    return [plain[each * to : each * (to + 1)] for to in targets]


T = TypeVar("T")

Hosts = tuple[tuple[int, ...], ...]
"""The ranks of each host, in order; the hosts stand in the order of their first ranks."""


class Piece(NamedTuple):
    """Value that a rank makes for ranks of other nodes. Descriptions of the inputs of all ranks of its node
    come with it, so a rank that gets none of their tensors finds their errors as if it had them.

    ranks: what each rank of the node has put in.
    value: an array, or a list of arrays; ``None``: there is none, since the inputs do not fit.
    whole: the value is a rank's own tensor.
    """

    ranks: tuple[Seen, ...]
    value: Any
    whole: bool = False


def look(
    values: Sequence[Any], op: ReduceOp | None = None
) -> tuple[tuple[Seen, ...], Arrays | None]:
    """Describe what ranks of one node put in. Also return the library of the values, if they fit each other
    and ``op``."""
    ranks = tuple(map(seen, values))
    arrays = arrays_of(values[0])
    if arrays is None or not all(one.fits and one.kind == ranks[0].kind for one in ranks):
        return ranks, None
    if op is not None and why_not(op, arrays, values[0].dtype) is not None:
        return ranks, None
    return ranks, arrays


def check(
    rank: Rank, ranks: Sequence[Seen], own: Any, op: ReduceOp | None, number: int | None = None
) -> Arrays:
    """Return the library of what ``ranks`` put in, all of them in order, ``own`` among it.

    Raises:
        TypeError, ValueError: as where one rank has the tensors of all.
    """
    title = title_of(rank, number)
    check_seen(title, rank.names, ranks)
    arrays = arrays_of(own)
    assert arrays is not None, "it was among what is checked"
    reason = None if op is None else why_not(op, arrays, own.dtype)
    if reason is not None:
        raise TypeError(f"{title}: {reason}")
    return arrays


def in_order(hosts: Hosts, each: Sequence[Sequence[T]]) -> list[T]:
    """Put the values that ``each`` node has for its ranks into the order of all ranks."""
    of = {
        rank: one
        for host, own in zip(hosts, each, strict=True)
        for rank, one in zip(host, own, strict=True)
    }
    return [of[rank] for rank in range(len(of))]


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
    ``ranks``: the number of ranks that they come from."""
    wide = widens(op, arrays, out.dtype)
    if not wide and op is not ReduceOp.AVG:
        reduce(op, arrays, sources, out)
        return
    size = arrays.size(out)
    scratch = arrays.empty((min(size, _CHUNK),), arrays.single()) if wide else None
    for begin in range(0, size, _CHUNK):
        to = out[begin : begin + _CHUNK]
        pieces = [source[begin : begin + _CHUNK] for source in sources]
        total = to if scratch is None else scratch[: arrays.size(to)]
        if scratch is None:
            reduce(_without_count(op), arrays, pieces, total)
        else:
            _widened(op, arrays, pieces, total)
        if op is ReduceOp.AVG:
            total /= ranks
        if scratch is not None:
            arrays.copy(to, total)


def _widened(op: ReduceOp, arrays: Arrays, sources: Sequence[Any], out: Any) -> None:
    """Reduce ``sources`` into ``out``, which is of the wider type."""
    function = arrays.function(_without_count(op))
    arrays.copy(out, sources[0])
    for source in sources[1:]:
        function(out, source, out=out)


def _without_count(op: ReduceOp) -> ReduceOp:
    """Return the reduction without the division by the number of ranks."""
    return ReduceOp.SUM if op is ReduceOp.AVG else op


#: Up to so many bytes a tensor is sent to other hosts as it is. It costs a frame, as a part of it would, and
#: is reduced in the order of ranks.
SMALL = 32 << 10


class HostPart(Reducing, frozen=True, kw_only=True):
    """Function that reduces a rank's part of the tensors of its node's ranks, which are its inputs.

    position: its position among these ranks.
    several: each of them puts in a tuple of tensors.
    """

    position: int
    several: bool = False

    def __call__(self, *inputs: Any) -> Any:
        """Return a ``Piece`` of each tensor in a list; or, which is much less to be packed, the rank's own
        tensor, if that is all that is to be told."""
        if self.several:
            return [self._piece(values) for values in zip(*inputs, strict=True)]
        piece = self._piece(inputs)
        return piece.value if piece.whole else [piece]

    def _piece(self, inputs: Sequence[Any]) -> Piece:
        ranks, arrays = look(inputs, self.op)
        if arrays is None:
            return Piece(ranks, None)
        values = [arrays.plain(value) for value in inputs]
        # Of two, the sum in 32 bits has as many bytes as both.
        halves = len(values) == 2 and widens(self.op, arrays, values[0].dtype)
        if halves or values[0].nbytes <= SMALL:
            return Piece(ranks, values[self.position], True)
        begin, end = bounds(arrays.size(values[0]), self.position, len(values))
        sources = [arrays.flat(value)[begin:end] for value in values]
        return Piece(ranks, partial(self.op, arrays, sources))


class AllReduceByHost(Reducing, frozen=True, kw_only=True):
    """Function that reduces the results of all nodes.

    Its inputs are its own tensor, and of each node the ``HostPart`` of each rank, or, where there is one rank
    on the node, that rank's tensor.

    hosts: the ranks of each node.
    several: each rank puts in a tuple of tensors.
    """

    hosts: Hosts
    several: bool = False

    def __call__(self, *inputs: Any) -> Any:
        own, *given = inputs
        if not any(isinstance(one, list) for one in given) and not self.several:
            return reduce_inputs(self, self.op, in_order(self.hosts, self._of_hosts(given)))
        of_hosts = self._of_hosts(given)
        tensors = [
            self._checked(value, number, [self._pieces(host, number) for host in of_hosts])
            for number, value in enumerate(own if self.several else (own,))
        ]
        made = [self._reduced(*tensor) for tensor in tensors]  # none before all are checked
        return made if self.several else made[0]

    def _of_hosts(self, given: Sequence[Any]) -> list[list[Any]]:
        each = iter(given)
        return [[next(each) for _ in host] for host in self.hosts]

    def _pieces(self, given: Sequence[Any], number: int) -> list[Piece]:
        """Return the pieces that a node has made of tensor ``number``."""
        if len(given) > 1 and isinstance(given[0], list):
            return [parts[number] for parts in given]
        values = [one[number] for one in given] if self.several else given
        looks = tuple(map(seen, values))
        return [Piece(looks, value, True) for value in values]

    def _checked(
        self, own: Any, number: int, of_hosts: Sequence[Sequence[Piece]]
    ) -> tuple[Any, Arrays, Sequence[Sequence[Piece]]]:
        """Check the values to be reduced. Returns ``own``, its library, and the results of all nodes."""
        ranks = in_order(self.hosts, [pieces[0].ranks for pieces in of_hosts])
        arrays = check(self, ranks, own, self.op, number if self.several else None)
        return own, arrays, of_hosts

    def _reduced(self, own: Any, arrays: Arrays, of_hosts: Sequence[Sequence[Piece]]) -> Any:
        if all(pieces[0].whole for pieces in of_hosts):
            values = [[arrays.plain(piece.value) for piece in pieces] for pieces in of_hosts]
            return reduced(self.op, arrays, in_order(self.hosts, values))
        size = arrays.size(own)
        out = arrays.empty(own.shape, own)
        flat = arrays.flat(out)
        hosts = [_Parts(arrays, size, pieces) for pieces in of_hosts]
        begin = 0
        for end in sorted({end for host in hosts for end in host.ends}):
            sources = [source for host in hosts for source in host.between(begin, end)]
            combine(self.op, len(self.names), arrays, sources, flat[begin:end])
            begin = end
        return out


class _Parts:
    """Results of one node's ranks: parts that follow each other, or the whole tensors of the ranks."""

    def __init__(self, arrays: Arrays, size: int, pieces: Sequence[Piece]) -> None:
        values = [arrays.flat(arrays.plain(piece.value)) for piece in pieces]
        #: The arrays that are reduced in each stretch, and where the stretch ends.
        self.sources = [values] if pieces[0].whole else [[value] for value in values]
        self.ends = [bounds(size, i, len(self.sources))[1] for i in range(len(self.sources))]

    def between(self, begin: int, end: int) -> list[Any]:
        """Return the elements from ``begin`` to ``end``, which lie in one stretch."""
        first = 0
        for sources, last in zip(self.sources, self.ends, strict=True):
            if end <= last:
                return [source[begin - first : end - first] for source in sources]
            first = last
        raise AssertionError("no stretch goes so far")


class HostShares(Reducing, frozen=True, kw_only=True):
    """Function that reduces the shares of some ranks of other nodes, from the tensors of its node's ranks,
    which are its inputs.

    targets: these ranks.
    rows: a share is of dimension 0; else of all elements in a row.
    """

    targets: tuple[int, ...]
    rows: bool

    def __call__(self, *inputs: Any) -> Any:
        ranks, arrays = look(inputs, self.op)
        made = [Piece(ranks, None)] * len(self.targets)
        if arrays is not None and (not self.rows or can_be_shared(self, inputs[0])):
            values = [arrays.plain(value) for value in inputs]
            made = [
                Piece(
                    ranks, partial(self.op, arrays, [_share(self, arrays, v, to) for v in values])
                )
                for to in self.targets
            ]
        return made if len(made) > 1 else made[0]


class ShareByHost(Reducing, frozen=True, kw_only=True):
    """Function that reduces a rank's own share.

    Its inputs are the tensors of its own node's ranks, and of each other node the value that one of its
    ``HostShares`` has made for this rank, all in the order of nodes.

    hosts: the ranks of each node.
    rows: as above.
    """

    hosts: Hosts
    rows: bool

    def __call__(self, *inputs: Any) -> Any:
        here = next(i for i, host in enumerate(self.hosts) if self.rank in host)
        behind = here + len(self.hosts[here])
        values, pieces = inputs[here:behind], [*inputs[:here], *inputs[behind:]]
        own = values[self.hosts[here].index(self.rank)]
        ranks: list[Any] = [piece.ranks for piece in pieces]
        ranks.insert(here, tuple(map(seen, values)))
        arrays = check(self, in_order(self.hosts, ranks), own, self.op)
        share = share_of(self, own) if self.rows else slice(*self._bounds(arrays, own))
        shape = (share.stop - share.start, *(own.shape[1:] if self.rows else ()))
        shares = [_share(self, arrays, arrays.plain(value), self.rank) for value in values]
        sources = [arrays.flat(piece.value) for piece in pieces]
        sources.insert(here, shares[0] if len(shares) == 1 else partial(self.op, arrays, shares))
        out = arrays.empty(shape, own)
        combine(self.op, len(self.names), arrays, sources, arrays.flat(out))
        return out

    def _bounds(self, arrays: Arrays, own: Any) -> tuple[int, int]:
        return bounds(arrays.size(own), self.rank, len(self.names))


def _share(rank: HostShares | ShareByHost, arrays: Arrays, value: Any, target: int) -> Any:
    """Return the elements of the share of rank ``target`` in a row."""
    ranks = len(rank.names)
    if not rank.rows:
        begin, end = bounds(arrays.size(value), target, ranks)
        return arrays.flat(value)[begin:end]
    each = value.shape[0] // ranks
    return arrays.flat(value[each * target : each * (target + 1)])


def can_be_shared(rank: Reducing, value: Any) -> bool:
    """Say whether dimension 0 of ``value`` can be divided among the ranks."""
    return bool(value.shape) and value.shape[0] % len(rank.names) == 0


HostsOf = Callable[[Sequence[Any]], Sequence[Hashable]]
"""Says on which hosts these actors are."""

#: Key of one collective: what it does, on which nodes.
_Key = tuple[Any, ...]


def by_host(
    tasks: Sequence[MethodNode], hosts_of: HostsOf
) -> tuple[tuple[MethodNode, ...], Mapping[MethodNode, MethodNode]]:
    """Have the ranks of collectives that are on several hosts send each other what these need.

    What a host's ranks reduce is reduced there first; of what is taken apart only the shares of a host's
    ranks go to it. A collective on one host is left as it is, as is one where each host gets each value once
    anyway.

    Args:
        tasks: those of the graph, in bind order.

    Returns:
        Those of the graph now, each behind those that it needs; and for each task that has another in its
        place, that one.
    """
    spreading = _Spreading(tasks, hosts_of)
    for task in tasks:
        spreading.add(task)
    return tuple(spreading.made), spreading.instead


class _Spreading:
    """The tasks in the making."""

    def __init__(self, tasks: Sequence[MethodNode], hosts_of: HostsOf) -> None:
        self.made: list[MethodNode] = []
        self.instead: dict[MethodNode, MethodNode] = {}
        self._hosts_of = hosts_of
        self._of_actors: dict[tuple[ActorRef, ...], Hosts] = {}
        #: Nodes made for a collective, which all of its ranks use.
        self._pieces: dict[_Key, Any] = {}
        #: For one collective, the ranks whose results are used.
        self._used: dict[int, list[int]] = {}
        for task in tasks:
            call = _call_of(task)
            if call is not None:
                self._used.setdefault(_together(task), []).append(call.rank)

    def add(self, task: MethodNode) -> None:
        """Add a task, and before it the tasks that its collective needs."""
        call = _call_of(task)
        made: MethodNode | None = None
        match call:
            case AllReduce() | FusedAllReduce():
                made = self._all_reduce(task, call)
            case ReduceScatter() | ReducePart():
                made = self._reduce_scatter(task, call)
            case AllToAll():
                made = self._all_to_all(task, call)
            case Scatter():
                made = self._scatter(task, call)
        if made is not None:
            self.instead[task] = made
        self.made.append(task if made is None else made)

    def _all_reduce(self, task: MethodNode, call: AllReduce | FusedAllReduce) -> MethodNode | None:
        if call.at_once:
            return None
        nodes, several = task.args, isinstance(call, FusedAllReduce)
        hosts = self._hosts(list(map(_actor_of, nodes)))
        if len(hosts) == 1 or len(hosts) == len(nodes):
            return None  # what goes from host to host is one tensor of each anyway
        parts = self._once(
            ("part", call.op, several, *nodes),
            lambda: [self._parts(task, call, host, several) for host in hosts],
        )
        given = [nodes[call.rank], *[part for host in parts for part in host]]
        final = AllReduceByHost(
            call.operation, call.names, call.rank, call.op, hosts=hosts, several=several
        )
        return _instead(task, final, given)

    def _parts(
        self, task: MethodNode, call: AllReduce | FusedAllReduce, host: Sequence[int], several: bool
    ) -> list[DAGNode]:
        """Make the tasks in which the ranks of a node reduce, and return their nodes."""
        nodes = [task.args[rank] for rank in host]
        if len(nodes) == 1:
            return nodes
        return [
            self._before(
                task,
                nodes,
                nodes[position],
                HostPart(
                    call.operation, call.names, rank, call.op, position=position, several=several
                ),
                "a host's part of",
            )
            for position, rank in enumerate(host)
        ]

    def _reduce_scatter(
        self, task: MethodNode, call: ReduceScatter | ReducePart
    ) -> MethodNode | None:
        nodes, rows = task.args, isinstance(call, ReduceScatter)
        hosts = self._hosts(list(map(_actor_of, nodes)))
        if len(hosts) == 1:
            return None
        used = self._used[_together(task)]
        shares = self._once(
            ("share", call.op, rows, _together(task), *nodes),
            lambda: [self._shares(task, call, host, used, rows) for host in hosts],
        )
        given: list[DAGNode] = []
        for host, of_host in zip(hosts, shares, strict=True):
            given += [nodes[rank] for rank in host] if call.rank in host else [of_host[call.rank]]
        final = ShareByHost(call.operation, call.names, call.rank, call.op, hosts=hosts, rows=rows)
        return _instead(task, final, given)

    def _shares(
        self,
        task: MethodNode,
        call: ReduceScatter | ReducePart,
        host: Sequence[int],
        used: Sequence[int],
        rows: bool,
    ) -> dict[int, DAGNode]:
        """Make the tasks in which a node's ranks reduce for each rank of other nodes; return them by that
        rank."""
        nodes = [task.args[rank] for rank in host]
        made: dict[int, DAGNode] = {}
        others = [rank for rank in used if rank not in host]
        for position, rank in enumerate(host):
            targets = tuple(others[position :: len(host)])
            if targets:
                function = HostShares(
                    call.operation, call.names, rank, call.op, targets=targets, rows=rows
                )
                given = self._before(
                    task, nodes, nodes[position], function, "a host's shares for", len(targets)
                )
                made.update(_elements(given, targets))
        return made

    def _all_to_all(self, task: MethodNode, call: AllToAll) -> MethodNode | None:
        nodes = task.args
        hosts = self._hosts(list(map(_actor_of, nodes)))
        if len(hosts) == 1:
            return None
        used = self._used[_together(task)]
        local_ranks = next(host for host in hosts if call.rank in host)
        rows = self._once(
            ("rows", _together(task), *nodes),
            lambda: {
                rank: self._rows(
                    task, nodes[rank], hosts, used, call, rank, RowsForHosts, "rows for"
                )
                for host in hosts
                for rank in host
            },
        )
        given = [
            node if rank in local_ranks else rows[rank][local_ranks]
            for rank, node in enumerate(nodes)
        ]
        position = [rank for rank in local_ranks if rank in used].index(call.rank)
        final = AllToAllByHost(
            call.operation, call.names, call.rank, local_ranks=local_ranks, position=position
        )
        return _instead(task, final, given)

    def _scatter(self, task: MethodNode, call: Scatter) -> MethodNode | None:
        (node,) = task.args
        if isinstance(node, (InputNode, InputAttributeNode)):
            return None  # the executor's: there is nobody who would take it apart
        assert task.collective is not None
        getting = task.collective.actors
        source = _actor_of(node)
        hosts = self._hosts([*getting, source])
        has = next(host for host in hosts if len(getting) in host)
        if call.rank in has:
            return None
        used = self._used[_together(task)]
        others = tuple([host for host in hosts if host is not has])
        rows = self._once(
            ("scattered", _together(task), node),
            lambda: self._rows(task, node, others, used, call, 0, ScatterRows, "rows for"),
        )
        local_ranks = next(host for host in hosts if call.rank in host)
        position = [rank for rank in local_ranks if rank in used].index(call.rank)
        final = Taken(call.operation, call.names, call.rank, position=position)
        return _instead(task, final, [rows[local_ranks]])

    def _rows(
        self,
        task: MethodNode,
        node: DAGNode,
        hosts: Hosts,
        used: Sequence[int],
        call: Rank,
        rank: int,
        make: Callable[..., Rank],
        words: str,
    ) -> dict[tuple[int, ...], DAGNode]:
        """Have the actor of ``node`` take its value apart for the nodes that the actor is not on; by
        these."""
        ranks = {host: tuple([one for one in host if one in used]) for host in hosts}
        to = [host for host in hosts if ranks[host] and not (make is RowsForHosts and rank in host)]
        if not to:
            return {}
        function = make(call.operation, call.names, rank, targets=tuple([ranks[h] for h in to]))
        given = self._before(task, [node], node, function, words, len(to))
        return dict(_elements(given, to))

    def _hosts(self, actors: Sequence[ActorRef]) -> Hosts:
        """Find which of ``actors``, by their positions, are on each host."""
        key = tuple(actors)
        if key not in self._of_actors:
            of: dict[Hashable, list[int]] = {}
            for position, host in enumerate(self._hosts_of(actors)):
                of.setdefault(host, []).append(position)
            self._of_actors[key] = tuple(map(tuple, of.values()))
        return self._of_actors[key]

    def _once(self, key: _Key, make: Callable[[], Any]) -> Any:
        if key not in self._pieces:
            self._pieces[key] = make()
        return self._pieces[key]

    def _before(
        self,
        task: MethodNode,
        nodes: Sequence[DAGNode],
        own: DAGNode,
        call: Rank,
        words: str,
        count: int = 1,
    ) -> MethodNode:
        """Add a task on the actor of ``own``, for ranks of the collective of ``task``. ``words`` go before
        what that is called; ``count``: so many values it returns."""
        assert task.collective is not None
        input_task = own.task if isinstance(own, OutputElementNode) else own
        assert isinstance(input_task, MethodNode), "what ranks put in is on their actors"
        collective = Collective(
            f"{words} {task.collective.title}", tuple(nodes), tuple(map(_actor_of, nodes))
        )
        made = MethodNode(
            input_task.actor,
            f"{words} {task.method}",
            tuple(nodes),
            {},
            num_returns=count if count > 1 else None,
            function=Function(call, (), False, False),
            collective=collective,
            owner=input_task.owner,
            planned=True,
        )
        self.made.append(made)
        return made


def _instead(task: MethodNode, call: Rank, nodes: Sequence[DAGNode]) -> MethodNode:
    """Make the task that a rank has in the place of ``task``."""
    return MethodNode(
        task.actor,
        task.method,
        tuple(nodes),
        {},
        num_returns=task.num_returns,
        function=Function(call, (), False, False),
        collective=task.collective,
        owner=task.owner,
        planned=True,
    )


def _elements(task: MethodNode, keys: Sequence[Any]) -> list[tuple[Any, DAGNode]]:
    """Pair the results of ``task`` with ``keys``."""
    if task.num_returns is None:
        return [(keys[0], task)]
    return [(key, OutputElementNode(task, i)) for i, key in enumerate(keys)]


def _call_of(task: MethodNode) -> Rank | None:
    """Return the function that a rank of a collective calls; ``None``: the task is no rank of a
    collective."""
    call = None if task.collective is None or task.function is None else task.function.call
    return call if isinstance(call, Rank) else None


def _together(task: MethodNode) -> int:
    """Tell collectives apart."""
    record = record_of(task)
    return min([one.number for one in record.together], default=record.number)


def _actor_of(node: DAGNode) -> ActorRef:
    task = node.task if isinstance(node, OutputElementNode) else node
    assert isinstance(task, MethodNode), "what ranks put in is on their actors"
    return task.actor
