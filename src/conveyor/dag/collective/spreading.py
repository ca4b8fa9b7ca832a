"""A graph whose collectives have ranks on several hosts gets tasks that send less between them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from conveyor.dag.collective.calls import (
    AllReduce,
    AllToAll,
    FusedAllReduce,
    Rank,
    ReducePart,
    ReduceScatter,
    Scatter,
)
from conveyor.dag.collective.host_rows import AllToAllByHost, RowsForHosts, ScatterRows, Taken
from conveyor.dag.collective.host_sums import AllReduceByHost, HostPart, HostShares, ShareByHost
from conveyor.dag.collective.pieces import Hosts
from conveyor.dag.functions import Function
from conveyor.dag.inputs import InputAttributeNode, InputNode
from conveyor.dag.methods import Collective, MethodNode, OutputElementNode
from conveyor.dag.node import ActorRef, DAGNode, record_of

HostsOf = Callable[[Sequence[Any]], Sequence[Hashable]]
"""Says on which hosts these actors are."""

#: Of one collective: what it does, on which nodes.
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
        #: What has been made for a collective, which all of its ranks use.
        self._pieces: dict[_Key, Any] = {}
        #: Of the ranks of one collective, those whose results are used.
        self._used: dict[int, list[int]] = {}
        for task in tasks:
            call = _call_of(task)
            if call is not None:
                self._used.setdefault(_together(task), []).append(call.rank)

    def add(self, task: MethodNode) -> None:
        """Add a task, and before it what its collective needs."""
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
        hosts = self._hosts(list(map(_place_of, nodes)))
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
        """Make what the ranks of a host reduce."""
        nodes = [task.args[rank] for rank in host]
        if len(nodes) == 1:
            return nodes
        return [
            self._before(
                task,
                nodes,
                nodes[place],
                HostPart(call.operation, call.names, rank, call.op, place=place, several=several),
                "a host's part of",
            )
            for place, rank in enumerate(host)
        ]

    def _reduce_scatter(
        self, task: MethodNode, call: ReduceScatter | ReducePart
    ) -> MethodNode | None:
        nodes, rows = task.args, isinstance(call, ReduceScatter)
        hosts = self._hosts(list(map(_place_of, nodes)))
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
        """Make what a host's ranks reduce for each rank of others, by that rank."""
        nodes = [task.args[rank] for rank in host]
        made: dict[int, DAGNode] = {}
        others = [rank for rank in used if rank not in host]
        for place, rank in enumerate(host):
            targets = tuple(others[place :: len(host)])
            if targets:
                function = HostShares(
                    call.operation, call.names, rank, call.op, targets=targets, rows=rows
                )
                given = self._before(
                    task, nodes, nodes[place], function, "a host's shares for", len(targets)
                )
                made.update(_elements(given, targets))
        return made

    def _all_to_all(self, task: MethodNode, call: AllToAll) -> MethodNode | None:
        nodes = task.args
        hosts = self._hosts(list(map(_place_of, nodes)))
        if len(hosts) == 1:
            return None
        used = self._used[_together(task)]
        near = next(host for host in hosts if call.rank in host)
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
        given = [node if rank in near else rows[rank][near] for rank, node in enumerate(nodes)]
        place = [rank for rank in near if rank in used].index(call.rank)
        final = AllToAllByHost(call.operation, call.names, call.rank, near=near, place=place)
        return _instead(task, final, given)

    def _scatter(self, task: MethodNode, call: Scatter) -> MethodNode | None:
        (node,) = task.args
        if isinstance(node, (InputNode, InputAttributeNode)):
            return None  # the executor's: there is nobody who would take it apart
        assert task.collective is not None
        getting = task.collective.actors
        source = _place_of(node)
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
        near = next(host for host in hosts if call.rank in host)
        place = [rank for rank in near if rank in used].index(call.rank)
        final = Taken(call.operation, call.names, call.rank, place=place)
        return _instead(task, final, [rows[near]])

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
        """Have the actor of ``node`` take it apart for hosts of which it is none; by host."""
        ranks = {host: tuple([one for one in host if one in used]) for host in hosts}
        to = [host for host in hosts if ranks[host] and not (make is RowsForHosts and rank in host)]
        if not to:
            return {}
        function = make(call.operation, call.names, rank, targets=tuple([ranks[h] for h in to]))
        given = self._before(task, [node], node, function, words, len(to))
        return dict(_elements(given, to))

    def _hosts(self, actors: Sequence[ActorRef]) -> Hosts:
        """Find which of ``actors``, by their places, are on each host."""
        key = tuple(actors)
        if key not in self._of_actors:
            of: dict[Hashable, list[int]] = {}
            for place, host in enumerate(self._hosts_of(actors)):
                of.setdefault(host, []).append(place)
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
        place = own.task if isinstance(own, OutputElementNode) else own
        assert isinstance(place, MethodNode), "what ranks put in is on their actors"
        collective = Collective(
            f"{words} {task.collective.title}", tuple(nodes), tuple(map(_place_of, nodes))
        )
        made = MethodNode(
            place.actor,
            f"{words} {task.method}",
            tuple(nodes),
            {},
            num_returns=count if count > 1 else None,
            function=Function(call, (), False, False),
            collective=collective,
            owner=place.owner,
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
    """Pair what ``task`` returns with ``keys``."""
    if task.num_returns is None:
        return [(keys[0], task)]
    return [(key, OutputElementNode(task, i)) for i, key in enumerate(keys)]


def _call_of(task: MethodNode) -> Rank | None:
    """Find what a rank of a collective calls; ``None``: it is none."""
    call = None if task.collective is None or task.function is None else task.function.call
    return call if isinstance(call, Rank) else None


def _together(task: MethodNode) -> int:
    """Tell collectives apart."""
    record = record_of(task)
    return min([one.number for one in record.together], default=record.number)


def _place_of(node: DAGNode) -> ActorRef:
    task = node.task if isinstance(node, OutputElementNode) else node
    assert isinstance(task, MethodNode), "what ranks put in is on their actors"
    return task.actor
