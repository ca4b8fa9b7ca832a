"""Interface between ``api`` and the runtime, with the types that both use.

``api`` talks to whatever ``conveyor.runtime.context.current()`` returns; a driver on local
processes, an actor's process and the inline engine each provide one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from msgspec import Struct, field

from conveyor.codec.frames import Sealed, seal
from conveyor.dag.node import ActorRef

if TYPE_CHECKING:
    from conveyor import _core
    from conveyor.calls.retrying import Retrying
    from conveyor.config import Config
    from conveyor.dag import DAGNode, MethodNode
    from conveyor.refs.imports import Imports
    from conveyor.refs.watcher import Watcher
    from conveyor.runtime.broker import Broker, Collectives
    from conveyor.runtime.cleanup import Cleanup
    from conveyor.runtime.deadlock import WaitRegistry
    from conveyor.runtime.process import Process
    from conveyor.weak import WeakValues


#: Bits of a process's number that are its pid on its own node: those of processes of other nodes have more.
PID_MASK = (1 << 32) - 1


ResultSpec: TypeAlias = "int | tuple[int, str, bool]"
"""How many results are wanted of a call. With a transport's name they stay where they were made: as they
are, or, if true, as they were then."""


class NameTakenError(ValueError):
    """Raised if another actor has the name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)

    def __str__(self) -> str:
        return f"there is an actor named {self.args[0]!r} already"


class Retries(Struct, frozen=True, eq=False):
    """How often a call is made again where it fails. ``most``: times (-1: without limit), or ``None``: as its
    actor's options say. ``exceptions``: whether also where the method has raised, or the classes of what it
    may have raised; else where the actor has died and is started again."""

    most: int | None = None
    exceptions: bool | tuple[type[BaseException], ...] | Sealed = False

    @property
    def named(self) -> bool | tuple[type[BaseException], ...]:
        """The ``exceptions``, which are loaded only where somebody needs them."""
        found = self.exceptions
        if isinstance(found, Sealed):
            opened: tuple[type[BaseException], ...] = found.open()
            return opened
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Retries) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[int | None, bool | tuple[type[BaseException], ...]]:
        return self.most, self.named

    def __reduce__(self) -> tuple[Any, ...]:
        # It goes by way of the driver, as a part of what is known of an actor's methods: there the classes
        # need not be known, and pickle may not know how to send them.
        sent = self.exceptions
        if isinstance(sent, tuple) and not all(one.__module__ == "builtins" for one in sent):
            sent = seal(sent)
        return Retries, (self.most, sent)


class MethodInfo(Struct, frozen=True):
    """Description of one method for a handle that does not have the class at hand; picklable.

    An asynchronous generator is both a generator and async. ``signature`` is without ``self`` (``None``
    where Python cannot tell). ``tensor_transport``: how results that stay with the actor are to be moved
    (``None``: they do not stay), and ``snapshot`` whether as they were when they were returned.
    ``received``: the names of parameters whose arguments it receives into memory of its own. ``retries``:
    ``None`` where a call is made once. ``allows_by_reference``: whether the actor's options let results
    stay with it. ``by_decorator``: a generator is what a decorator of its own makes of one, or passes on.
    """

    name: str
    num_returns: int
    is_async: bool
    is_generator: bool
    signature: inspect.Signature | None
    tensor_transport: str | None = None
    snapshot: bool = False
    received: tuple[str, ...] = ()
    retries: Retries | None = None
    allows_by_reference: bool = True
    by_decorator: bool = False


class Attached(Struct, frozen=True, eq=False):
    """An actor that somebody else has started, of whom the hosts know: it takes part in the session as long
    as that lasts, and goes on afterwards.

    key: what tells it from all others. handle: as its own system has it.
    """

    key: str
    name: str
    methods: Mapping[str, MethodInfo]
    handle: Any


class ProcessOptions(Struct, frozen=True):
    """Options of an actor's process. ``num_cpus=None`` means one. ``placement``: options of Ray's that say
    where it is to be, for engines that can choose. ``attached``: the process exists already, and is this
    one."""

    num_cpus: float | None
    num_gpus: float
    env_vars: dict[str, str]
    placement: Mapping[str, Any] = field(default_factory=dict)
    attached: Attached | None = None


class ActorSpec(Struct, frozen=True):
    """Everything needed to start an actor. ``max_restarts=-1``: no limit."""

    cls: type
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    methods: Mapping[str, MethodInfo]
    name: str | None = None
    num_cpus: float | None = None
    num_gpus: float = 0
    max_concurrency: int | None = None
    max_restarts: int = 0
    env_vars: dict[str, str] = field(default_factory=dict)
    placement: Mapping[str, Any] = field(default_factory=dict)

    @property
    def process(self) -> ProcessOptions:
        return ProcessOptions(self.num_cpus, self.num_gpus, self.env_vars, self.placement)


class ActorId(ActorRef, frozen=True):
    """An actor's identity within a session."""


class Functions(Protocol):
    """Calls of functions that share workers."""

    def call(self, call: Any) -> Any:
        """Start a ``calls.call.Call`` in a worker that is free, or as soon as one is; a ref, or a
        list of refs where several results are wanted."""
        ...

    def least_busy(self) -> Any:
        """The handle of the worker with the least to do, for a call that is made in it at once."""
        ...


