"""The base of all nodes, and the record by which a graph finds what hangs off it.

Nodes have ``compile`` and ``execute``, but this package knows no process. ``api``, which does, installs a
``Runners`` here when it is imported.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, NoReturn, TypeVar

from msgspec import Struct

import conveyor  # what is above is known by its public name
from conveyor.config import Config, ConfigOptions
from conveyor.dag.hints import TransportHint
from conveyor.exceptions import NodeSentError, RuntimeStateError
from conveyor.typevars import ResultT, Unpack


class Runners(NamedTuple):
    """Functions that run this process's graphs."""

    #: Deploys the graph that ends in a node.
    compile: Callable[[DAGNode, Config], Any]
    #: Executes such a graph once without deploying it, by ordinary calls.
    execute: Callable[[DAGNode, tuple[Any, ...], Mapping[str, Any]], Any]


_runners: Runners | None = None


def install(runners: Runners | None) -> None:
    """Have this process's graphs run by these functions."""
    global _runners
    _runners = runners


def runners() -> Runners:
    """Return the installed functions."""
    if _runners is None:
        raise RuntimeStateError("nothing here can run a graph: import conveyor, not conveyor.dag")
    return _runners


@dataclass
class DAGContext:
    """Ray's ``DAGContext``, for programs that set it. Other programs use ``Config``.

    submit_timeout, get_timeout: seconds; our settings of the same names for graphs that are compiled
        later with ``experimental_compile``. -1 or ``None``: no limit, which is the default here.
    max_inflight_executions: our ``depth``; ``None``: the default of ``Config``.
    overlap_gpu_communication: our ``overlap``; ``None``: the default of ``Config``.
    teardown_timeout, read_iteration_timeout, buffer_size_bytes, max_buffered_results: accepted, and nothing
        depends on them.
    """

    submit_timeout: float | None = None
    get_timeout: float | None = None
    teardown_timeout: float | None = None
    read_iteration_timeout: float | None = None
    buffer_size_bytes: int | None = None
    max_inflight_executions: int | None = None
    max_buffered_results: int | None = None
    overlap_gpu_communication: bool | None = None

    @staticmethod
    def get_current() -> DAGContext:
        """The settings of this process, to be changed in place."""
        return _current

    def options(self) -> ConfigOptions:
        """Return the settings that ``compile`` has too, by our names."""
        options: ConfigOptions = {}
        if self.submit_timeout is not None and self.submit_timeout >= 0:
            options["submit_timeout"] = self.submit_timeout
        if self.get_timeout is not None and self.get_timeout >= 0:
            options["get_timeout"] = self.get_timeout
        if self.max_inflight_executions is not None:
            options["depth"] = self.max_inflight_executions
        if self.overlap_gpu_communication is not None:
            options["overlap"] = self.overlap_gpu_communication
        return options


_current = DAGContext()


# Bind order. One counter for the whole process, because the order of an actor's tasks must not
# depend on which of its handles a task was bound through. ``next`` on it is atomic.
_numbers = itertools.count(1)


class ActorRef(Struct, frozen=True):
    """An actor as a graph sees it: a number of its own within a session, and its name for people."""

    index: int
    name: str


class Record:
    """Record that a node exists, and of the tasks that were bound to it.

    Nodes refer to what they need, never to who needs them; but a task that reaches no output has
    to be found at compile time. Weak references downward would make that depend on which variables
    are still alive (a bare ``log.write.bind(x)`` would vanish silently), strong ones would keep
    actors alive in cycles. So what points downward is only this: a number and a label.
    """

    __slots__ = ("consumers", "ends_graph", "label", "number", "together")

    def __init__(self, label: str) -> None:
        self.number = next(_numbers)
        self.label = label
        # Whether it has been asked for as a result: then it was not forgotten by another graph that
        # shares some of its nodes.
        self.ends_graph = False
        # Only ever appended to, which is atomic; readers take a copy.
        self.consumers: list[Record] = []
        # The tasks of a collective's ranks, of which one must be used, but not all.
        self.together: tuple[Record, ...] = ()


NodeT = TypeVar("NodeT", bound="DAGNode[Any]")


