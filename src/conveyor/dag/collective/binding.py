"""Collectives as tasks of a graph: binding them.

Over the memory of one host, a collective is data flow and nothing that blocks: what a rank gives is a value
that goes to the other ranks over an ordinary edge, and what a rank gets is an ordinary task on its actor,
which reads those values in place. So no order of executions or graphs can deadlock, and errors, deadlines,
deaths and restarts are those of every edge. That is bound here as if all ranks were on one host; where they
are known to be on several, the graph gets other tasks when it is compiled (``spreading.py``).

By a communicator of the user's the ranks do meet. What they put in is known to all before any comes there,
and no result is given before all have come back, over ordinary edges as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import conveyor  # what is above is known by its public name
from conveyor.dag.collective import calls
from conveyor.dag.collective.calls import Confirmed, Offer, Rank, Together
from conveyor.dag.collective.kernels import ReduceOp
from conveyor.dag.inputs import InputAttributeNode, InputNode
from conveyor.dag.methods import UNPLACED, Collective, Function, MethodNode, OutputElementNode
from conveyor.dag.node import ActorRef, DAGNode, record_of
from conveyor.exceptions import GraphError
from conveyor.later import LaterModule

# Of a higher layer.
communicators: Any = LaterModule("conveyor.transport.communicator")


class Participant(NamedTuple):
    """Actor of a rank, and its owner.

    actor: its actor.
    owner: the handle that keeps it alive.
    """

    actor: ActorRef
    owner: object


def check_lists(operation: str, lists: Sequence[Any]) -> list[Participant]:
    """Find the actors of ``lists``, each of which has a node of each of the same actors in the same order."""
    for position, nodes in enumerate(lists):
        if not isinstance(nodes, (list, tuple)):
            raise GraphError(
                f"{operation}: either all of what is bound are nodes, or all are lists of nodes; number "
                f"{position} is {nodes!r}"
            )
        if len(nodes) != len(lists[0]):
            raise GraphError(
                f"{operation}: the lists have a node for each actor, and so one length; list 0 has "
                f"{len(lists[0])}, list {position} has {len(nodes)}"
            )
    of_list = [participants_of(operation, nodes, f"list {i}, ") for i, nodes in enumerate(lists)]
    seen: dict[DAGNode[Any], None] = {}
    participants = of_list[0]
    for position, others in enumerate(of_list):
        here, there = [[p.actor.name for p in ranks] for ranks in (participants, others)]
        if {p.actor for p in others} != {p.actor for p in participants}:
            raise GraphError(
                f"{operation}: the lists are of the same actors; list 0 is of {', '.join(here)}, list "
                f"{position} of {', '.join(there)}"
            )
        if [p.actor for p in others] != [p.actor for p in participants]:
            raise GraphError(
                f"{operation}: the lists have the actors in the same order; list 0 is of "
                f"{', '.join(here)}, list {position} of {', '.join(there)}"
            )
        for node in lists[position]:
            if node in seen:
                raise GraphError(f"{operation}: {node!r} is bound twice")
            seen[node] = None
    return participants


def participants_of(operation: str, nodes: Any, where: str = "") -> list[Participant]:
    """Find the actor of each of ``nodes``, no two of which have the same actor."""
    _check_list(operation, nodes, "nodes", where)
    participants: list[Participant] = []
    seen: dict[ActorRef, Any] = {}
    for position, node in enumerate(nodes):
        if not isinstance(node, DAGNode):
            if isinstance(node, (list, tuple)):
                raise GraphError(
                    f"{operation}: {where}number {position} is a list; lists of nodes are for allreduce "
                    f"alone, as one list of them"
                )
            raise GraphError(
                f"{operation}: {where}number {position} is {node!r}, which is no node: bind takes what the "
                f"bind() of an actor's method gives"
            )
        if any(node is other for other in nodes[:position]):
            raise GraphError(f"{operation}: {where}{node!r} is bound twice")
        participant = _participant(operation, node, f"{where}number {position}")
        if participant.actor in seen:
            raise GraphError(
                f"{operation}: {where}{seen[participant.actor]!r} and {node!r} are both on the actor "
                f"{participant.actor.name}: each actor takes part once, so reduce its values on it first"
            )
        seen[participant.actor] = node
        participants.append(participant)
    return participants


def _participant(operation: str, node: DAGNode[Any], where: str) -> Participant:
    task = node.task if isinstance(node, OutputElementNode) else node
    if isinstance(task, (InputNode, InputAttributeNode)):
        raise GraphError(
            f"{operation}: {where} is {node!r}, a part of the input, which is on no actor: pass it through "
            f"a method of each actor first"
        )
    if not isinstance(task, MethodNode):
        raise GraphError(f"{operation}: {where} is {node!r}, which is on no actor")
    if task.actor is UNPLACED:
        raise GraphError(
            f"{operation}: {where} is {node!r}, a function that was bound to no actor: say which with "
            f"options(on=actor)"
        )
    _check_no_stream(operation, task, where)
    return Participant(task.actor, task.owner)


def participants_of_handles(operation: str, node: Any, actors: Any) -> list[Participant]:
    if not isinstance(node, DAGNode):
        raise GraphError(
            f"{operation}: it takes one node, whose value the actors get, not {node!r}"
        )
    task = node.task if isinstance(node, OutputElementNode) else node
    if node.ends_graph:
        raise GraphError(f"{operation}: {node!r} only ends a graph, and has no value")
    if isinstance(task, MethodNode):
        _check_no_stream(operation, task, "its node")
    _check_list(operation, actors, "handles of actors")
    participants: list[Participant] = []
    for position, handle in enumerate(actors):
        if not isinstance(handle, conveyor.ActorHandle):
            raise GraphError(
                f"{operation}: number {position} of the actors is {handle!r}, which is no actor's handle"
            )
        participant = Participant(handle._id, handle)
        if any(participant.actor == other.actor for other in participants):
            raise GraphError(
                f"{operation}: the actor {participant.actor.name} is named twice; each gets the value once"
            )
        participants.append(participant)
    return participants


def _check_list(operation: str, value: Any, of: str, where: str = "") -> None:
    if not isinstance(value, (list, tuple)):
        raise GraphError(f"{operation}: {where}it takes a list of {of}, not {value!r}")
    if not value:
        raise GraphError(f"{operation}: {where}the list of {of} is empty, so nobody takes part")


def _check_no_stream(operation: str, task: MethodNode[Any], where: str) -> None:
    if not task.use_value():
        raise GraphError(
            f"{operation}: {where} is what {task.label} yields, and the items of a generator go to the "
            f"driver only"
        )


def check_op(operation: str, op: Any) -> None:
    if not isinstance(op, ReduceOp):
        known = ", ".join(f"ReduceOp.{known.name}" for known in ReduceOp)
        raise GraphError(f"{operation}: op is {op!r}, and must be one of {known}")


def communicator_of(operation: str, transport: Any) -> Any:
    """Find the communicator that ``transport`` asks for; ``None``: it goes through host memory."""
    if transport is None or (isinstance(transport, str) and transport in ("auto", "shm")):
        return None
    if communicators.is_one(transport):
        return transport
    raise GraphError(
        f"{operation}: transport is {transport!r}; collectives go through host memory: leave it out, say "
        f'"auto" or "shm", or give a Communicator of your own'
    )


def check_members(
    operation: str, communicator: Any, participants: Sequence[Participant], *, in_order: bool
) -> None:
    """Refuse a communicator whose actors are not those of ``participants``. ``in_order``: its ranks must be
    in the order of the participants, since the results depend on it."""
    kind = type(communicator).__name__
    try:
        handles = list(communicator.get_actor_handles())
        ranks = {getattr(h, "_id", None): communicator.get_rank(h) for h in handles}
    except Exception as error:
        raise GraphError(
            f"{operation}: the {kind} cannot say which actors it has: {type(error).__name__}: {error}"
        ) from error
    actors = [participant.actor for participant in participants]
    if set(ranks) != set(actors):
        has = ", ".join(getattr(key, "name", "no actor") for key in ranks) or "none"
        raise GraphError(
            f"{operation}: all actors of a communicator take part, and no others: the {kind} has {has}, and "
            f"bound are nodes of {', '.join(actor.name for actor in actors)}"
        )
    if in_order and [ranks[actor] for actor in actors] != list(range(len(actors))):
        raise GraphError(
            f"{operation}: what a rank gets depends on its number, and the {kind} has given "
            f"{', '.join(actor.name for actor in actors)} the ranks {[ranks[a] for a in actors]}: bind the "
            f"nodes in the order of its ranks"
        )


def check_root(operation: str, root: Any, ranks: int) -> None:
    if not isinstance(root, int) or isinstance(root, bool) or not 0 <= root < ranks:
        raise GraphError(
            f"{operation}: root is {root!r}; it is the number of a rank, from 0 to {ranks - 1}"
        )


def names_of(participants: Sequence[Participant]) -> tuple[str, ...]:
    """Name the ranks for messages: by actor, with its number where two share a name."""
    names = [participant.actor.name for participant in participants]
    return tuple(
        [
            name if names.count(name) == 1 else f"{name}[{participant.actor.index}]"
            for name, participant in zip(names, participants, strict=True)
        ]
    )


class CollectiveOutputNode(MethodNode):
    """Result of a collective for one rank. It can be used as any node is; if it is not used, it is not
    computed."""

    __slots__ = ()


RankOf = tuple[str, tuple[str, ...], int]
"""Identity of a rank's function: the operation, the actors' names, and its number."""

_Make = Callable[[RankOf], Rank]
"""Makes a rank's function."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Makes the tasks of a collective.

    operation: what they are called: ``"allreduce"``.
    title: the same with what is to be known of it: ``"allreduce(SUM)"``.
    nodes: what the ranks put in.
    participants: the ranks.
    meets: their tasks wait for each other while they run.
    """

    operation: str
    title: str
    nodes: Sequence[DAGNode[Any]]
    participants: Sequence[Participant]
    meets: bool = False

    @property
    def count(self) -> int:
        return len(self.participants)

    @property
    def each(self) -> list[RankOf]:
        """Operation, names and rank for the function of each rank."""
        names = names_of(self.participants)
        return [(self.operation, names, rank) for rank in range(self.count)]

    def before(self, operation: str, title: str, *, meets: bool = False) -> Ranks:
        """Return a ``Ranks`` of the same actors, for tasks that prepare those of this one."""
        return Ranks(operation, title, self.nodes, self.participants, meets)

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
        transport = communicators.ForCollectives(communicator)
        name = f"communicator {transport.get_transport_name()}"
        title, own = f"{self.title} by the {name}", list(zip(*lists, strict=True))
        first = self.before(f"offer for {self.operation}", f"the offer for {title}")
        offers = first.bind_each(own, lambda rank: Offer(*rank))
        for offer in offers:
            offer.with_tensor_transport(transport)

        def together(rank: RankOf) -> Together:
            participant = rank[2]
            return Together(
                *self.each[participant],
                communicator=name,
                plain=plain[participant],
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
            self._task(rank, given, make, self.participants, num_returns)
            for rank, given in enumerate(args)
        ]
        records = tuple([record_of(node) for node in made])
        for record in records:  # that not all of them are used is no mistake
            record.together = records
        return made

    def bind_one(self, root: Any, make: _Make) -> CollectiveOutputNode:
        """Make a task of all nodes for one rank."""
        check_root(self.operation, root, self.count)
        return self._task(root, tuple(self.nodes), make, [self.participants[root]], None)

    def _task(
        self,
        rank: int,
        args: tuple[DAGNode[Any], ...],
        make: _Make,
        getting: Sequence[Participant],
        num_returns: int | None,
    ) -> CollectiveOutputNode:
        participant = self.participants[rank]
        return CollectiveOutputNode(
            participant.actor,
            self.operation,
            args,
            {},
            num_returns=num_returns,
            function=Function(
                make((self.operation, names_of(self.participants), rank)), (), False, False
            ),
            collective=Collective(
                self.title, tuple(self.nodes), tuple([p.actor for p in getting]), self.meets
            ),
            owner=participant.owner,
        )


#: From so many ranks on an allreduce has two rounds. In one round every rank reads all of what all others
#: have; in two it reads its part of that, then puts the parts together. Measured on two cores: with four
#: ranks two rounds take 10 to 20 % off from 1 MiB on, with eight 10 to 30 %, and small tensors wait 60 %
#: longer.
TWO_ROUNDS = 8


@overload
def allreduce(
    nodes: Sequence[Sequence[DAGNode[Any]]],
    op: ReduceOp = ...,
    transport: Any = ...,
    *,
    rounds: int | None = ...,
) -> list[list[OutputElementNode]]: ...
@overload
def allreduce(
    nodes: Sequence[DAGNode[Any]],
    op: ReduceOp = ...,
    transport: Any = ...,
    *,
    rounds: int | None = ...,
) -> list[CollectiveOutputNode]: ...


def allreduce(
    nodes: Sequence[Any],
    op: ReduceOp = ReduceOp.SUM,
    transport: Any = None,
    *,
    rounds: int | None = None,
) -> Any:
    """Bind a reduction whose result every rank gets. ::

        summed = allreduce.bind([a.grad.bind(x), b.grad.bind(x)])
        dag = MultiOutputNode([a.step.bind(summed[0]), b.step.bind(summed[1])])

    The tensors (or arrays) have one shape and one dtype; each rank gets a new one, with the same bits. They
    are reduced in the order of ranks, on several hosts first those of each host; 16-bit floats are summed in
    32 bits and rounded once.

    Args:
        nodes: one for each actor, in the order of ranks. Or several such lists, of the same actors in the
            same order: they are reduced in one operation, whose frames carry all of them.
        op: how. ``SUM``, ``PRODUCT`` and ``AVG`` are for numbers (``AVG`` for floats), ``MIN`` and ``MAX``
            also for bool.
        transport: ``None``, ``"auto"`` or ``"shm"``: host memory. Or a
            ``conveyor.experimental.channel.Communicator`` of exactly these actors, which then does the
            operation: with tensors, and every rank takes part, also one whose result nobody uses.
        rounds: 1: every rank reduces all inputs. 2: every rank reduces a part of them and gives it to the
            others, which is less work for large tensors, and one hop more for small ones. Left out, it is 2
            from 8 actors on, but for several lists; and of ranks that are on several hosts, those of each
            host reduce what they have before it is sent to others.

    Returns:
        A node for each actor, in order; for several lists, a list for each actor with a node for each of
        them.

    Raises:
        GraphError: the nodes are not one of each actor, or the lists do not fit each other; an argument that
            does not exist.
    """
    nested = isinstance(nodes, (list, tuple)) and any(isinstance(n, (list, tuple)) for n in nodes)
    check_op("allreduce", op)
    communicator = communicator_of("allreduce", transport)
    if rounds not in (None, 1, 2) or isinstance(rounds, bool):
        raise GraphError(f"allreduce: rounds is 1, 2 or None, not {rounds!r}")
    if communicator is not None:
        if rounds is not None:
            raise GraphError("allreduce: rounds is for host memory, and not for a communicator")
        participants = (
            check_lists("allreduce", nodes) if nested else participants_of("allreduce", nodes)
        )
        check_members("allreduce", communicator, participants, in_order=False)
        lists = nodes if nested else [nodes]
        every = [node for each in lists for node in each]
        ranks = Ranks("allreduce", f"allreduce({op.name})", every, participants)
        plain = [calls.AllReduce(*rank, op) for rank in ranks.each]
        return ranks.bind_together(lists, communicator, plain, several=nested, op=op)
    if nested:
        if rounds == 2:
            raise GraphError(
                "allreduce: several lists are reduced in one round; bind each by itself for rounds=2"
            )
        return _allreduce_fused(nodes, op, rounds == 1)
    ranks = Ranks("allreduce", f"allreduce({op.name})", nodes, participants_of("allreduce", nodes))
    if rounds == 1 or (rounds is None and ranks.count < TWO_ROUNDS):
        return ranks.bind(nodes, lambda rank: calls.AllReduce(*rank, op, rounds == 1))
    halfway = ranks.before("part of allreduce", f"a part of {ranks.title}")
    parts = halfway.bind(nodes, lambda rank: calls.ReducePart(*rank, op))
    return ranks.bind_each([(own, *parts) for own in nodes], lambda rank: calls.JoinParts(*rank))


def _allreduce_fused(lists: Sequence[Sequence[DAGNode[Any]]], op: ReduceOp, at_once: bool) -> Any:
    """Reduce several tensors of each rank: ``lists`` has a list of nodes for each tensor."""
    participants = check_lists("allreduce", lists)
    everything = [node for nodes in lists for node in nodes]
    ranks = Ranks("allreduce", f"allreduce({op.name})", everything, participants)
    first = ranks.before("list for allreduce", f"the list for {ranks.title}")
    packs = first.bind_each(list(zip(*lists, strict=True)), lambda rank: calls.Pack(*rank))
    made = ranks.bind(packs, lambda rank: calls.FusedAllReduce(*rank, op, at_once), len(lists))
    return [[OutputElementNode(task, i) for i in range(len(lists))] for task in made]


def allgather(
    nodes: Sequence[DAGNode[Any]], transport: Any = None, *, join: bool = True
) -> list[CollectiveOutputNode]:
    """Bind an operation that gives every rank the tensors of all ranks.

    Args:
        nodes: one for each actor, in the order of ranks; their tensors have one shape and one dtype.
        transport: as for ``allreduce``.
        join: they are joined along dimension 0, into a new tensor. ``False``: each rank gets a list of them,
            which are read in place, so it costs the same whatever their size; who writes to them makes a
            copy.

    Returns:
        A node for each actor, in order.
    """
    communicator = communicator_of("allgather", transport)
    ranks = Ranks("allgather", "allgather", nodes, participants_of("allgather", nodes))
    if communicator is not None:
        check_members("allgather", communicator, ranks.participants, in_order=True)
        plain = [calls.AllGather(*rank, bool(join)) for rank in ranks.each]
        gathered: list[CollectiveOutputNode]
        gathered = ranks.bind_together([nodes], communicator, plain, join=bool(join))
        return gathered
    return ranks.bind(nodes, lambda rank: calls.AllGather(*rank, bool(join)))


def reducescatter(
    nodes: Sequence[DAGNode[Any]], op: ReduceOp = ReduceOp.SUM, transport: Any = None
) -> list[CollectiveOutputNode]:
    """Bind a reduction whose result is divided among the ranks along dimension 0, in their order.

    Args:
        nodes: as for ``allreduce``. Dimension 0 of the tensors is a multiple of the number of actors; if it
            is not, that is an error of the execution.
        op: as for ``allreduce``.
        transport: likewise.

    Returns:
        A node for each actor, in order.
    """
    check_op("reducescatter", op)
    communicator = communicator_of("reducescatter", transport)
    participants = participants_of("reducescatter", nodes)
    ranks = Ranks("reducescatter", f"reducescatter({op.name})", nodes, participants)
    if communicator is not None:
        check_members("reducescatter", communicator, participants, in_order=True)
        plain = [calls.ReduceScatter(*rank, op) for rank in ranks.each]
        scattered: list[CollectiveOutputNode]
        scattered = ranks.bind_together([nodes], communicator, plain, op=op)
        return scattered
    return ranks.bind(nodes, lambda rank: calls.ReduceScatter(*rank, op))


def reduce(
    nodes: Sequence[DAGNode[Any]], op: ReduceOp = ReduceOp.SUM, *, root: int = 0
) -> CollectiveOutputNode:
    """Bind a reduction whose result one rank gets.

    Args:
        nodes: as for ``allreduce``.
        op: likewise.
        root: the rank that gets it, by its position among ``nodes``.

    Returns:
        The node of the result, on the actor of ``nodes[root]``.
    """
    check_op("reduce", op)
    ranks = Ranks("reduce", f"reduce({op.name})", nodes, participants_of("reduce", nodes))
    return ranks.bind_one(root, lambda rank: calls.AllReduce(*rank, op))


def gather(nodes: Sequence[DAGNode[Any]], *, root: int = 0) -> CollectiveOutputNode:
    """Bind an operation that gives one rank the tensors of all ranks, in a list, in order. They are read in
    place.

    Args:
        nodes: one for each actor, in the order of ranks; their tensors have one shape and one dtype.
        root: the rank that gets them, by its position among ``nodes``.

    Returns:
        The node of the list, on the actor of ``nodes[root]``.
    """
    ranks = Ranks("gather", "gather", nodes, participants_of("gather", nodes))
    return ranks.bind_one(root, lambda rank: calls.AllGather(*rank, False))


def broadcast(
    node: DAGNode[Any], actors: Sequence[conveyor.ActorHandle[Any] | conveyor.ActorProxy[Any]]
) -> list[CollectiveOutputNode]:
    """Bind an operation that gives ``actors`` the value of ``node``, which they read in place.

    Args:
        node: any node, a part of the input included; its value need not be a tensor.
        actors: handles of the actors that get it, in order. Its own actor may be one of them.

    Returns:
        A node for each of ``actors``, in order.
    """
    ranks = Ranks(
        "broadcast", "broadcast", [node], participants_of_handles("broadcast", node, actors)
    )
    return ranks.bind([node], lambda rank: calls.Pass(*rank))


def scatter(
    node: DAGNode[Any], actors: Sequence[conveyor.ActorHandle[Any] | conveyor.ActorProxy[Any]]
) -> list[CollectiveOutputNode]:
    """Bind an operation that gives each of ``actors`` its share of a tensor along dimension 0, in their
    order. A share is a view of what ``broadcast`` would give.

    Args:
        node: any node, a part of the input included. Dimension 0 of its tensor is a multiple of the number of
            actors; if it is not, that is an error of the execution.
        actors: handles of the actors that get a share, in order.

    Returns:
        A node for each of ``actors``, in order.
    """
    ranks = Ranks("scatter", "scatter", [node], participants_of_handles("scatter", node, actors))
    return ranks.bind([node], lambda rank: calls.Scatter(*rank))


def all_to_all(nodes: Sequence[DAGNode[Any]]) -> list[CollectiveOutputNode]:
    """Bind an operation that gives every rank its share of the tensors of all ranks along dimension 0, joined
    along it in the order of ranks.

    Args:
        nodes: one for each actor, in the order of ranks; their tensors have one shape and one dtype, and
            dimension 0 is a multiple of the number of actors.

    Returns:
        A node for each actor, in order.
    """
    ranks = Ranks("all_to_all", "all_to_all", nodes, participants_of("all_to_all", nodes))
    return ranks.bind(nodes, lambda rank: calls.AllToAll(*rank))


def barrier(nodes: Sequence[DAGNode[Any]]) -> list[CollectiveOutputNode]:
    """Bind an operation that gives each rank its own value once the values of all ranks are there. Only the
    news of them travels.

    Args:
        nodes: one for each actor, in order, with any values.

    Returns:
        A node for each actor, in order, with the value of its node.
    """
    ranks = Ranks("barrier", "barrier", nodes, participants_of("barrier", nodes))
    first = ranks.before("arrival at barrier", "arrival at barrier")
    arrived = first.bind_each([(node,) for node in nodes], lambda rank: calls.Arrive(*rank))
    return ranks.bind_each([(own, *arrived) for own in nodes], lambda rank: calls.Pass(*rank))