class Runtime(Protocol):
    """Interface that ``api`` and ``dag`` need of the process they run in."""

    #: The process that it was made in; a forked child has it too, and cannot use it.
    pid: int

    @property
    def inbox(self) -> _core.Inbox:
        """Doorbell of this process."""
        ...

    @property
    def wait_registry(self) -> WaitRegistry:
        """Wait registry: which of this process's threads waits for whom."""
        ...

    @property
    def watcher(self) -> Watcher:
        """Watcher that tells when refs are done."""
        ...

    @property
    def retrying(self) -> WeakValues[int, Retrying]:
        """Failed calls of each actor that are made again, by the actor's number."""
        ...

    @property
    def exports(self) -> Imports:
        """Directory of the refs that were pickled here, and of those that were loaded."""
        ...

    @property
    def cleanup(self) -> Cleanup:
        """Work that is left to be done for objects that are garbage here."""
        ...

    @property
    def broker(self) -> Broker:
        """Broker between the processes at the ends of a channel."""
        ...

    @property
    def collectives(self) -> Collectives:
        """Interface by which processes meet in groups."""
        ...

    @property
    def process(self) -> Process:
        """Endpoints of this process in the session."""
        ...

    #: Whether the engine has more than one place for an actor, so that the options that choose one count.
    places: bool

    #: The actor whose process this is; ``None`` in the driver and on the inline engine.
    own_actor: ActorId | None

    @property
    def graphs(self) -> Iterable[Any]:
        """The ``graph.lifecycle.GraphInfo`` of each graph that this process executes, as long as somebody
        holds the graph or one of its refs."""
        ...

    def create_actor(self, spec: ActorSpec) -> tuple[ActorId, object]:
        """Start an actor. With it comes what :meth:`retain` returns for its first handle: others may find
        the actor by its name, and drop their handles, before that one is made."""
        ...

    def find_actor(self, name: str) -> tuple[ActorId, str, Mapping[str, MethodInfo], object]:
        """The named actor with its class name, its methods, and what :meth:`retain` returns for a handle;
        ``ValueError`` if there is none."""
        ...

    def call(
        self,
        actor: ActorId,
        method: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result_spec: ResultSpec,
        what: int = ...,
        again: bool = ...,
    ) -> Any:
        """Start a call; one ref, or a list of refs where several results are wanted. ``what`` says what is
        called, and ``result_spec`` what is wanted of it (``calls.call``). ``again``: it has failed
        before, and goes ahead of the caller's calls that have not been sent."""
        ...

    def functions(self, kind: Hashable, start: Callable[[], Any]) -> Functions:
        """Calls from here of the functions that share workers of that ``kind``; ``start()`` starts one and
        returns its handle."""
        ...

    def stream(
        self,
        actor: ActorId,
        method: str,
        is_async: bool,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        what: int = ...,
        result_spec: ResultSpec = ...,
    ) -> Any:
        """Start a call of a generator method, or function; the ref of its items."""
        ...

    def get(self, refs: Any, timeout: float | None) -> Any: ...

    def keep(self, value: Any) -> Any:
        """Store a value like ``put``, but of any kind: a ref to a ref as well."""
        ...

    def put(self, value: Any, transport: str | None = None, snapshot: bool = False) -> Any: ...

    def wait(
        self, refs: Sequence[Any], num_returns: int, timeout: float | None
    ) -> tuple[list[Any], list[Any]]: ...

    def find_transport(self, name: str) -> bytes | None:
        """Find how the transport of that name was registered in this session; see ``direct.managers``."""
        ...

    def add_transport(self, name: str, registration: bytes) -> None:
        """Register a transport for the processes of this session. ``ValueError``: another one has the
        name."""
        ...

    def kill(self, actor: ActorId, no_restart: bool = True, graceful: bool = False) -> None: ...

    def compile(
        self, root: DAGNode, config: Config, placement: Mapping[MethodNode, ActorId]
    ) -> Any:
        """``placement``: the actors of functions that were bound to none."""
        ...

    def share_graph(self, graph: Any, graph_info: object) -> bool:
        """Note that a handle of ``graph`` is about to leave this process. False if the graph is not one of
        this session's, by its ``graph_info``."""
        ...

    def load_graph(self, number: int, name: str, whole: bool, options: tuple[str, ...]) -> Any:
        """The graph with this number, or a handle of it; see ``graph.handles``."""
        ...

    def retain(self, actor: ActorId) -> object:
        """Note a new handle of ``actor`` in this process. The handle lasts as long as the returned object."""
        ...

    def allocate(self, size: int) -> Any:
        """``size`` bytes of this process's arena as a writable buffer; ``MemoryError`` at the cap."""
        ...

    def abandon(self) -> None:
        """Abandon the runtime: this process was forked from the runtime's, and may use nothing of it."""
        ...

    def share(self, actor: ActorId) -> None:
        """Note that a handle of ``actor`` is about to leave this process."""
        ...

    @property
    def ending(self) -> bool:
        """Whether :meth:`shutdown` has begun to end it."""
        ...

    def fail(self, why: str) -> None:
        """End the session with that cause, in words: a thread of the library's has failed that it needs."""
        ...

    def shutdown(self) -> None:
        """End the session: then this is nobody's runtime any more (see ``runtime.context``). An exception
        that a signal handler raises meanwhile comes out afterwards. Should something be left all the same,
        another call sees to it."""
        ...
