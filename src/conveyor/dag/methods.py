"""Bound actor methods: the tasks of a graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

from msgspec import Struct

from conveyor.dag.containers import find_nodes, replace_nodes
from conveyor.dag.hints import TransportHint
from conveyor.dag.node import ActorRef, DAGNode, Record, assign
from conveyor.exceptions import GraphError
from conveyor.typevars import ResultT


class Function(Struct, frozen=True):
    """A function that a task calls instead of a method. ``options`` are those of its worker.
    ``by_decorator``: what a decorator of its own passes on, or makes of it, is perhaps no generator."""

    call: Callable[..., Any]
    options: tuple[tuple[str, Hashable], ...]
    is_async: bool
    is_generator: bool
    by_decorator: bool = False

    @property
    def name(self) -> str:
        name: str = getattr(self.call, "__name__", type(self.call).__name__)
        return name

    @property
    def worker(self) -> Hashable:
        """Functions with equal ones may share a worker."""
        return self.is_async, self.options


#: Stands for the actor of a function that has no worker yet.
UNPLACED = ActorRef(-1, "worker")


def function_of(call: Callable[..., Any], options: Mapping[str, Hashable]) -> Function:
    """Describe ``call`` as a task. ``options``: of a worker that runs it."""
    inside = inspect.unwrap(call)
    is_async = inspect.iscoroutinefunction(call) or inspect.isasyncgenfunction(inside)
    return Function(
        call,
        tuple(sorted(options.items())),
        is_async,
        is_generator(inside),
        by_decorator=not is_generator(call),
    )


def is_generator(function: Any) -> bool:
    """Whether a call of ``function`` yields items."""
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


class Collective(Struct, frozen=True):
    """Collective that a task is part of, as one of its ranks.

    title: its name for people: ``"allreduce(SUM)"``.
    nodes: what its ranks put in.
    actors: the actors that get something, in the order of ranks.
    meets: the tasks of its ranks wait for each other while they run.
    """

    title: str
    nodes: tuple[DAGNode, ...]
    actors: tuple[ActorRef, ...]
    meets: bool = False


class MethodNode(DAGNode[ResultT]):
    """Node that ``actor.method.bind(...)`` returns: a method call at each execution, and its result.

    The tasks of one actor run in the order in which they were bound.
    """

    __slots__ = (
        "_actor",
        "_args",
        "_by_reference",
        "_collective",
        "_function",
        "_is_async",
        "_kwargs",
        "_method",
        "_needs",
        "_num_returns",
        "_owner",
        "_streams",
    )

    _actor: ActorRef
    _method: str
    _args: tuple[Any, ...]
    _kwargs: Mapping[str, Any]
    _num_returns: int | None
    _streams: bool | None
    _is_async: bool
    _function: Function | None
    _collective: Collective | None
    _needs: tuple[DAGNode, ...]
    _by_reference: tuple[str, bool] | None
    # The handle this was bound through: the actor must live as long as the graph may be compiled.
    _owner: object

    def __init__(
        self,
        actor: ActorRef,
        method: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        num_returns: int | None = None,
        streams: bool | None = False,
        is_async: bool = False,
        function: Function | None = None,
        collective: Collective | None = None,
        owner: object = None,
        by_reference: tuple[str, bool] | None = None,
        planned: bool = False,
    ) -> None:
        """``streams``: ``None`` if it does unless its value is used (:meth:`use_value`). ``planned``: it is
        made when a graph is compiled, for that one alone: no other graph that shares nodes with it finds it
        bound to them."""
        label = label_of(actor.name, method, collective)
        needs: dict[DAGNode, None] = {}
        arguments = [(f"argument {i}", value) for i, value in enumerate(args, 1)]
        arguments += [(f"argument {name!r}", value) for name, value in kwargs.items()]
        for which, value in arguments:
            for node in find_nodes(value, f"{which} of {label}"):
                if node.ends_graph:
                    raise GraphError(
                        f"{which} of {label} is a {type(node).__name__}, which only ends a graph: pass a "
                        f"list of its nodes instead"
                    )
                if isinstance(node, MethodNode) and not node.use_value():
                    raise GraphError(
                        f"{which} of {label} is what {node.label} yields, and the items of a generator "
                        f"go to the driver only: return a list from it, or bind it with "
                        f"options(num_returns=n)"
                    )
                needs[node] = None
        assign(
            self,
            _hint=None,
            _record=Record(label),
            _actor=actor,
            _method=method,
            # Containers with nodes are copied: changing the list afterwards changes no graph.
            _args=tuple(_snapshot(a) for a in args),
            _kwargs=MappingProxyType({k: _snapshot(v) for k, v in kwargs.items()}),
            _num_returns=num_returns,
            _streams=streams,
            _is_async=is_async,
            _function=function,
            _collective=collective,
            _needs=tuple(needs),
            _owner=owner,
            _by_reference=by_reference,
        )
        if planned:
            return
        for record in dict.fromkeys(node._record for node in needs):
            record.consumers.append(self._record)

    @property
    def actor(self) -> ActorRef:
        """The actor that runs the method."""
        return self._actor

    @property
    def method(self) -> str:
        """The method's name."""
        return self._method

    @property
    def args(self) -> tuple[Any, ...]:
        """The positional arguments as bound: values, nodes, and containers of both."""
        return self._args

    @property
    def kwargs(self) -> Mapping[str, Any]:
        """The keyword arguments as bound."""
        return self._kwargs

    @property
    def num_returns(self) -> int | None:
        """How many values the method returns separately; ``None`` for one value."""
        return self._num_returns

    @property
    def streams(self) -> bool:
        """Whether the method is a generator, whose items go to the driver one by one."""
        return self._streams is not False

    def use_value(self) -> bool:
        """Use what the method returns as one value. Whether that can be: a generator's items go to the
        driver. A method that may be one, behind a decorator, is none from now on."""
        if self._streams is None:
            assign(self, _streams=False)
        return not self._streams

    def _set_hint(self, hint: TransportHint) -> None:
        self.use_value()
        super()._set_hint(hint)

    @property
    def is_async(self) -> bool:
        """Whether the method is a coroutine function or an asynchronous generator."""
        return self._is_async

    @property
    def function(self) -> Function | None:
        """The function that is called, where it is no method of the actor's."""
        return self._function

    @property
    def collective(self) -> Collective | None:
        """Collective that the task is a rank's part of."""
        return self._collective

    @property
    def by_reference(self) -> tuple[str, bool] | None:
        """Transport, and whether as a snapshot, if the result stays on its actor and the executor gets a
        reference."""
        return self._by_reference

    @property
    def number(self) -> int:
        """Position in the order of all ``bind`` calls of this process."""
        return self._record.number

    @property
    def label(self) -> str:
        """``"actor.method"``, for messages; ``"allreduce on actor"`` of a collective's rank."""
        return self._record.label

    @property
    def owner(self) -> object:
        """The handle this was bound through."""
        return self._owner

    def __getitem__(self, index: object) -> NoReturn:
        # Reached by `x[0]` as well as by `a, b = x`.
        raise TypeError(
            f"{self.label} is bound with one return value, which cannot be taken apart in a graph; "
            f"bind it with actor.{self._method}.options(num_returns=n).bind(...), or decorate the "
            f"method with @conveyor.method(num_returns=n)"
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.label}>"

    def _upstream(self) -> tuple[DAGNode, ...]:
        return self._needs


