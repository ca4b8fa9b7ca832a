"""The tasks of a collective's ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from conveyor.dag.collective.calls import Rank
from conveyor.dag.collective.ranks import Place, check_root, names_of
from conveyor.dag.collective.reduceop import ReduceOp
from conveyor.dag.collective.together import Confirmed, Offer, Together
from conveyor.dag.methods import Collective, Function, MethodNode, OutputElementNode
from conveyor.dag.node import DAGNode, record_of
from conveyor.later import import_later


class CollectiveOutputNode(MethodNode):
    """Result of a collective for one rank. It can be used as any node is; if it is not used, it is not
    computed."""

    __slots__ = ()


RankOf = tuple[str, tuple[str, ...], int]
"""What each rank's function knows of its place: the operation, the actors' names, and its number."""

_Make = Callable[[RankOf], Rank]
"""Makes a rank's function."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Makes the tasks of a collective.

    operation: what they are called: ``"allreduce"``.
    title: the same with what is to be known of it: ``"allreduce(SUM)"``.
    nodes: what the ranks put in.
    places: the ranks.
    meets: their tasks wait for each other while they run.
    """

    operation: str
    title: str
    nodes: Sequence[DAGNode[Any]]
    places: Sequence[Place]
    meets: bool = False

    @property
    def count(self) -> int:
        return len(self.places)

    @property
    def each(self) -> list[RankOf]:
        """Operation, names and rank for the function of each rank."""
        names = names_of(self.places)
        return [(self.operation, names, rank) for rank in range(self.count)]

    def before(self, operation: str, title: str, *, meets: bool = False) -> Ranks:
        """Return a ``Ranks`` of the same actors, for tasks that prepare those of this one."""
        return Ranks(operation, title, self.nodes, self.places, meets)

    def bind_together(
        self,
        lists: Sequence[Sequence[DAGNode[Any]]],
        communicator: Any,
        plain: Sequence[Rank],
        *,
        several: bool = False,
        op: ReduceOp | None = None,
        join: bool = True,
    ) -> Any:
        """Make the tasks of a collective that a communicator does. ``lists`` has a list of nodes for each
        tensor of the ranks. ``plain`` has the function that a rank without a communicator calls for each
        list."""
        transport = import_later("conveyor.transport.communicator").ForCollectives(communicator)
        name = f"communicator {transport.get_transport_name()}"
        title, own = f"{self.title} by the {name}", list(zip(*lists, strict=True))
        first = self.before(f"offer for {self.operation}", f"the offer for {title}")
        offers = first.bind_each(own, lambda rank: Offer(*rank))
        for offer in offers:
            offer.with_tensor_transport(transport)

        def together(rank: RankOf) -> Together:
            place = rank[2]
            return Together(
                *self.each[place],
                communicator=name,
                plain=plain[place],
                tensors=len(lists),
                op=op,
                join=join,
            )

        halfway = self.before(f"{self.operation} by {name}", title, meets=True)
        made = halfway.bind_each([(*values, *offers) for values in own], together, 2)
        done = [OutputElementNode(task, 1) for task in made]
        ends = self.bind_each(
            [(OutputElementNode(task, 0), *done) for task in made],
            lambda rank: Confirmed(*rank, several),
            len(lists) if several else None,
        )
        if not several:
            return ends
        return [[OutputElementNode(task, i) for i in range(len(lists))] for task in ends]

    def bind(
        self, args: Sequence[DAGNode[Any]], make: _Make, num_returns: int | None = None
    ) -> list[CollectiveOutputNode]:
        """Make a task for each rank; each gets all of ``args``."""
        return self.bind_each([tuple(args)] * self.count, make, num_returns)

    def bind_each(
        self,
        args: Sequence[tuple[DAGNode[Any], ...]],
        make: _Make,
        num_returns: int | None = None,
    ) -> list[CollectiveOutputNode]:
        """Make a task for each rank; ``args`` has the arguments of each."""
        made = [
            self._task(rank, given, make, self.places, num_returns)
            for rank, given in enumerate(args)
        ]
        records = tuple([record_of(node) for node in made])
        for record in records:  # that not all of them are used is no mistake
            record.together = records
        return made

    def bind_one(self, root: Any, make: _Make) -> CollectiveOutputNode:
        """Make a task of all nodes for one rank."""
        check_root(self.operation, root, self.count)
        return self._task(root, tuple(self.nodes), make, [self.places[root]], None)

    def _task(
        self,
        rank: int,
        args: tuple[DAGNode[Any], ...],
        make: _Make,
        getting: Sequence[Place],
        num_returns: int | None,
    ) -> CollectiveOutputNode:
        place = self.places[rank]
        return CollectiveOutputNode(
            place.actor,
            self.operation,
            args,
            {},
            num_returns=num_returns,
            function=Function(
                make((self.operation, names_of(self.places), rank)), (), False, False
            ),
            collective=Collective(
                self.title, tuple(self.nodes), tuple([p.actor for p in getting]), self.meets
            ),
            owner=place.owner,
        )