class DAGNode(Generic[ResultT]):
    """A value that a graph will have at each execution. Made by ``bind``, never changed afterwards but
    for how it should travel (``with_tensor_transport``).

    A node is an argument for further ``bind`` calls, alone or inside lists, tuples and dicts. The
    node that stands for the result (or a ``MultiOutputNode`` of several) is what is compiled.
    """

    __slots__ = ("__weakref__", "_hint", "_record")

    #: Whether it only ends a graph, and stands for no value that could be bound.
    ends_graph: ClassVar[bool] = False

    _hint: TransportHint | None
    _record: Record

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"cannot set {name!r}: graph nodes never change")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"cannot delete {name!r}: graph nodes never change")

    def __getattr__(self, name: str) -> Any:
        # Only reached for names that do not exist.
        if name in ("remote", "bind"):
            raise AttributeError(
                f"{self!r} is a graph node and has no .{name}(). It stands for a value: pass it to "
                f"the bind() of an actor's method, or call .compile() or .execute() on it"
            )
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise NodeSentError(
            f"{self!r} is a graph node, which cannot be pickled or sent to an actor; did you mean "
            f"bind() instead of remote()? (A node may also be inside a list, tuple, dict or dataclass "
            f"that is given to bind(), but not inside other objects.)"
        )

    # Nodes never change, so a copy is as good as the original.
    def __copy__(self: NodeT) -> NodeT:
        return self

    def __deepcopy__(self: NodeT, memo: dict[int, Any]) -> NodeT:
        return self

    def compile(
        self, config: Config | None = None, **options: Unpack[ConfigOptions]
    ) -> conveyor.CompiledGraph[ResultT]:
        """Compile the graph that ends in this node.

        Args:
            config: the settings; the defaults if left out.
            **options: settings by name (``depth=4``), which override those of ``config``.

        Returns:
            The compiled graph, ready to ``execute``. Compiling the same node again gives another,
            independent graph.

        Raises:
            GraphError: the graph is not valid; the message says where.
            TypeError: an unknown setting.
        """
        if config is None:
            config = Config()
        elif not isinstance(config, Config):
            raise TypeError(
                f"config must be a conveyor.Config, not {type(config).__name__}; "
                f"single settings are given by name, as in compile(depth=4)"
            )
        if options:
            config = config.with_options(**options)
        self._record.ends_graph = True
        graph: conveyor.CompiledGraph[ResultT] = runners().compile(self, config)
        return graph

    def experimental_compile(
        self,
        _submit_timeout: float | None = None,
        _buffer_size_bytes: int | None = None,
        enable_asyncio: bool = False,
        _max_inflight_executions: int | None = None,
        _max_buffered_results: int | None = None,
        _overlap_gpu_communication: bool | None = None,
        _default_communicator: Any = "create",
    ) -> conveyor.CompiledGraph[ResultT]:
        """Compile the graph, under Ray's name and with Ray's parameters.

        ``_max_inflight_executions`` is our ``depth``, and ``_submit_timeout`` (seconds; -1: no limit)
        our ``submit_timeout``; ``_overlap_gpu_communication`` is our ``overlap``, and
        ``_default_communicator`` our ``default_communicator``. The other parameters are accepted and have
        nothing to do here: values of any size pass without a buffer size, every graph serves ``get``
        and ``await`` alike, and results are not counted. What is left out is taken from
        ``DAGContext.get_current()``, as far as the program has changed that.
        """
        options: ConfigOptions = DAGContext.get_current().options()
        if _max_inflight_executions is not None:
            options["depth"] = _max_inflight_executions
        if _submit_timeout is not None:
            options["submit_timeout"] = None if _submit_timeout == -1 else _submit_timeout
        if _overlap_gpu_communication is not None:
            options["overlap"] = _overlap_gpu_communication
        options["default_communicator"] = _default_communicator
        return self.compile(**options)

    def execute(self, /, *args: Any, **kwargs: Any) -> ResultT:
        """Run the graph once without compiling it, through ordinary actor calls.

        Takes what the compiled graph's ``execute`` takes, and gives the same values; slower, and
        with nothing to set up or tear down. A node nested in a container argument is waited for
        here, because an ordinary call only accepts references as arguments of their own.

        Returns:
            A reference to the result, or a list of references for a ``MultiOutputNode``.
        """
        self._record.ends_graph = True
        refs: ResultT = runners().execute(self, args, kwargs)
        return refs

    def with_tensor_transport(
        self: NodeT,
        transport: Any = "auto",
        device: str = "default",
        _static_shape: bool = False,
        _direct_return: bool = False,
    ) -> NodeT:
        """Say how this node's tensors should travel to their readers, and return the node. ::

            x = sender.send.bind(inp).with_tensor_transport(transport="shm")

        The latest call counts, for graphs that are compiled after it.

        Args:
            transport: ``"auto"``, ``"shm"`` (host memory), another name of ``conveyor.transport``
                (``"gloo"``, ``"nccl"``, ``"nixl"``, ``"cuda_ipc"``), ``"accelerator"`` (the default
                communicator of the graph, else ``"nccl"``), or a
                ``conveyor.experimental.channel.Communicator``. Whether it can be used here is found
                out when the graph is compiled.
            device: where the readers want the tensors: ``"default"`` (the kind of device they come
                from), ``"cpu"``, or ``"cuda"``, also spelled ``"gpu"``.
            _static_shape: shape, dtype and device of all tensors are those of the first execution. An
                execution that differs fails, and no other one does.
            _direct_return: the value is one tensor. An execution where it is not fails, and no other
                one does.

        Raises:
            ValueError: an unknown transport or device.
        """
        self._set_hint(TransportHint(transport, device, _static_shape, _direct_return))
        return self

    def with_type_hint(self: NodeT, typ: Any) -> NodeT:
        """Say the same with a ``conveyor.experimental.channel.TorchTensorType``, as older programs do.

        Raises:
            ValueError: ``typ`` is something else.
        """
        if not isinstance(typ, TransportHint):
            raise ValueError(
                f"with_type_hint takes a conveyor.experimental.channel.TorchTensorType, not {typ!r}"
            )
        self._set_hint(typ)
        return self

    def _set_hint(self, hint: TransportHint) -> None:
        assign(self, _hint=hint)

    def _get_hint(self) -> TransportHint | None:
        return self._hint

    def _upstream(self) -> tuple[DAGNode, ...]:
        """Nodes that this one directly needs, in order, each once."""
        raise NotImplementedError


def assign(node: DAGNode, **attributes: Any) -> None:
    """Give a node under construction its attributes."""
    for name, value in attributes.items():
        object.__setattr__(node, name, value)


def hint_of(node: DAGNode) -> TransportHint | None:
    """The transport hint given to ``node``."""
    return node._get_hint()


def upstream_of(node: DAGNode) -> tuple[DAGNode, ...]:
    """The nodes that ``node`` directly needs, in order, each once."""
    return node._upstream()


def record_of(node: DAGNode) -> Record:
    """The record of the input or task that ``node`` belongs to."""
    return node._record