class OutputElementNode(DAGNode):
    """Node of a single value of a method bound with ``num_returns=n``."""

    __slots__ = ("_index", "_task")

    _task: MethodNode
    _index: int

    def __init__(self, task: MethodNode, index: int) -> None:
        assign(self, _hint=None, _record=task._record, _task=task, _index=index)

    @property
    def task(self) -> MethodNode:
        """The method call that returns this among others."""
        return self._task

    @property
    def index(self) -> int:
        """Position of this value among the returned ones."""
        return self._index

    def __repr__(self) -> str:
        return f"<OutputElementNode {self._task.label}[{self._index}]>"

    def _upstream(self) -> tuple[DAGNode, ...]:
        return (self._task,)


def bind(
    actor: ActorRef,
    method: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    signature: inspect.Signature | None = None,
    num_returns: int = 1,
    generator: bool = False,
    by_decorator: bool = False,
    is_async: bool = False,
    function: Function | None = None,
    owner: object = None,
    by_reference: tuple[str, bool] | None = None,
) -> MethodNode | tuple[OutputElementNode, ...]:
    """Make ``actor.method(*args, **kwargs)`` a task of a graph.

    Args:
        signature: the method's, without ``self``; the arguments are checked against it.
        num_returns: more than one gives that many nodes, one for each value returned.
        generator: the method is a generator; its items are streamed, or, with ``num_returns``, are
            the values that it returns.
        by_decorator: what a decorator makes of the generator is perhaps none.
        is_async: the method is a coroutine function or an asynchronous generator.
        function: what is called, where it is no method of the actor's.
        owner: kept alive by the node, so that the actor is.
        by_reference: a transport, and whether as a snapshot, if what the executor gets of it stays on the
        actor.

    Raises:
        TypeError: the arguments do not fit the signature.
        GraphError: a node where none can be.
    """
    check_arguments(f"{actor.name}.{method}", signature, args, kwargs)
    task = MethodNode(
        actor,
        method,
        args,
        kwargs,
        num_returns=num_returns if num_returns > 1 else None,
        streams=(None if by_decorator else True) if generator and num_returns == 1 else False,
        is_async=is_async,
        function=function,
        owner=owner,
        by_reference=by_reference,
    )
    if num_returns == 1:
        return task
    return tuple(OutputElementNode(task, index) for index in range(num_returns))


def label_of(actor: str, method: str, collective: Collective | None, time: int = 1) -> str:
    """Name a task in messages. ``time``: so many of its name were bound to the actor until then."""
    again = "" if time == 1 else f"#{time}"
    return f"{actor}.{method}{again}" if collective is None else f"{method}{again} on {actor}"


def check_arguments(
    label: str,
    signature: inspect.Signature | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> None:
    """Raise a ``TypeError`` that names ``label`` unless the arguments fit ``signature``."""
    if signature is None:
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{label}{signature}: {error}") from None


def _snapshot(value: Any) -> Any:
    return replace_nodes(value, lambda node: node)
